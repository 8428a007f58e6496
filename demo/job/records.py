"""What a run records of each step: a line of metrics, and the line of progress."""

import logging
from typing import Any

from popxl_gpt.demo.job.part import Call, Job, Part, RunState, Step
from popxl_gpt.demo.job.progress import Progress, validation_pieces
from popxl_gpt.demo.job.progress_line import Piece, ProgressLine, tell, whole
from popxl_gpt.execution.planning.machine import run_ceiling
from popxl_gpt.execution.reports.metrics import MetricsFile

_LOG = logging.getLogger(__name__)
FIRST = (
    "step", "tokens", "seconds", "step_seconds", "data_seconds", "forward_seconds",
    "backward_seconds", "update_seconds", "rows_seconds", "others_seconds", "mfu", "memory_bytes",
    "loss", "validation_loss", "learning_rate", "gradient_norm",
)  # fmt: skip
"""Fields that a line begins with; others follow by name."""


def in_order(values: "dict[str, Any]") -> "dict[str, Any]":
    """The fields of a line in one order, whatever parts said them first."""
    names = [*(name for name in FIRST if name in values), *sorted(values.keys() - set(FIRST))]
    return {name: values[name] for name in names}


class Records(Part):
    """Records each step, with what parts say of it. Instance 0 writes and prints."""

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._progress = Progress(job.config, run.step, job.limit_seconds, run.tokens)
        self._metrics: MetricsFile | None = None
        if run.is_leader:
            self._metrics, self._line = MetricsFile(run.folder.metrics, run.step), ProgressLine()
            if job.saved is not None and run.folder.holds(job.saved):
                self._metrics.tell_of_lost_lines(job.saved.position.metrics)
            run.last_record = self._metrics.last
            run.clock.go_on(self._metrics.seconds)
            self._progress.loss = self._metrics.kept_loss

    def validated(self, values: "dict[str, float]") -> None:
        """Record it for the step that the run goes on from, or as a line before the first step."""
        run, last = self.run, self.run.last_record
        if self._metrics is None:
            return
        if last is not None:
            self._metrics.replace_last(in_order({**last, **values}))
            return
        begin = {"step": 0, "tokens": 0, "seconds": self._seconds(), "loss": None}
        nothing = {"learning_rate": None, "gradient_norm": None, "skipped": 0}
        self._metrics.write(in_order({**begin, **nothing, **values}))
        tell(whole([Piece(f"step 0/{run.config.training.steps}"), *validation_pieces(values)]))

    def called(self, call: Call) -> None:
        """Take the time of the call."""
        run, progress = self.run, self._progress
        progress.config = run.config
        progress.ran(len(call.rates), call.seconds, call.waited)
        told = progress.news_of_data()
        if told is not None and run.is_leader:
            _LOG.warning("%s", told)
        if call.is_first:
            with run.aside():
                progress.ceiling = run_ceiling(run.config)

    def _labels(self, step: Step) -> "dict[str, int | None]":
        """How many labels the losses of a step are means over, where that is not plain."""
        is_told = self.run.config.training.masked_labels or step.result.losses
        return {"labels": step.result.labels} if is_told else {}

    def stepped(self, step: Step) -> None:
        """Leave the step's line, and show it."""
        if self._metrics is None:
            return
        run, result, progress = self.run, step.result, self._progress
        values = {
            "step": run.step,
            "tokens": run.tokens,
            "seconds": self._seconds(),
            **progress.fields(),
            "loss": result.loss,
            "validation_loss": None,
            "learning_rate": step.rate,
            "gradient_norm": result.gradient_norm,
            **result.losses,
            **self._labels(step),
            **run.fields(),
            **({} if result.loss_scale is None else {"loss_scale": result.loss_scale}),
        }
        self._metrics.write(in_order(values))
        pieces = progress.pieces(values)  # of each step, for the smoothed loss
        if self._line.is_terminal or self._is_shown(values):
            self._line.show(pieces)
        run.each("recorded", {**values, "tokens_per_second": progress.tokens_per_second})

    def _is_shown(self, values: "dict[str, Any]") -> bool:
        """Whether a log tells of this step."""
        run = self.run
        is_edge = run.step == run.first_step + 1 or run.clock.is_last(run.step)
        is_due = run.step % run.config.logging.log_every == 0
        return is_due or is_edge or values["validation_loss"] is not None

    def _seconds(self) -> float:
        """Seconds since the run began, as if nothing had stopped it."""
        return round(self.run.clock.seconds, 3)

    def stage_begins(self) -> None:
        """Measure the speed of the new program."""
        self._progress.begin_stage(self.run.stage)

    def saving(self) -> "dict[str, Any]":
        """Bring what is recorded onto the disk; the lines that the file has by now."""
        if self._metrics is None:
            return {}
        self._metrics.sync()
        return {"metrics": self._metrics.lines}

    def end(self) -> None:
        """Close the file and the line: no metrics come any more."""
        if self._metrics is not None:
            self._metrics.close()
            self._line.close()
