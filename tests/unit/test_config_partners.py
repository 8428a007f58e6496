"""Flags that do nothing without another setting are told, with what they need."""

import pytest

from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.partners import without_partner
from popxl_gpt.config.presets import override, preset

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


def test_files_that_no_step_is_validated_on_are_told_and_checks_of_one_replica():
    files = {"input_files": ("a",), "validation_files": ("b", "c")}
    given = {"validation_files", "check_replicas"}
    one = {"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1}
    alone = preset("tiny", check_replicas=2, **one, **files)
    assert without_partner(alone, given) == [
        "--validation_files: got b c, which validates nothing with validate_every 0. Give "
        "--validate_every, or leave it out.",
        "--check_replicas: got 2, which does nothing with one replica. Give more replicas, or "
        "leave it out.",
    ]
    assert without_partner(override(alone, validate_every=5, data_parallel=2), given) == []


def test_a_warm_up_that_no_step_is_left_for_is_told_with_the_rate_that_it_comes_to():
    long = preset("tiny", warmup_steps=100, steps=4, learning_rate=1e-3)
    assert without_partner(long, {"warmup_steps"}) == [
        "--warmup_steps: got 100 with steps 4, in which the learning rate rises to 3.96e-05, and "
        "not to 0.001. Lower it, or give more --steps."
    ]
    assert without_partner(long, {"steps"}) == []  # of a preset that is tried for some steps
    assert without_partner(override(long, steps=101), {"warmup_steps"}) == []


@pytest.mark.parametrize(
    "pattern, windows",
    [((), [None] * 3), (("full",), [None] * 3), (("full", "sliding"), [None, 4, None])],
)
def test_a_window_is_of_sliding_layers_alone(pattern, windows):
    model = preset("tiny", layers=3, layer_pattern=pattern, window=4).model
    assert [block.window for block in model.blocks] == windows
