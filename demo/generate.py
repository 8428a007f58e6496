"""Text that a trained model writes: `python demo/generate.py --checkpoint runs/demo --prompt
'def main():'`. See --help.
"""

import io
import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # run by its path: the packages are beside this folder
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from popxl_gpt.demo import commands

    commands.generate()

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import popdist

from popxl_gpt.config.flags import Flags
from popxl_gpt.config.presets import override
from popxl_gpt.config.saving import to_mapping
from popxl_gpt.config.schedules import NO_RAMPUP
from popxl_gpt.config.schema import Config
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.demo.commands import GENERATE
from popxl_gpt.demo.commands import GenerateOptions as Options
from popxl_gpt.demo.job.talk import Lines, Templated
from popxl_gpt.demo.job.text import check_vocabulary, read_tokenizer, tokenizer_path
from popxl_gpt.demo.job.writing import OnEnd, OnText, end_of_documents, write
from popxl_gpt.execution.checkpoints.checkpoint_folder import TOKENIZER
from popxl_gpt.execution.exchange.trained import TrainedModel, find_model
from popxl_gpt.execution.inference.generation import CachedModel
from popxl_gpt.execution.inference.sampling import Sampling
from popxl_gpt.execution.instances import check_instances, check_same_checkpoint
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.escaping import COMMANDS, as_it_is
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.runtime import drop_dead_sessions, gather, runtime_errors_are_told
from popxl_gpt.utils.texts import encoding_problem, several, user_path

if TYPE_CHECKING:
    from popxl_gpt.demo.keywords import GenerateSettings, Unpack

PROMPT_BYTES = 2**26
"""The bytes of a file with a prompt, at most."""
CHAT_TOKENS = 512
"""Tokens of a conversation that there is room for at least, where the model sees as many."""


class Trained:
    """A checkpoint with its tokenizer, and how to run it.

    Args:
        special_tokens: take those that prompts spell as tokens, not as text.
    """

    def __init__(self, saved: TrainedModel, config: Config, special_tokens: bool):
        self.saved = saved
        self.config = config
        self.tokenizer = find_tokenizer(saved, config)
        self._special_tokens = special_tokens

    def tokens(self, text: str, where: str, goes_on: bool = False) -> "list[int]":
        """A prompt's tokens; UserError where it has none, or is no text.

        Args:
            goes_on: it stands after other text.
        """
        problem = encoding_problem(text)
        if problem is not None:
            raise UserError(f"{where}: {problem}. Convert it.")
        found = self.tokenizer.encode_part(text, self._special_tokens)
        if not found:
            raise UserError(
                f"{where}: got an empty prompt; expected some text. Give text, or leave it out to "
                "begin a new document."
            )
        return found if goes_on else self.tokenizer.around(found)

    def talk(self, system: str | None = None, templated: bool = True) -> Lines | Templated:
        """A conversation that begins.

        Args:
            templated: as the chat template writes it, where there is one.
        """
        if templated and self.tokenizer.template is not None:
            return Templated(self.tokenizer, self._special_tokens, system)
        first = self.tokenizer.first.tolist()
        return Lines(lambda text: self.tokens(text, "--chat", goes_on=True), first, system)

    def begin(self) -> "list[int]":
        """What a new document begins with: the tokens before its text, or the end of the one
        before.
        """
        if self.tokenizer.first.size:
            return self.tokenizer.first.tolist()
        end = end_of_documents(self.tokenizer, self.config.model, self.saved.ends)
        if end is None:
            raise UserError(
                "--prompt: got none, and a tokenizer without a token that ends documents; expected "
                "a prompt. Give one."
            )
        return [end]

    @contextmanager
    def running(self, texts: int, longest: int, tokens: int) -> Iterator[CachedModel]:
        """The model with its weights, for so many texts at a time."""
        model = CachedModel(self.config, texts, longest, tokens)
        write_whole_weights(model.session, model.config, self.saved.weights())
        with model.session:
            yield model


def generate(
    checkpoint: "str | Path",
    prompts: "str | Sequence[str]" = (),
    *,
    tokens: int = 200,
    sampling: Sampling | None = None,
    samples: int = 1,
    stop: "str | Sequence[str]" = (),
    special_tokens: bool = False,
    chat: bool = False,
    system: str | None = None,
    on_text: OnText = lambda number, text: None,
    **settings: "Unpack[GenerateSettings]",
) -> "list[str]":
    """Texts that a trained model writes, `samples` after each prompt.

    Args:
        checkpoint: a run's folder, a checkpoint, or a model of Hugging Face's: its folder or name.
        prompts: a text to go on from, or several; none: one new document is begun.
        tokens: to write after each.
        sampling: how tokens are chosen; its seed is the checkpoint's unless it is given.
        stop: a text that ends what is written, and is left out, or several.
        special_tokens: take those that prompts spell as tokens, not as text.
        chat: prompts are users' messages, each of a conversation of its own; `system` stands before
            each.
        on_text: called with text as it is made: its number in the result, and what is new.
        settings: `precision`, `tokenizer`, and the layout, by their names on the command line.
    Returns:
        the texts without their prompts: all samples of the first prompt, then those of the second.
    Raises:
        UserError: something given cannot be used.
        NotFiniteError: weights or logits are not finite.
    """
    options = GENERATE.chosen(tokens=tokens, samples=samples, stop=[*several(stop)])
    texts = several(prompts)
    if system is not None and not chat:
        raise UserError("system: got it without chat; expected both or none. Give chat=True.")
    if chat and not texts:
        raise UserError("chat: got it without prompts; expected messages to answer. Give prompts.")
    saved = find_model(user_path("--checkpoint", checkpoint))
    batch = settings.get("data_parallel", 1)
    GENERATE.check_settings(settings)
    changes = {"global_batch_size": batch, **NO_RAMPUP, **GENERATE.defaults, **settings}
    config = override(saved.config, **changes)
    trained = Trained(saved, config, special_tokens)
    if chat:
        found = [trained.talk(system).ask(text) for text in texts]
    else:
        found = [trained.tokens(text, "prompts") for text in texts]
    found = found or [trained.begin()]
    sampling = sampling or Sampling(seed=config.training.seed)
    return _write_all(
        trained, found, options.tokens, sampling, options.samples, options.stop, on_text
    )


def main(arguments: Sequence[str]) -> int:
    """Write as the command line says. Returns the exit code."""
    return run(GENERATE.read(arguments))


def run(flags: Flags) -> int:
    """Write as flags say. Returns the exit code."""
    saved, config, options = GENERATE.parse(flags, find_model, _sections)
    if options.chat and (options.prompt or options.prompt_file is not None):
        raise UserError(
            "--chat: got prompts beside it; expected one or the other, for a conversation reads "
            "its lines from the terminal. Leave the prompts out."
        )
    if options.chat and options.samples > 1:
        raise UserError(
            f"--samples: got {options.samples} with --chat; expected 1, for a conversation goes on "
            "with one answer. Leave it out."
        )
    if options.system is not None and not options.chat:
        raise UserError("--system: got it without --chat; expected both or none. Give --chat.")
    is_leader = check_instances(config)
    check_same_checkpoint(saved.folder)
    trained = Trained(saved, config, options.special_tokens)
    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=config.training.seed,
    )
    with runtime_errors_are_told():
        if options.chat:
            chat(trained, options, sampling, is_leader)
        else:
            show_texts(trained, options, sampling, is_leader)
    return 0


def _sections(saved: TrainedModel, values: Mapping[str, Any]) -> "dict[str, Any]":
    """The sections of a checkpoint's configuration, with a batch that these values allow."""
    mapping = to_mapping(saved.config)
    batch = values.get("data_parallel", 1)
    mapping["training"] |= {"global_batch_size": batch, **NO_RAMPUP}
    return mapping


def find_tokenizer(saved: TrainedModel, config: Config) -> TextTokenizer:
    """The tokenizer that is named, or else the one beside a checkpoint, or in the run's folder.

    Raises:
        UserError: there is none, or it has tokens that the model lacks.
    """
    path = tokenizer_path(saved, config)
    if path is None:
        raise UserError(
            f"--tokenizer: got none, and no {saved.beside[0] / TOKENIZER}; expected the "
            "tokenizer.json that made the training data. Give its path."
        )
    tokenizer = read_tokenizer(path)
    check_vocabulary(tokenizer, path, config.model.vocabulary_size)
    return tokenizer


def _write_all(
    trained: Trained,
    prompts: "list[list[int]]",
    tokens: int,
    sampling: Sampling,
    samples: int,
    stop: Sequence[str],
    on_text: OnText = lambda number, text: None,
    on_end: OnEnd = lambda number: None,
) -> "list[str]":
    """`samples` texts after each prompt, all at the same time."""
    each = [prompt for prompt in prompts for _ in range(samples)]
    with trained.running(len(each), max(map(len, prompts)), tokens) as model:
        told = (on_text, on_end)
        ends = trained.saved.ends
        return write(model, trained.tokenizer, each, tokens, sampling, stop, *told, ends=ends)


def show_texts(trained: Trained, options: Options, sampling: Sampling, is_leader: bool) -> None:
    """Print texts as they are made, one after the other, though all are made at the same time."""
    given = _prompts(options)
    prompts = [trained.tokens(text, where) for where, text in given] or [trained.begin()]
    texts = [text for _, text in given] or [""]
    show = Printed([text for text in texts for _ in range(options.samples)])
    told = (show.add, show.finish) if is_leader else ()
    _write_all(trained, prompts, options.tokens, sampling, options.samples, options.stop, *told)


def _prompts(options: Options) -> "list[tuple[str, str]]":
    """Prompts, and where each is from. All processes have those of instance 0."""
    found = [("--prompt", text) for text in options.prompt]
    if options.prompt_file is not None:
        is_leader = popdist.getInstanceIndex() == 0
        text = _read_prompt(options.prompt_file) if is_leader else ""
        text = gather(text, patiently=True)[0]
        found.append((f"--prompt_file {options.prompt_file}", text))
    return found


def _read_prompt(name: str) -> str:
    """The text of a file, or of standard input, as texts to train on are read, without the line
    break at its end.
    """
    try:
        content = (
            sys.stdin.buffer.read(PROMPT_BYTES)
            if name == "-"
            else read_bounded(Path(name), PROMPT_BYTES)
        )
        text = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig").read()
    except OSError as error:
        raise UserError(
            f"--prompt_file: got {name}: {error.strerror}; expected a readable text file. Check "
            "the path."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt_file: got {name}, which is not UTF-8; expected text in UTF-8. Convert it."
        ) from error
    return text.removesuffix("\n")


@dataclass
class Printed:
    """Prints several texts that grow at the same time, one after the other."""

    prompts: "list[str]"
    waiting: "dict[int, list[str]]" = field(default_factory=dict)
    """What is to be printed when its text's turn comes."""
    finished: "set[int]" = field(default_factory=set)
    turn: int = -1
    """The text that is printed now."""

    def add(self, number: int, text: str) -> None:
        """Print what is new of a text, now or later."""
        if self.turn < 0:
            self._begin(0)
        if number == self.turn:
            print_text(text)
        else:
            self.waiting.setdefault(number, []).append(text)

    def finish(self, number: int) -> None:
        """Nothing more comes of a text: the next one's turn comes, once it is this one's."""
        self.finished.add(number)
        while self.turn in self.finished:
            print(flush=True)
            self.finished.remove(self.turn)
            if self.turn + 1 < len(self.prompts):
                self._begin(self.turn + 1)

    def _begin(self, number: int) -> None:
        self.turn = number
        if len(self.prompts) > 1:
            print(f"{'' if number == 0 else chr(10)}--- {number + 1} of {len(self.prompts)} ---")
        begin = "".join([self.prompts[number], *self.waiting.pop(number, [])])
        print_text(begin)


def print_text(text: str) -> None:
    """Print a text that a model made. A terminal must not take it for commands; files get it as it
    is.
    """
    if sys.stdout.isatty():
        text = COMMANDS.sub("\ufffd", text)
    with as_it_is():
        print(text, end="", flush=True)


def chat(trained: Trained, options: Options, sampling: Sampling, is_leader: bool) -> None:
    """Answer lines until there are no more."""
    talk = trained.talk(options.system, options.chat_template)
    positions, tokens = trained.config.model.positions, options.tokens
    with ExitStack() as running:
        longest = _longest(0, tokens, positions)
        model = running.enter_context(trained.running(1, longest, tokens))
        for number, line in enumerate(_lines(is_leader)):
            said = talk.ask(line)
            if longest < min(len(said), positions):
                running.close()
                del model
                drop_dead_sessions()
                longest = _longest(len(said), tokens, positions)
                model = running.enter_context(trained.running(1, longest, tokens))
            show = Printed([""])
            told = (show.add, show.finish) if is_leader else (_ignore, _ignore)
            (answer,) = write(
                model,
                trained.tokenizer,
                [said],
                tokens,
                sampling,
                stop=options.stop,
                on_text=told[0],
                on_end=told[1],
                first_number=number,
                ends=trained.saved.ends,
            )
            talk.answered(answer)


def _longest(said: int, tokens: int, positions: int) -> int:
    """Tokens of a conversation that a model is made for, beside an answer of `tokens`: not many
    more than were said, for each new token reads all that there is room for.
    """
    room = 1 << (max(said, CHAT_TOKENS) + tokens - 1).bit_length()
    return room - tokens if room < positions else positions


def _ignore(*_: Any) -> None:
    """Tell nobody."""


def _lines(is_leader: bool) -> Iterator[str]:
    """Lines of standard input that hold something; all processes get those of instance 0."""
    while True:
        line = ""
        if is_leader:
            if sys.stdin.isatty():
                print("> ", end="", flush=True)
            line = _read_line()
        line = gather(line, patiently=True)[0]
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")


def _read_line() -> str:
    """A line of standard input with its end; nothing where there are no more."""
    content = sys.stdin.buffer.readline(PROMPT_BYTES)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--chat: got {ascii(content[:40])}, which is not UTF-8; expected lines of text in "
            "UTF-8. Convert them."
        ) from error
