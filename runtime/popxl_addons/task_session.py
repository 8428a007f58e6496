"""A session with named streams, named state and checkpoints."""

import importlib
import json
import logging
import shutil
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import popdist
import popxl
from popdist import exchange
from popxl import DeviceToHostStream, HostToDeviceStream
from popxl.session import together
from popxl.tensor import Variable

from popxl_addons.durable import replace_folder, sync_file
from popxl_addons.memmap_files import copy_files
from popxl_addons.named_tensors import NamedTensorData, NamedTensors
from popxl_addons.streams import InputStreams, OutputStreams

ReportMissingMethods = Literal["none", "warn", "error"]
WANDB_PREFIX = "wandb://"
_logger = logging.getLogger("popxl_addons")


class TaskSession(popxl.Session):
    """A `popxl.Session` that knows its streams and its state by name.

    A checkpoint is a folder with ``model/<dotted name>.npz`` for each variable of the state (one
    array, under the same name, in host layout; a memory-mapped variable is its raw ``.npy`` file
    instead), ``session_info.json`` with ``session_state``, and ``dataloader.bin`` if there is a
    dataloader. It is written beside its place, flushed, and then renamed, so that what carries the
    name is always whole.

    Args:
        inputs, outputs: streams of the program.
        state: variables that checkpoints hold.
        max_checkpoints: checkpoints of this session to keep, at least 1; the oldest is deleted
            beyond, unless one that stays is inside it.
        args, kwargs: go to `popxl.Session`.
    Raises:
        ValueError: max_checkpoints is less than 1.
        TypeError: state that is neither a variable nor the shard of one.
    """

    def __init__(
        self,
        inputs: InputStreams | Iterable[HostToDeviceStream],
        outputs: OutputStreams | Iterable[DeviceToHostStream],
        state: NamedTensors,
        max_checkpoints: int = 1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if max_checkpoints < 1:
            raise ValueError(
                f"TaskSession: got max_checkpoints {max_checkpoints}; expected 1 or more. Where no "
                "checkpoint is to be kept, save none."
            )
        super().__init__(*args, **kwargs)
        # Streams by name, or the list that was given: only the caller knows which.
        self.inputs: Any = inputs if isinstance(inputs, InputStreams) else list(inputs)
        self.outputs: Any = outputs if isinstance(outputs, OutputStreams) else list(outputs)
        self.state = self._variables_of(state)
        self.max_checkpoints = max_checkpoints
        self.session_state: dict[str, Any] = {"steps": 0}
        self._dataloader: Any = None
        self._saved: list[Path] = []
        """Real paths of this session's checkpoints, oldest first."""

    @property
    def dataloader(self) -> Any:
        """Object with ``save(path)`` and ``resume(filename=path)``, saved with checkpoints.
        ValueError for another.
        """
        return self._dataloader

    @dataloader.setter
    def dataloader(self, value: Any) -> None:
        if not (
            callable(getattr(value, "save", None)) and callable(getattr(value, "resume", None))
        ):
            raise ValueError(
                f"TaskSession.dataloader: got {type(value).__name__}; expected an object with "
                "save and resume."
            )
        self._dataloader = value

    def add_session_state_info(self, info: dict[str, Any]) -> None:
        """Add items that JSON can hold to ``session_state``. TypeError for others."""
        json.dumps(info)
        self.session_state.update(info)

    def run(self, inputs: Mapping[Any, Any] | None = None, downcast_inputs: bool = True) -> Any:
        """`Session.run`; counts ``session_state["steps"]``."""
        with together(self, "Session.run"):
            result = super().run(inputs, downcast_inputs)
            self.session_state["steps"] = self.session_state.get("steps", 0) + 1
        return result

    # state

    def _variables_of(self, state: NamedTensors) -> NamedTensors:
        """The same names, with the variable of each shard in its place."""
        whole = {v.shard: v for v in self.ir.main_graph.variables if v.shard is not None}
        named = state.map(lambda t: whole.get(t, t))
        for name, t in named.to_dict().items():
            if not isinstance(t, Variable):
                raise TypeError(
                    f"TaskSession: got %{t.name} as state '{name}'; expected a variable, or the "
                    "shard of one."
                )
        return named

    def _variables_by_name(self) -> dict[str, Variable]:
        return cast(dict[str, Variable], self.state.to_dict())

    def get_named_tensors_data(self) -> NamedTensorData:
        """Current values of the state, by name."""
        named = self._variables_by_name()
        values = self.get_tensors_data(named.values())
        return NamedTensorData.from_dict({name: values[t] for name, t in named.items()})

    def load_from_session(
        self, src: "TaskSession", report_missing: ReportMissingMethods = "none"
    ) -> None:
        """Copy the state of another session, by name. ValueError for names missing there, with
        "error".
        """
        data = src.get_named_tensors_data().to_dict()
        self.write_variables_data(self._new_values(data, "load_from_session", report_missing))

    def _new_values(
        self,
        data: Mapping[str, np.ndarray],
        where: str,
        report_missing: ReportMissingMethods,
        skipped: Collection[str] = (),
    ) -> dict[Variable, np.ndarray]:
        """The values to be written, checked; those that are missing are reported."""
        named = self._variables_by_name()
        missing = [name for name in named if name not in data and name not in skipped]
        _report_missing(missing, where, "one for each variable of the state", report_missing)
        return {
            variable: self._checked(name, variable, data[name], where)
            for name, variable in named.items()
            if name in data
        }

    def _checked(self, name: str, variable: Variable, value: np.ndarray, where: str) -> np.ndarray:
        dtype, shape = variable.dtype.as_numpy(), tuple(variable.shape_on_host)
        if value.dtype != dtype or value.shape != shape:
            raise ValueError(
                f"{where}: got {value.dtype}{list(value.shape)} for '{name}'; expected "
                f"{dtype}{list(shape)}. Use the checkpoint of a program with the same state."
            )
        return value

    # checkpoints

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write a checkpoint folder. In a program over several processes all call this; instance 0
        writes, others wait.

        Args:
            checkpoint_dir: its place; an older one there is replaced. "wandb://name" makes an
                artifact of it.
        Raises:
            ValueError: a checkpoint that is to be kept is inside that place.
            RuntimeError: instance 0, which raises another error itself, wrote none.
        """
        failure: Exception | None = None
        with together(self, "save_checkpoint"):  # values and session_state of one moment
            # every instance takes part in reading the variables
            values = self.get_named_tensors_data().to_dict()
            if popdist.getInstanceIndex() == 0:
                try:
                    self._save(checkpoint_dir, values)
                except Exception as error:  # the others wait to hear of it
                    failure = error
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        if self.ir.replication_factor > self.ir.instance_replication_factor:
            said = exchange.gather_patiently(said, f"waiting for {checkpoint_dir}")[0]
        if failure is not None:
            raise failure
        if said is not None:
            raise RuntimeError(
                f"save_checkpoint: got no checkpoint {checkpoint_dir} of instance 0 ({said}); "
                "expected one. Look at its error."
            )

    def _save(self, checkpoint_dir: str, values: Mapping[str, np.ndarray]) -> None:
        if checkpoint_dir.startswith(WANDB_PREFIX):
            self._save_artifact(checkpoint_dir[len(WANDB_PREFIX) :], values)
            return
        target = Path(checkpoint_dir)
        place = target.parent.resolve() / target.name  # what is written replaces a link of its name
        older = [path for path in self._saved if path != place]
        kept = [*older, place][-self.max_checkpoints :]
        if lost := [path for path in kept if place in path.parents]:
            raise ValueError(
                f"save_checkpoint: got {target}, which has the checkpoint {lost[0]} inside and "
                "would replace it; expected a folder beside those that are kept. Save elsewhere."
            )
        replace_folder(target, lambda folder: self._write_checkpoint(folder, values))
        for path in older[: len(older) + 1 - len(kept)]:
            if not any(path in other.parents for other in kept):
                shutil.rmtree(path, ignore_errors=True)
        self._saved = [*(path for path in older if path.is_dir()), place]

    def _write_checkpoint(self, folder: Path, values: Mapping[str, np.ndarray]) -> None:
        (folder / "model").mkdir(parents=True)
        for name, value in values.items():
            if isinstance(self.state[name].host_value, np.memmap):
                path = folder / "model" / f"{name}.npy"
                value.tofile(path)
            else:
                path = folder / "model" / f"{name}.npz"
                np.savez(path, **{name: value})  # type: ignore[arg-type]
            sync_file(path)
        (folder / "session_info.json").write_text(json.dumps(self.session_state, indent=2))
        sync_file(folder / "session_info.json")
        if self._dataloader is not None:
            self._dataloader.save(str(folder / "dataloader.bin"))
            sync_file(folder / "dataloader.bin")

    def load_checkpoint(
        self,
        checkpoint_dir: str,
        report_missing: ReportMissingMethods = "warn",
        skip_memmap: bool = False,
    ) -> None:
        """Read a checkpoint back: variables that both have, the session state, the dataloader's
        position.

        Everything is read and checked before anything is overwritten.

        Args:
            report_missing: what to do about variables that the checkpoint lacks, or the
                dataloader's position.
            skip_memmap: leave memory-mapped variables as they are.
        Raises:
            FileNotFoundError: no checkpoint there.
            ValueError: a damaged file, or a value of another shape or dtype.
        """
        if checkpoint_dir.startswith(WANDB_PREFIX):
            wandb = importlib.import_module("wandb")
            checkpoint_dir = wandb.use_artifact(checkpoint_dir[len(WANDB_PREFIX) :]).download()
        folder = Path(checkpoint_dir)
        if not (folder / "model").is_dir():
            raise FileNotFoundError(
                f"load_checkpoint: got {folder}, which has no folder 'model'; expected a "
                "checkpoint written by save_checkpoint."
            )
        data, skipped = {}, set()
        for name, variable in self._variables_by_name().items():
            raw, packed = folder / "model" / f"{name}.npy", folder / "model" / f"{name}.npz"
            if packed.exists():
                data[name] = _read_npz(packed, name)
            elif raw.exists() and skip_memmap:
                skipped.add(name)
            elif raw.exists():
                data[name] = _read_raw(raw, variable)
        info, position = folder / "session_info.json", folder / "dataloader.bin"
        state = _read_json(info) if info.exists() else {"steps": 0}
        where = f"load_checkpoint({folder})"
        values = self._new_values(data, where, report_missing, skipped)
        if self._dataloader is not None and not position.exists():
            _report_missing([position.name], where, "the dataloader's position", report_missing)
        elif self._dataloader is not None:
            self._dataloader.resume(filename=str(position))  # it may be damaged, too
        with together(self, "load_checkpoint"):
            self.write_variables_data(values)
            self.session_state = state

    # wandb

    def _save_artifact(self, name: str, values: Mapping[str, np.ndarray]) -> None:
        wandb = importlib.import_module("wandb")
        with tempfile.TemporaryDirectory() as folder:
            self._write_checkpoint(Path(folder) / "checkpoint", values)
            artifact = wandb.Artifact(name, type="checkpoint")
            artifact.add_dir(str(Path(folder) / "checkpoint"))
            wandb.log_artifact(artifact)
            artifact.wait()

    def wandb_histogram(self, name: str, step: int, data: np.ndarray) -> None:
        """Log a histogram of some values."""
        wandb = importlib.import_module("wandb")
        wandb.log({name: wandb.Histogram(np_histogram=np.histogram(data, bins=64))}, step=step)

    def wandb_variable_histograms(self, step: int = 0) -> None:
        """Log a histogram of every variable of the state."""
        for name, value in self.get_named_tensors_data().to_dict().items():
            self.wandb_histogram(name, step, value)


def write_variables_pb(session: popxl.Session, weights: Mapping[Variable, np.ndarray]) -> None:
    """Write several variables at once."""
    session.write_variables_data(dict(weights))


def initialise_memmap_dir_from_checkpoint(checkpoint_dir: str, memmap_dir: str) -> None:
    """Copy the raw files of a checkpoint's memory-mapped variables into a memmap directory.

    Raises:
        RemoteMemoryError: it does not take them, or another user can write to it.
    """
    copy_files(sorted((Path(checkpoint_dir) / "model").glob("*.npy")), Path(memmap_dir))


def _report_missing(
    missing: list[str], where: str, expected: str, report: ReportMissingMethods
) -> None:
    if report not in ("none", "warn", "error"):
        raise ValueError(
            f"{where}: got report_missing {report!r}; expected 'none', 'warn' or 'error'."
        )
    if not missing or report == "none":
        return
    message = f"{where}: got no values for {', '.join(missing)}; expected {expected}."
    if report == "error":
        raise ValueError(message + " Pass report_missing='warn' to keep what is there now.")
    _logger.warning(message)


def _damaged(path: Path, reason: object) -> ValueError:
    return ValueError(
        f"load_checkpoint: got {path}, which cannot be read ({reason}); expected a whole "
        "file. Use another checkpoint."
    )


def _read_npz(path: Path, name: str) -> np.ndarray:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return arrays[name]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from error


def _read_raw(path: Path, variable: Variable) -> np.ndarray:
    values = np.fromfile(path, variable.dtype.as_numpy())
    try:
        return values.reshape(variable.shape_on_host)
    except ValueError as error:
        raise _damaged(path, error) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise _damaged(path, error) from error
