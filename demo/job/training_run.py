"""The training loop: steps, validation, checkpoints, and an end that loses nothing."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import NoReturn

import numpy as np
import popdist

from popxl_gpt.config.schedules import stage_of
from popxl_gpt.config.schema import Config
from popxl_gpt.data.dataset import Dataset
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.demo.job.divergence import Divergence
from popxl_gpt.demo.job.interruption import Interruption, first
from popxl_gpt.demo.job.progress import Progress, validation_parts
from popxl_gpt.demo.job.progress_line import Part, whole
from popxl_gpt.demo.job.run_clock import RunClock
from popxl_gpt.demo.job.run_folder import RunFolder, for_rescue
from popxl_gpt.demo.job.run_records import RunRecords
from popxl_gpt.demo.job.step_clock import StepClock
from popxl_gpt.demo.job.validation import Validation, bytes_of_tokens
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import folder_name, validated_in
from popxl_gpt.execution.checkpoints.manifest import ManifestError
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import (
    NotSavedError,
    Saving,
    add_validation,
    begin_save,
    save,
)
from popxl_gpt.execution.host import StepResult, data_share, run_steps
from popxl_gpt.execution.overflow import Skipped, name_the_first
from popxl_gpt.execution.planning.machine import run_ceiling
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.replicas import check_replicas
from popxl_gpt.execution.reports.profile.report import StepProfiler
from popxl_gpt.execution.verification import due, verified
from popxl_gpt.utils.errors import DataError, UserError, failure_number, numbered, reason_of
from popxl_gpt.utils.process_memory import resident_bytes
from popxl_gpt.utils.runtime import drop_dead_sessions, gather, release_freed_memory

_LOG = logging.getLogger(__name__)
RETRY_SECONDS = 60
"""Between attempts at the checkpoint with which a batch grows."""


class TrainingRun:
    """A run from its first step, or from a checkpoint, to its last.

    Over several processes each has one, and instance 0's leaves the run's files and prints.
    """

    _checked_step: int | None = None
    _validated_step: int | None = None
    _last_validation: "dict[str, float]" = {}
    _is_save_due = False
    _has_steps = False
    """Whether this process has done one."""
    _batches: "list[tuple[np.ndarray, np.ndarray]] | None" = None
    """Of the next call of the session, once they are read."""
    _data_error: DataError | None = None
    """Why they cannot be read."""
    _is_stage_late = False
    """Whether the batch is to grow, and the disk has taken no checkpoint for that yet."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        data: Dataset,
        validation_data: Dataset | None,
        saved: SavedRun | None,
        interruption: Interruption,
        profiler: StepProfiler | None = None,
        tokenizer: TextTokenizer | None = None,
        limit_seconds: float | None = None,
        after_steps: "Callable[[TrainingRun], None]" = lambda run: None,
    ):
        """``limit_seconds``: of a step at the machine's physical limit, where that is known.
        ``after_steps``: is called after each call of the session.
        """
        self.config, self._after_steps = config, after_steps
        self.folder = folder
        self.tokenizer = tokenizer
        self.data = data
        self.step, self._tokens = 0, 0
        """Optimizer steps done, and tokens seen."""
        if saved is not None:
            self.step, self._tokens = saved.position.step, saved.position.tokens or 0
        self.stage = stage_of(config, self._tokens)
        """The configuration of the steps from here on, which a batch that grows changes."""
        self.session = pretraining(self.stage)
        self._fingerprint = data.fingerprint  # of the data as it is now
        if saved is not None:
            saved.check_data(self._fingerprint)
            saved.restore(self.session)
        self.skipped = Skipped.of(self.session)
        self.loader = _loader(self.stage, data, self.step, self._tokens)
        self.validation = (
            Validation(config, validation_data, data, bytes_of_tokens(config, tokenizer))
            if validation_data is not None and config.training.validate_every > 0
            else None
        )
        self.is_leader = popdist.getInstanceIndex() == 0
        self.divergence = Divergence(folder.checkpoints, self.skipped, self.is_leader)
        self.records = RunRecords(config, folder, self.step, saved) if self.is_leader else None
        self.progress = Progress(config, self.step, limit_seconds, self._tokens)
        self.profiler = profiler
        self._first_step, self._step_clock = self.step, StepClock()
        self.resident, self._has_compiled = resident_bytes(), False
        """Bytes of this process after the last call of the session, and whether it was called."""
        metrics = None if self.records is None else self.records.metrics
        if metrics is not None:
            self.progress.loss = metrics.kept_loss
        self.clock = RunClock(config, metrics, saved, has_texts=tokenizer is not None)
        self._kept_steps = config.training.steps
        """In the configuration that the run's folder has."""
        self._saved_step, self._saved_at = None if saved is None else self.step, time.monotonic()
        self._saving: Saving | None = None
        """A checkpoint that is written while training goes on."""
        self._interruption = interruption
        self._loaded = saved.folder if saved is not None and folder.holds(saved) else None
        if self.is_leader and self._loaded is not None:
            self._tell_of_other_losses()

    def run(self) -> int | None:
        """Train to the last step, or until too many in a row are skipped; all is saved then.

        Returns:
            the signal that ended the run early, if one did; then, too, all is saved.
        Raises:
            DivergedError: weights or moments are not finite; they are not saved.
            CorruptedError: replicas differ in what they must hold alike, or a phase that ran twice
                came to something else; it is not saved.
        """
        with self._interruption.training():
            try:
                with ExitStack() as entered:
                    entered.enter_context(self.session)
                    self._take_steps(self.clock.steps)
                    self._catch_up()
                    self._step_clock.take()  # the first step begins
                    ending = self._agree()
                    while ending is None and not self._is_over():
                        self._advance_or_save()
                        ending = self._agree()
                        is_doubtful = self.divergence.is_doubtful
                        goes_on = ending is None and not self._is_over()
                        if goes_on and self._is_stage_due():
                            ending = self._grow(entered)
                        elif self._is_save_due and goes_on and not is_doubtful:
                            with self._step_clock.left_out():
                                self._save()
                            ending = self._agree()
                    ending = self._save_surely()
                    if self.divergence.diverged is not None:
                        self.divergence.diverged += self._first_place()
            except (KeyboardInterrupt, SystemExit):  # a signal that does not wait
                self.loader.close(wait=False)
                if self._saving is not None:
                    self._saving.abandon()
                raise
            finally:
                self._complete_saving()
                self.loader.close()
                if self.records is not None:
                    self.records.end()
        return ending

    def _is_over(self) -> bool:
        """Whether training has come to its last step, or can or shall not go on to it."""
        return self.clock.is_last(self.step) or self.divergence.failure is not None

    def _is_stage_due(self) -> bool:
        """Whether the next step has another batch, and the checkpoint for that is to be tried."""
        stage = stage_of(self.config, self._tokens)
        is_over = stage.training.global_batch_size != self.stage.training.global_batch_size
        return is_over and (self._is_save_due or not self._is_stage_late)

    def _grow(self, entered: ExitStack) -> int | None:
        """Save, and begin the next stage; where the disk takes no checkpoint, training goes on with
        the batch that it has. Returns the signal that ends the run, if one does.
        """
        try:
            with self._step_clock.left_out():
                ending = self._save_surely()
        except NotSavedError as error:
            self._is_stage_late = True
            if self.is_leader:
                _LOG.warning(
                    "%s Training goes on with batches of %d sequences; they grow when a checkpoint "
                    "is taken, which is tried every %d seconds.",
                    error,
                    self.stage.training.global_batch_size,
                    RETRY_SECONDS,
                )
            return None
        self._is_stage_late = False
        if ending is not None:
            return ending
        with self._step_clock.left_out():
            self._begin_stage(entered)
        return self._agree()

    def _save_surely(self) -> int | None:
        """Save this step, also where the folder was lost meanwhile. Returns the signal that ends
        the run, if one does.
        """
        self._save_last()
        ending = self._agree()
        self._save_last()
        return ending

    def _begin_stage(self, entered: ExitStack) -> None:
        """Go on with the next stage's batch: a program of its own takes this step's checkpoint, as
        that of a run that goes on. The state exists once.

        Args:
            entered: has the session, and gets the next one.
        """
        saved = SavedRun(self.folder.checkpoints / folder_name(self.step), self.config)
        before, self.stage = self.stage, stage_of(self.config, self._tokens)
        entered.close()
        del self.session
        drop_dead_sessions()
        self.session, self._has_compiled = pretraining(self.stage), False
        saved.restore(self.session)
        entered.enter_context(self.session)
        self.loader.close()
        self.loader, self._batches = _loader(self.stage, self.data, self.step, self._tokens), None
        self.progress.begin_stage(self.stage)
        if self.profiler is not None:
            self.profiler.begin_again(self.stage)
        if self.records is not None:
            old, new = (each.training.global_batch_size for each in (before, self.stage))
            self.records.line.tell(
                f"step {self.step}: the batch grows from {old} to {new} sequences"
            )

    def _agree(self) -> int | None:
        """Let all processes do the same after this step: note whether to save, and return the
        signal that ends the run, if one does.

        Raises:
            UserError: the run's folder is gone; this step is saved elsewhere.
            DataError: some process cannot read what it trains on next; this step is saved.
        """
        problem = self._read_ahead()
        mine = [
            self._interruption.signal,
            self._interruption.take_save() or self.is_leader and self._is_late(),
            self.folder.is_lost,
            self.folder.has_lost_checkpoints,
            self._saving is not None and self._saving.is_done,
            problem,
            self._step_clock.waited,
        ]
        signals, saves, is_lost, has_lost_checkpoints, are_saved, problems, waited = zip(
            *gather(mine, popdist.getNumInstances())
        )
        self._step_clock.waited = max(waited)  # all wait for the last
        self._is_save_due |= any(saves)
        if all(are_saved):
            with self._step_clock.left_out():
                self._finish_saving()
        if any(is_lost):
            self._end_elsewhere()
        if any(has_lost_checkpoints):
            self._begin_checkpoints_again()
        ending = first(list(signals))
        if ending is None and any(problems):
            self._end_without_data(problems)
        return ending

    def _read_ahead(self) -> "tuple[str, int] | None":
        """Read what the next call of the session trains on, if one follows. Returns the problem."""
        if self._is_over() or self._batches is not None:
            return None
        try:
            with self._step_clock.waiting():
                self._batches = self._read_batches()
        except DataError as error:
            self._data_error = error
        return _told(self._data_error)

    def _read_batches(self) -> "list[tuple[np.ndarray, np.ndarray]]":
        """The batches of the next call of the session."""
        iterations = self.config.execution.device_iterations
        return [self.loader.batch(self.step + i) for i in range(iterations)]

    def _end_without_data(self, problems: "Sequence[tuple[str, int] | None]") -> NoReturn:
        """Save, and end a run that some process has no data for."""
        self._save_if_possible()
        _raise_problem(self._data_error, problems)

    def _end_elsewhere(self) -> NoReturn:
        """Save where there is a folder, and end a run that has lost its own."""
        self._finish_saving()
        with (
            for_rescue(self.folder, self.config) if self.is_leader else nullcontext(self.folder)
        ) as other:
            position = self._position()
            saved = save(self.session, self.config, other.checkpoints, position, keep_all=True)
        problem = ""
        if self.is_leader:
            place = self.folder.locks[0].now_at()
            problem = (
                f"{self.folder.path}: got a run folder that was "
                f"{'deleted' if place is None else f'renamed to {place}'} during the run; expected "
                f"it to stay. Step {self.step} is saved: {saved}. Go on from there with "
                "--checkpoint.load."
            )
        raise UserError(gather(problem, popdist.getNumInstances(), patiently=True)[0])

    def _begin_checkpoints_again(self) -> None:
        """Make the folder for checkpoints anew, to save this step there."""
        self._finish_saving()
        if self.is_leader:
            self.folder.make_checkpoints_again()
            _LOG.warning(
                "%s: got a folder that was deleted or renamed during the run; expected it to stay. "
                "It is made again, and this step is saved there.",
                self.folder.checkpoints,
            )
        self._saved_step, self._is_save_due = None, True

    def _is_late(self) -> bool:
        """Whether a checkpoint is due by the clock: one of a validated step, that can be the best,
        is worth more.
        """
        passed = time.monotonic() - self._saved_at
        if self._is_stage_late and passed >= RETRY_SECONDS:
            return True
        minutes = self.config.checkpoint.every_minutes
        share = 0.5 if self._validated_step == self.step else 1.0
        return 0 < 60 * minutes * share <= passed

    def _advance_or_save(self) -> None:
        """`_advance`; where some process cannot read data to validate on, which ends it in all of
        them, the step is saved.
        """
        try:
            self._advance()
        except DataError:
            self._save_if_possible()
            raise

    def _save_if_possible(self) -> None:
        """Save before an error that ends the run, which is told, whatever the disk says."""
        try:
            self._save_last()
        except NotSavedError as error:
            _LOG.warning("%s", error)

    def _advance(self) -> None:
        """One session run, then what is due after it."""
        iterations = self.config.execution.device_iterations
        batches = self._read_batches() if self._batches is None else self._batches
        self._batches = None
        rates = [self.clock.learning_rate(self.step + i) for i in range(iterations)]
        words, labels = (_joined([batch[part] for batch in batches]) for part in (0, 1))
        with self._watched(iterations, self.clock.is_last(self.step + iterations)):
            results = run_steps(self.session, self.stage, words, labels, rates)
            self.progress.ran(iterations, *self._step_clock.take())
        if not self._has_steps:
            self._has_steps = True
            self._interruption.has_steps()
            # nobody notes the step while a signal still ends another one at once
            gather(None, popdist.getNumInstances())
        self._warn_of_data()
        if not self._has_compiled:
            release_freed_memory()  # what loading and compiling took
            with self._step_clock.left_out():
                self.progress.ceiling = run_ceiling(self.config)
            self._has_compiled = True
        self.resident = resident_bytes()
        self._last_call = words, labels, results
        end = self.step + iterations
        for result, rate in zip(results, rates):
            self.step += 1
            self._tokens += self.stage.tokens_per_step
            self.skipped.count(result)
            is_end = self.step == end
            self._record(result, rate, is_end)
            is_last = is_end and self.clock.is_last(self.step)
            self.divergence.judge(self.step, result, self.config, is_last)
        with self._step_clock.left_out():
            self._after_steps(self)
            if self.has_passed(self.config.execution.check_replicas):
                check_replicas(self.session, self.step)
                self._checked_step = self.step
        self._is_save_due |= self.has_passed(self.config.checkpoint.every)
        self._take_steps(self.clock.called(self.step))

    def _warn_of_data(self) -> None:
        """Say once that steps wait for data."""
        told = self.progress.news_of_data()
        if told is not None and self.is_leader:
            _LOG.warning("%s", told)

    def has_passed(self, every: int) -> bool:
        """Whether the last call of the session came to a multiple of so many steps, or past one: of
        a run that ends by the clock, a call may end anywhere. Never for 0.
        """
        before = self.step - self.config.execution.device_iterations
        return every > 0 and self.step // every > before // every

    def _take_steps(self, steps: int) -> None:
        """Take the steps of the run, which those of so many minutes come to know on the way."""
        if steps != self.config.training.steps:
            self.config = replace(self.config, training=self.clock.training(steps))
            self.progress.config = self.config
        is_fixed = self.clock.state is not None  # before, they are an estimate
        if self.is_leader and is_fixed and steps != self._kept_steps:
            self.folder.keep_config(self.config)
            self._kept_steps = steps

    @contextmanager
    def _watched(self, iterations: int, is_last: bool) -> Iterator[None]:
        """Around a call of the session, which is profiled, or verified, where that is due."""
        every = self.config.execution.verify_every
        numbers = due(every, self.step, iterations) if every else []
        with ExitStack() as stack:
            if self.profiler is not None and not self.profiler.is_done:
                stack.enter_context(self.away())
                stack.enter_context(self.profiler.around(self.session, is_last))
            elif numbers:
                step = self.step + iterations
                stack.enter_context(verified(self.session, self.stage, step, numbers))
            yield

    def _first_place(self) -> str:
        """A sentence on where the last call first met a number that is not finite; none where that
        cannot be found.
        """
        *_, results = self._last_call
        # weights have changed since its first step
        if not all(result.is_skipped for result in results):
            return ""
        place = name_the_first(self.session, self.stage, *self._last_call)
        return "" if place is None else f" The first number that was not finite: {place}."

    def _catch_up(self) -> None:
        """Validate after the step that the run goes on from, where it was stopped before it had
        done so.
        """
        before = gather(
            None if self.records is None else self.records.metrics.last,
            popdist.getNumInstances(),
            patiently=True,
        )
        last = before[0]
        if self.step == 0 and self.config.training.validate_first:
            self._validate_first()
            return
        if last is None or last["step"] != self.step or last["validation_loss"] is not None:
            return
        validation = self._validate()
        if validation is None or self.records is None:
            return
        self._add_validation()  # the line, which ends this, comes last
        self.records.metrics.replace_last({**last, **validation})
        self.records.log({"step": self.step, **validation})

    def _add_validation(self) -> None:
        """Let this run's checkpoint that was loaded have the loss, too, or it can never be the best
        one.
        """
        if self._loaded is None:
            return
        try:
            add_validation(self._loaded, self._position())
        except (OSError, ManifestError) as error:
            _LOG.warning(
                "%s: its validation loss could not be added: %s. It is not compared for best.",
                self._loaded,
                reason_of(error),
            )

    def _tell_of_other_losses(self) -> None:
        """Say so where checkpoints of before have losses that mean something else than those to
        come.
        """
        before = validated_in(self.folder.checkpoints, {})
        if self.validation is None or not before:
            return
        if before[0].fingerprint != self.validation.fingerprint:
            _LOG.warning(
                "%s: got validation losses measured on other data, on another number or length of "
                "samples, or by an earlier version, than from here on; expected the same, to "
                "compare them. The best checkpoint is that of those measured as the newest.",
                self.folder.checkpoints,
            )

    def _validate_first(self) -> None:
        """Validate the weights that training begins with."""
        validation = self._validate()
        if validation is None or self.records is None:
            return
        begin = {"step": 0, "tokens": 0, "seconds": self._seconds(), "loss": None}
        nothing = {"learning_rate": None, "gradient_norm": None, "skipped": 0}
        self.records.metrics.write({**begin, **nothing, **validation})
        self.records.log({"step": 0, **validation})
        first = Part(f"step 0/{self.config.training.steps}")
        self.records.line.tell(whole([first, *validation_parts(validation)]))

    def _validate(self) -> "dict[str, float] | None":
        """What validation finds after this call of the session; None where it is not due, or
        somebody wants to stop.
        """
        is_due = self.clock.is_last(self.step) or self.has_passed(
            self.config.training.validate_every
        )
        if self.validation is None or not is_due:
            return None
        with self._step_clock.left_out(), self.clock.validating():
            release_freed_memory()
            found = self.validation.measure(self.session, self._is_validation_over)
            release_freed_memory()
        if found is not None:
            self._last_validation, self._validated_step = found, self.step
        return found

    def _is_validation_over(self, problem: DataError | None) -> bool:
        """Let all processes do the same before this batch of validation: whether some process got a
        signal.

        Raises:
            DataError: some process cannot read the batch.
        """
        mine = [self._interruption.signal, _told(problem)]
        signals, problems = zip(*gather(mine, popdist.getNumInstances()))
        if first(list(signals)) is not None:
            return True
        if any(problems):
            _raise_problem(problem, problems)
        return False

    def _seconds(self) -> float:
        """Since the run began, as if nothing had stopped it."""
        return round(self.clock.seconds, 3)

    def _record(self, result: StepResult, rate: float, is_end: bool) -> None:
        """Leave the step's metrics, also where validation fails.

        Args:
            is_end: whether the call of the session ended with this step, whose weights there are.
        """
        validation = None
        try:
            validation = self._validate() if is_end else None
        finally:
            self._write_line(result, rate, validation)

    def _write_line(
        self, result: StepResult, rate: float, validation: "dict[str, float] | None"
    ) -> None:
        if self.records is None:
            return
        config, mfu = self.config, self.progress.last_mfu
        size = self.stage.training.global_batch_size
        values = {
            "step": self.step,
            "tokens": self._tokens,
            "seconds": self._seconds(),
            "step_seconds": self.progress.last_seconds,
            "data_seconds": self.progress.last_waited,
            **({} if mfu is None else {"mfu": mfu}),
            "memory_bytes": self.resident,
            "loss": result.loss,
            "validation_loss": None,
            "learning_rate": rate,
            "gradient_norm": result.gradient_norm,
            "skipped": self.skipped.total,
            **({"no_labels": self.skipped.no_labels} if config.training.masked_labels else {}),
            **({} if result.loss_scale is None else {"loss_scale": result.loss_scale}),
            **({} if result.norm_limit is None else {"spikes": self.skipped.spikes}),
            **({"global_batch_size": size} if config.training.rampup_batch_size else {}),
        }
        values |= validation or {}  # in the order of `_catch_up`
        self.records.metrics.write(values)
        self.records.log({**values, "tokens_per_second": self.progress.tokens_per_second})
        self._show(result, rate, is_news=validation is not None)
        with self._step_clock.left_out():
            self.records.report_if_due(is_news=validation is not None)

    def wait_for_checkpoint(self) -> None:
        """Wait for the one that is being written, if one is; all processes call this."""
        self._finish_saving()

    def away(self) -> AbstractContextManager[None]:
        """Nothing of the progress line stays on the terminal meanwhile."""
        return nullcontext() if self.records is None else self.records.line.away()

    def close(self) -> None:
        """Complete what the services and the report have."""
        if self.records is not None:
            self.records.close()

    def _show(self, result: StepResult, rate: float, is_news: bool) -> None:
        """Tell the progress: of every step on a terminal, of those that are due elsewhere."""
        parts = self.progress.parts(
            self.step,
            self._tokens,
            result.loss,
            self._last_validation,
            rate,
            result.gradient_norm,
            self.skipped.total,
            self.skipped.no_labels,
        )
        is_first, is_last = self.step == self._first_step + 1, self.clock.is_last(self.step)
        is_due = self.step % self.config.logging.log_every == 0 or is_news or is_first or is_last
        if self.records is not None and (is_due or self.records.line.is_terminal):
            self.records.line.show(parts)

    def _save(self, *, is_last: bool = False, keep_all: bool = False) -> None:
        """Begin a checkpoint, unless this step has one; the one before, and the last one, are
        waited for. Metrics up to it are on the disk first. Where the disk does not take it, older
        ones stay; unless it is the last, training goes on.

        Weights that only lead to skipped steps may be worth little: those before them are not
        deleted then.
        """
        self._is_save_due = False
        self._finish_saving()
        if self._saved_step == self.step:
            return
        if self.config.execution.check_replicas and self._checked_step != self.step:
            check_replicas(self.session, self.step)
        place, position = self.folder.checkpoints, self._position()
        if self.tokenizer is not None and self.is_leader:
            self.folder.keep_tokenizer(self.tokenizer)
        self._saved_at = time.monotonic()
        release_freed_memory()  # what is read of the state takes the place of a step's tensors
        self._saving = begin_save(
            self.session, self.config, place, position, keep_all=keep_all, is_behind=not is_last
        )
        if is_last:
            self._finish_saving(is_last=True)
        else:
            release_freed_memory()

    def _complete_saving(self) -> None:
        """Where an error ends the run, complete the checkpoint that is being written. Others may
        not come here.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        saving.wait()
        if isinstance(saving.problem, UserError) and self.is_leader:
            _LOG.warning("%s", saving.problem)

    def _finish_saving(self, *, is_last: bool = False) -> None:
        """Wait for the checkpoint that is being written, if one is."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.finish()
        except NotSavedError as error:
            if any(self._lost()):
                return  # the folder went away meanwhile: seen before the next step
            if is_last:
                raise
            if self.is_leader:
                _LOG.warning("%s Training goes on, and saves again when it is due.", error)
            return
        self._saved_step = saving.step
        if self.records is not None:
            self.records.report_if_due(is_news=True)

    def _save_last(self) -> None:
        is_doubtful = self.divergence.is_doubtful or self.divergence.spike is not None
        self._save(is_last=True, keep_all=is_doubtful)

    def _lost(self) -> "tuple[bool, bool]":
        """Whether some process sees that the run's folder is gone, and that for checkpoints."""
        mine = [self.folder.is_lost, self.folder.has_lost_checkpoints]
        folders, checkpoints = zip(*gather(mine, popdist.getNumInstances(), patiently=True))
        return any(folders), any(checkpoints)

    def end(self) -> None:
        """After everything that is written into the folder: see that it is still there, and save
        once more where it is not.

        Raises:
            UserError: the run's folder is gone; the last step is saved elsewhere.
        """
        is_lost, has_lost_checkpoints = self._lost()
        if is_lost or has_lost_checkpoints:
            with self.session:
                if is_lost:
                    self._end_elsewhere()
                self._begin_checkpoints_again()
                self._save_last()

    def _position(self) -> Position:
        """Where the run stands; its metrics are on the disk."""
        lines = None
        if self.records is not None:
            self.records.metrics.sync()
            lines = self.records.metrics.lines
        is_validated = self._validated_step == self.step
        loss = self._last_validation["validation_loss"] if is_validated else None
        if loss is not None and not math.isfinite(loss):
            loss = None
        measured = None if loss is None or self.validation is None else self.validation.fingerprint
        schedule = self.clock.state
        return Position(self.step, self._fingerprint, lines, loss, self._tokens, schedule, measured)


def _told(problem: DataError | None) -> "tuple[str, int] | None":
    """What processes tell each other of a problem."""
    return None if problem is None else (str(problem), failure_number(problem))


def _raise_problem(own: DataError | None, told: "Sequence[tuple[str, int] | None]") -> NoReturn:
    """Raise the problem of this process, or else that of the first which has told one."""
    if own is not None:
        raise own
    instance, problem = next(each for each in enumerate(told) if each[1] is not None)
    assert problem is not None
    raise DataError(f"instance {instance}: {problem[0]}") from numbered(problem[1])


def _loader(config: Config, dataset: Dataset, step: int, tokens: int) -> BatchLoader:
    """Batches of a run that has done so many steps and seen so many tokens, in batches of whatever
    size.
    """
    share = data_share(config)
    samples = tokens // config.model.sequence_length
    return BatchLoader(
        dataset,
        config.training.global_batch_size,
        seed=config.training.seed,
        instance=share.index,
        instances=share.count,
        accumulation_steps=config.gradient_accumulation,
        shift=samples - step * config.training.global_batch_size,
    )


def _joined(arrays: "list[np.ndarray]") -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
