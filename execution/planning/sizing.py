"""`--minutes`: what to train in a given time, chosen from data and machine.

The program itself is run for a moment, which tells its speed. The largest model is taken that sees
enough tokens for each of its parameters in the time, and no token more often than is of use.
"""

import time
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

from popxl_gpt.config.preparing import vocabulary_for
from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.data.known_text import Text
from popxl_gpt.execution.planning.axes import Known, candidates
from popxl_gpt.execution.planning.memory import activation_bytes, state_bytes
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.execution.planning.training_axes import (
    BATCH,
    LEAST_BATCH,
    RATE,
    RATE_WIDTH,
    REFINED,
    TRAINED,
    flops_of_token,
    matrices,
    tokens_in_time,
    worth,
)
from popxl_gpt.execution.planning.trial import step_times
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.runtime import host_bytes, runs_on_gpu
from popxl_gpt.utils.units import counted, duration, si

TOKENS_PER_PARAMETER = 8
"""Tokens for each parameter of the matrices of decoder blocks: a model that sees fewer in its time
learns less than a smaller one. In 5 minutes of a dictionary on two cores with AMX, with 4 rows of
bigrams a word and batches of 8,192, 2 layers of 128 come to 1.067 bits per byte (25 tokens each), 2
of 192 to 1.093 (6.1) and 4 of 192 to 1.087 (2.4); in a minute 2 of 128 to 1.37 (2.7) and 2 of 192
to 1.46 (0.8). On AVX-512, without bigrams, 4 layers of 192 (2.1) and 2 (5.7) are alike after 5
minutes of other text, 0.980 and 0.987. Others have 12 for each of matrices and head: "nanochat",
github.com/karpathy/nanochat.
"""
EPOCHS = 4
"""Times that a text is seen: up to the fourth it is worth nearly as much. Source: Muennighoff et
al. 2023, "Scaling Data-Constrained Language Models", arXiv:2305.16264.
"""
LEAST_STEPS = 100
"""Steps of the smallest batch that a model needs which is larger for the sake of a small text: one
that makes a handful has learned nothing.
"""
TOTAL_DECAY, MOST_DECAY = 0.4, 0.2
"""Weight decay times the rates of all steps, for each time that a text is seen again, and the
largest weight decay: without it a model learns the text by heart. 3 layers of 192 come after 750
steps of 4,096 tokens with rates up to 0.009, in bits per byte of held-out text, to 1.021 without
and 1.027 with 0.02 where they see a third of a text, to 1.152 without, 1.127 with 0.03 and 1.141
with 0.1 where they see half of one again, and to 1.414, 1.274 and 1.234 where they see one three
times, to 1.254 with 0.3, to 1.330 with dropout of 0.1 in place of it and to 1.234 with both. More
steps want less of it: Wang and Aitchison 2024, "How to set AdamW's weight decay as you scale model
and dataset size", arXiv:2405.13698.
"""
DECAY = 0.4
"""Share of the steps in which the rate falls: 4 layers of 256 come to 1.343 bits per byte from 0.8
M tokens with 0.3 of them, to 1.346 with 0.5 and to 1.361 with 0.75.
"""
VALIDATED, VALIDATION = 100, 3
"""Steps between validations, at least, and steps that take as long as one: 3 % of the time."""
VALIDATIONS = 10
"""Validations before that of the last step, at most."""
ENDING = 1.0
"""Seconds for reports and what else ends a run."""
TRIED_STEPS = 3
"""Steps of a trial, after one that compiles. The fastest counts: what else the machine does decides
nothing then.
"""
TRIAL_SHARE = 0.1
"""Share of the time for all trials: another is made where it fits, too, by what the last took. The
first is made in any case.
"""
GUESS, SLOW = 5e10, 5e9
"""FLOP/s, before the first trial: of two cores; and of a machine on which that trial is to end
within the share of trials, too.
"""


@dataclass(frozen=True)
class Trial:
    """What a moment of the real program took, in seconds."""

    build: float
    """All but the steps that are timed: building, the first step, and closing."""
    step: float

    @property
    def seconds(self) -> float:
        """The time of the whole trial."""
        return self.build + TRIED_STEPS * self.step


@dataclass(frozen=True)
class Sized:
    """The configuration, why it is this one, and what is expected of it."""

    config: Config
    reasons: tuple[str, ...]


Execute = Callable[[Config, float], tuple[Config, str]]
"""Finds in so many seconds how a candidate is executed; gives it so, and what is to be said of it.
"""


def tried(config: Config) -> Trial:
    """Build the training program, and run some steps of it on tokens that mean nothing."""
    begin = time.perf_counter()
    times = step_times(pretraining, config, 1, TRIED_STEPS, time.perf_counter)
    stepping = sum(times) * config.execution.device_iterations
    return Trial(time.perf_counter() - begin - stepping, min(times))


def as_it_is(config: Config, seconds: float) -> tuple[Config, str]:
    """The way that flags and the table of axes give, where no other is searched."""
    return config, ""


def _nothing(config: Config) -> None:
    """What is checked of the first candidate by itself."""


def chosen(
    config: Config,
    given: Set[str],
    text: Text | None,
    seconds: float,
    try_out: Callable[[Config], Trial] = tried,
    execute: Execute = as_it_is,
    check: Callable[[Config], None] = _nothing,
) -> Sized:
    """Choose what was not given for a run of so many seconds.

    Args:
        config: what was given, and the recipe for the rest: a preset.
        given: names of settings that stay as they are.
        text: what is known of the data.
        try_out: measures a configuration.
        execute: finds the way to execute a candidate.
        check: raises UserError for a candidate that cannot be trained; called before the first
            trial.

    Raises:
        UserError: no size goes with what was given, or as of `check`: before the first trial.
    """
    known = Known(given=frozenset(given), text=text, seconds=seconds, left=seconds, speed=GUESS)
    sizing = _Sizing(config, known, try_out, execute)
    check(sizing.first)
    return sizing.chosen()


def whole_calls(config: Config, steps: float) -> int:
    """So many steps, as calls of the program make them; of one call at least."""
    iterations = config.execution.device_iterations
    return iterations * max(1, int(steps / iterations))


class _Sizing:
    """Trials of ever better candidates, until one comes again or the share of trials is spent."""

    def __init__(
        self,
        config: Config,
        known: Known,
        try_out: Callable[[Config], Trial],
        execute: Execute,
    ):
        self.base, self.known, self.try_out, self.execute = config, known, try_out, execute
        self.memory = host_bytes()[1] // 2
        self.spent = 0.0
        self.trials: dict[Config, Trial] = {}
        self.ways: dict[Config, tuple[Config, str]] = {}
        self.is_by_text = False
        """Whether a text that is small has decided the size."""
        self.last: Trial | None = None
        """The trial whose speed is known."""
        self.first = self._sized()
        """The candidate of the first trial."""

    def chosen(self) -> Sized:
        """The configuration that the trials come to."""
        candidate = self.first
        while candidate not in self.trials and self._fits(candidate):
            self._measure(candidate)
            self._go_by(candidate)
            candidate = self._sized()
        if candidate in self.trials:
            self._go_by(candidate)
            candidate = self._refined(self._without_narrow(candidate))
        assert self.last is not None, "a run has time for one trial"
        left = self.known.seconds - self.spent - 2 * self.last.build - ENDING
        step = candidate.tokens_per_step * flops_of_token(candidate) / self.known.speed
        executed, words = self.ways.get(candidate) or self.execute(candidate, 0.0)
        steps = whole_calls(candidate, self._without_validations(candidate, left / step))
        final = self._finished(executed, steps)
        return Sized(final, (*self._reasons(final, steps), *filter(None, [words])))

    def _without_validations(self, config: Config, steps: float) -> float:
        """The steps of a time less what validations take of them."""
        if not config.data.validation_files:
            return steps
        return steps - VALIDATION * (1 + min(VALIDATIONS, steps / VALIDATED))

    def _without_narrow(self, candidate: Config) -> Config:
        """The candidate, or the one that float32 comes to where that is faster."""
        if "precision" in self.known.given:
            return candidate
        try:
            wide = override(candidate, precision="float32")
        except ConfigError:  # something that was given needs 16 bits
            return candidate
        if wide == candidate or not self._fits(wide):
            return candidate
        assert self.last is not None
        if self._measure(wide).step >= self.last.step:
            return candidate
        self.base = override(self.base, precision="float32")
        self.known = replace(self.known, given=self.known.given | {"precision"})
        self._go_by(wide)
        return self._sized()

    def _refined(self, candidate: Config) -> Config:
        """The candidate, or what learns more in the time by what steps take: along one axis after
        the other, as far as that is so and trials fit.
        """
        best, known = candidate, self.known
        if best not in self.trials:
            return best
        for axis in REFINED:
            for other in candidates(best, (axis,), known, []):
                is_new = other not in self.trials
                if is_new and not self._fits(other):
                    break
                step = self._measure(other).step if is_new else self.trials[other].step
                if worth(other, known) / step > worth(best, known) / self.trials[best].step:
                    best = other
                    self._go_by(best)
                elif is_new:
                    break
        return best

    def _changed(self, config: Config, **values: Any) -> Config:
        return override(config, **{n: v for n, v in values.items() if n not in self.known.given})

    def _sized(self) -> Config:
        """The largest model that sees enough tokens, with its batch. Shapes that do not go with
        what was given are left out.
        """
        best, errors, self.is_by_text = None, list[ConfigError](), False
        for config in candidates(self.base, TRAINED, self.known, errors):
            is_large = state_bytes(config) > self.memory or not self._is_sure(config)
            if best is not None and is_large:
                break
            sees_enough = self._sees_enough(config)
            if best is None or sees_enough or self._spares_text(config, best):
                self.is_by_text = best is not None and not sees_enough
                best = config
        if best is None:
            raise errors[0]
        keeps = activation_bytes(best) <= self.memory // 2
        return self._changed(best, recomputation=not keeps)

    def _sees_enough(self, config: Config) -> bool:
        """Whether a size sees enough tokens for each of its parameters in the time."""
        return tokens_in_time(config, self.known) >= TOKENS_PER_PARAMETER * matrices(config)

    def _spares_text(self, config: Config, smaller: Config) -> bool:
        """Whether a smaller size sees the text too often, and this one makes steps enough."""
        text, known = self.known.text, self.known
        is_few = text is not None and tokens_in_time(smaller, known) > EPOCHS * text.tokens
        return is_few and tokens_in_time(config, known) >= LEAST_STEPS * LEAST_BATCH

    def _is_sure(self, config: Config) -> bool:
        """Whether a trial of this size may be the first, whatever the machine."""
        step = config.tokens_per_step * flops_of_token(config) / SLOW
        sure = (1 + TRIED_STEPS) * step <= TRIAL_SHARE * self.known.seconds
        return sure or self.last is not None

    def _fits(self, config: Config) -> bool:
        """Whether a trial, by what the last one took, ends within the share of trials; the first is
        made in any case. Building runs a step, too.
        """
        if self.last is None:
            return True
        step = config.tokens_per_step * flops_of_token(config) / self.known.speed
        build = self.last.build + max(0.0, step - self.last.step)
        return self.spent + Trial(build, step).seconds <= TRIAL_SHARE * self.known.seconds

    def _measure(self, config: Config) -> Trial:
        """Try a candidate, with half of the time that is left for trials to find its execution."""
        begin, left = time.perf_counter(), TRIAL_SHARE * self.known.seconds - self.spent
        way = self.ways[config] = self.execute(config, max(0.0, left / 2))
        trial = self.trials[config] = self.try_out(way[0])
        self.spent += max(time.perf_counter() - begin, trial.seconds)
        return trial

    def _go_by(self, config: Config) -> None:
        """Take the speed of a candidate's trial for that of the machine."""
        self.last = trial = self.trials[config]
        speed = flops_of_token(config) * config.tokens_per_step / trial.step
        left = max(0.0, self.known.seconds - self.spent)
        self.known = replace(self.known, speed=speed, left=left)

    def _finished(self, config: Config, steps: int) -> Config:
        """The configuration with what follows from the number of steps."""
        training = config.training
        validated = whole_calls(config, max(VALIDATED, steps // VALIDATIONS))
        steps = training.steps if "steps" in self.known.given else steps
        warmup = min(steps // 4, max(10, steps // 50))
        warmup = training.warmup_steps if "warmup_steps" in self.known.given else warmup
        decay, again = training.weight_decay, self._epochs(config, steps) - 1
        if again > 0:
            decay = min(MOST_DECAY, TOTAL_DECAY * again / (training.learning_rate * steps))
        return self._changed(
            config,
            weight_decay=decay,
            steps=steps,
            warmup_steps=warmup,
            decay_steps=max(1, int(DECAY * steps)),  # its share of the time, whatever warms up
            validate_every=validated if config.data.validation_files else 0,
            log_every=max(1, steps // 50),
            every=0,
        )

    def _epochs(self, config: Config, steps: int) -> float:
        """How often a text is seen in so many steps; 0 where nothing is known of it."""
        text = self.known.text
        return 0.0 if text is None else steps * config.tokens_per_step / text.tokens

    def _reasons(self, config: Config, steps: int) -> tuple[str, ...]:
        """Why it is this one, a line each."""
        model, training, trials = config.model, config.training, len(self.trials)
        tokens, size, known = steps * config.tokens_per_step, matrices(config), self.known
        why = f"at least {TOKENS_PER_PARAMETER:g} where time allows"
        if self.is_by_text:
            why = f"a smaller one would see the text more than {EPOCHS} times"
        size_reason = self._why(why, "layers", "hidden_size")
        batch_reason = self._why(
            f"{BATCH:g} times the root of all tokens or more, by what steps take",
            "global_batch_size",
        )
        rows, words = model.bigram_rows, model.vocabulary_size
        rows_reason = self._why("fewer where they take more time than they save", "bigram_rows")
        rate_reason = self._why(
            f"the {RATE:g} of width {RATE_WIDTH} by the root of the width", "learning_rate"
        )
        decay = training.weight_decay
        decay_reason = self._why(
            "without it a text that is seen again is learned by heart", "weight_decay"
        )
        text = "random tokens, or files without dataset.json"
        if known.text is not None:
            text = (
                f"{si(known.text.tokens, 'tokens')}, vocabulary {known.text.vocabulary_size}"
                f"{self._vocabulary_hint(config)}; {self._epochs(config, steps):.2g} epochs"
            )
        return (
            f"machine     {si(known.speed, 'FLOP/s')} of the program itself, in {trials} "
            f"trial{'s' * (trials > 1)} of {duration(self.spent)}",
            f"data        {text}",
            f"size        {counted(model.layers, 'layer')} of {model.hidden_size}, "
            f"{si(parameter_count(model))} parameters; {tokens / size:.2g} tokens of text for each "
            f"parameter of its blocks: {size_reason}",
            *([f"bigrams     {rows / words:.3g} rows a word: {rows_reason}"] if rows else []),
            f"batch       {counted(training.global_batch_size, 'sequence')} of "
            f"{model.sequence_length}, {config.execution.micro_batch_size} at a time: "
            f"{batch_reason}",
            f"rate        {training.learning_rate:.2g}, {rate_reason}; stable, then "
            "falling by the clock",
            *([f"decay       {decay:.2g} of weights: {decay_reason}"] if decay else []),
            f"precision   {model.precision}, activations "
            f"{'computed again' if config.execution.recomputation else 'kept'}",
            f"expected    {counted(steps, 'step')}, {si(tokens, 'tokens')}, "
            f"{duration(known.seconds)} with everything",
        )

    def _vocabulary_hint(self, config: Config) -> str:
        """How to have a vocabulary that fits the time of a CPU, where this one is several times as
        large.
        """
        minutes = self.known.seconds / 60
        fitting = vocabulary_for(minutes)
        if config.model.vocabulary_size <= 2 * fitting or runs_on_gpu(config.execution.device):
            return ""
        how = f"data/prepare.py --minutes {minutes:.2g}"
        return f"; with one of {fitting} it would learn more in the time ({how})"

    def _why(self, reason: str, *names: str) -> str:
        """A reason, unless settings were given."""
        return "as given" if self.known.given >= set(names) else reason
