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
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
from popxl.tensor import Variable

from popxl_gpt.config.presets import from_mapping, override
from popxl_gpt.config.schema import Config, Model
from popxl_gpt.data.special_tokens import END, as_list
from popxl_gpt.execution.averaging import AVERAGE
from popxl_gpt.execution.checkpoints.checkpoint_folder import MANIFEST, NAME
from popxl_gpt.execution.checkpoints.damage import (
    DamagedError,
    DeletedError,
    damaged,
    not_read,
    some_of,
)
from popxl_gpt.execution.checkpoints.fit import check_fits
from popxl_gpt.execution.checkpoints.manifest import FORMAT, FORMATS, ManifestError, read_manifest
from popxl_gpt.execution.checkpoints.saved_state import (
    FileTensor,
    Position,
    file_of,
    file_tensors,
    is_finite,
    layer_tensors,
    layers_of,
    scalars_of,
)
from popxl_gpt.execution.checkpoints.tensor_files import (
    TensorFileError,
    damaged_tensors,
    read_tensors,
    tensor_entries,
)
from popxl_gpt.execution.overflow import COUNTED, SEEDS, read_count
from popxl_gpt.execution.variables import write
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.linear import DOWN, UP, merged
from popxl_gpt.modelling.parameters import Role, Table
from popxl_gpt.utils.errors import NotFiniteError, UserError
from popxl_gpt.utils.files.plain import check_plain, open_plain, real_path
from popxl_gpt.utils.files.whole import set_aside

_LOG = logging.getLogger(__name__)


class SavedRun:
    """A checkpoint that was found whole, and is of this model.

    Raises:
        DamagedError: it is not whole.
        UserError: it is of another version, or of another model.
    """

    def __init__(self, folder: Path, config: Config | None, checksums: bool = True):
        """``config``: None: as it was saved. ``checksums``: compare those of all files; without,
        contents are not verified.
        """
        self.folder = folder
        self.passed_over: list[Path] = []
        """Newer ones, which are damaged."""
        self._manifest = _read_manifest(folder)
        self.config = from_mapping(self._manifest["config"]) if config is None else config
        self.position = Position.of(self._manifest)
        check_fits(folder, self._manifest, self.config)
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
        """The tokens that texts end with."""
        return as_list(self.special_tokens.get(END))

    @property
    def beside(self) -> "list[Path]":
        """Folders where the run's tokenizer may be: beside the checkpoints, and the run's own."""
        return list(real_path(self.folder).parents[:2])

    @property
    def types(self) -> "dict[str, str]":
        """The type that each weight came in, or has been trained in, by its name. The files have
        bfloat16 as float32.
        """
        saved = model_table(self.adapted)
        found = dict.fromkeys(model_table(self.config.model), "float32")
        for layer in layers_of(self.config):
            path = self.folder / file_of(layer)
            try:
                entries = tensor_entries(path)
            except TensorFileError as error:
                raise DamagedError(f"{path}, {error}") from error
            except OSError as error:
                raise not_read(path, error) from error
            for key, entry in entries.items():
                name = f"{layer}.{key.removeprefix('weights.')}"
                is_merged = f"{name.rpartition('.')[0]}.{DOWN}" in saved.keys() - found.keys()
                if name in found and entry.type == "F16" and not is_merged:
                    found[name] = "float16"
        came = self._manifest.get("bfloat16", [])
        return {**found, **{name: "bfloat16" for name in came if name in found}}

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
            _LOG.warning("%s: damaged, now %s.", path, set_aside(path, "damaged_").name)
        self.passed_over = []

    def restore(self, session: addons.TaskSession) -> None:
        """Give weights, optimizer state, seeds and counters to a session."""
        if self._manifest.get("weights_only"):
            raise UserError(
                f"{self.folder}: got a checkpoint of weights alone; expected one with the state of "
                "the optimizer. Begin a run with it: --init_from instead of --checkpoint.load."
            )
        for layer, codecs in layer_tensors(session, self.config).items():
            of_file = file_tensors(layer, codecs, self.config)
            tensors, values = self._read(layer, set(of_file)), {}
            for name, tensor in of_file.items():
                self._check_tensor(f"{self.folder / file_of(layer)}, {name}", tensor, tensors[name])
                for codec, part in zip(tensor.codecs, tensor.cut(tensors[name])):
                    values[codec.variable] = codec.pieces(part)
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
        saved = self.adapted
        table, of_file = model_table(self.config.model), model_table(saved)
        for layer in layers_of(self.config):
            tensors = self._read(layer)
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
                got = f"tensors that its model has not: {some_of(left)}"
                raise damaged(self.folder / file_of(layer), got, "the layer's alone")

    @property
    def adapted(self) -> Model:
        """The model as it was trained, with its adapters where it has any."""
        return from_mapping(self._manifest["config"]).model

    def adapters(self) -> "Iterator[tuple[str, np.ndarray]]":
        """The adapters by parameter name; raises as `weights`."""
        table = model_table(self.adapted)
        for layer in layers_of(self.config):
            tensors = self._read(layer)
            for name, parameter in table.items():
                if name.startswith(f"{layer}.") and parameter.role is Role.ADAPTER:
                    yield name, self._weight(tensors, layer, name, table)

    def _weight(
        self, tensors: "dict[str, np.ndarray]", layer: str, name: str, table: Table
    ) -> np.ndarray:
        """A parameter's weight, or where there is one its average, of the tensors of its layer's
        file.
        """
        path, own = self.folder / file_of(layer), name.removeprefix(f"{layer}.")
        key, average = f"weights.{own}", f"optimizer.{own}.{AVERAGE}"
        if key not in tensors:
            raise damaged(path, f"tensors without {key}", "all weights")
        last, key = tensors.pop(key), average if average in tensors else key
        array, where = tensors.get(average, last), f"{path}, {key}"
        _check_kind(where, array, table[name].shape)
        if not is_finite(array):
            raise NotFiniteError(
                f"{where}: got numbers that are not finite; expected finite ones. Use an older "
                "checkpoint."
            )
        return array

    def _check_tensor(self, where: str, tensor: FileTensor, array: np.ndarray) -> None:
        """Refuse a tensor of another type or shape than saving writes, and numbers that are no
        weights of a model.
        """
        codec = tensor.codecs[0]
        _check_kind(where, array, tensor.shape)
        if not is_finite(array):
            raise damaged(where, "numbers that are not finite", "finite ones")
        is_narrow = codec.variable.dtype is popxl.float16 or (
            codec.name.startswith("weights.") and self.config.model.precision == "float16"
        )
        if is_narrow and max(-array.min(), array.max()) > np.finfo(np.float16).max:
            raise UserError(
                f"{where}: got numbers beyond float16's largest, 65504; expected ones that it "
                "holds. Train with --precision bfloat16 or float32."
            )

    def _scalar(self, name: str, variable: Variable) -> np.ndarray:
        """A counter, as it begins where none was saved; or a seed, where none was saved, or for
        other replicas, as it is after as many steps.
        """
        if name not in SEEDS:
            return read_count(self._manifest, name)
        saved = np.asarray(self._manifest.get(name, ()), np.uint32)
        if saved.shape == tuple(variable.shape_on_host):
            return saved
        fresh = popxl.create_seeds(
            self.config.training.seed, replicas=variable.replica_grouping.num_groups
        )
        return fresh + np.uint32(self.position.step)

    def _verify(self, checksums: bool) -> None:
        """Check that every file is there and holds what was saved."""
        if set(map(file_of, layers_of(self.config))) != self._manifest["files"].keys():
            raise damaged(self.folder / MANIFEST, "a list without all files", "one for each layer")
        for name, entry in self._manifest["files"].items():
            path = self.folder / name
            try:
                size, digest = check_plain(path).st_size, entry["sha256"]
                if checksums and size == entry["bytes"]:  # it may be larger than can be read
                    digest = _sha256(path)
            except OSError as error:
                raise not_read(path, error) from error
            if size != entry["bytes"]:
                raise damaged(path, f"{size} bytes{_where(path, entry)}", f"{entry['bytes']}")
            if digest != entry["sha256"]:
                got = f"contents with SHA-256 {digest[:12]}{_where(path, entry)}"
                raise damaged(path, got, f"{entry['sha256'][:12]}")

    def _read(self, layer: str, expected: "set[str] | None" = None) -> "dict[str, np.ndarray]":
        """The tensors of a layer's file; only those that are expected, where that is said."""
        path = self.folder / file_of(layer)
        try:
            tensors = read_tensors(path)
        except TensorFileError as error:
            raise DamagedError(f"{path}, {error}") from error
        except OSError as error:
            raise not_read(path, error) from error
        except ValueError as error:
            raise damaged(path, f"'{error}'", "a safetensors file") from error
        if expected is not None and set(tensors) != expected:
            got = f"tensors that the run has not: {some_of(sorted(tensors.keys() - expected))}"
            if missing := sorted(expected - tensors.keys()):
                got = f"tensors without {some_of(missing)}"
            raise damaged(path, got, "those of the layer")
        return tensors


def _check_kind(where: str, array: np.ndarray, shape: "tuple[int, ...]") -> None:
    """Refuse a tensor of another type or shape than saving writes."""
    if array.dtype not in (np.float32, np.float16):
        raise damaged(where, str(array.dtype), "float32 or float16")
    if array.shape != shape:
        raise damaged(where, f"shape {array.shape}", str(shape))


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
        raise not_read(path, error) from error
    except ManifestError as error:
        raise DamagedError(f"{path}: {error}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise damaged(
            path, f"no count that a run comes to ({error})", "what saving wrote"
        ) from error
    if manifest["format"] not in FORMATS:
        raise UserError(
            f"{path}: got format {manifest['format']}; expected {FORMAT} or older. "
            "Use the version of this program that wrote it."
        )
    named = NAME.fullmatch(real_path(folder).name)
    if named is not None and int(named[1]) != manifest["step"]:
        raise damaged(
            path, f"step {manifest['step']}", f"{int(named[1])}, as its folder's name says"
        )
    return manifest


def _where(path: Path, entry: "dict[str, Any]") -> str:
    """Which of a file's tensors are damaged, as far as checksums and its header tell."""
    try:
        names = damaged_tensors(path, entry.get("tensors", {}), entry["bytes"])
    except OSError:
        return ""
    if not names:
        return " in its header" if entry.get("tensors") else ""
    return f" in {some_of(names)}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(open_plain(path), "rb", buffering=0) as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()
