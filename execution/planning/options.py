"""The flags that ask for a plan or a profile, and say which machine it is set beside."""

from dataclasses import dataclass
from typing import Annotated

from popxl_gpt.config.bounds import PathText, Positive, Range
from popxl_gpt.utils.errors import ConfigError

USED_BY = {
    "auto_seconds": ("auto",),
    "devices": ("plan",),
    "plan_folder": ("plan",),
    "profile_folder": ("profile",),
    "device_tflops": ("plan", "profile", "limit", "profile_every"),
    "link_gbps": ("plan", "limit"),
    "remote_gbps": ("plan", "profile", "limit", "profile_every"),
}
"""The flags that make use of each flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What a plan or a profile is made for. Speeds that are not given are measured on this
    machine.
    """

    plan: bool = False
    """Print what the run would need of memory, traffic and time, and stop; nothing of the model's
    size is allocated.
    """
    auto: bool = False
    """Choose by plans and short trials how the model is executed on this machine: what flags leave
    open of micro-batch, width, recomputation, layout over the launcher's replicas, and where rows
    are. With --plan print the choice and its plan. A run that goes on keeps its choice.
    """
    auto_seconds: Positive | None = None
    """Seconds of that search after which no further trial begins; none: 60."""
    devices: tuple[Annotated[int, Range(low=1, high=2**16)], ...] = ()
    """Plan every layout over so many devices, print the five fastest, with --device_memory of those
    that fit, and the fastest one's plan. Of several numbers, print what the fastest layout over
    each takes. None: the layout that is given.
    """
    plan_folder: PathText | None = None
    """Folder for plan.json; none: the run's name with -plan, where runs are."""
    profile: bool = False
    """Record one call of the session: a table, profile.json, and timeline.json for
    ui.perfetto.dev or chrome://tracing.
    """
    profile_folder: PathText | None = None
    """Folder for the files of a profile; none: the folder of the run that is profiled, or of its
    name with -profile where there is none.
    """
    device_tflops: Positive | None = None
    """Speed of one device on matrix products, in 1e12 FLOP/s; none: measured here."""
    link_gbps: Positive | None = None
    """What one device can send to the others, in 1e9 bytes/s (gigabytes, not gigabits); none:
    measured here.
    """
    remote_gbps: Positive | None = None
    """Speed between one device and its remote memory, both ways together, in 1e9 bytes/s; none:
    measured here.
    """

    def is_plan(self) -> bool:
        """Whether a plan is asked for.

        Raises:
            ConfigError: flags that nothing makes use of, or a plan and a profile at once.
        """
        problems = []
        for name, users in USED_BY.items():
            if getattr(self, name) not in (None, ()) and not any(
                getattr(self, user, False) for user in users
            ):
                known = [user for user in users if hasattr(self, user)]
                flags = " or ".join(f"--{user}" for user in known)
                problems.append(
                    f"--{name}: got a value without {flags}; expected both or none. Add "
                    f"--{users[0]}."
                )
        if self.auto and self.devices:
            problems.append(
                "--devices: got it with --auto, which is for this machine; expected one of them. "
                "Choose one."
            )
        if self.plan and self.profile:
            problems.append(
                "--profile: got it with --plan, which runs nothing; expected one of them. "
                "Choose one."
            )
        if problems:
            raise ConfigError(problems)
        return self.plan
