"""The services that show a run: Weights & Biases (`--wandb`) and TensorBoard (`--tensorboard`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from popxl_gpt.demo.job.part import Distribution, Job, Part, RunState
from popxl_gpt.demo.job.tensorboard_log import TensorboardLog
from popxl_gpt.demo.job.wandb_log import WandbLog


class Service(Part):
    """What is recorded goes to a log, which has a thread of its own."""

    log: WandbLog | TensorboardLog

    def validated(self, values: "dict[str, float]") -> None:
        """Log it for the step that is done already."""
        self.log.log({"step": self.run.step, **values})

    def recorded(self, values: "dict[str, Any]") -> None:
        """Log it."""
        self.log.log(values)

    def measured(self, found: "Mapping[str, Distribution]") -> None:
        """Log norms, and histograms."""
        self.log.log_histograms(self.run.step, found)

    def close(self) -> None:
        """Bring out what waits."""
        self.log.close()


class Wandb(Service):
    """Sends what is recorded to Weights & Biases."""

    log: WandbLog

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self.log = WandbLog(job.config, run.folder.path)

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether it is asked for; instance 0 sends."""
        return job.is_leader and job.config.logging.wandb

    def wrote(self, texts: "Sequence[tuple[str, str]]") -> None:
        """Send it at the end."""
        self.log.log_samples(self.run.step, texts)


class Tensorboard(Service):
    """Writes what is recorded for TensorBoard."""

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self.log = TensorboardLog(run.folder.tensorboard, run.step)

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether it is asked for; instance 0 writes."""
        return job.is_leader and job.config.logging.tensorboard
