"""What a run does at signals: it saves, or ends after this step."""

from collections.abc import Sequence

from popxl_gpt.demo.job.interruption import first
from popxl_gpt.demo.job.part import Call, Job, Part, RunState
from popxl_gpt.utils.runtime import gather


class Interruptions(Part):
    """Lets all processes hear the signals of each."""

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._interruption, self._has_steps = job.interruption, False

    def vote(self) -> "tuple[int | None, bool]":
        """The signal that ends the run, and whether one asked for a checkpoint."""
        return self._interruption.signal, self._interruption.take_save()

    def hear(self, votes: "Sequence[tuple[int | None, bool]]") -> None:
        """Do as any process was told."""
        signals, saves = zip(*votes)
        self.run.signal = first(signals)
        self.run.wants_save |= any(saves)

    def called(self, call: Call) -> None:
        """Note after the first call that there is something to save."""
        if not self._has_steps:
            self._has_steps = True
            self._interruption.has_steps(True)
            # nobody notes the step while a signal still ends another one at once
            gather(None)

    def end(self) -> None:
        """Note that all is saved."""
        self._interruption.has_steps(False)
