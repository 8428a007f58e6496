"""Writing checkpoints, while training goes on where memory takes a copy of the state.

What a checkpoint is stands in `checkpoint.py`. Each process writes the files of some layers, in a
thread: what it has read of them is the thread's own. A folder gets a checkpoint's name when all
processes have brought theirs onto the disk.
"""

import errno
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import popdist
import popxl_addons as addons

from popxl_gpt.config.saving import numerics_hash, to_mapping
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.checkpoints.checkpoint_folder import (
    MANIFEST,
    delete_old,
    folder_name,
    remove_leftovers,
)
from popxl_gpt.execution.checkpoints.manifest import FORMAT, manifest_text, read_manifest
from popxl_gpt.execution.checkpoints.saved_state import (
    Position,
    TensorCodec,
    file_of,
    file_tensors,
    is_finite,
    layer_tensors,
    layers_of,
    scalars_of,
)
from popxl_gpt.execution.checkpoints.tensor_files import write_tensors
from popxl_gpt.execution.instances import processes_here
from popxl_gpt.execution.part_queue import PartQueue, copied
from popxl_gpt.utils.errors import DivergedError, UserError, failure_number, numbered, reason_of
from popxl_gpt.utils.files.folders import partial_folder, publish
from popxl_gpt.utils.files.plain import write_plain
from popxl_gpt.utils.files.whole import remove_partial, sync, write_whole
from popxl_gpt.utils.runtime import gather, gather_beside, host_bytes
from popxl_gpt.utils.units import bytes_text


class NotSavedError(UserError):
    """A checkpoint that the folder did not take."""


class _Abandoned(BaseException):
    """Nobody waits for the checkpoint any more. Other processes are not told."""


def save(
    session: addons.TaskSession,
    config: Config,
    folder: Path,
    position: Position,
    *,
    keep_all: bool = False,
) -> Path:
    """Write a checkpoint into a folder, then delete those beyond the newest `checkpoint.keep` but
    the best, unless it keeps all.

    Over several processes all call this, and each writes a part.

    Raises:
        NotSavedError: the folder takes no files or the disk is full; what was saved before stays.
            All processes raise it, and can go on.
        DivergedError: a weight or a moment is not finite; what was saved before stays. All
            processes raise it.
    """
    saving = begin_save(session, config, folder, position, keep_all=keep_all, is_behind=False)
    return saving.finish()


def begin_save(
    session: addons.TaskSession,
    config: Config,
    folder: Path,
    position: Position,
    *,
    keep_all: bool = False,
    is_behind: bool = True,
) -> "Saving":
    """Save as `save` does, but return while a copy of the state is written.
    All processes call this, and later `Saving.finish`, which raises what `save` does.

    The copy takes up to half of the memory that is free. What has no place there, and all of a
    state whose rows are in files, is written before this returns.

    Args:
        is_behind: whether a copy is taken.
    """
    saving = Saving(config, folder / folder_name(position.step), position, keep_all)
    if not gather(saving.target.exists(), patiently=True)[0]:
        is_in_files = config.execution.memmap_dir is not None
        saving.begin(session, is_behind and not is_in_files)
    return saving


class Saving:
    """A checkpoint that is being written. This process's thread writes its part; processes tell
    each other how they fared.
    """

    def __init__(self, config: Config, target: Path, position: Position, keep_all: bool):
        self.target, self.step = target, position.step
        self._config, self._position, self._keep_all = config, position, keep_all
        self._index = popdist.getInstanceIndex()
        self._thread: threading.Thread | None = None
        self._parts = PartQueue(0)
        self._needed = 0
        """Bytes of the checkpoint."""
        self._scalars: dict[str, Any] = {}
        self._codecs: dict[str, dict[str, TensorCodec]] = {}
        """Codecs of each layer's tensors, by name."""
        self.problem: BaseException | None = None
        """Why it was not written."""

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is left to do in this process."""
        return self._thread is None or not self._thread.is_alive()

    def begin(self, session: addons.TaskSession, is_behind: bool) -> None:
        """Read the state, and let this process's part be written. See `begin_save`."""
        self._codecs = layer_tensors(session, self._config)
        sizes = {
            layer: sum(codec.nbytes for codec in codecs.values())
            for layer, codecs in self._codecs.items()
        }
        own = _shares(sizes, popdist.getNumInstances())[self._index]
        self._needed = sum(sizes.values())
        self._parts = PartQueue(host_bytes()[1] // 2 // processes_here() if is_behind else 0)
        self._scalars = {
            name: session.get_tensor_data(variable).tolist()
            for name, variable in scalars_of(session).items()
        }
        self._thread = threading.Thread(target=self._work, name="checkpoint")
        self._thread.start()
        try:
            for layer, codecs in self._codecs.items():
                variables = [codec.variable for codec in codecs.values()]
                data = session.get_tensors_data(variables)  # all processes read all
                if layer in own:
                    part = layer, {name: data[codec.variable] for name, codec in codecs.items()}
                    self._parts.put(copied(part) if is_behind else part)
                    del part
                del data  # before the next layer is read
        except BaseException:
            self.abandon()
            self._thread.join()
            raise
        self._parts.end()
        if not is_behind:
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is left to do in this process."""
        if self._thread is None:
            return
        try:
            self._thread.join()
        except BaseException:  # a second Ctrl-C
            self.abandon()
            self._thread.join()
            raise

    def abandon(self) -> None:
        """Write no more than is being written, and remove it: this process ends."""
        self._parts.end(_Abandoned())

    def finish(self) -> Path:
        """Wait until the checkpoint is there; all processes call this. Raises as `save`."""
        self.wait()
        if self.problem is not None:
            raise self.problem
        return self.target

    # In the thread

    def _work(self) -> None:
        try:
            with ExitStack() as stack:
                (partial, *_) = self._together(lambda: self._make_folder(stack))
                files = self._together(lambda: self._write_part(Path(partial)))
                self._together(lambda: self._publish(Path(partial), files))
        except BaseException as error:
            self.problem = error
        finally:
            self._parts.close()

    def _together(self, work: "Callable[[], Any]") -> "list[Any]":
        """What the work of each process gives, which must be JSON. Where it failed in one, all
        raise what it did.
        """
        value, own, problem = None, None, None
        try:
            value = work()
        except OSError as error:
            told = _not_saved(self.target, self._needed, error)
            problem = ["disk", told, failure_number(error)]
        except DivergedError as error:
            problem = ["diverged", str(error)]
        except Exception as error:
            own, problem = error, ["program", f"{type(error).__name__}: {error}"]
        found = gather_beside([value, problem])
        if own is not None:
            raise own
        for instance, (_, theirs) in enumerate(found):
            if theirs is not None:
                _raise(instance, *theirs)
        return [value for value, _ in found]

    def _make_folder(self, stack: ExitStack) -> str | None:
        """Instance 0 makes the folder, which goes with the stack unless it is published."""
        if self._index != 0:
            return None
        remove_leftovers(self.target.parent)
        return str(stack.enter_context(partial_folder(self.target)))

    def _write_part(self, partial: Path) -> "dict[str, Any]":
        """Write the files of this process's layers. Returns their entries in the manifest."""
        files = {}
        for layer, arrays in self._parts.taken():
            files.update(self._write_layer(partial, layer, arrays))
            del arrays
        sync(partial)
        return files

    def _write_layer(
        self, partial: Path, layer: str, arrays: "dict[str, np.ndarray]"
    ) -> "dict[str, Any]":
        tensors = {}
        for name, pieces in arrays.items():
            tensors[name] = self._codecs[layer][name].whole(pieces)
            if not is_finite(tensors[name]):
                raise DivergedError(
                    f"{name} of {layer}: got numbers that are not finite after step {self.step}; "
                    "expected finite ones, so this step is not saved. Older checkpoints in "
                    f"{self.target.parent} stay. Continue from the last one with a lower learning "
                    "rate."
                )
        of_file = file_tensors(layer, self._codecs[layer], self._config)
        whole = {name: tensor.joined(tensors) for name, tensor in of_file.items()}
        return _write_file(partial, layer, whole)

    def _publish(self, partial: Path, files: "list[dict[str, Any]]") -> None:
        """Instance 0 completes the folder, gives it its name, and deletes old ones."""
        if self._index != 0:
            return
        entries = {name: entry for theirs in files for name, entry in theirs.items()}
        in_order = {name: entries[name] for name in map(file_of, layers_of(self._config))}
        _write_manifest(partial, self._config, self._position, self._scalars, in_order)
        publish(partial, self.target, overwrite=False)
        if not self._keep_all:
            delete_old(self.target.parent, self._config.checkpoint.keep)


def _shares(sizes: "dict[str, int]", instances: int) -> "list[set[str]]":
    """Which layers each process writes: about as many bytes as any other."""
    shares: list[set[str]] = [set() for _ in range(instances)]
    loads = [0] * instances
    for layer in sorted(sizes, key=lambda layer: -sizes[layer]):
        least = loads.index(min(loads))
        shares[least].add(layer)
        loads[least] += sizes[layer]
    return shares


def _raise(instance: int, kind: str, problem: str, failure: int = 0) -> NoReturn:
    """Raise what an instance has told."""
    if kind == "disk":
        raise NotSavedError(problem) from numbered(failure)
    if kind == "diverged":
        raise DivergedError(problem)
    raise RuntimeError(f"instance {instance}, saving: {problem}")


def _not_saved(target: Path, needed: int, error: OSError) -> str:
    way_out = "Free space on the disk"
    if error.errno == errno.EFBIG:
        way_out = "Raise the limit of a file's size (ulimit -f)"
    return (
        f"{target}: got '{reason_of(error)}' while saving; expected a folder that takes the "
        f"checkpoint's {needed} bytes{_free(target.parent)}. {way_out} or "
        "set --checkpoint.save to another folder, and continue with --checkpoint.load."
    )


def _free(folder: Path) -> str:
    """Words for the space that a folder has."""
    try:
        return f" ({bytes_text(shutil.disk_usage(folder).free)} are free)"
    except OSError:
        return ""


def write_weights(
    folder: Path,
    config: Config,
    weights: "Iterator[tuple[str, np.ndarray]]",
    special_tokens: "Mapping[str, int | list[int]]" = MappingProxyType({}),
    bfloat16: "Sequence[str]" = (),
) -> None:
    """Fill a folder with a checkpoint of whole weights alone, of step 0: for programs that use a
    model, and to begin a run with.

    Args:
        weights: by parameter name, in the table's order.
        special_tokens: that texts begin and end with, by Hugging Face's names.
        bfloat16: names of those that came in bfloat16, which are float32 here.
    """
    files = {}
    for layer, named in groupby(weights, lambda item: _layer_of(item[0])):
        prefix = f"{layer}."
        tensors = {f"weights.{name.removeprefix(prefix)}": array for name, array in named}
        files.update(_write_file(folder, layer, tensors))
    described: dict[str, Any] = {"weights_only": True, "seed": [[0, 0]]}
    described["special_tokens"] = dict(special_tokens)
    if bfloat16:
        described["bfloat16"] = list(bfloat16)
    _write_manifest(folder, config, Position(0, ""), described, files)


def _layer_of(parameter: str) -> str:
    kind, number, *_ = parameter.split(".")
    return f"{kind}.{number}" if kind == "decoder" else kind


def _write_file(folder: Path, layer: str, tensors: "dict[str, np.ndarray]") -> "dict[str, Any]":
    """Write a layer's file. Returns its entry in the manifest, by its name."""
    path = folder / file_of(layer)
    return {path.name: write_tensors(tensors, path)}


def _write_manifest(
    folder: Path,
    config: Config,
    position: Position,
    described: "dict[str, Any]",
    files: "dict[str, Any]",
) -> None:
    tokens = position.tokens
    if tokens is None:
        tokens = position.step * config.tokens_per_step
    manifest = {
        "format": FORMAT,
        "step": position.step,
        "data": {
            "fingerprint": position.data,
            "samples": tokens // config.model.sequence_length,
            "tokens": tokens,
        },
        **described,
        "numerics": numerics_hash(config),
        "config": to_mapping(config),
        **position.beside(),
        "files": files,
    }
    # whoever publishes the folder brings it onto the disk
    write_plain(folder / MANIFEST, manifest_text(manifest))


def add_validation(checkpoint: Path, position: Position) -> None:
    """Let a checkpoint that is there say what was measured after it was saved. It is on the disk
    then, and the description is the old or the new one at any moment.

    Raises:
        OSError: the folder takes no files or the disk is full.
        ManifestError: the description is damaged.
    """
    path = checkpoint / MANIFEST
    found = read_manifest(path)
    found.pop("sha256", None)  # the first format has none
    files = found.pop("files")
    if position.validation_loss is not None:
        found["validation_loss"] = position.validation_loss
        found["validation_fingerprint"] = position.validation_fingerprint
    remove_partial(path)
    write_whole(path, manifest_text({**found, "files": files}))
