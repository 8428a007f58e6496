"""All families. Of several that a model is of, the first one is its."""

from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families.family import Family
from popxl_gpt.execution.exchange.families.gemma import GEMMA2, GEMMA3
from popxl_gpt.execution.exchange.families.gpt2 import GPT2
from popxl_gpt.execution.exchange.families.gpt_neox import GPT_NEOX
from popxl_gpt.execution.exchange.families.llama import LLAMA
from popxl_gpt.execution.exchange.families.mistral import MISTRAL
from popxl_gpt.execution.exchange.families.olmo2 import OLMO2
from popxl_gpt.execution.exchange.families.olmo3 import OLMO3
from popxl_gpt.execution.exchange.families.own import OWN
from popxl_gpt.execution.exchange.families.phi3 import PHI3
from popxl_gpt.execution.exchange.families.qwen2 import QWEN2
from popxl_gpt.execution.exchange.families.qwen3 import QWEN3
from popxl_gpt.execution.exchange.families.smollm3 import SMOLLM3
from popxl_gpt.utils.errors import UserError

ALL = (
    GPT2, LLAMA, MISTRAL, SMOLLM3, QWEN2, QWEN3, OLMO2, OLMO3, GEMMA2, GEMMA3, GPT_NEOX, PHI3, OWN,
)  # fmt: skip
FAMILIES = {family.model_type: family for family in ALL}


def family_of(model: Model, wanted: str | None = None) -> Family:
    """The family that a model of ours is of, or that of a type. UserError where it is not of it."""
    found = {name: family for name, family in FAMILIES.items() if family.fits(model)}
    if not found:
        (name, expected), *_ = OWN.foreign(model).items()
        raise UserError(
            f"{name}: got {getattr(model, name)}; expected {expected}, for no family that is known "
            "here has this among its settings. Export a model of a known family."
        )
    if wanted is None:
        return next(iter(found.values()))
    if wanted not in found:
        raise UserError(
            f"--family: got {wanted}; expected one that the model is of: {', '.join(found)}. Give "
            "one of these, or leave it out."
        )
    return found[wanted]
