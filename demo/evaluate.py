"""The loss of a trained model on text: `python demo/evaluate.py --checkpoint runs/demo --text
FILES`. See --help.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # run by its path: the packages are beside this folder
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from popxl_gpt.demo import commands

    commands.evaluate()

import errno
import importlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import popdist

from popxl_gpt.config.flags import Flags
from popxl_gpt.config.presets import build
from popxl_gpt.config.rules import largest_divisor
from popxl_gpt.config.saving import to_mapping
from popxl_gpt.config.schedules import NO_RAMPUP
from popxl_gpt.config.schema import Config
from popxl_gpt.demo.commands import EVALUATE, ONE_REPLICA
from popxl_gpt.demo.commands import EvaluateOptions as Options
from popxl_gpt.demo.evaluation_data import open_evaluated, tokenizer_of
from popxl_gpt.demo.job.text import check_made_by
from popxl_gpt.demo.job.validation import bytes_of_tokens
from popxl_gpt.execution.exchange.trained import TrainedModel, find_model
from popxl_gpt.execution.inference.evaluation import Evaluation, Measured
from popxl_gpt.execution.inference.inference import evaluation
from popxl_gpt.execution.inference.scoring import ROWS
from popxl_gpt.execution.instances import check_instances, check_same_checkpoint, check_same_data
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.utils.errors import NotFiniteError, UserError, reason_of
from popxl_gpt.utils.files.whole import write_whole
from popxl_gpt.utils.runtime import runtime_errors_are_told
from popxl_gpt.utils.texts import several, user_path
from popxl_gpt.utils.units import duration

if TYPE_CHECKING:
    from popxl_gpt.demo.keywords import EvaluateSettings, Unpack

REPORT_SECONDS = 10.0
"""Seconds between lines that say how far it is."""
UNKNOWN_BITS = "not known without a tokenizer that has every character"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a model was measured to be, and how."""

    checkpoint: str
    step: int
    data: "tuple[str, ...]"
    sequence_length: int
    stride: int
    measured: Measured
    seconds: float

    def values(self) -> "dict[str, Any]":
        """The numbers by name, as JSON takes them."""
        found = self.measured
        return {
            "checkpoint": self.checkpoint,
            "step": self.step,
            "data": list(self.data),
            "sequence_length": self.sequence_length,
            "stride": self.stride,
            "loss": found.loss,
            "perplexity": found.perplexity if math.isfinite(found.perplexity) else None,
            "bits_per_byte": found.bits_per_byte,
            "tokens": found.tokens,
            "bytes": found.bytes,
            "seconds": self.seconds,
        }

    def table(self) -> str:
        """The numbers for people."""
        found = self.measured
        bits = found.bits_per_byte
        rows = [
            ("data", " ".join(self.data)),
            ("loss", f"{found.loss:.4f} nats per token"),
            ("perplexity", f"{found.perplexity:.3f}"),
            ("bits per byte", UNKNOWN_BITS if bits is None else f"{bits:.4f}"),
            ("tokens", f"{found.tokens}, each once"),
            ("bytes", "not known" if found.bytes is None else f"{found.bytes}"),
            ("window", f"{self.sequence_length} tokens, {self.stride} from one to the next"),
            ("time", f"{duration(self.seconds)}, {found.tokens / self.seconds:.0f} tokens/s"),
        ]
        return "\n".join([f"{self.checkpoint}", *(f"  {name:<15}{value}" for name, value in rows)])


def evaluate(
    checkpoint: "str | Path",
    input_files: "str | Path | Sequence[str | Path]" = (),
    *,
    text: "str | Path | Sequence[str | Path]" = (),
    stride: int | None = None,
    **settings: "Unpack[EvaluateSettings]",
) -> Result:
    """Measure a trained model on token files or on text, every token once.

    Args:
        checkpoint: a run's folder, a checkpoint, or a model of Hugging Face's: its folder or name.
        input_files, text: one or several, as the command line takes them; neither: the run's
            validation files.
        stride: tokens from a window's beginning to the next one's; None: sequence_length.
        settings: `precision`, `sequence_length`, `tokenizer` and the layout, by their names on the
            command line.
    Raises:
        UserError: something given cannot be used.
        NotFiniteError: a weight or the loss is not finite.
    """
    given: dict[str, Any] = {**settings}
    if input_files:
        given["input_files"] = tuple(map(str, several(input_files)))
    options = EVALUATE.chosen(text=[*map(str, several(text))], stride=stride)
    saved, config = _opened(checkpoint, {**given, "text": options.text}, given)
    return _measure(saved, config, options)


def _opened(
    checkpoint: "str | Path", values: Mapping[str, Any], settings: Mapping[str, Any]
) -> "tuple[TrainedModel, Config]":
    """A checkpoint, and how to run it.

    Args:
        values: all that was given; `settings`: what is of the configuration.
    """
    saved = find_model(user_path("--checkpoint", checkpoint))
    EVALUATE.check_settings(settings)
    return saved, build(_sections(saved, values), settings)


def main(arguments: Sequence[str]) -> int:
    """Evaluate as the command line says. Returns the exit code."""
    return run(EVALUATE.read(arguments))


def run(flags: Flags) -> int:
    """Evaluate as flags say. Returns the exit code."""
    saved, config, options = EVALUATE.parse(flags, find_model, _sections)
    _check_options(options)
    is_leader = check_instances(config)
    check_same_checkpoint(saved.folder)
    with runtime_errors_are_told():
        if options.lm_eval:
            values = _run_tasks(saved, config, options)
            shown = _harness().table(values) if is_leader else ""
        else:
            result = _measure(saved, config, options, _Progress() if is_leader else _silent)
            values, shown = result.values(), result.table()
    if is_leader:
        print(shown)
        if options.json is not None:
            _write_json(Path(options.json), values)
    return 0


def _check_options(options: Options) -> None:
    """UserError for what would be ignored, or only refused at the end."""
    for name in ("num_fewshot", "limit"):
        value = getattr(options, name)
        if value is not None and not options.lm_eval:
            raise UserError(
                f"--{name}: got {value} without --lm_eval; expected tasks that it is for. Leave it "
                "out, or name tasks."
            )
    if options.json is None:
        return
    path = Path(options.json)
    if path.is_dir():
        raise _unwritable(path, os.strerror(errno.EISDIR))
    if not path.parent.is_dir():
        raise _unwritable(path, os.strerror(errno.ENOENT))
    if not os.access(path.parent, os.W_OK):
        raise _unwritable(path, os.strerror(errno.EACCES))


def _unwritable(path: Path, why: str) -> UserError:
    return UserError(
        f"--json: got {path}: {why}; expected a file that can be written. Choose another."
    )


def evaluate_tasks(
    checkpoint: "str | Path",
    tasks: "str | Path | Sequence[str | Path]",
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    **settings: "Unpack[EvaluateSettings]",
) -> "dict[str, Any]":
    """Measure a trained model on tasks of EleutherAI's lm-evaluation-harness.

    Args:
        checkpoint: a run's folder, a checkpoint, or a model of Hugging Face's: its folder or name.
        tasks: a name of the harness's or a task file, or several.
        num_fewshot, limit, settings: as the command line takes them.
    Returns:
        what the harness gives: numbers by task below `results`.
    Raises:
        UserError: something given cannot be used.
        NotFiniteError: a weight or a loss is not finite.
    """
    named = [*map(str, several(tasks))]
    options = EVALUATE.chosen(lm_eval=named, num_fewshot=num_fewshot, limit=limit)
    saved, config = _opened(checkpoint, {**settings, "lm_eval": options.lm_eval}, settings)
    return _run_tasks(saved, config, options)


def _run_tasks(saved: TrainedModel, config: Config, options: Options) -> "dict[str, Any]":
    if options.text or config.data.input_files or options.stride is not None:
        raise UserError(
            "--lm_eval: got tasks, and --text, --input_files or --stride; expected tasks alone. "
            "Evaluate them one after the other."
        )
    tokenizer = tokenizer_of(saved, config, needed=True)
    assert tokenizer is not None
    found: dict[str, Any] = _harness().run_tasks(
        saved, config, tokenizer, options.lm_eval, options.num_fewshot, options.limit
    )
    return {"checkpoint": str(saved.folder), "step": saved.position.step, **found}


def _harness() -> Any:
    """`demo/harness.py`: few need it, and the package that it stands on."""
    try:
        return importlib.import_module("popxl_gpt.demo.harness")
    except ImportError as error:
        raise UserError(
            f"--lm_eval: got no package {error.name}; expected the lm-evaluation-harness. Run: pip "
            "install 'lm_eval>=0.4.13', or '.[lm_eval]' in a checkout."
        ) from error


def _sections(saved: TrainedModel, values: Mapping[str, Any]) -> "dict[str, Any]":
    """The sections of a checkpoint's configuration, for the data and the layout of these values."""
    mapping = to_mapping(saved.config)
    data, execution = mapping["data"], mapping["execution"]
    has_other = values.get("text") or values.get("lm_eval")
    data["input_files"] = [] if has_other else data["validation_files"]
    data["validation_files"], data["mix"] = [], []
    mapping["training"] |= {
        "validate_every": 0,
        "validate_first": False,
        "validate_training": False,
        "validation_batches": 1,
        **NO_RAMPUP,
    }
    execution.update(ONE_REPLICA)
    mapping["inference"] = {}
    sequence = values.get("sequence_length", saved.config.model.sequence_length)
    if isinstance(sequence, int) and sequence > saved.config.model.positions:
        raise UserError(
            f"--sequence_length: got {sequence}; expected at most {saved.config.model.positions}, "
            "the positions that the model has. Lower it."
        )
    micro_batch = values.get("micro_batch_size", 1)
    widening = values.get("widening", max(1, ROWS // (sequence * micro_batch)))
    execution["widening"] = widening
    execution["head_serialisation"] = max(
        math.gcd(widening * micro_batch * sequence, execution["head_serialisation"]),
        largest_divisor(sequence, max(1, sequence // ROWS)),
    )
    mapping["training"]["global_batch_size"] = (
        values.get("data_parallel", 1) * micro_batch * widening
    )
    if values.get("sequence_length") is not None and mapping["model"]["max_positions"] is None:
        mapping["model"]["max_positions"] = saved.config.model.positions
    return mapping


def _silent(done: int, samples: int) -> None:
    del done, samples


class _Progress:
    """Says how far it is, on the error output, where it takes long."""

    def __init__(self) -> None:
        self._begin = self._told = time.monotonic()

    def __call__(self, done: int, samples: int) -> None:
        now = time.monotonic()
        if now - self._told >= REPORT_SECONDS and done < samples:
            self._told = now
            left = (now - self._begin) * (samples - done) / done
            print(f"{done}/{samples} windows, {duration(left)} left", file=sys.stderr, flush=True)


def _measure(
    saved: TrainedModel,
    config: Config,
    options: Options,
    progress: Callable[[int, int], None] = _silent,
) -> Result:
    sequence = config.model.sequence_length
    stride = sequence if options.stride is None else options.stride
    if stride > sequence:
        raise UserError(
            f"--stride: got {stride}; expected at most sequence_length = {sequence}, or tokens "
            "are left out. Lower it."
        )
    if options.text and config.data.input_files:
        raise UserError("--text: got text and --input_files; expected one of the two. Choose one.")
    tokenizer = tokenizer_of(saved, config, needed=bool(options.text))
    begin = time.monotonic()
    dataset, text_bytes = open_evaluated(config, options, tokenizer, stride)
    if popdist.getNumInstances() > 1:
        check_same_data({"--text" if options.text else "--input_files": dataset.fingerprint})
    if tokenizer is not None:
        check_made_by(tokenizer, config.data.tokenizer or "the run's", dataset)
    session = evaluation(config)
    write_whole_weights(session, config, saved.weights())
    sizes = bytes_of_tokens(config, None if options.text else tokenizer)
    run = Evaluation(session, config, dataset, token_bytes=sizes)
    measured = run.measure(on_batch=lambda done: progress(done, len(run.samples)))
    assert measured is not None
    if not math.isfinite(measured.loss):
        raise NotFiniteError(
            f"loss: got {measured.loss}; expected a finite one. Use another precision, or an older "
            "checkpoint."
        )
    if text_bytes is not None:
        measured = replace(measured, bytes=text_bytes)
    return Result(
        checkpoint=str(saved.folder),
        step=saved.position.step,
        data=options.text or config.data.input_files,
        sequence_length=sequence,
        stride=stride,
        measured=measured,
        seconds=time.monotonic() - begin,
    )


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=2, default=str)  # the harness's tell of functions, too
    try:
        write_whole(path, text + "\n")
    except OSError as error:
        raise _unwritable(path, reason_of(error)) from error
