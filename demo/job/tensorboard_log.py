"""Event files for TensorBoard, by its own writer, which has a thread for it. Training waits where
the disk is far behind, and at the end.
"""

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from popxl_gpt.demo.job.options import no_tensorboard
from popxl_gpt.demo.job.part import Distribution
from popxl_gpt.utils.errors import reason_of

_LOG = logging.getLogger(__name__)
QUEUE = 10_000
"""What may wait for the disk before training does; a step has one or two."""


class TensorboardLog:
    """Writes metrics of steps to a folder. The first failure is reported, and ends the writing."""

    def __init__(self, folder: Path, step: int):
        """Begin the log of a run that has done so many steps: later ones of a run that was cut off
        count no more.

        Raises:
            UserError: the optional package cannot be imported.
        """
        try:  # slow to import, and few runs need it
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise no_tensorboard(error) from error

        self._event, self._summary, self._writer = Event, Summary, None
        self._histogram = HistogramProto
        self._has_failed = False
        try:
            self._writer = EventFileWriter(str(folder), max_queue_size=QUEUE, flush_secs=10)
            self._add(step + 1, session_log=SessionLog(status=SessionLog.START))
        except OSError as error:
            self._fail(error)

    def log(self, values: "Mapping[str, Any]") -> None:
        """Write the metrics of a step, later."""
        found = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
        ]
        self._add(values["step"], summary=self._summary(value=found))

    def log_histograms(self, step: int, found: "Mapping[str, Distribution]") -> None:
        """Write norms, and histograms where numbers are finite, later."""
        values = []
        for name, each in found.items():
            if math.isfinite(each.norm):
                values.append(self._summary.Value(tag=f"norms/{name}", simple_value=each.norm))
            if each.counts:
                histogram = self._histogram(
                    min=each.edges[0],
                    max=each.edges[-1],
                    num=each.count,
                    sum=each.total,
                    sum_squares=each.norm**2,
                    bucket_limit=each.edges[1:],
                    bucket=each.counts,
                )
                values.append(self._summary.Value(tag=name, histo=histogram))
        self._add(step, summary=self._summary(value=values))

    def close(self) -> None:
        """Write what waits."""
        if self._writer is not None and not self._has_failed:
            try:
                self._writer.close()
            except OSError as error:
                self._fail(error)

    def _add(self, step: int, **content: Any) -> None:
        if self._writer is None or self._has_failed:
            return
        try:
            self._writer.add_event(self._event(step=step, wall_time=time.time(), **content))
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._has_failed = True
        _LOG.warning(
            "tensorboard: got '%s' while writing. Training goes on without it; metrics.jsonl has "
            "everything.",
            reason_of(error),
        )
