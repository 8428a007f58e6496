"""Checkpoints of a training run: folders `step_<n>` with one safetensors file per layer, and
`checkpoint.json`.

Files hold whole tensors, whatever the layout: `weights.<parameter>` and
`optimizer.<parameter>.<moment>`. bfloat16 is stored as float32, without loss: moments in bfloat16
go on in float32 as they are. The other way would lose some of them and is refused. Weights go on in
any type, and rounding is reported. A folder appears under its name only when all of it
is on the disk. What is not finite is neither saved nor loaded. `checkpoint.json` has a checksum of
itself, of every file and of every tensor (see `manifest.py`).
"""

import copy
import errno
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import popxl
import popxl_addons as addons
from popxl.tensor import Variable

from popxl_gpt.config.model import ARCHITECTURE, BY_DEFAULT, Model
from popxl_gpt.config.presets import from_mapping, override
from popxl_gpt.config.saving import numerics_hash, to_mapping
from popxl_gpt.config.schema import Config
from popxl_gpt.data.special_tokens import END, as_list
from popxl_gpt.execution.checkpoints.checkpoint_folder import (
    MANIFEST,
    NAME,
    best_of,
    checkpoints_in,
    set_aside,
    validated_in,
)
from popxl_gpt.execution.checkpoints.manifest import FORMAT, FORMATS, ManifestError, read_manifest
from popxl_gpt.execution.checkpoints.saved_state import (
    Position,
    TensorCodec,
    is_finite,
    layer_variables,
    layers_of,
    scalars_of,
)
from popxl_gpt.execution.checkpoints.tensor_files import (
    TensorFileError,
    damaged_tensors,
    read_tensors,
)
from popxl_gpt.execution.overflow import COUNTED, SEEDS, read_count
from popxl_gpt.execution.variables import write
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.linear import DOWN, UP, merged
from popxl_gpt.modelling.parameters import Parameter, Table
from popxl_gpt.utils.errors import NotFiniteError, PointerError, UserError, io_failure, unreadable
from popxl_gpt.utils.files.bounded import shown
from popxl_gpt.utils.files.hub import foreign_model, hub_hint
from popxl_gpt.utils.files.plain import NO_FILE, check_plain, open_plain, real_path
from popxl_gpt.utils.units import counted

OLDER = (
    "The checkpoint is damaged: load an older one with --checkpoint.load; auto finds the newest "
    "whole one."
)
_LOG = logging.getLogger(__name__)
Found = TypeVar("Found")


class DeletedError(UserError):
    """A checkpoint that is not there, or no longer.

    Attributes:
        folder: the checkpoint.
    """

    def __init__(self, folder: Path, text: str):
        self.folder = folder
        super().__init__(text)


class DamagedError(UserError):
    """A checkpoint that is not as it was saved.

    Attributes:
        problem: what was found and what was expected.
    """

    def __init__(self, problem: str):
        self.problem = problem
        super().__init__(f"{problem}. {OLDER}")


class SavedRun:
    """A checkpoint that was found whole, and is of this model.

    Raises:
        DamagedError: it is not whole.
        UserError: it is of another version, or of another model.
    """

    def __init__(self, folder: Path, config: Config, checksums: bool = True):
        """``checksums``: compare those of all files; without, contents are not verified."""
        self.folder = folder
        self.config = config
        self.passed_over: list[Path] = []
        """Newer ones, which are damaged."""
        manifest = _read_manifest(folder)
        self._manifest = manifest
        self.position = Position(
            manifest["step"],
            manifest["data"]["fingerprint"],
            manifest.get("metrics"),
            manifest.get("validation_loss"),
            _tokens(manifest),
            manifest.get("schedule"),
            manifest.get("validation_fingerprint"),
        )
        _check_fits(folder, manifest, config)
        self._verify(checksums)

    @property
    def special_tokens(self) -> "dict[str, int | list[int]]":
        """The tokens that texts begin and end with, by Hugging Face's names; none where the weights
        are not as they came from there.
        """
        found: dict[str, int | list[int]] = self._manifest.get("special_tokens", {})
        return found

    @property
    def ends(self) -> "list[int]":
        """Those that texts end with."""
        return as_list(self.special_tokens.get(END))

    def check_data(self, fingerprint: str) -> None:
        """Say so where the run continues on other data: its position in them then means little."""
        files, _, contents = fingerprint.partition("-")
        files_then, _, contents_then = self.position.data.partition("-")
        if files != files_then:
            _LOG.warning(
                "%s: continuing on other training data than the checkpoint's.", self.folder
            )
        elif contents_then and contents != contents_then:  # older ones name no contents
            _LOG.warning(
                "%s: continuing on training data with other contents than the checkpoint's, in "
                "files of the same names and sizes. Restore them, or prepare them again.",
                self.folder,
            )

    def set_aside_passed_over(self) -> None:
        """Rename the damaged checkpoints that this one is loaded in place of: what the run saves
        from now on is newer.
        """
        for path in self.passed_over:
            _LOG.warning("%s: damaged, now %s.", path, set_aside(path).name)
        self.passed_over = []

    def restore(self, session: addons.TaskSession) -> None:
        """Give weights, optimizer state, seeds and counters to a session."""
        if self._manifest.get("weights_only"):
            raise UserError(
                f"{self.folder}: got a checkpoint of weights alone; expected one with the state of "
                "the optimizer. Begin a run with it: --init_from instead of --checkpoint.load."
            )
        table = model_table(self.config.model)
        for layer, variables in layer_variables(session, self.config).items():
            tensors = self._read(f"{layer}.safetensors", set(variables))
            values = {}
            for name, variable in variables.items():
                codec = TensorCodec.of(table, layer, name, variable, self.config)
                array = tensors[name]
                self._check_tensor(f"{layer}.safetensors", name, array, codec.parameter, variable)
                values[variable] = codec.pieces(array)
            write(session, values)
        write(
            session,
            {
                variable: self._scalar(name, variable)
                for name, variable in scalars_of(session).items()
            },
        )

    def merged(self) -> "SavedRun":
        """The checkpoint of the same model without adapters: `weights` has them in the weights that
        they adapt.
        """
        found = copy.copy(self)
        found.config = override(self.config, lora_rank=0)
        return found

    def weights(self) -> "Iterator[tuple[str, np.ndarray]]":
        """The whole weights by parameter name, one layer's file after the other.

        Raises:
            NotFiniteError: a weight is not finite; names it.
        """
        saved = from_mapping(self._manifest["config"]).model
        table, of_file = model_table(self.config.model), model_table(saved)
        for layer in layers_of(self.config):
            tensors = self._read(f"{layer}.safetensors")
            for name in (name for name in table if name.startswith(f"{layer}.")):
                array = self._weight(tensors, layer, name, of_file)
                adapter = [f"{name.rpartition('.')[0]}.{part}" for part in (DOWN, UP)]
                is_adapted = of_file.keys() > {*adapter} and not table.keys() & {*adapter}
                if is_adapted and name.endswith(".weight"):
                    parts = (self._weight(tensors, layer, part, of_file) for part in adapter)
                    array = merged(saved, array, *parts)
                yield name, array
            left = [name for name in tensors if not name.startswith("optimizer.")]
            if left:
                got = f"tensors that its model has not: {_first(left)}"
                raise _damaged(self.folder / f"{layer}.safetensors", got, "the layer's alone")

    def _weight(
        self, tensors: "dict[str, np.ndarray]", layer: str, name: str, table: Table
    ) -> np.ndarray:
        """A parameter's weight, of the tensors of its layer's file."""
        file, key = f"{layer}.safetensors", f"weights.{name.removeprefix(f'{layer}.')}"
        if key not in tensors:
            raise _damaged(self.folder / file, f"tensors without {key}", "all weights")
        array, where = tensors.pop(key), f"{self.folder / file}, {key}"
        _check_kind(where, array, table[name].shape)
        if not is_finite(array):
            raise NotFiniteError(
                f"{where}: got numbers that are not finite; expected finite ones. Use an older "
                "checkpoint."
            )
        return array

    def _check_tensor(
        self,
        file: str,
        name: str,
        array: np.ndarray,
        parameter: Parameter | None,
        variable: Variable,
    ) -> None:
        """Refuse a tensor of another type or shape than saving writes, and numbers that are no
        weights of a model.
        """
        where, shape = f"{self.folder / file}, {name}", () if parameter is None else parameter.shape
        _check_kind(where, array, shape)
        if not is_finite(array):
            raise _damaged(where, "numbers that are not finite", "finite ones")
        is_narrow = variable.dtype is popxl.float16 or (
            name.startswith("weights.") and self.config.model.precision == "float16"
        )
        if is_narrow and max(-array.min(), array.max()) > np.finfo(np.float16).max:
            raise UserError(
                f"{where}: got numbers beyond float16's largest, 65504; expected ones that it "
                "holds. Train with --precision bfloat16 or float32."
            )

    def _scalar(self, name: str, variable: Variable) -> np.ndarray:
        """A seed, or a counter; as it begins where none was saved."""
        return self._seed(name, variable) if name in SEEDS else read_count(self._manifest, name)

    def _seed(self, name: str, variable: Variable) -> np.ndarray:
        """A seed; where none was saved, or for other replicas, as it is after as many steps."""
        saved = np.asarray(self._manifest.get(name, ()), np.uint32)
        if saved.shape == tuple(variable.shape_on_host):
            return saved
        fresh = popxl.create_seeds(
            self.config.training.seed, replicas=variable.replica_grouping.num_groups
        )
        return fresh + np.uint32(self.position.step)

    def _verify(self, checksums: bool) -> None:
        """Check that every file is there and holds what was saved."""
        expected = {f"{layer}.safetensors" for layer in layers_of(self.config)}
        if expected != set(self._manifest["files"]):
            raise _damaged(self.folder / MANIFEST, "a list without all files", "one for each layer")
        for name, entry in self._manifest["files"].items():
            path = self.folder / name
            try:
                size = check_plain(path).st_size
                # a file may have been made larger than can be read
                has_size = size == entry["bytes"]
                digest = _sha256(path) if checksums and has_size else entry["sha256"]
            except OSError as error:
                raise _unreadable(path, error) from error
            if size != entry["bytes"]:
                raise _damaged(path, f"{size} bytes{_where(path, entry)}", f"{entry['bytes']}")
            if digest != entry["sha256"]:
                got = f"contents with SHA-256 {digest[:12]}{_where(path, entry)}"
                raise _damaged(path, got, f"{entry['sha256'][:12]}")

    def _read(self, name: str, expected: "set[str] | None" = None) -> "dict[str, np.ndarray]":
        """A file's tensors; only those that are expected, where that is said."""
        path = self.folder / name
        try:
            tensors = read_tensors(path)
        except TensorFileError as error:
            raise DamagedError(f"{path}, {error}") from error
        except OSError as error:
            raise _unreadable(path, error) from error
        except ValueError as error:
            raise _damaged(path, f"'{error}'", "a safetensors file") from error
        if expected is not None and set(tensors) != expected:
            missing, left = (sorted(s) for s in (expected - set(tensors), set(tensors) - expected))
            got = (
                f"tensors without {_first(missing)}"
                if missing
                else f"tensors that the run has not: {_first(left)}"
            )
            raise _damaged(path, got, "those of the layer")
        return tensors


def _check_kind(where: str, array: np.ndarray, shape: "tuple[int, ...]") -> None:
    """Refuse a tensor of another type or shape than saving writes."""
    if array.dtype not in (np.float32, np.float16):
        raise _damaged(where, str(array.dtype), "float32 or float16")
    if array.shape != shape:
        raise _damaged(where, f"shape {array.shape}", str(shape))


def find_trained(path: Path, flag: str = "--checkpoint") -> SavedRun:
    """The checkpoint that a path names: a checkpoint itself, or the newest whole one of a run's
    folder or of a folder of checkpoints. It needs no configuration but its own. Adapters are merged
    into the weights.

    Raises:
        UserError: there is none, or none can be used.
    """
    if _is_checkpoint(path):
        return SavedRun(path, _own_config(path)).merged()
    return _again_where_deleted(lambda: _newest_trained(path, flag)).merged()


def _newest_trained(path: Path, flag: str) -> SavedRun:
    folder = _checkpoints_of(path)
    if folder is None:
        found = "no folder" if not path.is_dir() else "a folder without checkpoints"
        problem = foreign_model(path)
        if problem is not None:
            raise UserError(f"{flag}: got {path}, {problem}")
        if (path / "config.json").is_file():
            raise UserError(
                f"{flag}: got {path}, a model of Hugging Face's; expected a checkpoint. Make one: "
                f"demo/convert.py from_hugging_face {path} OUT."
            )
        raise UserError(
            f"{flag}: got {path}, {found}; expected a run's folder, such as runs/demo, or a "
            "checkpoint, such as runs/demo/checkpoints/step_00000700. Train one first, or check "
            f"the path.{hub_hint(path) if flag == '--init_from' else ''}"
        )
    whole = None
    for checkpoint in reversed(checkpoints_in(folder)):
        try:
            whole = _own_config(checkpoint)
            break
        except DamagedError:
            continue  # `_newest_whole` tells of it
    found_run = None if whole is None else _newest_whole(folder, whole)
    if found_run is None:
        raise UserError(
            f"{flag}: got {folder}, whose checkpoints are all damaged; expected a whole one. "
            "Restore one from a copy."
        )
    return found_run


def _again_where_deleted(find: Callable[[], Found]) -> Found:
    """What is found; again where a run has deleted it meanwhile, as it does with old ones."""
    while True:
        try:
            return find()
        except DeletedError as error:
            is_link = error.folder.is_symlink()  # that leads nowhere
            if is_link or error.folder.exists():
                raise


def _own_config(folder: Path) -> Config:
    return from_mapping(_read_manifest(folder)["config"])


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is meant to be one, be it damaged."""
    return (path / MANIFEST).exists() or NAME.fullmatch(real_path(path).name) is not None


def _checkpoints_of(path: Path) -> Path | None:
    """The folder that has the checkpoints of a run, or is one with checkpoints."""
    return next((f for f in (path / "checkpoints", path) if checkpoints_in(f)), None)


def find(load: str, folder: Path, config: Config, checksums: bool = True) -> SavedRun | None:
    """The checkpoint that `checkpoint.load` asks for: a path, of a run's folder the newest that is
    whole; "best"; or "auto" for the newest of a folder that is whole, None where there is none at
    all. ``checksums`` is that of `SavedRun`.

    Raises:
        UserError: it cannot be used, all are damaged, or none is the best.
    """
    if load in ("best", "auto"):
        return _again_where_deleted(lambda: _find_in(folder, load, config, checksums))
    path = Path(load)
    others = None if _is_checkpoint(path) else _checkpoints_of(path)
    if others is None:
        return SavedRun(path, config, checksums)
    saved = _again_where_deleted(lambda: _newest_whole(others, config, checksums))
    if saved is not None:
        saved.passed_over = []  # another run's stay as they are
    return saved


def _find_in(folder: Path, load: str, config: Config, checksums: bool) -> SavedRun | None:
    """The newest whole checkpoint of a folder, or the best."""
    if load == "best":
        validated = validated_in(folder)
        best = best_of(validated)
        if best is None:
            raise UserError(
                f"--checkpoint.load: got best, and no checkpoint in {folder} has a validation "
                "loss; expected one. Load the newest with auto, and use --validate_every."
            )
        newest, *older = validated
        odd = [each.path.name for each in older if not each.is_comparable(newest)]
        if odd:
            _LOG.warning(
                "%s: got %s with validation losses that were measured otherwise than that of %s; "
                "expected the same measurement. They are not compared for best.",
                folder, ", ".join(odd), newest.path.name,
            )  # fmt: skip
        return SavedRun(best, config, checksums)
    return _newest_whole(folder, config, checksums)


def _newest_whole(folder: Path, config: Config, checksums: bool = True) -> SavedRun | None:
    damaged: list[DamagedError] = []
    for number, path in enumerate(reversed(checkpoints := checkpoints_in(folder))):
        try:
            saved = SavedRun(path, config, checksums)
        except DamagedError as error:
            damaged.append(error)
            continue
        saved.passed_over = checkpoints[len(checkpoints) - number :]
        for found in damaged:
            _LOG.warning("%s. It is passed over for %s.", found.problem, path.name)
        return saved
    if damaged:
        problems = "; ".join(found.problem for found in damaged[:3])
        raise UserError(
            f"{folder}: got {counted(len(damaged), 'checkpoint')}, all damaged ({problems}); "
            "expected a whole one. Restore one from a copy, or start afresh without "
            "--checkpoint.load."
        )
    return None


def _read_manifest(folder: Path) -> "dict[str, Any]":
    path = folder / MANIFEST
    try:
        manifest = read_manifest(path)
        for name in COUNTED:
            read_count(manifest, name)
    except (FileNotFoundError, NotADirectoryError) as error:
        problem = (
            f"{folder}: got no checkpoint ({MANIFEST} is not there); expected a run's folder, or "
            "a folder step_<n> of it"
        )
        if folder.exists() and NAME.fullmatch(folder.name):
            raise DamagedError(problem) from error
        told = f"{problem}. Check --checkpoint.load; auto finds the newest."
        raise DeletedError(folder, told) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    except ManifestError as error:
        raise DamagedError(f"{path}: {error}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise _damaged(
            path, f"no count that a run comes to ({error})", "what saving wrote"
        ) from error
    if manifest["format"] not in FORMATS:
        raise UserError(
            f"{path}: got format {manifest['format']}; expected {FORMAT} or older. "
            "Use the version of this program that wrote it."
        )
    named = NAME.fullmatch(real_path(folder).name)
    if named is not None and int(named[1]) != manifest["step"]:
        raise _damaged(
            path, f"step {manifest['step']}", f"{int(named[1])}, as its folder's name says"
        )
    return manifest


def _check_fits(folder: Path, manifest: "dict[str, Any]", config: Config) -> None:
    """Refuse a checkpoint of another model; tell of other changes."""
    saved, now = manifest["config"], to_mapping(config)
    before = to_mapping(Config())  # what a setting was before it could be chosen
    must_agree = [("model", name) for name in (*ARCHITECTURE, "lora_rank")]
    must_agree.append(("training", "optimizer"))
    problems = [
        f"{name} {shown(old)}, not {now[section][name]}"
        for section, name in must_agree
        if (old := saved[section].get(name, before[section][name])) != now[section][name]
    ]
    old = saved["model"]
    old_positions = old.get("max_positions") or old.get("sequence_length")
    if config.model.has_position_table and old_positions != config.model.positions:
        problems.append(f"max_positions {old_positions}, not {config.model.positions}")
    known = {name: old[name] for name in before["model"] if name in old}
    model = Model(**{**before["model"], **known})
    problems += [
        f"{name} {getattr(model, told)}, not {getattr(config.model, told)}"
        for name, told in BY_DEFAULT.items()
        if getattr(model, told) != getattr(config.model, told)
    ]
    old_moments, moments = (
        saved["training"].get("moment_precision", "float32"),
        config.training.moment_precision,
    )
    if moments not in ("float32", old_moments):  # float32 holds any of them
        problems.append(
            f"moment_precision {old_moments}, not {moments}, which would lose some of it"
        )
    if problems:
        raise UserError(
            f"{folder}: got a checkpoint with {'; '.join(problems)}. Train with the checkpoint's "
            "settings (its run's config.yml), or start afresh without --checkpoint.load."
        )
    changed = [
        f"{section}.{name}: {old} -> {value}"
        for section in ("model", "training", "execution")
        for name, value in now[section].items()
        if name != "master_weights"  # what follows from it is told
        # expected ones then
        and (name not in ("steps", "decay_steps") or config.training.minutes is None)
        and (old := saved[section].get(name, before[section][name])) != value
    ]
    old_kept, kept = _weight_precision(saved), config.weight_precision
    if old_kept != kept:
        how = "as they are" if kept == "float32" else "rounded to the nearest"
        changed.append(f"weights kept in {old_kept} -> {kept}, {how}")
    if changed and manifest.get("numerics") != numerics_hash(config):
        _LOG.warning("%s: continuing with other settings: %s.", folder, "; ".join(changed))


def _tokens(manifest: "dict[str, Any]") -> int:
    """Seen by a saved run; those that do not say it had batches of one size."""
    saved = manifest["config"]
    per_step = saved["training"]["global_batch_size"] * saved["model"]["sequence_length"]
    found: int = manifest["data"].get("tokens", manifest["step"] * per_step)
    return found


def _weight_precision(saved: "dict[str, Any]") -> str:
    """Data type that a saved configuration's run kept weights in."""
    training, precision = saved["training"], str(saved["model"].get("precision", "float32"))
    has_master = training.get("master_weights", False)  # those before the setting had none
    if has_master is None:
        has_master = not training.get("stochastic_rounding", False)
    return "float32" if has_master else precision


def _damaged(path: Path | str, got: str, expected: str) -> DamagedError:
    return DamagedError(f"{path}: got {got}; expected {expected}")


def _unreadable(path: Path, error: OSError) -> UserError:
    """What to raise for a file of a checkpoint: it is damaged where nothing is there that could be
    read, and not where a disk, or a network, does not give what is there.
    """
    if isinstance(error, PointerError):
        return unreadable(path, error)
    if isinstance(error, PermissionError):
        return UserError(
            f"{path}: got '{error.strerror}'; expected a file that can be read. Check its "
            "permissions."
        )
    if error.errno in (errno.ENOENT, errno.ESTALE) and not path.parent.exists():
        return DeletedError(
            path.parent,
            f"{path.parent}: got a checkpoint that was deleted while it was read; expected one "
            "that stays. A run deletes its old ones: give its folder for the newest, or train it "
            "with a larger --checkpoint.keep.",
        )
    if error.errno in NO_FILE:
        return _damaged(path, f"'{error.strerror}'", "a readable file")
    if io_failure(error) is None:
        return unreadable(path, error)
    return UserError(
        f"{path}: got '{error.strerror}' while reading; expected a disk, or a network, that works. "
        f"Start again; if it fails again, rename {path.parent}: auto then takes the newest whole "
        "checkpoint that is left."
    )


def _where(path: Path, entry: "dict[str, Any]") -> str:
    """Which of a file's tensors are damaged, as far as checksums and its header tell."""
    try:
        names = damaged_tensors(path, entry.get("tensors", {}), entry["bytes"])
    except OSError:
        return ""
    if not names:
        return " in its header" if entry.get("tensors") else ""
    return f" in {_first(names)}"


def _first(names: "Sequence[str]") -> str:
    """The first ones of many names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(shown, names[:3])) + more


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(open_plain(path), "rb", buffering=0) as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()
