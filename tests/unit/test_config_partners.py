"""Flags that do nothing without another setting are told, with what they need."""

import pytest

from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.partners import PARTNERS, without_partner
from popxl_gpt.config.presets import preset

NAMES = [name for partner in PARTNERS for name in partner.names]
WITHOUT, WITH = (
    {
        "optimizer": one[0], "schedule": one[1], "loss_scaling": one[2], "on_spike": one[3],
        "lora_rank": one[4], "position_embedding": one[5], "wandb": one[6],
    }
    for one in (
        ("adamw", "constant", 1.0, "off", 0, "learned", False),
        ("muon", "wsd", "auto", "skip", 0, "rotary", True),
    )
)  # fmt: skip


def test_flags_that_do_nothing_are_told_and_settings_of_presets_are_not():
    config = preset("tiny", muon_momentum=0.9, wandb_tags=("a", "b"), **WITHOUT)
    assert without_partner(config, set()) == []
    told = without_partner(config, {*NAMES, "steps"})
    assert len(told) == len(NAMES)
    assert told[0] == (
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


@pytest.mark.parametrize("partner", PARTNERS, ids=lambda partner: partner.without)
def test_partners_are_settings(partner):
    known = {leaf.name for leaf in leaves()}
    assert {*partner.names, partner.without} <= known
    assert f"--{partner.without}" in partner.given_by
