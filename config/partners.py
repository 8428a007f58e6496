"""Settings that have an effect together with another one alone. A preset may hold them without it;
who gives a flag expects that it does something.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass

from popxl_gpt.config.leaves import flatten, shown
from popxl_gpt.config.schema import Config


@dataclass(frozen=True)
class Partner:
    """What settings need to have an effect."""

    names: tuple[str, ...]
    without: str
    """The setting that leaves them without one, by its name."""
    is_there: Callable[[Config], bool]
    given_by: str
    """Flags that mend it."""


PARTNERS = (
    Partner(
        ("muon_momentum",),
        "optimizer",
        lambda config: config.training.optimizer == "muon",
        "--optimizer muon",
    ),
    Partner(
        ("minimum_learning_rate",),
        "schedule",
        lambda config: config.training.schedule != "constant",
        "--schedule linear, cosine or wsd",
    ),
    Partner(
        ("loss_scaling_window",),
        "loss_scaling",
        lambda config: config.training.is_scaled_by_program,
        "--loss_scaling auto",
    ),
    Partner(
        ("spike_threshold", "spike_window"),
        "on_spike",
        lambda config: config.training.looks_for_spikes,
        "--on_spike skip or stop",
    ),
    Partner(
        ("lora_alpha",), "lora_rank", lambda config: config.model.lora_rank > 0, "--lora_rank 8"
    ),
    Partner(
        ("rotary_base",),
        "position_embedding",
        lambda config: not config.model.has_position_table,
        "--position_embedding rotary",
    ),
    Partner(
        ("wandb_name", "wandb_tags", "wandb_project"),
        "wandb",
        lambda config: config.logging.wandb,
        "--wandb",
    ),
)


def without_partner(config: Config, given: Set[str]) -> list[str]:
    """What to tell of flags that do nothing.

    Args:
        given: names of the settings that a command line says itself.
    """
    values = flatten(config)
    return [
        f"--{name}: got {shown(values[name])}, which does nothing with {partner.without} "
        f"{shown(values[partner.without])}. Give {partner.given_by}, or leave it out."
        for partner in PARTNERS
        for name in partner.names
        if name in given and not partner.is_there(config)
    ]
