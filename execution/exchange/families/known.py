"""All families. Of several that a model is of, the first one is its."""

from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families.family import Family
from popxl_gpt.execution.exchange.families.gpt2 import GPT2
from popxl_gpt.execution.exchange.families.llama import LLAMA
from popxl_gpt.execution.exchange.families.mistral import MISTRAL
from popxl_gpt.execution.exchange.families.own import OWN
from popxl_gpt.execution.exchange.families.qwen2 import QWEN2
from popxl_gpt.execution.exchange.families.qwen3 import QWEN3

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, OWN)}


def family_of(model: Model) -> Family:
    """The family that a model of ours is of."""
    return next(family for family in FAMILIES.values() if family.fits(model))
