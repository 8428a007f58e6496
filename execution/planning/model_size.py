"""How large a model is and how much work a step of it, read from the model itself."""

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import popxl_addons as addons

from popxl_gpt.config.schema import Config, Model
from popxl_gpt.execution.inference.forward import forward_program
from popxl_gpt.modelling.gpt import layer_tables
from popxl_gpt.modelling.parameters import trained

BACKWARD = 2
"""Matrix products of the backward pass for each of the forward pass: by either operand."""
FROZEN_BACKWARD = 1
"""Matrix products of the backward pass over frozen weights: by the activations alone."""


def parameter_count(model: Model) -> int:
    """Numbers in the whole model, padding apart; what layers share counts once."""
    return _of_all_layers(model, numbers_by_kind(model))


def trained_count(model: Model) -> int:
    """Numbers that training changes: all of them, or those of adapters."""
    return _of_all_layers(model, numbers_by_kind(model, trained_only=True))


def numbers_by_kind(model: Model, trained_only: bool = False) -> dict[str, int]:
    """Numbers of a layer of each kind, all of them or those that training changes."""
    has_adapters = trained_only and model.lora_rank > 0
    return {
        kind: sum(math.prod(parameter.shape) for parameter in trained(table, has_adapters).values())
        for kind, table in layer_tables(model).items()
    }


def _of_all_layers(model: Model, counts: Mapping[str, int]) -> int:
    return counts["embedding"] + model.layers * counts["decoder"] + counts["head"]


def flops_per_token(model: Model) -> float:
    """Floating-point operations of the matrix products that forward and backward pass need per
    token, recomputation not counted.

    Counted in the program of the forward pass, attention as if not causal.
    """
    plain = replace(model, attention_serialisation=1, dropout=0.0)
    kinds = Counter(model.kinds)
    found = {kind: _forward_flops(replace(plain.of_kind(kind), layers=1)) for kind in kinds}
    forward = sum(count * found[kind][0] for kind, count in kinds.items())
    forward += found[model.kinds[0]][1]
    backward = FROZEN_BACKWARD if model.lora_rank else BACKWARD
    return (1 + backward) * forward / model.sequence_length


@functools.lru_cache(maxsize=16)
def _forward_flops(model: Model) -> "tuple[int, int]":
    """Operations of one sequence's forward pass through a model of one block: the block's, and the
    others.
    """
    phases = forward_program(model).main_graph.called_graphs
    flops = {phase.name: _products(addons.evaluate_FLOPs(phase)) for phase in phases}
    block = sum(count for name, count in flops.items() if name.startswith("decoder"))
    return block, sum(flops.values()) - block


def _products(work: "Mapping[str, Any]") -> int:
    """Operations of matrix products."""
    return sum(work.get("matmul", {}).values())


def flops_per_step(config: Config) -> float:
    """Floating-point operations of one global batch, as of `flops_per_token`."""
    return flops_per_token(config.model) * config.tokens_per_step
