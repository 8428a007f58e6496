"""Logging to Weights & Biases from a thread of its own: training neither waits for it nor ends with
it.
"""

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.config.saving import to_mapping
from popxl_gpt.config.schema import Config
from popxl_gpt.demo.job.description import machine, versions
from popxl_gpt.demo.job.part import Distribution
from popxl_gpt.utils.escaping import as_it_is
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.whole import write_whole

QUEUE = 10000
"""Steps that may wait for a slow connection; more are dropped."""
CLOSE_SECONDS = 20.0
"""How long the end of a run waits for what is still to be sent."""
_LOG = logging.getLogger(__name__)


class WandbLog:
    """Sends metrics of steps. The first failure is reported once, and ends the sending.

    A run that goes on in its folder goes on in the same run there, by the name in `wandb_id`.
    """

    def __init__(self, config: Config, folder: Path):
        self._config = config
        self._folder = folder
        self._samples: list[tuple[int, str, str]] = []
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUE)
        self._has_failed, self._has_dropped = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, values: "dict[str, Any]") -> None:
        """Send the metrics of a step, later."""
        if self._has_failed.is_set():
            return
        try:
            self._queue.put_nowait(values)
        except queue.Full:
            if not self._has_dropped:
                self._has_dropped = True
                _LOG.warning(
                    "wandb: got %d steps that wait for it; expected a faster connection. It gets "
                    "no more while so many wait; metrics.jsonl has everything.",
                    QUEUE,
                )

    def log_histograms(self, step: int, found: "Mapping[str, Distribution]") -> None:
        """Send norms, and histograms where numbers are finite, later."""
        norms = {f"norms/{name}": each.norm for name, each in found.items()}
        self.log({"step": step, **norms, **{n: each for n, each in found.items() if each.counts}})

    def log_samples(self, step: int, texts: "Sequence[tuple[str, str]]") -> None:
        """Send prompts and what the model made of them, as a table, when the run is closed."""
        self._samples += [(step, prompt, text) for prompt, text in texts]

    def close(self) -> None:
        """Send what waits, for a limited time."""
        if self._has_failed.is_set():
            return
        end = time.monotonic() + CLOSE_SECONDS
        with suppress(queue.Full):  # and nobody takes from it
            self._queue.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"it did not finish within {CLOSE_SECONDS:g} s")

    def _work(self) -> None:
        with as_it_is():  # it colours what it says
            self._log()

    def _log(self) -> None:
        try:
            import wandb  # slow to import, and needed by this thread only

            if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
                raise RuntimeError("no API key. Run `wandb login`, or set WANDB_MODE=offline")
            run = wandb.init(
                project=self._config.logging.wandb_project,
                name=self._config.logging.wandb_name or self._config.name,
                tags=list(self._config.logging.wandb_tags) or None,
                config=to_mapping(self._config) | {"versions": versions(), "machine": machine()},
                dir=str(self._folder),
                id=self._id(),
                resume="allow",
            )
            # wandb's own steps only grow: a run that goes on would lose those that it repeats
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            run.define_metric("validation_loss", step_metric="step", summary="min")
            run.define_metric("tokens", step_metric="step", summary="max")
            while (values := self._queue.get()) is not None:
                told = {key: value for key, value in values.items() if value is not None}
                for key, value in told.items():
                    if isinstance(value, Distribution):
                        bars = np.asarray(value.counts), np.asarray(value.edges)
                        told[key] = wandb.Histogram(np_histogram=bars)
                run.log(told)
            if self._samples:
                names: list[str | int] = ["step", "prompt", "text"]
                run.log({"samples": wandb.Table(names, [list(row) for row in self._samples])})
            run.finish()
        except BaseException as error:  # whatever happens to wandb, training goes on
            self._fail(f"{type(error).__name__}: {error}")

    def _id(self) -> str:
        """What the run is called there: as before, or anew."""
        path = self._folder / "wandb_id"
        try:
            return read_bounded(path, 1000).decode("ascii").strip()
        except FileNotFoundError:
            made = secrets.token_hex(4)
            write_whole(path, made + "\n")
            return made

    def _fail(self, reason: str) -> None:
        if not self._has_failed.is_set():
            self._has_failed.set()
            _LOG.warning(
                "wandb: %s. Training goes on without it; metrics.jsonl has everything.", reason
            )
