"""A program that extends texts by one token a run, with the keys and values of tokens before kept.

A run takes either the tokens of a prompt, so many at a time, or one token of each text. Nothing
attends to the padding before a text. Both branches of the program use the same rows of remote
memory in the same order, so that weights that do not fit come as in training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import popdist
import popxl
import popxl_addons as addons
from popxl import Tensor, TensorSpec, ops

from popxl_gpt.config.presets import override
from popxl_gpt.config.schedules import NO_RAMPUP
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.graphs import ForwardGraphs, InferenceGraphs, LayerRun
from popxl_gpt.execution.host import own_samples, token_array
from popxl_gpt.execution.inference.cache import (
    CacheSizes,
    LayersCache,
    kept_specs,
    make_cache,
    mask_and_rows,
    seen_keys_and_rows,
)
from popxl_gpt.execution.layer_weights import layer_weights
from popxl_gpt.execution.phase_graphs import PhaseGraphs
from popxl_gpt.execution.pretraining import make_ir
from popxl_gpt.execution.transfers import first_row
from popxl_gpt.execution.variables import make_weights, write
from popxl_gpt.modelling.decoder import CachedDecoderBlock
from popxl_gpt.modelling.embedding import Embedding, none_before_first
from popxl_gpt.modelling.head import TIED, LogitsHead
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.utils.runtime import (
    data_type,
    expect_session,
    find_not_finite,
    gather,
    session_device,
)


@dataclass(frozen=True, eq=False)
class CachedPass(ForwardGraphs):
    """All that the phases need of a run that takes so many tokens of each text."""

    layout: Layout
    sizes: CacheSizes
    tokens: int
    caches: Mapping[int | None, LayersCache]
    """What layers keep, by the size of their rings."""
    words: popxl.HostToDeviceStream
    """The stream of words: of each text the word before, and so many more."""
    logits: popxl.DeviceToHostStream


def cached_session(config: Config, sizes: CacheSizes) -> addons.TaskSession:
    """The session of such a program. Weights are zeros until they are written."""
    expect_session(config.execution.device, config.model.precision)
    ir = make_ir(config)
    vocabulary = config.model.vocabulary_size
    with ir.main_graph:
        inputs = addons.InputStreams(
            prompt=((sizes.texts * (sizes.prompt + 1),), popxl.int32),
            words=((sizes.texts * 2,), popxl.int32),
            padding=((sizes.texts,), popxl.int32),
            column=((), popxl.int32),
            is_prompt=((), popxl.bool),
        )
        outputs = addons.OutputStreams(logits=((sizes.texts, vocabulary), popxl.float32))
        layout = Layout.of(ir, config.execution)
        caches, kept = make_cache(config, sizes)
        word, prompt = _passes(config, layout, sizes, caches, inputs, outputs)
        state = make_weights(word, "generation")
        state.cache = kept
        with popxl.in_sequence(True):
            is_prompt, column, padding = (
                ops.host_load(inputs[name]) for name in ("is_prompt", "column", "padding")
            )
            read, write = (
                ir.create_graph(extend, step, column, padding) for step in (prompt, word)
            )
            ops.conditional(is_prompt, read, write, [column, padding], [column, padding])
    ir.num_host_transfers = 1
    device = session_device(config.execution.device)
    return addons.TaskSession(inputs, outputs, state, 1, ir, device)


def _passes(
    config: Config,
    layout: Layout,
    sizes: CacheSizes,
    caches: Mapping[int | None, LayersCache],
    inputs: addons.InputStreams,
    outputs: addons.OutputStreams,
) -> tuple[CachedPass, CachedPass]:
    """The passes for one token of each text, and for those of a prompt; they share weights and
    cache.
    """
    word: CachedPass | None = None
    for tokens, stream in ((1, inputs["words"]), (sizes.prompt, inputs["prompt"])):
        graphs = _graphs(config, layout, sizes, tokens, word)
        passed = CachedPass(
            config, *graphs, layout, sizes, tokens, caches, stream, outputs["logits"]
        )
        word, prompt = word or passed, passed
    assert word is not None
    return word, prompt


def _graphs(
    config: Config, layout: Layout, sizes: CacheSizes, tokens: int, other: CachedPass | None
) -> tuple[
    InferenceGraphs, InferenceGraphs, InferenceGraphs, tuple[LayerRun[InferenceGraphs], ...]
]:
    """Embedding, decoder and head on so many tokens of each text, and the decoder's layers in
    order.

    Args:
        other: a pass whose weights they share.
    """
    model, texts = config.model, sizes.texts
    width = model.hidden_size // config.execution.tensor_parallel_2
    words, last = (TensorSpec((count,), popxl.int32) for count in (texts * tokens, texts))
    x = TensorSpec((texts * tokens, width), data_type(model.precision))
    positions = words if model.has_position_table else None
    before = words if model.has_word_before else None
    kinds = tuple(dict.fromkeys(model.kinds))
    layers: tuple[tuple[Any, int, Sequence[Any]], ...] = (
        (Embedding(model, layout), 1, (words, None, positions, before)),
        *(
            (
                CachedDecoderBlock(model.of_kind(kind), layout),
                model.layers,
                _of_block(config, sizes, sizes.ring(model, kind), x, words),
            )
            for kind in kinds
        ),
        (LogitsHead(model, layout), 1, (x, last)),
    )
    shared = (other.embedding, *(other.decoder,) * len(kinds), other.head) if other else ()
    result: list[InferenceGraphs] = []
    for (layer, rows, specs), same in zip_longest(layers, shared):
        factories, fwd = layer.create_graph(*specs)
        if same is None and 1 < len(result) < len(layers) - 1:  # kinds have the same weights
            same = result[1]
        tied_to = result[0] if result and TIED in factories else None
        weights = (
            layer_weights(config, layout, factories, rows, tied_to)
            if same is None
            else same.weights
        )
        table = layout.in_parts(layer.parameters(model))
        result.append(InferenceGraphs(table=table, rows=rows, weights=weights, fwd=fwd))
    embedding, *blocks, head = result
    runs = LayerRun.of(model.kinds, range(model.layers), dict(zip(kinds, blocks)))
    return embedding, blocks[0], head, runs


def _of_block(
    config: Config, sizes: CacheSizes, ring: int | None, x: TensorSpec, words: TensorSpec
) -> tuple[Any, ...]:
    """What a `CachedDecoderBlock` is made for."""
    model, tokens = config.model, words.shape[0] // sizes.texts
    keys, values, *rows_before = kept_specs(config, sizes, ring).values()
    count, rows = seen_keys_and_rows(sizes, ring, tokens)
    return (
        *(x, keys, values, TensorSpec((sizes.texts, 1, tokens, count), x.dtype)),
        *(TensorSpec((), popxl.int32), TensorSpec((rows,), popxl.int32), sizes.columns),
        words if model.value_embeddings else None,
        words if model.has_convolutions else None,
        tuple(rows_before),
    )


def extend(step: CachedPass, column: Tensor, padding: Tensor) -> None:
    """Some tokens of each text, through all layers, to the logits of what follows the last.

    Args:
        column: of the first token, int32 scalar.
        padding: columns before each text, int32 [texts].
    """
    run = PhaseGraphs(step, step.config.model.layers)
    with popxl.in_sequence(True):
        rows = ops.host_load(step.words).reshape((step.sizes.texts, step.tokens + 1))
        words, before = (t.reshape((-1,)) for t in (rows[:, 1:], rows[:, :-1]))
        x, positions, *found = run.once(embedding_phase, words, before, column, padding)
        model = step.config.model
        masks_and_rows = dict(zip(step.caches, zip(found[::2], found[1::2]), strict=True))
        beside = [words] if model.value_embeddings else []
        beside += [positions] if model.has_convolutions else []
        for each in step.layers:
            ring = step.sizes.ring(model, model.kinds[each.layers.start])
            cache, (mask, rows) = step.caches[ring], masks_and_rows[ring]
            row = popxl.constant(cache.row_before(each.layers.start), popxl.int32)
            inputs = (x, row, mask, column, rows, beside, each.graphs, cache)
            x = run.per_layer(decoder_phase, *inputs, layers=each.layers)
        run.once(head_phase, x)


def embedding_phase(
    step: CachedPass, words: Tensor, before: Tensor, column: Tensor, padding: Tensor
) -> tuple[Tensor, ...]:
    """Words, and the word before each, to activations [texts * tokens, H/tp2], positions in the
    texts, int32 [texts * tokens], and for each of the caches what `mask_and_rows` gives.
    """
    graphs, sizes, model = step.embedding, step.sizes, step.config.model
    own = popxl.constant(np.arange(step.tokens, dtype=np.int32), popxl.int32) + column
    begins = padding.reshape((sizes.texts, 1))
    positions = ops.maximum(own - begins, popxl.constant(0, popxl.int32))  # [texts, tokens]
    weights = graphs.fwd_all_gather(graphs.fwd_load(first_row()))
    numbers = positions.reshape((-1,))
    beside = [numbers] if model.has_position_table else []
    if model.has_word_before:
        beside.append(none_before_first(before, numbers))
    x, *_ = graphs.fwd.bind(weights).call(words, *beside)

    seen = (mask_and_rows(sizes, ring, own, own - positions, x.dtype) for ring in step.caches)
    return (x, numbers, *(tensor for pair in seen for tensor in pair))


def decoder_phase(
    step: CachedPass,
    n: Tensor,
    x: Tensor,
    row: Tensor,
    mask: Tensor,
    column: Tensor,
    rows: Tensor,
    beside: list[Tensor],
    graphs: InferenceGraphs,
    cache: LayersCache,
) -> tuple[Tensor, Tensor]:
    """Layer n, whose cache comes and goes with its weights. Returns n + 1 and its result.

    Args:
        row: what to add to n for the layer's row in the cache, int32 scalar.
        mask, rows: of `mask_and_rows`.
        beside: the words, for value embeddings, and positions, for convolutions.
    """
    weights, row = graphs.fwd_all_gather(graphs.fwd_load(n)), n + row
    kept = [ops.remote_load(buffer, row) for buffer in cache.buffers.values()]
    keys, values, *rows_before = kept
    seen = (keys, values, mask, column, rows, *beside, *rows_before)
    (x,) = graphs.fwd.bind(weights).call(x, *seen)
    for buffer, tensor in zip(cache.buffers.values(), kept):
        ops.remote_store(buffer, row, tensor)
    return n + 1, x


def head_phase(step: CachedPass, x: Tensor) -> None:
    """The last token of each text to the logits of the next one, on every replica all classes."""
    graphs, texts, tp1 = step.head, step.sizes.texts, step.layout.tp1
    rows = np.arange(1, texts + 1, dtype=np.int32) * step.tokens - 1
    weights = graphs.fwd_all_gather(graphs.fwd_load(first_row()))
    (logits,) = graphs.fwd.bind(weights).call(x, popxl.constant(rows, popxl.int32))
    if tp1.group_size > 1:
        logits = ops.collectives.replicated_all_gather(logits, 1, tp1, "concat")
    ops.host_store(step.logits, logits[:, : step.config.model.vocabulary_size])


class CachedModel:
    """A model that gives the logits of what follows each of some texts, which grow.

    At most max_positions tokens of a text are seen. One that would have more loses the first half
    of what is seen, and the rest is read again.

    Args:
        config: of the model, and the layout to run it in.
        texts: how many there will be at a time, over all processes.
        longest: tokens of the longest prompt.
        tokens: how many will follow it.
    """

    def __init__(self, config: Config, texts: int, longest: int, tokens: int):
        config = config.in_inference
        self.sizes = CacheSizes.of(config, texts, longest, tokens)
        batch = self.sizes.texts * config.execution.data_parallel
        self.config = override(
            config,
            micro_batch_size=self.sizes.texts,
            global_batch_size=batch,
            **NO_RAMPUP,
            widening=1,
            head_serialisation=1,  # logits are of one row per text
            device_iterations=1,
            document_attention=False,  # a text is one document
        )
        self.session = cached_session(self.config, self.sizes)
        self.own = self._own(texts)
        """Numbers of the texts whose logits this process has."""
        self._batch = batch
        self._seen: list[list[int]] = []
        self._finished: set[int] = set()
        self._column = 0
        """The first that is free."""

    def start(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Read texts. Returns the logits of what follows each: float32 [own texts, vocabulary].

        Args:
            texts: token ids, at least one of each. Only the last max_positions tokens are seen.
        """
        positions = self.config.model.positions
        seen = [list(text)[-positions:] for text in texts]
        self._seen = seen + [[0] for _ in range(self._batch - len(seen))]
        self._finished = set(range(len(seen), self._batch))
        return self._read()

    def append(self, tokens: Sequence[int]) -> np.ndarray:
        """Add a token to each text, also to those of other processes. Returns what `start` does."""
        positions = self.config.model.positions
        for number, token in enumerate(tokens):
            if number not in self._finished:
                self._seen[number].append(token)
        if self._column == self.sizes.columns or any(len(text) > positions for text in self._seen):
            self._seen = [
                text[-max(1, positions // 2) :] if len(text) > positions else text
                for text in self._seen
            ]
            return self._read()
        words = np.array([[0, *text][-2:] for text in self._seen], np.int32)
        return self._run(words, is_prompt=False)

    def forget(self, number: int) -> None:
        """Note that a text is finished: nothing follows it."""
        self._seen[number] = [0]
        self._finished.add(number)

    def where_not_finite(self) -> str:
        """The place where a number of the last run was not finite first; all processes must call
        it.
        """
        rows = self.session.state.cache.tensors  # what failed has left its numbers there
        write(self.session, {row: np.zeros(row.shape_on_host) for row in rows})
        with find_not_finite(self.session) as found:
            self._read()
        own = [
            (
                first.order,
                first.replica,
                f"tensor {first.tensor} ({first.value}), by {first.op} of graph {first.graph}, "
                f"made at {first.where}",
            )
            for first in found
        ]
        everyone = [entry for part in gather(own) for entry in part]
        return str(min(everyone)[-1]) if everyone else "nowhere: the logits alone"

    def _read(self) -> np.ndarray:
        """Read all that is seen, some columns at a time."""
        size, longest = self.sizes.prompt, max(len(text) for text in self._seen)
        columns = -(-longest // size) * size
        words = np.zeros((self._batch, 1 + columns), np.int32)
        for row, text in zip(words, self._seen):
            row[1 + columns - len(text) :] = text
        self._padding = np.array([columns - len(text) for text in self._seen], np.int32)
        self._column = 0
        for first in range(0, columns, size):
            logits = self._run(words[:, first : first + 1 + size], is_prompt=True)
        return logits

    def _run(self, words: np.ndarray, is_prompt: bool) -> np.ndarray:
        """Run tokens of all texts into the next columns: int32 [batch, 1 + tokens], the first of
        which is the one before.
        """
        session, inputs, config = self.session, self.session.inputs, self.config
        prompt = words if is_prompt else np.zeros((self._batch, 1 + self.sizes.prompt), np.int32)
        word = words[:, -2:]
        samples = {"prompt": prompt, "words": word, "padding": self._padding[:, None]}
        arrays: dict[Any, Any] = {
            inputs[name]: token_array(session, name, own_samples(array, config), config)
            for name, array in samples.items()
        }
        for name, value in (("column", self._column), ("is_prompt", is_prompt)):
            stream = inputs[name]
            shape = session._full_input_shape(stream.shape)
            arrays[stream] = np.full(shape, value, stream.dtype.as_numpy())
        self._column += words.shape[1] - 1
        found = np.asarray(session.run(arrays)[session.outputs.logits])
        execution, local = config.execution, session.ir.instance_replication_factor
        copies = min(local, execution.tensor_parallel_1 * execution.tensor_parallel_2)
        # [replicas here, texts, vocabulary]; replicas of a tensor-parallel group have the same
        logits = found.reshape(local, *session.outputs.logits.shape)[::copies]
        return logits.reshape(-1, logits.shape[-1])[: len(self.own)]

    def _own(self, texts: int) -> range:
        execution, local = self.config.execution, self.session.ir.instance_replication_factor
        copies = execution.tensor_parallel_1 * execution.tensor_parallel_2
        first = popdist.getInstanceIndex() * local // copies * self.sizes.texts
        return range(first, min(texts, first + max(1, local // copies) * self.sizes.texts))
