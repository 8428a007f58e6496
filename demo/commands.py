"""The commands: what each takes, known before the programs themselves are loaded.

Imports what loads in a moment: `config`, and the flags of a plan.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from popxl_gpt.config.bounds import Count, CountOrZero, PathText, PositiveOrZero, TopP
from popxl_gpt.config.command_line import (
    CommandLine,
    configured,
    parse_options,
    read_flags,
)
from popxl_gpt.config.flags import Flags
from popxl_gpt.config.inference import AS_IN_TRAINING
from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.preparing import parse_preparation
from popxl_gpt.config.schema import Config
from popxl_gpt.config.validation import checked
from popxl_gpt.data.dataset_info import implied_settings
from popxl_gpt.demo.job.choice import (
    WAITING,
    check_choice,
    chooses_model,
    chosen_before,
    defaults_of_choice,
    implied_for_choice,
)
from popxl_gpt.demo.job.options import TrainOptions, no_tensorboard, unreadable_tokenizer
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.files.hub import tokenizer_file
from popxl_gpt.utils.files.plain import open_plain
from popxl_gpt.utils.programs import start, typed_as, unknown_command
from popxl_gpt.utils.texts import IsFreeText, text_of_path

FreeText = Annotated[str, IsFreeText()]
Model = TypeVar("Model")
LAYOUT = (
    "data_parallel", "tensor_parallel_1", "tensor_parallel_2", "replicated_tensor_sharding",
    "device", "device_memory", "memmap_dir", "host_memory",
)  # fmt: skip
"""Settings of training that say where a trained model runs."""
ONE_REPLICA = {
    "data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1, "micro_batch_size": 1,
    "device_iterations": 1, "embedding_serialisation": 1, "replicated_tensor_sharding": False,
    "device": "auto", "device_memory": None, "memmap_dir": None, "host_memory": None,
    "io_mode": "io",
}  # fmt: skip
"""How a trained model runs unless it is told otherwise, whatever trained it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateOptions:
    """What is evaluated: every token once. Without `--input_files`, `--text` and `--lm_eval` it is
    the run's own validation data. Numbers are the same for every layout, width and batch, to
    rounding.
    """

    checkpoint: PathText | None = None
    """A run's folder, or a checkpoint: its newest checkpoint that is whole is used; or a model of
    Hugging Face's: its folder, or its name at the hub.
    """
    text: tuple[PathText, ...] = ()
    """Files of text, JSON, CSV, Parquet or Arrow, folders or quoted globs, in place of token files,
    as `data/prepare.py text` reads them; each file, object or row is a document.
    """
    text_field: str = "text"
    """The field, or the column, that holds the text of `--text`."""
    plain_text: bool = False
    """Take JSON and CSV files of `--text` as plain text, syntax and all."""
    stride: Count | None = None
    """Tokens from the beginning of a window to the next one's; fewer than sequence_length give
    every token more text before it, for more time; none: sequence_length.
    """
    lm_eval: tuple[PathText, ...] = ()
    """Tasks of EleutherAI's lm-evaluation-harness, in place of a loss: names of its own, or task
    files (.yaml), whose code is run. Needs the package lm_eval.
    """
    num_fewshot: CountOrZero | None = None
    """Examples that stand before each document of a task; none: as the task has it."""
    limit: Count | None = None
    """Documents of each task, the first ones; none: all."""
    json: PathText | None = None
    """File to write the numbers to, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """What is written."""

    checkpoint: PathText | None = None
    """A run's folder, or a checkpoint: its newest checkpoint that is whole is used; or a model of
    Hugging Face's: its folder, or its name at the hub.
    """
    prompt: tuple[FreeText, ...] = ()
    """Texts to go on from, each by itself; none: a new document is begun."""
    prompt_file: PathText | None = None
    """A file whose text is a prompt; -: standard input."""
    special_tokens: bool = False
    """Take special tokens that prompts spell as tokens, such as those of a chat template; off: as
    text, which is how training data are made.
    """
    chat: bool = False
    """Read prompts from standard input, a line each. The model sees all that was said before, as
    its chat template writes it where it has one, else a line each.
    """
    chat_template: bool = True
    """Let the model's chat template write what is said with --chat."""
    system: FreeText | None = None
    """What stands before all that is said with --chat: the system's message."""
    tokens: Count = 200
    """Tokens to write after each prompt, unless the text ends before. The model sees at most
    max_positions tokens of a text, the last ones of a longer prompt; when a text grows beyond, it
    goes on from the second half of those.
    """
    samples: Count = 1
    """Texts to write after each prompt."""
    stop: tuple[FreeText, ...] = ()
    """Texts that end what is written, and are left out."""
    temperature: PositiveOrZero = 0.8
    """What logits are divided by: below one makes likely tokens likelier; 0: always the likeliest
    one.
    """
    top_k: Count | None = 40
    """Tokens that are chosen from, the likeliest ones; none: all."""
    top_p: TopP = 1.0
    """Probability that these have together; as few as have it are chosen from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Which runs, and where the page goes."""

    runs: tuple[PathText, ...]
    """Folders of runs, such as runs/demo; several are laid over each other."""
    output: PathText | None = None
    """File of the page; none: report.html in the run's folder, or in this one for several runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What is converted, and into what."""

    paths: tuple[PathText, ...]
    """What is read, and the folder or file to make."""
    positions: Count | None = None
    """Positions that the new model has: the first ones, or with fresh ones after them; none: all
    that there are.
    """
    overwrite: bool = False
    """Replace what is to be made if it is there, and this command made it."""

    def folders(self) -> "tuple[Path, Path]":
        """The folder to read and the folder to make. ConfigError where there are not two."""
        if len(self.paths) != 2:
            raise ConfigError(
                [f"PATHS: got {len(self.paths)}; expected two, the folder to read and OUT."]
            )
        source, out = (Path(path) for path in self.paths)
        return source, out


@dataclass(frozen=True, kw_only=True, slots=True)
class Export(Conversion):
    """What is converted, and into what."""

    file_bytes: Count = 5_000_000_000
    """Begin another file of weights after so many bytes."""
    precision: Literal["float32", "float16", "bfloat16"] | None = None
    """Type of the weights; none: as in the checkpoint, which holds bfloat16 as float32."""
    family: str | None = None
    """What the model is to be there, such as mistral, where it may be several things: model_type of
    config.json; none: the first of the families that are known here that it is.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufExport(Conversion):
    """What is converted, and into what."""

    type: Literal["f32", "f16", "bf16", "q8_0"] | None = None
    """Type of the matrices; q8_0 has 8 bits for each number, and a scale for 32 of them; none: as
    in the checkpoint, which holds bfloat16 as float32.
    """
    family: str | None = None
    """What the model is to be there, where it may be several things; none: the first of GGUF's
    that it is.
    """


CONVERSIONS: "dict[str, tuple[str, type[Conversion]]]" = {
    "from_hugging_face": ("FOLDER|NAME OUT: make a checkpoint of Hugging Face's model", Conversion),
    "from_nanogpt": ("FILE OUT: make a checkpoint of nanoGPT's ckpt.pt", Conversion),
    "to_hugging_face": ("CHECKPOINT OUT: make a model that transformers loads", Export),
    "to_peft": ("CHECKPOINT OUT: make adapters that peft loads", Conversion),
    "to_ipu_config": ("RUN OUT: make what optimum-graphcore reads of its execution", Conversion),
    "to_gguf": ("CHECKPOINT FILE: make a file that llama.cpp and Ollama run", GgufExport),
}
"""The ways to convert: what each does, and what it takes."""


@dataclass(frozen=True, kw_only=True)
class TrainedModelCommand:
    """A command that runs a trained model: its flags, and settings of training.

    Attributes:
        command: the console command; `script`: the file in a checkout.
        about: what it does.
        used: the settings of training that mean something to it.
        defaults: settings that it does not take from the checkpoint.
    """

    command: str
    script: str
    about: str
    options: type
    used: "tuple[str, ...]"
    defaults: "Mapping[str, Any]" = field(default_factory=dict)

    def unused(self) -> "list[str]":
        """Settings that mean nothing to it."""
        return [leaf.name for leaf in leaves() if leaf.name not in self.used]

    def read(self, arguments: Sequence[str]) -> Flags:
        """The flags; prints the help and exits, or raises ConfigError for such as are wrong by
        themselves.
        """
        flags = read_flags(
            arguments,
            program=f"{typed_as(self.command, self.script)}: {self.about}",
            options=self.options,
            unused=self.unused(),
            has_presets=False,
        )
        flags.answer_help(defaults=self.defaults)
        flags.check()
        return flags

    def parse(
        self,
        flags: Flags,
        find: "Callable[[Path], Model]",
        sections_of: "Callable[[Model, Mapping[str, Any]], Mapping[str, Any]]",
    ) -> "tuple[Model, Config, Any]":
        """The model that flags name, the configuration that it runs with, and the options.

        Args:
            find: gives the model of a path; `sections_of`: the sections of its configuration, with
                what follows from the values of flags.
        Raises:
            ConfigError: no model is named, or the configuration cannot run.
        """
        named = flags.values.get("checkpoint")
        if named is None:
            raise ConfigError(
                ["--checkpoint: got none; expected a run's folder, such as runs/demo. Give one."]
            )
        model = find(Path(named))
        sections = sections_of(model, flags.values)
        line = configured(flags, self.options, defaults=self.defaults, sections=sections)
        return model, line.config, line.options

    def check_settings(self, settings: "Mapping[str, Any]") -> None:
        """Raise ConfigError for settings that mean nothing to it, and for values that are wrong by
        themselves.
        """
        refused = sorted({*settings} - {*self.used})
        if refused:
            raise ConfigError([f"{refused[0]}: unknown setting. Known are {', '.join(self.used)}."])
        checked(Config, settings)

    def chosen(self, **values: Any) -> Any:
        """The options with these values; raises ConfigError for those that are wrong."""
        return self.options(**checked(self.options, values))


EVALUATE = TrainedModelCommand(
    command="popxl-gpt-evaluate",
    script="demo/evaluate.py",
    about="the loss of a trained model on text",
    options=EvaluateOptions,
    used=(
        "precision", "sequence_length", "attention_serialisation", "input_files", "tokenizer",
        "skip_damaged", "micro_batch_size", "widening", "head_serialisation", "log_level", *LAYOUT,
    ),
)  # fmt: skip
GENERATE = TrainedModelCommand(
    command="popxl-gpt-generate",
    script="demo/generate.py",
    about="text that a trained model writes",
    options=GenerateOptions,
    used=("precision", "seed", "tokenizer", "log_level", *LAYOUT),
    defaults={**ONE_REPLICA, **AS_IN_TRAINING, "widening": 1, "head_serialisation": 1},
)


FIRST_WEIGHTS = "popxl_gpt.execution.exchange.initial_weights"
"""The module that reads another model, which takes time to load: only where there is one."""


def implied_by_model(flags: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """What a run takes from its data and, unless a file says what is trained, from the model of
    Hugging Face's whose weights it begins with.
    """
    found, begun = implied_settings(flags, file), flags.get("init_from")
    if begun is None or file:
        return found
    own = importlib.import_module(FIRST_WEIGHTS).settings_of_model(Path(begun))
    if flags.get("sequence_length", 0) > own.get("max_positions", 0):
        own.pop("max_positions", None)  # the run's are as many
    return {**{name: value for name, value in own.items() if name not in flags}, **found}


def parse_training(arguments: Sequence[str]) -> CommandLine:
    """The configuration of a run, and what else is asked for. What waits for a choice is in it as
    it was given, and is checked with what is chosen.
    """
    program = f"{typed_as('popxl-gpt-train', 'demo/pretraining.py')}: pretrain a GPT"
    flags = read_flags(arguments, program=program, options=TrainOptions)
    flags.config = chosen_before(flags) or flags.config
    given, waiting = flags.given, {}
    if not chooses_model(given, flags.values.get("minutes"), flags.values.get("load")):
        line = configured(flags, TrainOptions, default="demo", implied=implied_by_model)
    else:
        check_choice(given)
        waiting = {name: flags.values[name] for name in WAITING if name in flags.values}
        line = configured(
            flags,
            TrainOptions,
            default="modern",
            defaults=defaults_of_choice(flags.values),
            implied=implied_for_choice,
        )
    config, data = line.config, line.config.data
    if data.tokenizer and Path(data.tokenizer).is_dir():
        data = replace(data, tokenizer=text_of_path(tokenizer_file(Path(data.tokenizer))))
    config = replace(config, training=replace(config.training, **waiting), data=data)
    return line._replace(config=config)


def check_training(arguments: Sequence[str]) -> CommandLine:
    """What `parse_training` does, and whether there is what a run needs: a tokenizer, and what
    writes for TensorBoard.
    """
    line = parse_training(arguments)
    config, is_plan = line.config, line.options.is_plan()
    if config.data.tokenizer and not is_plan:
        path = Path(config.data.tokenizer)
        try:
            os.close(open_plain(path))
        except OSError as error:
            raise unreadable_tokenizer(path, error) from error
    if config.logging.tensorboard and not is_plan and find_spec("tensorboard") is None:
        raise no_tensorboard("it is not installed")
    return line


def parse_report(arguments: Sequence[str]) -> ReportOptions:
    """The runs that the page shows, and where it goes."""
    program = typed_as("popxl-gpt-report", "demo/report.py")
    return parse_options(
        arguments, program=f"{program}: runs as a page", options=ReportOptions, words="runs"
    )


def parse_conversion(arguments: Sequence[str]) -> "tuple[str, Conversion]":
    """The way to convert, and what it takes."""
    program = typed_as("popxl-gpt-convert", "demo/convert.py")
    name, *words = list(arguments) or [""]
    if name in ("--help", "-h"):
        lines = [f"  {name:<20}{about}" for name, (about, _) in CONVERSIONS.items()]
        print("\n".join([f"{program} COMMAND", "", *lines]))
        print(f"\n{program} COMMAND --help tells what each takes.")
        sys.exit(0)
    if name not in CONVERSIONS:
        raise ConfigError([unknown_command(name, CONVERSIONS, program)], "command line")
    about, options = CONVERSIONS[name]
    program = f"{program} {name} {about}"
    return name, parse_options(words, program=program, options=options, words="paths")


train = partial(start, "popxl_gpt.demo.pretraining", check_training)
"""What `starting.train` loads."""
evaluate = partial(start, "popxl_gpt.demo.evaluate", EVALUATE.read)
"""`popxl-gpt-evaluate`, `demo/evaluate.py`."""
generate = partial(start, "popxl_gpt.demo.generate", GENERATE.read)
"""`popxl-gpt-generate`, `demo/generate.py`."""
convert = partial(start, "popxl_gpt.demo.convert", parse_conversion)
"""`popxl-gpt-convert`, `demo/convert.py`."""
report = partial(start, "popxl_gpt.demo.report", parse_report)
"""`popxl-gpt-report`, `demo/report.py`."""
prepare = partial(start, "popxl_gpt.data.prepare", parse_preparation)
"""`popxl-gpt-prepare`, `data/prepare.py`."""
