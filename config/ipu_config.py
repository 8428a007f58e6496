"""`ipu_config.json`, in which optimum-graphcore says how IPUs execute a model: what its keys are
here.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from popxl_gpt.config.bounds import Count, Range
from popxl_gpt.config.leaves import Leaf, leaves
from popxl_gpt.config.other_programs import SAME
from popxl_gpt.config.schema import Config
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.files.bounded import read_object, shortened
from popxl_gpt.utils.files.plain import is_folder, write_plain
from popxl_gpt.utils.texts import did_you_mean, user_path

NAME = "ipu_config.json"
FILE_BYTES = 2**20
Layers = Annotated[tuple[int, ...], Range(low=-1)]
Splits = Annotated[tuple[int, ...], Range(low=0)]
Proportions = Annotated[tuple[float, ...], Range(low=0)]


@dataclass(frozen=True, kw_only=True)
class IpuConfig:
    """The keys, with their defaults there. What has a setting here becomes that one; of what has
    none the string under a field says why it has no effect.
    """

    replication_factor: Count = 1
    """Replicas that see different sequences."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches per replica and optimizer step."""
    device_iterations: Count = 1
    """Optimizer steps per call of the session."""
    replicated_tensor_sharding: bool = False
    """Whether replicas keep a part of the state each. With one replica it does nothing, and the run
    warns.
    """
    recompute_checkpoint_every_layer: bool = False
    """Whether layers compute their activations again in the backward pass."""
    projection_serialization_factor: Count | None = None
    """Parts of the head: there of the vocabulary, here of the rows, which compute nothing twice."""
    embedding_serialization_factor: Count | None = None
    """Parts of the word embedding's rows."""
    auto_loss_scaling: bool = False
    """Whether the program finds the loss scale; false leaves the setting as it is."""
    seed: Annotated[int | None, Range(low=0)] = None
    """Source of what is drawn; null leaves the setting as it is."""
    optimizer_state_offchip: bool = False
    """No effect: state is in remote memory always, and what fits stays on the device."""
    executable_cache_dir: str | None = None
    """No effect: programs compile in seconds, and kernels are kept in POPXL_CACHE_DIR."""
    matmul_proportion: Proportions = (0.2,)
    """No effect: matrix products have no memory set aside. A list has an entry for each IPU."""
    enable_half_partials: bool = True
    """No effect: matrix products sum in float32."""
    explicit_ir_inference: bool = False
    """No effect: every program is explicit."""
    output_mode: Literal["all", "sum", "final", "default"] = "final"
    """No effect: every step's loss is returned."""
    layers_per_ipu: Layers = (-1,)
    """No effect: there are no stages of a pipeline. Their sum is the model's layers; each -1 has an
    equal share of what the others leave.
    """
    ipus_per_replica: Count | None = None
    """No effect, for the same reason. As many as layers_per_ipu has entries."""
    serialized_embedding_splits_per_ipu: Splits | None = None
    """No effect, for the same reason. An entry for each IPU, and no 0 between others."""
    serialized_projection_splits_per_ipu: Splits | None = None
    """No effect, as those of the embedding."""
    inference_replication_factor: Count = 1
    """Replicas of validation, and of what writes texts."""
    inference_device_iterations: Count = 1
    """Global batches of validation per call of the session."""
    inference_projection_serialization_factor: Count | None = None
    """Parts of the head in validation."""
    inference_embedding_serialization_factor: Count | None = None
    """No effect: the parts are those of training, from which weights are copied."""
    inference_matmul_proportion: Proportions | None = None
    """No effect, as that of training, and checked like it."""
    inference_layers_per_ipu: Layers | None = None
    """No effect, as that of training, and checked like it."""
    inference_ipus_per_replica: Count | None = None
    """No effect, as that of training, and checked like it."""
    inference_serialized_embedding_splits_per_ipu: Splits | None = None
    """No effect, as that of training, and checked like it."""
    inference_serialized_projection_splits_per_ipu: Splits | None = None
    """No effect, as that of training, and checked like it."""


DEPRECATED = {
    "enable_half_first_order_momentum": "Use --moment_precision bfloat16.",
    "sharded_execution_for_inference": "Use --tensor_parallel_1: layers are split, not placed.",
}
"""Keys that optimum-graphcore itself has given up, with what to use."""
NOT_HERE = {
    "parallelize_kwargs": "layers have no places on devices; use --tensor_parallel_1",
    "inference_parallelize_kwargs": "layers have no places on devices; use --tensor_parallel_1",
    "execute_encoder_on_cpu_for_generation": "a GPT has no encoder",
}
"""Keys that are refused unless they ask for nothing."""
UNREAD = ("model_type", "optimum_version", "transformers_version")
"""Keys that say who wrote the file."""


def setting_of(key: Leaf) -> "Leaf | None":
    """The setting that a key becomes here; None for one without effect."""
    return {leaf.name: leaf for leaf in leaves()}.get(SAME.get(key.name, key.name))


class IpuConfigFile:
    """What a file says.

    Attributes:
        sections: settings of this program by section, of the keys that have some.
    """

    def __init__(self, given: str):
        """Read a file, or that in a folder.

        Raises:
            ConfigError: there is none, or it holds what has no meaning here; lists every key.
        """
        self.file = user_path("--ipu_config", given)
        if is_folder(self.file):
            self.file /= NAME
        found = read_object(self.file, FILE_BYTES, "got no JSON object; expected one of keys")
        if found is None:
            raise ConfigError(
                [f"--ipu_config: got {self.file}, which is no file; expected an {NAME}."]
            )
        self._problems: list[str] = []
        self._values = self._checked(found)
        self._problems += _stage_problems(self._values)
        self._refuse_problems()
        self.sections: dict[str, dict[str, Any]] = {}
        for key in leaves(IpuConfig):
            setting, value = setting_of(key), _ours(key.name, self._values[key.name])
            if setting is not None and key.name in found and value is not None:
                self.sections.setdefault(setting.section, {})[setting.name] = value
        without = [
            key.name
            for key in leaves(IpuConfig)
            if self._values[key.name] != key.default and setting_of(key) is None
        ]
        for name in found.keys() & DEPRECATED.keys():
            told = f"{self.file}: warning: {name} is deprecated. {DEPRECATED[name]}"
            print(told, file=sys.stderr)
        if without:
            print(f"{self.file}: without effect here: {', '.join(without)}.", file=sys.stderr)

    @property
    def names(self) -> frozenset[str]:
        """Names of the settings that it says."""
        return frozenset(name for section in self.sections.values() for name in section)

    def check_layers(self, layers: int) -> None:
        """Raise ConfigError where what it says of a model's layers is not of so many."""
        self._problems += _layer_problems(self._values, layers)
        self._refuse_problems()

    def _refuse_problems(self) -> None:
        if self._problems:
            raise ConfigError([f"{self.file}: {problem}" for problem in self._problems])

    def _checked(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """A value for every key; notes what is wrong by itself."""
        keys = {key.name: key for key in leaves(IpuConfig)}
        values = {name: key.default for name, key in keys.items()}
        for name, value in found.items():
            if name in NOT_HERE and value:
                self._problems.append(
                    f"{name}: got {shortened(value)}; expected none, for {NOT_HERE[name]}. "
                    "Leave it out."
                )
            elif name in keys:
                is_one = name.endswith("matmul_proportion") and isinstance(value, (int, float))
                plain = None if value == "" else value
                try:
                    values[name] = keys[name].check([value] if is_one else plain)
                except ValueError as error:
                    self._problems.append(f"{error} Correct it.")
            elif name not in (*NOT_HERE, *DEPRECATED, *UNREAD):
                hint = did_you_mean(name, keys) or "Leave it out."
                self._problems.append(f"{name}: got a key that has no meaning here. {hint}")
        return values


def _ours(key: str, value: Any) -> Any:
    """The value of a key's setting; None where that stays as it is."""
    if key == "auto_loss_scaling":
        return "auto" if value else None
    return value


def _of_modes(values: Mapping[str, Any]) -> "Iterator[tuple[str, tuple[int, ...], int]]":
    """What training and inference put before a key's name, their layers per IPU, and their IPUs."""
    layers, count = values["layers_per_ipu"], values["ipus_per_replica"]
    count = count or len(layers)
    yield "", layers, count
    own, prefix = values["inference_layers_per_ipu"] or layers, "inference_"
    if count == len(layers) or own != (-1,):
        count = len(own)
    yield prefix, own, values[f"{prefix}ipus_per_replica"] or count


def _stage_problems(values: Mapping[str, Any]) -> "Iterator[str]":
    """What does not go together of what is said of IPUs one by one."""
    for prefix, layers, count in _of_modes(values):
        lists = {f"{prefix}layers_per_ipu": None if layers == (-1,) else layers}
        proportions = values[f"{prefix}matmul_proportion"]
        is_list = proportions is not None and len(proportions) > 1
        lists[f"{prefix}matmul_proportion"] = proportions if is_list else None
        for part in ("embedding", "projection"):
            name, factor = (
                f"{prefix}serialized_{part}_splits_per_ipu",
                f"{prefix}{part}_serialization_factor",
            )
            lists[name] = splits = values[name]
            if splits and values[factor]:
                yield f"{name}: got it with {factor}; expected one of them. Leave one out."
            if splits is not None and not _is_one_block(splits):
                yield (
                    f"{name}: got {[*splits]}; expected at least one split, and no 0 between "
                    "others. Correct it."
                )
        for name, entries in lists.items():
            if entries is not None and len(entries) != count:
                yield (
                    f"{name}: got {[*entries]}; expected an entry for each of the {count} IPUs "
                    f"of {prefix}ipus_per_replica. Change one of them."
                )


def _is_one_block(splits: "tuple[int, ...]") -> bool:
    """Whether there are splits, and all are on IPUs next to each other."""
    used = [number for number, count in enumerate(splits) if count]
    return bool(used) and used[-1] - used[0] < len(used)


def _layer_problems(values: Mapping[str, Any], layers: int) -> "Iterator[str]":
    """Sums of layers that are not the model's. On one IPU all layers are, whatever is said."""
    for prefix, per_ipu, count in _of_modes(values):
        named = sum(number for number in per_ipu if number != -1)
        has_rest = -1 in per_ipu
        if count > 1 and (named > layers if has_rest else named != layers):
            yield (
                f"{prefix}layers_per_ipu: got {[*per_ipu]}, which names {named} layers; expected "
                f"{'at most ' * has_rest}the model's {layers}. Correct it."
            )


def ipu_config(config: Config) -> dict[str, Any]:
    """What `ipu_config.json` says of a configuration: every key."""
    found: dict[str, Any] = {}
    in_inference = config.in_inference.execution
    for key in leaves(IpuConfig):
        setting = setting_of(key)
        value = key.default if setting is None else setting.of(config)
        found[key.name] = [*value] if isinstance(value, tuple) else value
    return found | {
        "matmul_proportion": found["matmul_proportion"][0],
        "executable_cache_dir": "",
        "gradient_accumulation_steps": config.gradient_accumulation,
        "auto_loss_scaling": config.training.is_scaled_by_program,
        "optimizer_state_offchip": True,
        "inference_replication_factor": in_inference.data_parallel,
        "inference_device_iterations": in_inference.device_iterations,
        "inference_projection_serialization_factor": in_inference.head_serialisation,
    }


def write_ipu_config(config: Config, place: Path) -> Path:
    """Write it to a file, or into a folder. Returns the file."""
    file = place / NAME if is_folder(place) else place
    write_plain(file, json.dumps(ipu_config(config), indent=2, sort_keys=True) + "\n")
    return file
