"""OLMo 3: OLMo 2 with windows in three of four layers, whose positions are not scaled."""

from popxl_gpt.config.model import FULL, SLIDING
from popxl_gpt.execution.exchange.families import olmo2
from popxl_gpt.execution.exchange.families import rotary_decoder as shared
from popxl_gpt.execution.exchange.families.family import Family, TheirConfig, Values

BASE = 500000.0


def _read(theirs: TheirConfig) -> Values:
    layers = theirs.get(*olmo2.SIZES["layers"])
    kinds = shared.named_kinds(theirs, layers) or [SLIDING, SLIDING, SLIDING, FULL]
    return {
        **shared.read_by_kind(theirs, olmo2.SIZES, (BASE, BASE)),
        **shared.read_windows(theirs, olmo2.SIZES, kinds, by_kind=True),
    }


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    prefix="model.",
    settings=olmo2.SETTINGS,
    modules=olmo2.MODULES,
    is_transposed=True,
    sizes=olmo2.SIZES,
    fixed=olmo2.FIXED,
    read=_read,
    write=shared.write_by_kind,
    varied=(*shared.VARIED, *shared.BY_KIND),
    is_loaded=shared.turns_by_kind,
    buffers=shared.BUFFERS,
)
