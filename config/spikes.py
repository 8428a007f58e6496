"""Settings: gradient norms far above those before."""

from dataclasses import dataclass
from typing import Annotated, Literal

from popxl_gpt.config.bounds import Count, Needs, Positive

_NEEDS = Needs("on_spike", "--on_spike skip or stop", lambda value: value != "off")


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """What counts as a spike, and what it does."""

    on_spike: Literal["off", "skip", "stop"] = "off"
    """What a gradient norm does that is far above those before: skip leaves its step's update out,
    stop does too and ends the run with exit code 6.
    """
    spike_threshold: Annotated[Positive, _NEEDS] = 6.0
    """Standard deviations above the mean from which on a gradient norm is a spike."""
    spike_window: Annotated[Count, _NEEDS] = 100
    """Steps over which mean and deviation of gradient norms run; the first as many have no
    spikes.
    """

    @property
    def looks_for_spikes(self) -> bool:
        """Whether the program compares gradient norms with those before."""
        return self.on_spike != "off"
