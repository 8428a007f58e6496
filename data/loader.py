"""Batches by step, made ahead of time in a thread."""

import threading
from concurrent.futures import Future
from queue import SimpleQueue

import numpy as np

from popxl_gpt.data.dataset import Dataset
from popxl_gpt.data.masking import ids_of, labels_of
from popxl_gpt.data.sampling import BatchSampler
from popxl_gpt.utils.errors import DataError


class BatchLoader:
    """Gives inputs and labels of any step; while one step is used, a thread makes the next ones.

    There is no state to save: a resumed run asks for the step it has reached. Errors of the thread
    are raised by the `batch` call that needed what failed.

    Args:
        dataset: where samples come from.
        global_batch_size: samples per step over all instances.
        seed, shuffle, instance, instances, accumulation_steps, shift: see `BatchSampler`.
        prefetch: steps made ahead of time; 0 means no thread.
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        instance: int = 0,
        instances: int = 1,
        accumulation_steps: int = 1,
        shift: int = 0,
        prefetch: int = 2,
    ) -> None:
        self.dataset = dataset
        self.sampler = BatchSampler(
            samples=len(dataset),
            global_batch_size=global_batch_size,
            seed=seed,
            shuffle=shuffle,
            instance=instance,
            instances=instances,
            accumulation_steps=accumulation_steps,
            mixture=dataset.mixture,
            shift=shift,
        )
        self.prefetch = prefetch
        self._pending: dict[int, Future[tuple[np.ndarray, np.ndarray]]] = {}
        self._asked: SimpleQueue[tuple[int, Future[tuple[np.ndarray, np.ndarray]]] | None]
        self._asked = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and labels of step `step`, int32 [samples, sequence_length] each; labels
        are the next tokens, or `IGNORED`.

        Samples are this instance's, in global order. Steps may be asked for in any order; one after
        the other is fast.
        """
        if self._closed:
            raise DataError(
                f"batch loader: got step {step} after close; expected an open loader. Make a "
                "new one."
            )
        if self.prefetch == 0:
            return self._make(step)
        if self._thread is None:  # a process that ends does not wait for a disk that is stuck
            self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
            self._thread.start()
        wanted = range(step, step + self.prefetch + 1)
        for stale in self._pending.keys() - set(wanted):
            self._pending.pop(stale).cancel()
        for soon in wanted:
            if soon not in self._pending:
                self._pending[soon] = Future()
                self._asked.put((soon, self._pending[soon]))
        return self._pending.pop(step).result()

    def close(self, wait: bool = True) -> None:
        """Stop the thread, after the batch it is making; the data set stays open.

        Args:
            wait: for the thread; else it ends by itself, or with the process.
        """
        self._closed = True
        for made in self._pending.values():
            made.cancel()
        self._pending.clear()
        self._asked.put(None)
        thread, self._thread = self._thread, None
        if thread is not None and wait:
            thread.join()

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        """Make the batches that are asked for, in their order."""
        while (asked := self._asked.get()) is not None:
            step, made = asked
            if made.set_running_or_notify_cancel():
                try:
                    made.set_result(self._make(step))
                except BaseException as error:  # raised where the batch is asked for
                    made.set_exception(error)

    def _make(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = self.dataset.read(self.sampler.indices(step))
        return ids_of(tokens[:, :-1]), labels_of(tokens[:, 1:])
