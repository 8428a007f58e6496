"""Flags that do nothing without another setting are told, with what they need."""

import pytest

from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.partners import without_partner
from popxl_gpt.config.presets import preset

PARTNERS = {leaf.name: leaf.needs for leaf in leaves() if leaf.needs is not None}
NAMES = [*PARTNERS]
WITHOUT, WITH = (
    {
        "optimizer": one[0], "schedule": one[1], "loss_scaling": one[2], "on_spike": one[3],
        "lora_rank": one[4], "position_embedding": one[5], "wandb": one[6],
        "rotary_scaling": one[7], "qk_norm": one[8],
        "layer_pattern": one[9], "window": one[10], "base_batch_size": one[11],
        "validate_every": one[12], "data_parallel": one[13],
    }
    for one in (
        ("adamw", "constant", 1.0, "off", 0, "learned", False, None, False, (), None, None, 0, 1),
        ("muon", "wsd", "auto", "skip", 0, "rotary", True, "linear", True, ("sliding",), 4, 8, 10, 2),
    )
)  # fmt: skip


def test_flags_that_do_nothing_are_told_and_settings_of_presets_are_not():
    config = preset("tiny", muon_momentum=0.9, wandb_tags=("a", "b"), **WITHOUT)
    assert without_partner(config, set()) == []
    told = without_partner(config, {*NAMES, "steps"})
    assert len(told) == len(NAMES)
    assert told[NAMES.index("muon_momentum")] == (
        "--muon_momentum: got 0.9, which does nothing with optimizer adamw. Give --optimizer muon, "
        "or leave it out."
    )
    assert "--wandb_tags: got a b, which does nothing with wandb false. Give --wandb, or" in (
        "\n".join(told)
    )


def test_flags_whose_partner_is_there_are_not_told():
    config = preset("tiny", precision="float16", **WITH)
    assert without_partner(config, {*NAMES} - {"lora_alpha"}) == []
    assert without_partner(preset("tiny", lora_rank=2), {"lora_alpha"}) == []


@pytest.mark.parametrize("name", NAMES)
def test_partners_are_settings(name):
    assert PARTNERS[name].name in {leaf.name for leaf in leaves()}
    assert PARTNERS[name].flag.split()[0] == f"--{PARTNERS[name].name}"
