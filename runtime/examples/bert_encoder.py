"""A BERT-style encoder: it learns to fill in masked words, and then to answer questions with spans
of the text.

A text is made of two runs of numbers that count up, of any lengths, and padding: `4 5 6 10 11 _`. A
question is the number that a run begins with; its answer is where that run begins and ends.

B micro-batch, S sequence, H hidden size, D size of a head, V vocabulary.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import InputStreams, NamedTensors, OutputStreams
from popxl_addons.layers import Embedding, LayerNorm, Linear
from popxl_addons.optimizers import AdamOptimizerStep

PAD, MASK, QUESTION = 0, 1, 2  # words that are no numbers
FIRST = 3


@dataclass(frozen=True)
class BertConfig:
    """The model, and how it is trained."""

    vocabulary_size: int = 15
    sequence_length: int = 8
    hidden_size: int = 48
    heads: int = 4
    layers: int = 2
    micro_batch_size: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    dtype: popxl.dtype = popxl.float32
    loss_scaling: float = 1.0


class SelfAttention(addons.Module):
    """Every position looks at every other that is no padding."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.qkv = Linear(3 * config.hidden_size)
        self.output = Linear(config.hidden_size)

    def build(self, x: popxl.Tensor, mask: popxl.Tensor) -> popxl.Tensor:
        """x [B*S, H], mask [B, 1, 1, S] -> [B*S, H]."""
        features = self.config.hidden_size // self.config.heads
        by_heads = (-1, self.config.sequence_length, self.config.heads, features)
        query, key, value = (
            t.reshape(by_heads).transpose((0, 2, 1, 3))  # [B, heads, S, D]
            for t in ops.split(self.qkv(x), 3, axis=1)
        )
        scores = query @ key.transpose((0, 1, 3, 2)) * (1 / math.sqrt(features)) + mask
        mixed = ops.softmax(scores, axis=-1) @ value
        return self.output(mixed.transpose((0, 2, 1, 3)).reshape(x.shape))


class Layer(addons.Module):
    """Attention and feed-forward, each added to its input and then normalised."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention, self.attention_norm = SelfAttention(config), LayerNorm()
        self.up, self.down = Linear(4 * config.hidden_size), Linear(config.hidden_size)
        self.feed_forward_norm = LayerNorm()

    def build(self, x: popxl.Tensor, mask: popxl.Tensor) -> popxl.Tensor:
        """x [B*S, H], mask [B, 1, 1, S] -> [B*S, H]."""
        x = self.attention_norm(x + self.attention(x, mask))
        return self.feed_forward_norm(x + self.down(ops.geluerf(self.up(x))))


class Bert(addons.Module):
    """Embeddings and layers."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.words = Embedding(config.dtype, config.vocabulary_size, config.hidden_size)
        self.places = Embedding(config.dtype, config.sequence_length, config.hidden_size)
        self.parts = Embedding(config.dtype, 2, config.hidden_size)  # question, text
        self.norm = LayerNorm()

    def build(self, ids: popxl.Tensor, parts: popxl.Tensor) -> popxl.Tensor:
        """ids, parts [B, S] -> [B*S, H]."""
        batch, sequence = ids.shape
        with popxl.name_scope("mask"):
            is_padding = ops.equal(ids, popxl.constant(PAD, popxl.int32))
            mask = (
                ops.cast(is_padding, self.config.dtype).reshape((batch, 1, 1, sequence)) * -10_000
            )
        places = popxl.constant(np.tile(np.arange(sequence), batch), popxl.int32)
        x = self.norm(self.words(ids.flatten()) + self.places(places) + self.parts(parts.flatten()))
        # one graph, called with the weights of each layer
        facts, layer = Layer(self.config).create_graph(x, mask)
        for i in range(self.config.layers):
            (x,) = layer.bind(self.add_variable_inputs(i, facts)).call(x, mask)
        return x


class MaskedWords(addons.Module):
    """The loss of masked positions, and the most likely words. The last matrix is the table of
    words.
    """

    inputs = ("ids", "parts", "labels")

    def __init__(self, config: BertConfig):
        super().__init__()
        self.bert, self.dense, self.norm = Bert(config), Linear(config.hidden_size), LayerNorm()

    def build(
        self, ids: popxl.Tensor, parts: popxl.Tensor, labels: popxl.Tensor
    ) -> tuple[popxl.Tensor, popxl.Tensor]:
        """ids, parts, labels [B, S], labels PAD where nothing is masked -> loss [], words [B,
        S].
        """
        x = self.norm(ops.geluerf(self.dense(self.bert(ids, parts))))
        words = self.bert.words.weight
        scores = x @ words.T + self.add_variable_input(
            "bias", lambda: np.zeros(words.shape[0]), x.dtype
        )
        loss = addons.cross_entropy(scores, labels.flatten(), ignore_index=PAD)
        return loss, ops.argmax(scores, dim=-1).reshape(ids.shape)


class Spans(addons.Module):
    """The loss of an answer's first and last position, and the most likely ones."""

    inputs = ("ids", "parts", "first", "last")

    def __init__(self, config: BertConfig):
        super().__init__()
        self.bert, self.ends = Bert(config), Linear(2)

    def build(
        self, ids: popxl.Tensor, parts: popxl.Tensor, first: popxl.Tensor, last: popxl.Tensor
    ):
        """ids, parts [B, S], first, last [B] -> loss [], the most likely positions [B, 2]."""
        scores = self.ends(self.bert(ids, parts)).reshape((*ids.shape, 2))
        begin, end = (t.reshape(ids.shape) for t in ops.split(scores, 2, axis=2))  # [B, S]
        loss = (addons.cross_entropy(begin, first) + addons.cross_entropy(end, last)) * 0.5
        return loss, ops.argmax(scores, dim=1)


def training_session(model: MaskedWords | Spans, config: BertConfig) -> addons.TaskSession:
    """A session that does one step of AdamW with each run."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        batch, sequence = config.micro_batch_size, config.sequence_length
        shapes = {"first": (batch,), "last": (batch,)}
        inputs = InputStreams(
            **{n: (shapes.get(n, (batch, sequence)), popxl.int32) for n in model.inputs}
        )
        facts, graph = model.create_graph(*(stream.spec for stream in inputs))
        variables = NamedTensors(fwd=facts.init())

        loss, answers = graph.graph.outputs
        outputs = OutputStreams(
            loss=(loss.shape, loss.dtype), answers=(answers.shape, answers.dtype)
        )
        weights = graph.args.to_dict()
        gradient = addons.autodiff(graph, grads_provided=[loss], grads_required=weights.values())

        call = graph.bind(variables.fwd).call_with_info(
            *(ops.host_load(stream) for stream in inputs)
        )
        for stream, t in zip(outputs, call.outputs):
            ops.host_store(stream, t)
        # small gradients vanish in float16 otherwise
        scale = popxl.constant(config.loss_scaling, loss.dtype)
        gradients = gradient.call(scale, args=gradient.grad_graph_info.inputs_dict(call))
        adam = AdamOptimizerStep(cache=True)  # weights of one shape share a graph
        for name, weight_gradient in zip(weights, gradients):
            weight = variables.fwd[name]
            optim_facts, update = adam.create_graph(
                weight,
                weight_gradient,
                lr=config.learning_rate,
                weight_decay=config.weight_decay if weight.rank > 1 else 0.0,
                loss_scaling=config.loss_scaling,
                first_order_dtype=popxl.float32,
            )
            state = optim_facts.init()
            variables.insert(f"optim.{name}", state, overwrite=True)
            update.bind(state).call(weight, weight_gradient)
    return addons.TaskSession(inputs, outputs, variables, ir=ir, device_desc="cpu")


def texts(rng: np.random.Generator, config: BertConfig) -> dict[str, np.ndarray]:
    """A question, a gap and two runs for each of B sequences, with first and last position of the
    run asked for.
    """
    batch, sequence = config.micro_batch_size, config.sequence_length
    ids, first, last = np.full((batch, sequence), PAD), np.zeros(batch), np.zeros(batch)
    for row in range(batch):
        lengths = rng.integers(2, (sequence - 2) // 2 + 1, 2)
        half = (config.vocabulary_size - FIRST) // 2  # of the numbers; each run has one to itself
        numbers = [
            FIRST + half * i + rng.integers(half - n) for i, n in zip(rng.permutation(2), lengths)
        ]
        runs = [start + np.arange(length) for start, length in zip(numbers, lengths)]
        ids[row, : 2 + sum(lengths)] = np.concatenate(
            [[numbers[asked := rng.integers(2)], QUESTION], *runs]
        )
        first[row] = 2 + asked * lengths[0]
        last[row] = first[row] + lengths[asked] - 1
    parts = np.tile(np.arange(sequence) >= 2, (batch, 1))
    found = {"ids": ids, "parts": parts, "first": first, "last": last}
    return {name: array.astype(np.int32) for name, array in found.items()}


def masked(rng: np.random.Generator, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with one number in six masked."""
    ids = batch["ids"]
    is_masked = (ids >= FIRST) & (rng.random(ids.shape) < 1 / 6)
    return {**batch, "ids": np.where(is_masked, MASK, ids), "labels": np.where(is_masked, ids, PAD)}


def train(session: addons.TaskSession, batch: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """One step: (loss, answers)."""
    outputs = session.run({stream: batch[name] for name, stream in session.inputs.items()})
    return float(outputs[session.outputs.loss]), outputs[session.outputs.answers]


def main() -> None:
    """Pretrain, then fine-tune the same encoder with another head."""
    np.random.seed(0)
    rng, config = np.random.default_rng(0), BertConfig()
    with training_session(MaskedWords(config), config) as pretraining:
        for step in range(201):
            batch = masked(rng, texts(rng, config))
            loss, words = train(pretraining, batch)
            if step % 50 == 0:
                right = (words == batch["labels"])[batch["ids"] == MASK].mean()
                print(f"pretraining step {step:3}: loss {loss:.1f}, right {right:.0%}")
    with training_session(Spans(config), replace(config, learning_rate=1e-3)) as fine_tuning:
        fine_tuning.load_from_session(pretraining)  # whatever both have, by name
        for step in range(201):
            batch = texts(rng, config)
            loss, answers = train(fine_tuning, batch)
            if step % 100 == 0:
                right = (answers == np.stack([batch["first"], batch["last"]], 1)).all(1).mean()
                print(f"fine-tuning step {step:3}: loss {loss:.1f}, right {right:.0%}")
    question, text, (first, last) = batch["ids"][0, 0], batch["ids"][0, 2:], answers[0]
    print("text", *(word for word in text if word != PAD), "- question", question)
    print("answer", *batch["ids"][0, first : last + 1])


if __name__ == "__main__":
    main()
