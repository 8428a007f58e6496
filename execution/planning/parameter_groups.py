"""What training does to parameters: which decay, at which rate they learn, and which are frozen."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.optimizer import is_by_muon, rate_multiplier
from popxl_gpt.execution.planning.text import table
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.parameters import Parameter, trained

FROZEN = "frozen"


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters of one role that are updated alike."""

    role: str
    optimizer: str
    """What updates them; `frozen`: nothing does."""
    rate_multiplier: float
    """Their learning rate over that of the step."""
    weight_decay: float
    """Decoupled, times the learning rate."""
    tensors: int = 0
    parameters: int = 0


def parameter_groups(config: Config) -> "list[ParameterGroup]":
    """The groups of a model's parameters, in the order in which the model has them."""
    found: dict[ParameterGroup, list[int]] = {}
    whole = model_table(config.model)
    changed = trained(whole, config.model.lora_rank > 0)
    for name, parameter in whole.items():
        group = _group(config, parameter, is_trained=name in changed)
        found.setdefault(group, []).append(math.prod(parameter.shape))
    return [
        ParameterGroup(**{**asdict(group), "tensors": len(sizes), "parameters": sum(sizes)})
        for group, sizes in found.items()
    ]


def _group(config: Config, parameter: Parameter, is_trained: bool) -> ParameterGroup:
    training, role = config.training, parameter.role.value
    if not is_trained or not training.updates:
        return ParameterGroup(role, FROZEN, 0.0, 0.0)
    decay = training.weight_decay if parameter.decays else 0.0
    by = "muon" if is_by_muon(training, parameter) else "adamw"
    return ParameterGroup(role, by, rate_multiplier(training, parameter), decay)


def parameter_text(groups: "Sequence[ParameterGroup]") -> str:
    """The groups as a table."""
    rows = [("parameters", "updated by", "rate", "decay", "tensors", "numbers")]
    for each in groups:
        rate = "-" if each.optimizer == FROZEN else f"x {each.rate_multiplier:g}"
        numbers = f"{each.tensors:,}", f"{each.parameters:,}"
        rows.append((each.role, each.optimizer, rate, f"{each.weight_decay:g}", *numbers))
    return table(rows, numbers_from=2)
