"""Files of GGUF, which llama.cpp and Ollama run: settings, tokenizer and weights of a model in one.

A family of ours is an architecture of GGUF's. Its names are those of the package gguf, which finds
tensors by Hugging Face's names. Weights pass through memory a tensor at a time.
Source: github.com/ggml-org/ggml, docs/gguf.md; github.com/ggml-org/llama.cpp, conversion and
src/models.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.config.model import FULL, NOPE, SLIDING
from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families.family import Family
from popxl_gpt.execution.exchange.families.known import FAMILIES
from popxl_gpt.execution.exchange.hugging_face import WORDS
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.parameters import Parameter, Role
from popxl_gpt.modelling.rotary import speeds, table_factor
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.files.bounded import shown
from popxl_gpt.utils.files.whole import written_whole

Values = dict[str, Any]
MAGIC = b"GGUF"
"""How a file begins."""
LARGEST = {"f32": np.inf, "f16": 65504.0, "bf16": 3.38e38, "q8_0": 127 * 65504.0}
"""The largest number of each type of weights; q8_0 has a scale in f16 for 32 of them."""
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
ROWS = 2**12
"""Rows of a tensor that are rounded at a time."""
EPSILONS = {"layer_norm": "layer_norm_eps", "rms_norm": "layer_norm_rms_eps"}


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp runs a family as.

    Attributes:
        name: in `gguf.MODEL_ARCH`.
        turns_neighbours: whether the two features of a rotary pair lie side by side there.
        has_factors: whether it takes a factor for the speed of each pair.
        pattern: kinds of its layers, again and again.
        wide: layers of its largest model, whose scores are divided by the root of hidden_size over
            heads.
        has_head: whether a head's matrix stands there, be it that of the words.
        has_own_size: whether all heads together may be of another width than hidden_size.
    """

    name: str
    turns_neighbours: bool = False
    has_factors: bool = False
    pattern: "tuple[str, ...]" = (FULL,)
    wide: int | None = None
    has_head: bool = False
    has_own_size: bool = True


_LLAMA = Architecture("LLAMA", turns_neighbours=True, has_factors=True)
_OLMO = Architecture("OLMO2", has_head=True, has_own_size=False)
ARCHITECTURES = {
    "gemma2": Architecture("GEMMA2", pattern=(SLIDING, FULL), wide=46),
    "gemma3_text": Architecture("GEMMA3", pattern=(*(SLIDING,) * 5, FULL), wide=62),
    "gpt2": Architecture("GPT2"),
    "gpt_neox": Architecture("GPTNEOX", has_head=True),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "olmo2": _OLMO,
    "olmo3": replace(_OLMO, pattern=(SLIDING, SLIDING, SLIDING, FULL)),
    "phi3": Architecture("PHI3", has_own_size=False),
    "qwen2": Architecture("QWEN2", has_own_size=False),
    "qwen3": Architecture("QWEN3"),
    "smollm3": Architecture("SMOLLM3", turns_neighbours=True, pattern=(FULL, FULL, FULL, NOPE)),
}
"""Architectures by the names of our families; what more a family says is in `_settings`."""


def gguf_family(model: Model, wanted: str | None) -> Family:
    """The family that a model is exported as. UserError where GGUF has none for it.

    Args:
        wanted: its name; none: the first that the model is of.
    """
    exported = {name: family for name, family in FAMILIES.items() if name in ARCHITECTURES}
    found = {name: family for name, family in exported.items() if family.fits(model)}
    family = next(iter(found.values()), None) if wanted is None else found.get(wanted)
    if family is not None:
        return family
    if found:
        raise UserError(
            f"--family: got {wanted}; expected one that GGUF has and the model is of: "
            f"{', '.join(found)}. Give one of these, or leave it out."
        )
    lacking = {name: family.foreign(model) for name, family in exported.items()}
    nearest = min(lacking, key=lambda name: len(lacking[name]))
    settings = " and ".join(f"{name} {shown(value)}" for name, value in lacking[nearest].items())
    raise UserError(
        "to_gguf: got a model of an architecture of our own; expected one of those that GGUF has: "
        f"{', '.join(exported)}. Train one with {settings}, which is {nearest}, or use "
        "to_hugging_face."
    )


def write_gguf(
    path: Path,
    model: Model,
    family: Family,
    weights: "Iterator[tuple[str, np.ndarray]]",
    kind: str,
    values: "Mapping[str, Any]",
) -> int:
    """Write a file, which is there whole or not at all. Returns the tensors that q8_0 cannot hold,
    for their rows are no multiple of 32: they are f16.

    Args:
        weights: whole, by our names, in the table's order.
        kind: type of matrices: a key of `LARGEST`.
        values: what else it says, by the names of gguf's writer.
    Raises:
        UserError: GGUF cannot say what the model does, or weights are beyond the type.
    """
    gguf, architecture = library(), ARCHITECTURES[family.model_type]
    settings = _settings(gguf, model, architecture)
    with written_whole(path) as partial:
        writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[architecture.name]])
        try:
            for name, value in {**settings, **values}.items():
                getattr(writer, f"add_{name}")(value)
            writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            return _write_tensors(gguf, writer, model, family, weights, kind)
        finally:
            writer.close()


def library() -> Any:
    """The package gguf. UserError where it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UserError(
            f"to_gguf: got it without the package gguf ({error}); expected that it can be "
            "imported. Run `pip install gguf`."
        ) from error


def _settings(gguf: Any, model: Model, architecture: Architecture) -> Values:
    """Settings of a model, by the names of gguf's writer."""
    found: Values = {
        "vocab_size": model.vocabulary_size,
        "context_length": model.positions,
        "embedding_length": model.hidden_size,
        "block_count": model.layers,
        "feed_forward_length": model.feed_forward,
        "head_count": model.heads,
        "head_count_kv": model.key_value,
        EPSILONS[model.norm]: model.layer_norm_eps,
    }
    if SLIDING in _kinds(model, architecture):
        found["sliding_window"] = model.window
        found["rope_freq_base_swa"] = model.of_kind(SLIDING).rotary_base
    _check_fits(model, architecture)
    if model.score_softcap:
        found["attn_logit_softcapping"] = model.score_softcap
    if model.logit_softcap:
        found["final_logit_softcapping"] = model.logit_softcap
    if architecture.name == "GPTNEOX":
        found["parallel_residual"] = model.parallel_branches
    if model.has_position_table:
        return found
    found |= {"key_length": model.head_width, "value_length": model.head_width}
    found |= {"rope_dimension_count": model.rotary_size, "rope_freq_base": model.rotary_base}
    scaling = model.rotary_scaling
    if scaling == "dynamic" or (scaling == "llama3" and not architecture.has_factors):
        raise UserError(
            f"rotary_scaling: got {scaling}; expected none, linear or yarn, or llama3 in a family "
            "of Llama's, for llama.cpp has no other. Use to_hugging_face."
        )
    if scaling in ("linear", "yarn"):
        found["rope_scaling_type"] = gguf.RopeScalingType[scaling.upper()]
        found["rope_scaling_factor"] = model.rotary_factor
    if scaling == "yarn":
        own = table_factor(replace(model, rotary_attention_factor=None))  # that llama.cpp has, too
        found["rope_scaling_orig_ctx_len"] = model.rotary_original_positions
        found["rope_scaling_yarn_beta_fast"] = model.rotary_fast_turns
        found["rope_scaling_yarn_beta_slow"] = model.rotary_slow_turns
        found["rope_scaling_attn_factors"] = table_factor(model) / own
    return found


def _check_fits(model: Model, architecture: Architecture) -> None:
    """UserError where llama.cpp has another model in the family, whatever a file says."""
    is_wide = architecture.wide == model.layers
    size = model.hidden_size / model.heads if is_wide else model.head_width
    caps = (model.score_softcap, model.logit_softcap)
    problem = None
    if abs(model.score_scale * size**0.5 - 1) > 1e-6:
        problem = f"attention_scale: got {model.score_scale:.6g}; expected {size**-0.5:.6g}"
    elif model.has_own_head_size and not architecture.has_own_size:
        whole = f"hidden_size / heads = {model.hidden_size / model.heads:g}"
        problem = f"head_size: got {model.head_width}; expected {whole}"
    elif architecture.name == "GEMMA2" and not model.tied_head:
        problem = "tied_head: got false; expected true"
    elif architecture.name == "GEMMA2" and not all(caps):
        problem = f"score_softcap, logit_softcap: got {caps[0]:g}, {caps[1]:g}; expected both"
    if problem is not None:
        raise UserError(f"{problem}, which llama.cpp has in this family. Use to_hugging_face.")


def _kinds(model: Model, architecture: Architecture) -> "list[str]":
    """The kind of each layer. UserError where llama.cpp has others in the family, unless windows
    are as long as texts.
    """
    pattern = architecture.pattern
    is_wide = model.window is not None and model.window >= model.positions
    is_full = is_wide and SLIDING not in pattern
    kinds = [FULL if kind == SLIDING and is_full else kind for kind in model.kinds]
    sliding = model.of_kind(SLIDING)
    # in windows llama.cpp scales none
    scaling = None if SLIDING in kinds else model.rotary_scaling
    base = sliding.rotary_base if architecture.name == "GEMMA3" else model.rotary_base
    turns_so = (sliding.rotary_base, sliding.rotary_scaling) == (base, scaling)
    is_known = kinds == [pattern[n % len(pattern)] for n in range(model.layers)]
    if not is_known or (SLIDING in model.kinds and not turns_so):
        raise UserError(
            f"layer_pattern: got {' '.join(model.layer_pattern)} with window {model.window}; "
            f"expected {' '.join(pattern)}, which llama.cpp has in this family, or windows as long "
            f"as texts of {model.positions} tokens, and one rotary_base, scaled in full layers "
            "alone. Give --positions, or use to_hugging_face."
        )
    return kinds


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a file.

    Attributes:
        name: there, and `shape`.
        kind: of gguf's types.
        is_turned: whether ours lies the other way round.
        neighbours: heads whose rotary pairs come to lie side by side; 0: none.
        grouped: heads whose queries, keys and values lie together, and come apart; 0: none.
        offset: what is added.
    """

    name: str
    shape: "tuple[int, ...]"
    kind: Any
    is_turned: bool
    neighbours: int
    grouped: int
    offset: float

    def of(self, array: np.ndarray) -> np.ndarray:
        """What the file has, from Hugging Face's tensor."""
        if self.is_turned:
            array = array.T
        if self.neighbours:
            heads = array.reshape(self.neighbours, 2, -1, *array.shape[1:])
            array = heads.swapaxes(1, 2).reshape(array.shape)
        if self.grouped:
            heads = array.reshape(self.grouped, 3, -1, *array.shape[1:])
            array = heads.swapaxes(0, 1).reshape(array.shape)
        if self.offset:
            array = array + np.float32(self.offset)
        return np.ascontiguousarray(array, np.float32)


def _write_tensors(
    gguf: Any,
    writer: Any,
    model: Model,
    family: Family,
    weights: "Iterator[tuple[str, np.ndarray]]",
    kind: str,
) -> int:
    """Write what is behind the settings: names of tensors, and tensors."""
    architecture, table = ARCHITECTURES[family.model_type], model_table(model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.name], model.layers)
    factors = _factors(model)
    if factors is not None:
        name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS]
        writer.add_tensor_info(f"{name}.weight", factors.shape, factors.dtype, factors.nbytes)
    planned: dict[str, list[_Tensor]] = {}
    for name, parameter in table.items():
        shapes = family.shapes(name, parameter).items()
        planned[name] = [
            _tensor(gguf, names, model, family, parameter, theirs, shape, kind)
            for theirs, shape in shapes
        ]
        if name == WORDS and model.tied_head and architecture.has_head:
            head = f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.OUTPUT]}.weight"
            planned[name].append(replace(planned[name][0], name=head))
        for tensor in planned[name]:
            block, size = gguf.GGML_QUANT_SIZES[tensor.kind]
            bytes_there = prod(tensor.shape) // block * size
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), bytes_there, tensor.kind
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for (name, array), (expected, tensors) in zip(weights, planned.items(), strict=True):
        assert name == expected, (name, expected)
        if max(array.max(), -array.min()) > LARGEST[kind]:  # no copy of it
            raise UserError(
                f"--type: got {kind} for {name}, which has numbers beyond it; expected a type that "
                "holds them. Use bf16 or f32."
            )
        parts = family.split(name, table[name], array).values()
        for part, tensor in zip(cycle(parts), tensors):  # the head is the words once more
            writer.write_tensor_data(_rounded(gguf, tensor.of(part), tensor.kind))
    wanted = gguf.GGMLQuantizationType[kind.upper()]
    matrices = [each for tensors in planned.values() for each in tensors if each.kind != wanted]
    return sum(each.kind == gguf.GGMLQuantizationType.F16 for each in matrices)


def _rounded(gguf: Any, array: np.ndarray, kind: Any) -> np.ndarray:
    """The bytes of a tensor's numbers in a type, made of some rows at a time: rounding takes
    several times their memory.
    """
    if kind == gguf.GGMLQuantizationType.F32:
        return array
    found = np.empty(gguf.quants.quant_shape_to_byte_shape(array.shape, kind), np.uint8)
    for first in range(0, len(array), ROWS):
        rows = gguf.quants.quantize(array[first : first + ROWS], kind)
        found[first : first + ROWS] = rows.view(np.uint8)
    return found


def _tensor(
    gguf: Any,
    names: Any,
    model: Model,
    family: Family,
    parameter: Parameter,
    theirs: str,
    shape: "tuple[int, ...]",
    kind: str,
) -> _Tensor:
    """A tensor of a file, of one of Hugging Face's."""
    role, name = names.get_type_and_name(theirs, (".weight", ".bias"))
    is_turned = parameter.role is Role.WEIGHT and not family.is_transposed
    shape = shape[::-1] if is_turned else shape
    types, tensors = gguf.GGMLQuantizationType, gguf.MODEL_TENSOR
    there = types[kind.upper()]
    if len(shape) == 1 or role is tensors.POS_EMBD:  # llama.cpp takes no others
        there = types.F32
    elif shape[-1] % gguf.GGML_QUANT_SIZES[there][0]:
        there = types.F16
    heads = {tensors.ATTN_Q: model.heads, tensors.ATTN_K: model.key_value}.get(role, 0)
    is_paired = ARCHITECTURES[family.model_type].turns_neighbours
    grouped = model.heads if role is tensors.ATTN_QKV and family.is_grouped else 0
    offset = 1.0 if parameter.role is Role.GAIN and model.zero_centered_gains else 0.0
    return _Tensor(name, shape, there, is_turned, heads if is_paired else 0, grouped, offset)


def _factors(model: Model) -> np.ndarray | None:
    """What the speed of each rotary pair is divided by, float32 [D/2], where llama.cpp has no name
    for the kind.
    """
    if model.rotary_scaling != "llama3":
        return None
    plain = speeds(replace(model, rotary_scaling=None), model.positions)
    return (plain / speeds(model, model.positions)).astype(np.float32)
