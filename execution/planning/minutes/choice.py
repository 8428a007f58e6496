"""What to train in a given time: sizes, batch, rate, precision, chosen from data and machine.

The program itself is run for a moment, which tells its speed. The largest model is taken that sees
enough tokens for each of its parameters in the time, and no token more often than is of use.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from popxl_gpt.config.batch import MOST_STAGES
from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.data.dataset_info import read_info, tokenizer_of, training_files
from popxl_gpt.data.records import RecordFile
from popxl_gpt.data.token_files import find_files
from popxl_gpt.execution.planning.auto.trial import step_times
from popxl_gpt.execution.planning.memory import state_bytes
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.runtime import host_bytes
from popxl_gpt.utils.units import counted, duration, si

SHAPES = (
    (2, 128), (2, 192), (3, 192), (4, 192), (4, 256), (6, 256), (6, 384), (8, 512), (10, 640),
    (12, 768), (16, 1024), (20, 1280), (24, 1536), (28, 1792), (32, 2048),
)  # fmt: skip
"""Layers and hidden sizes, from the smallest model on."""
HEAD_SIZE = 64
TOKENS_PER_PARAMETER = 1.5
"""Of the matrices of decoder blocks: a model that sees fewer in its time learns less than a smaller
one. On two cores 2 layers of 128 learn more in a minute (3.1 tokens for each, 1.218 bits a byte)
than 2 of 192 (1.1, 1.240), and 4 layers of 192 more in 5 minutes (2.1, 0.980) than 2 (5.7, 0.987).
"""
EPOCHS = 4
"""That a text is seen: up to the fourth time it is worth nearly as much. Source: Muennighoff et al.
2023, "Scaling Data-Constrained Language Models", arXiv:2305.16264.
"""
BATCH = 2.6
"""Tokens of a batch over the root of all that the run sees. 4 layers of 256 learn most from 2.4 M
tokens, in 5 minutes on two cores, with batches of 4,096: of 2,048 they see fewer in the time, of
8,192 they learn less from each. What a batch may have grows with about the root of the tokens:
Zhang et al. 2024, "How does critical batch size scale in pre-training?", arXiv:2410.21676.
"""
ROWS, MOST_ROWS = 2048, 4096
"""Tokens of the smallest batch, for products of fewer are slower, and of a micro-batch at most: 4
layers of 192 take 1.07 and 1.2 times the time (two runs) for two of 2,048 that one of 4,096 takes.
"""
RATE, RATE_WIDTH = 8e-3, 256
"""The highest learning rate of so wide a model; it falls with the root of the width. Rates of 6e-3,
9e-3 and 12e-3 come to 1.346, 1.340 and 1.340 bits a byte in as many tokens.
"""
DECAY = 0.4
"""Of the steps, in which the rate falls: 4 layers of 256 come to 1.343 bits a byte from 0.8 M
tokens with 0.3 of them, to 1.346 with 0.5 and to 1.361 with 0.75.
"""
VALIDATED = 20
"""Steps between validations, at least: one takes as long as three steps."""
TRIED_STEPS = 3
"""Of a trial, after one that compiles."""
TRIAL_SHARE = 0.1
"""Of the time, for all trials: another is made where it fits, too, by what the last one took. The
first is made in any case.
"""
LENGTHS = ((8 * 3600.0, 1024), (3600.0, 512), (0.0, 256))
"""From so many seconds on, tokens of a sequence."""
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Text:
    """The data, as `dataset.json` beside them has it."""

    tokens: int
    vocabulary_size: int
    tokenizer: str | None = None
    validation_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """What a moment of the real program took, in seconds."""

    build: float
    """All but the steps that are timed: building, the first step, and closing."""
    step: float


@dataclass(frozen=True)
class Choice:
    """The configuration, why it is this one, and what is expected of it."""

    config: Config
    reasons: tuple[str, ...]


def text_of(config: Config) -> Text | None:
    """What is known of the training data beside their files; None for random tokens, or where
    nothing is. A mixture has as many tokens as are read until a source of it was seen once.
    """
    mixed = config.data.mixed()
    parts: list[tuple[tuple[str, ...], float]]
    parts = [((training_files(name),), weight) for name, weight in mixed.items()]
    if config.data.input_files:
        parts = [(config.data.input_files, 1.0)]
    whole, tokens = math.fsum(weight for _, weight in parts), math.inf
    found: dict[Path, dict[str, Any]] = {}
    for patterns, weight in parts:
        own = _descriptions(find_files(patterns))
        trained = [info.get("splits", {}).get("train", {}).get("tokens") for info in own.values()]
        if None in trained:
            return None
        tokens = min(tokens, sum(trained) * whole / weight)
        found |= own
    if not found:
        return None
    folder, info = next(iter(found.items()))
    tokenizer = tokenizer_of(folder, info)
    return Text(
        tokens=int(tokens),
        vocabulary_size=max(info["vocabulary_size"] for info in found.values()),
        tokenizer=None if tokenizer is None else str(tokenizer),
        validation_files=tuple(
            str(path) for folder in found for path in sorted(folder.glob("validation-*.tfrecord"))
        ),
    )


def _descriptions(paths: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """What is said of the folders of files, nothing of one without a description. The files are
    refused now, not after the trials.
    """
    for path in paths:
        RecordFile(path).check()
    return {folder: read_info(folder) or {} for folder in dict.fromkeys(p.parent for p in paths)}


def tried(config: Config) -> Trial:
    """Build the training program, and run some steps of it on tokens that mean nothing."""
    begin = time.perf_counter()
    times = step_times(pretraining, config, 1, TRIED_STEPS, time.perf_counter)
    stepping = sum(times) * config.execution.device_iterations
    return Trial(time.perf_counter() - begin - stepping, statistics.median(times))


def chosen(
    config: Config,
    given: Set[str],
    text: Text | None,
    seconds: float,
    try_out: Callable[[Config], Trial] = tried,
) -> Choice:
    """Choose what was not given for a run of so many seconds.

    Args:
        config: what was given, and the recipe for the rest: a preset.
        given: names of settings that stay as they are.
        text: what is known of the data.
        try_out: measures a configuration.

    Raises:
        ConfigError: no size goes with what was given: before the first trial.
    """
    chooser = _Chooser(config, given, text, seconds)
    speed, trials, spent, trial = _GUESS, 0, 0.0, None
    tried_ones: dict[Config, Trial] = {}
    candidate = chooser.sized(speed, seconds)
    while candidate not in tried_ones and _fits(candidate, speed, trial, seconds, spent):
        begin = time.perf_counter()
        trial = tried_ones[candidate] = try_out(candidate)
        spent += max(time.perf_counter() - begin, trial.build + TRIED_STEPS * trial.step)
        trials += 1
        speed = _speed(candidate, trial)
        candidate = chooser.sized(speed, seconds - spent)
    assert trial is not None, "a run has time for one trial"
    if candidate in tried_ones:
        trial = tried_ones[candidate]
        speed = _speed(candidate, trial)
        wide = override(candidate, precision="float32")
        if chooser.tries_float32 and _fits(wide, speed, trial, seconds, spent):
            other = try_out(wide)
            spent, trials = spent + other.build + TRIED_STEPS * other.step, trials + 1
            if other.step < trial.step:
                trial, speed = other, _speed(wide, other)
                chooser.base = override(chooser.base, precision="float32")
                candidate = chooser.sized(speed, seconds - spent)
    step = candidate.tokens_per_step * _flops(candidate) / speed
    steps = _whole_calls(candidate, (seconds - spent - 2 * trial.build) / step)
    final = chooser.finished(candidate, steps)
    return Choice(final, chooser.reasons(final, speed, trials, spent, steps))


_GUESS = 5e10
"""FLOP/s, before the first trial: of two cores."""


def _speed(config: Config, trial: Trial) -> float:
    """FLOP/s of a trial."""
    return _flops(config) * config.tokens_per_step / trial.step


def _fits(config: Config, speed: float, last: Trial | None, seconds: float, spent: float) -> bool:
    """Whether a trial, by what the last one took, ends within the share of trials; the first is
    made in any case. What building takes grows with what is computed.
    """
    if last is None:
        return True
    step = config.tokens_per_step * _flops(config) / speed
    cost = last.build * max(1.0, step / last.step) + TRIED_STEPS * step
    return spent + cost <= TRIAL_SHARE * seconds


def _whole_calls(config: Config, steps: float) -> int:
    """So many steps, as calls of the program make them; of one call at least."""
    iterations = config.execution.device_iterations
    return iterations * max(1, int(steps / iterations))


def _matrices(layers: int, hidden: int) -> int:
    """Parameters of the matrices of decoder blocks."""
    return 12 * layers * hidden**2


def _heads(hidden: int) -> int:
    """The most that have HEAD_SIZE features or more; an even number, for rotary positions."""
    wanted = max(1, hidden // HEAD_SIZE)
    return next((n for n in range(wanted, 1, -1) if hidden % (2 * n) == 0), 1)


def _flops(config: Config) -> float:
    """About what a token takes, as the sizes of matrices have it."""
    model = config.model
    products = (
        _matrices(model.layers, model.hidden_size) + model.vocabulary_size * model.hidden_size
    )
    return 6.0 * products + 12.0 * model.layers * model.sequence_length * model.hidden_size


def _has_bfloat16() -> bool:
    """Whether this processor multiplies in bfloat16."""
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False
    return any(flag in words for flag in BFLOAT16_FLAGS)


class _Chooser:
    """Settings by the speed of the machine, but those that were given."""

    def __init__(self, config: Config, given: Set[str], text: Text | None, seconds: float):
        self.given, self.text, self.seconds = given, text, seconds
        known: dict[str, Any] = {}
        if text is not None:
            known["vocabulary_size"] = text.vocabulary_size
            known["tokenizer"] = text.tokenizer
            known["validation_files"] = text.validation_files
        if config.data.validation_files or known.get("validation_files"):
            known["validate_every"] = config.execution.device_iterations  # until steps are known
        self.tries_float32 = "precision" not in given and _has_bfloat16()
        if self.tries_float32:
            known["precision"] = "bfloat16"
        known["sequence_length"] = next(n for least, n in LENGTHS if seconds >= least)
        self.base = self._changed(config, **known)
        self.memory = host_bytes()[1] // 2

    def _changed(self, config: Config, **values: Any) -> Config:
        return override(config, **{n: v for n, v in values.items() if n not in self.given})

    def sized(self, speed: float, seconds: float) -> Config:
        """The largest model that sees enough tokens, with its batch. Shapes that do not go with
        what was given are left out.
        """
        best, problem = None, None
        for layers, hidden in self._shapes():
            try:
                config = self._with_batch(layers, hidden, speed, seconds)
            except ConfigError as error:
                problem = problem or error
                continue
            if best is not None and state_bytes(config) > self.memory:
                break
            if best is None or self._is_worth(config, speed, seconds, best):
                best = config
        if best is None:
            assert problem is not None, "there is a smallest shape"
            raise problem
        return best

    def _shapes(self) -> Sequence[tuple[int, int]]:
        model = self.base.model
        found = [
            (
                model.layers if "layers" in self.given else layers,
                model.hidden_size if "hidden_size" in self.given else hidden,
            )
            for layers, hidden in SHAPES
        ]
        return list(dict.fromkeys(found))

    def _is_worth(self, config: Config, speed: float, seconds: float, smaller: Config) -> bool:
        """Whether this size learns more in the time than a smaller one."""
        model = config.model
        tokens = speed * seconds / _flops(config)
        needed = TOKENS_PER_PARAMETER * _matrices(model.layers, model.hidden_size)
        return tokens >= needed or self._epochs(smaller, speed, seconds) > EPOCHS

    def _epochs(self, config: Config, speed: float, seconds: float) -> float:
        tokens = speed * seconds / _flops(config)
        return 0.0 if self.text is None else tokens / self.text.tokens

    def _with_batch(self, layers: int, hidden: int, speed: float, seconds: float) -> Config:
        length = self.base.model.sequence_length
        heads = _heads(hidden)
        config = self._changed(self.base, layers=layers, hidden_size=hidden, heads=heads)
        tokens = speed * seconds / _flops(config)
        wanted = max(ROWS, BATCH * math.sqrt(tokens)) / length
        training, widening = self.base.training, self.base.execution.widening
        batch = self._batch(wanted)
        grown = (training.rampup_batch_size or batch, training.rampup_increment or batch)
        micro_batch = math.gcd(
            *(size // widening for size in (batch, *grown)),
            2 ** int(math.log2(max(1, MOST_ROWS // length))),
        )
        rate = RATE * math.sqrt(RATE_WIDTH / hidden)
        kept = 42 * layers * hidden * batch * length  # bytes of activations, about
        return self._changed(
            config,
            global_batch_size=batch,
            micro_batch_size=micro_batch,
            learning_rate=rate,
            recomputation=kept > self.memory // 2,
            minimum_learning_rate=0.0,
        )

    def _batch(self, wanted: float) -> int:
        """Sequences of a step, about as many as are wanted; such as a ramp leads to that was
        given.
        """
        training, execution = self.base.training, self.base.execution
        if "global_batch_size" in self.given:
            return training.global_batch_size
        first, increment = training.rampup_batch_size, training.rampup_increment
        if first is None:
            given = execution.micro_batch_size if "micro_batch_size" in self.given else 1
            at_once = execution.widening * given
            return at_once * 2 ** max(0, round(math.log2(wanted / at_once)))
        if increment is None:
            return first * 2 ** max(1, round(math.log2(wanted / first)))
        return first + increment * min(MOST_STAGES, max(1, round((wanted - first) / increment)))

    def finished(self, config: Config, steps: int) -> Config:
        """With what follows from the number of steps."""
        training = config.training
        validated = _whole_calls(config, max(VALIDATED, steps // 10))
        steps = training.steps if "steps" in self.given else steps
        warmup = min(steps // 4, max(10, steps // 50))
        warmup = training.warmup_steps if "warmup_steps" in self.given else warmup
        return self._changed(
            config,
            steps=steps,
            warmup_steps=warmup,
            decay_steps=max(1, min(int(DECAY * steps), steps - warmup)),
            validate_every=validated if config.data.validation_files else 0,
            log_every=max(1, steps // 50),
            every=0,
        )

    def reasons(
        self, config: Config, speed: float, trials: int, spent: float, steps: int
    ) -> tuple[str, ...]:
        """Why it is this one, a line each."""
        model, training = config.model, config.training
        tokens, size = steps * config.tokens_per_step, _matrices(model.layers, model.hidden_size)
        size_reason = self._why(
            f"at least {TOKENS_PER_PARAMETER:g} where time allows", "layers", "hidden_size"
        )
        batch_reason = self._why(
            f"about {BATCH:g} times the root of all tokens, {ROWS} or more", "global_batch_size"
        )
        rate_reason = self._why(
            f"the {RATE:g} of width {RATE_WIDTH} by the root of the width", "learning_rate"
        )
        text = "random tokens, or files without dataset.json"
        if self.text is not None:
            text = (
                f"{si(self.text.tokens, 'tokens')}, vocabulary {self.text.vocabulary_size}; "
                f"{tokens / self.text.tokens:.2g} epochs"
            )
        return (
            f"machine     {si(speed, 'FLOP/s')} of the program itself, in {trials} "
            f"trial{'s' * (trials > 1)} of {duration(spent)}",
            f"data        {text}",
            f"size        {counted(model.layers, 'layer')} of {model.hidden_size}, "
            f"{si(parameter_count(model))} parameters; {tokens / size:.2g} tokens of text for each "
            f"parameter of its blocks: {size_reason}",
            f"batch       {counted(training.global_batch_size, 'sequence')} of "
            f"{model.sequence_length}, {config.execution.micro_batch_size} at a time: "
            f"{batch_reason}",
            f"rate        {training.learning_rate:.2g}, {rate_reason}; stable, then "
            "falling by the clock",
            f"precision   {model.precision}, activations "
            f"{'computed again' if config.execution.recomputation else 'kept'}",
            f"expected    {counted(steps, 'step')}, {si(tokens, 'tokens')}, "
            f"{duration(self.seconds)} with everything",
        )

    def _why(self, reason: str, *names: str) -> str:
        """A reason, unless settings were given."""
        return "as given" if self.given >= set(names) else reason
