"""Tasks of EleutherAI's lm-evaluation-harness, by a trained model. Needs the package `lm_eval`."""

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import popdist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
from tqdm import tqdm

from popxl_gpt.config.schema import Config
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.demo.job.writing import write
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.inference.generation import CachedModel
from popxl_gpt.execution.inference.sampling import Sampling
from popxl_gpt.execution.inference.scoring import Continuation, score
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.utils.errors import ConfigError, UserError

TEXTS = 8
"""Written at the same time by each data-parallel replica."""
SAMPLING = ("temperature", "top_k", "top_p")
KNOWN = ("until", "max_gen_toks", "do_sample", *SAMPLING)
"""What a task may say about texts to be written."""
TASK_FILES = (".yaml", ".yml")
BOOTSTRAP = 100000
"""Samples for standard errors that no formula gives, as many as the harness takes."""
_LOG = logging.getLogger(__name__)


class HarnessModel(TemplateLM):
    """A trained model as the harness asks it. In a program of several processes each has one, all
    are asked the same, and all answer.
    """

    def __init__(self, saved: SavedRun, config: Config, tokenizer: TextTokenizer):
        super().__init__()
        self.saved, self.config = saved, config
        self._tokenizer = tokenizer
        self._is_silent = popdist.getInstanceIndex() != 0

    @property
    def eot_token_id(self) -> int:
        """Ends documents, and stands before texts without context."""
        found = self._tokenizer.end
        assert found is not None  # see demo/evaluate.py
        return found

    @property
    def prefix_token_id(self) -> int:
        """Stands before texts without context: what begins texts, or else what ends documents."""
        begin = self._tokenizer.begin
        return self.eot_token_id if begin is None else begin

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **more: Any
    ) -> "list[int]":
        """A text's tokens, as in training."""
        del more
        if add_special_tokens is False:
            return self._tokenizer.encode_part(string)
        return self._tokenizer.encode(string)

    def loglikelihood(
        self, requests: "list[Instance]", disable_tqdm: bool = True
    ) -> "list[tuple[float, bool]]":
        """The log-likelihood of each continuation after its context, in nats, and whether it is the
        likeliest one.
        """
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self,
        requests: "list[tuple[tuple[str, str], list[int], list[int]]]",
        **more: Any,
    ) -> "list[tuple[float, bool]]":
        del more
        texts = [Continuation(context + end, len(end)) for _, context, end in requests]
        positions = self.config.model.positions
        longest = max((text.count for text in texts), default=0)
        if longest > positions:
            raise UserError(
                f"--lm_eval: got a continuation of {longest} tokens; expected at most "
                f"max_positions = {positions}. Leave the task out."
            )
        cut = sum(len(text.tokens) > positions + 1 for text in texts)
        if cut and not self._is_silent:
            _LOG.warning("--lm_eval: %d of %d texts lose their beginning.", cut, len(texts))
        with self._progress(len(texts), "loglikelihood") as progress:
            found = score(self.config, self.saved.weights, texts, progress.update)
        return [(each.log_likelihood, each.is_likeliest) for each in found]

    def loglikelihood_rolling(
        self, requests: "list[Instance]", disable_tqdm: bool = False
    ) -> "list[float]":
        """Log-likelihood of whole texts, whose tokens count once each, in nats."""
        del disable_tqdm
        windows, texts = [], []
        for number, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.config.model.positions,
                context_len=1,
            ):
                windows.append((("", ""), *make_disjoint_window(window)))
                texts.append(number)
        result = [0.0] * len(requests)
        for number, (found, _) in zip(texts, self._loglikelihood_tokens(windows)):
            result[number] += found
        return result

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> "list[str]":
        """What the model writes after each text."""
        del disable_tqdm
        result = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        with self._progress(len(requests), "generate_until") as progress:
            for numbers in groups.values():
                texts = (requests[number].args[0] for number in numbers)
                prompts = [self.tok_encode(text) or [self.eot_token_id] for text in texts]
                found = self._written(prompts, requests[numbers[0]].args[1], progress)
                for number, text in zip(numbers, found):
                    result[number] = text
        return result

    def _written(
        self, prompts: "list[list[int]]", options: "dict[str, Any]", progress: "tqdm[Any]"
    ) -> "list[str]":
        """Texts after prompts that share their options."""
        values = dict(normalize_gen_kwargs(options))
        others = {name: v for name, v in values.items() if name not in KNOWN and v is not None}
        if others:
            raise UserError(
                f"--lm_eval: got generation_kwargs {json.dumps(others)}; expected some of "
                f"{', '.join(KNOWN)}. Leave the task out."
            )
        tokens, positions = int(values["max_gen_toks"]), self.config.model.positions
        # as other models of the harness do; where nothing is left, the window slides
        room = positions - tokens if tokens < positions else max(1, positions // 2)
        prompts = [prompt[-room:] for prompt in prompts]
        sampling = self._sampling(values)
        stop = tuple(text for text in values["until"] if text)
        size = min(len(prompts), TEXTS * self.config.execution.data_parallel)
        model = CachedModel(self.config, size, max(map(len, prompts)), tokens)
        write_whole_weights(model.session, model.config, self.saved.weights())
        result = [""] * len(prompts)
        # texts of about one length come together
        order = iter(sorted(range(len(prompts)), key=lambda number: -len(prompts[number])))
        done = 0
        with model.session:
            while numbers := list(islice(order, size)):
                given = [prompts[number] for number in numbers]
                found = write(
                    model,
                    self._tokenizer,
                    given,
                    tokens,
                    sampling,
                    stop,
                    first_number=done,
                    ends=self.saved.ends,
                )
                for number, text in zip(numbers, found):
                    result[number] = text
                done += len(numbers)
                progress.update(len(numbers))
        return result

    def _sampling(self, values: "Mapping[str, Any]") -> Sampling:
        if not values["do_sample"]:
            return Sampling(temperature=0)
        top_p = values.get("top_p")
        try:
            return Sampling(
                temperature=values.get("temperature", 1.0),
                top_k=values.get("top_k") or None,
                top_p=1.0 if top_p is None else top_p,
                seed=self.config.training.seed,
            )
        except ConfigError as error:
            said = " ".join(error.problems)
            raise UserError(f"--lm_eval: generation_kwargs: {said}") from error

    def _progress(self, total: int, name: str) -> "tqdm[Any]":
        return tqdm(total=total, desc=f"{name} requests", disable=self._is_silent)


def run_tasks(
    saved: SavedRun,
    config: Config,
    tokenizer: TextTokenizer,
    tasks: Sequence[str],
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> "dict[str, Any]":
    """What the harness finds, as its `simple_evaluate` gives it.

    Args:
        tasks: names of the harness's, or task files.
        num_fewshot, limit: as the harness has them.
    Raises:
        UserError: a task is not known, or cannot be made or run.
    """
    is_leader = popdist.getInstanceIndex() == 0
    found = simple_evaluate(
        HarnessModel(saved, config, tokenizer),
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        bootstrap_iters=BOOTSTRAP if is_leader else 0,
        log_samples=False,
        # all of the harness's take seconds to list
        task_manager=Tasks(include_defaults=not all(name.endswith(TASK_FILES) for name in tasks)),
    )
    return dict(found or {})


class Tasks(TaskManager):
    """The harness's tasks; those that cannot be had are the user's errors."""

    def load(self, task_list: Any) -> Any:
        """Load tasks as the harness does.

        Raises:
            UserError: a task is not known, cannot be made, or is not for models of text.
        """
        names = " ".join(map(str, task_list))
        try:
            found = super().load(task_list)
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            Exception
        ) as error:  # tasks have code and data of their own, and raise what they like
            said = " ".join(str(error).split()).strip("'\"")
            raise UserError(
                f"--lm_eval: got {names}: '{said}'; expected task files, or names of tasks whose "
                "data can be loaded. `lm-eval ls tasks` lists names."
            ) from error
        for name, task in found["tasks"].items():
            for mark, what in (
                ("UNSAFE_CODE", "code that the model writes"),
                ("MULTIMODAL", "images"),
            ):
                if getattr(task, mark, False):
                    raise UserError(
                        f"--lm_eval: got task {name}, which is about {what}; expected one about "
                        "text. Leave it out."
                    )
        return found


def table(results: "Mapping[str, Any]") -> str:
    """Results for people, as the harness shows them."""
    parts = [make_table(dict(results))]
    if results.get("groups"):
        parts.append(make_table(dict(results), "groups"))
    return "\n".join(parts)
