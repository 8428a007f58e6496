"""Logging to Weights & Biases from a thread of its own: training neither waits for it nor ends with
it.
"""

import logging
import os
import queue
import threading
from typing import Any, Optional

from config import Config, to_mapping

QUEUE = 10000
"""Steps that may wait for a slow connection; more are dropped."""
CLOSE_SECONDS = 20.0
"""How long the end of a run waits for what is still to be sent."""
_LOG = logging.getLogger(__name__)


class WandbLog:
    """Sends metrics of steps. The first failure is told once, and ends the sending."""

    def __init__(self, config: Config, folder: str):
        self._config = config
        self._folder = folder
        self._queue: "queue.Queue[Optional[dict[str, Any]]]" = queue.Queue(QUEUE)
        self._has_failed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, values: "dict[str, Any]") -> None:
        """Send the metrics of a step, later."""
        if self._has_failed.is_set():
            return
        try:
            self._queue.put_nowait(values)
        except queue.Full:
            self._fail("its queue is full; the connection is too slow")

    def close(self) -> None:
        """Send what waits, for a limited time."""
        if not self._has_failed.is_set():
            self._queue.put(None)
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                self._fail(f"it did not finish within {CLOSE_SECONDS:g} s")

    def _work(self) -> None:
        try:
            import wandb  # slow to import, and needed by this thread only

            if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
                raise RuntimeError("no API key. Run `wandb login`, or set WANDB_MODE=offline")
            run = wandb.init(
                project=self._config.logging.wandb_project,
                name=self._config.logging.wandb_name or self._config.name,
                config=to_mapping(self._config),
                dir=self._folder,
            )
            while (values := self._queue.get()) is not None:
                run.log(
                    {key: value for key, value in values.items() if value is not None},
                    step=values["step"],
                )
            run.finish()
        except BaseException as error:  # whatever happens to wandb, training goes on
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if not self._has_failed.is_set():
            self._has_failed.set()
            _LOG.warning(
                "wandb: %s. Training goes on without it; metrics.jsonl has everything.", reason
            )
