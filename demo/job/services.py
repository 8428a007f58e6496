"""The services that show a run: Weights & Biases (`--wandb`) and TensorBoard (`--tensorboard`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from popxl_gpt.demo.job.part import Distribution, Job, Part, RunState
from popxl_gpt.demo.job.tensorboard_log import TensorboardLog
from popxl_gpt.demo.job.wandb_log import WandbLog


class Wandb(Part):
    """Sends what is recorded to Weights & Biases."""

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._log = WandbLog(job.config, run.folder.path)

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether it is asked for; instance 0 sends."""
        return job.is_leader and job.config.logging.wandb

    def validated(self, values: "dict[str, float]") -> None:
        """Send it for the step that is done already."""
        self._log.log({"step": self.run.step, **values})

    def recorded(self, values: "dict[str, Any]") -> None:
        """Send it."""
        self._log.log(values)

    def measured(self, found: "Mapping[str, Distribution]") -> None:
        """Send the histograms."""
        self._log.log_histograms(self.run.step, found)

    def wrote(self, texts: "Sequence[tuple[str, str]]") -> None:
        """Send it at the end."""
        self._log.log_samples(self.run.step, texts)

    def close(self) -> None:
        """Send what waits."""
        self._log.close()


class Tensorboard(Part):
    """Writes what is recorded for TensorBoard."""

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._log = TensorboardLog(run.folder.tensorboard, run.step)

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether it is asked for; instance 0 writes."""
        return job.is_leader and job.config.logging.tensorboard

    def validated(self, values: "dict[str, float]") -> None:
        """Write it for the step that is done already."""
        self._log.log({"step": self.run.step, **values})

    def recorded(self, values: "dict[str, Any]") -> None:
        """Write it."""
        self._log.log(values)

    def measured(self, found: "Mapping[str, Distribution]") -> None:
        """Write norms, and histograms."""
        self._log.log_histograms(self.run.step, found)

    def close(self) -> None:
        """Write what waits."""
        self._log.close()
