"""The training loop: parts that agree, and calls of the session."""

import logging
from contextlib import ExitStack
from dataclasses import replace

from popxl_gpt.config.schema import Config
from popxl_gpt.demo.job.part import Call, RunState, Step
from popxl_gpt.execution.checkpoints.saving import NotSavedError
from popxl_gpt.execution.host import run_steps
from popxl_gpt.utils.errors import DataError
from popxl_gpt.utils.runtime import gather

_LOG = logging.getLogger(__name__)


class TrainingRun(RunState):
    """A run that trains. Over several processes each has one, and instance 0's leaves the run's
    files and prints.
    """

    _called: Config | None = None
    """The program of the last call."""

    def run(self) -> int | None:
        """Train to the last step, or until a part says why not; all is saved then.

        Returns:
            the signal that ended the run early, if one did; then, too, all is saved.
        Raises:
            DivergedError: weights or moments are not finite; they are not saved.
            CorruptedError: replicas differ in what they must hold alike; it is not saved.
            DataError: some process cannot read its data; what was done is saved.
            UserError: the run's folder is gone; what was done is saved elsewhere.
        """
        try:
            with self.entered:
                self.entered.enter_context(self.session)
                self._take_steps(self.clock.steps)
                self.each("begin")
                self.step_clock.take()  # the first step begins
                try:
                    while self._goes_on():
                        if not self._between():
                            self._advance()
                except DataError:
                    self._save_if_possible()
                    raise
                self.each("save")
                self._agree()
        except (KeyboardInterrupt, SystemExit):
            self.is_abandoned = True
            raise
        finally:
            with ExitStack() as ends:
                for part in self.parts:
                    ends.callback(part.end)
        self.is_complete = self.signal is None
        return self.signal

    def _save_if_possible(self) -> None:
        """Save before an error that ends the run, which is told, whatever the disk says."""
        try:
            self.each("save")
        except NotSavedError as error:
            _LOG.warning("%s", error)

    def _goes_on(self) -> bool:
        """Let all processes do the same before the next step, and say whether there is one."""
        self._agree()
        return self.signal is None and not self.is_over

    def _agree(self) -> None:
        own = {type(part).__name__: part.vote() for part in self.parts}
        votes = gather(own)
        for part in self.parts:
            part.hear([each[name] for each in votes if (name := type(part).__name__) in each])

    def _between(self) -> bool:
        """Whether a part has done something between steps."""
        with self.aside():
            return any(part.between() for part in self.parts)

    def _advance(self) -> None:
        """One call of the session, and what parts do after it."""
        iterations = self.config.execution.device_iterations
        rates = [self.clock.learning_rate(self.step + i) for i in range(iterations)]
        is_first, self._called = self._called is not self.stage, self.stage
        call = Call(rates, is_first, self.clock.is_last(self.step + iterations))
        with ExitStack() as around:
            for part in self.parts:
                around.enter_context(part.around(call))
            call.results = run_steps(self.session, self.stage, call.words, call.labels, rates)
            call.seconds, call.waited = self.step_clock.take()
        end = self.step + iterations
        self._take_steps(self.clock.called(end))  # parts do after the last step what is due then
        self.each("called", call)
        for result, rate in zip(call.results, rates):
            self.step += 1
            self.tokens += self.stage.tokens_per_step
            self.skipped.count(result)
            self.each_surely("stepped", Step(result, rate, is_end=self.step == end))
        self.each("after")

    def _take_steps(self, steps: int) -> None:
        """Take the steps of the run, which those of so many minutes come to know on the way."""
        if steps != self.config.training.steps:
            self.config = replace(self.config, training=self.clock.training(steps))
        is_fixed = self.clock.state is not None  # before, they are an estimate
        if self.is_leader and is_fixed and steps != self.kept_steps:
            self.folder.keep_config(self.config)
            self.kept_steps = steps
