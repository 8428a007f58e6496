"""A T5-style encoder and decoder: positions are biases of attention by distance, norms have no
mean, no layer a bias.

It learns to put letters in order: `f b d` -> `b d f`. The decoder reads what the encoder made of
the letters by cross attention, and what it wrote itself by causal attention.

B micro-batch, S sequence of the encoder, T of the decoder (as long here), H hidden size, D size of
a head, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import InputStreams, NamedTensors, OutputStreams
from popxl_addons.layers import Embedding, Linear
from popxl_addons.optimizers import AdamOptimizerStep

PAD, END = 0, 1  # the decoder begins with PAD, and ends with END
ALPHABET = "abcdefghijkl"


@dataclass(frozen=True)
class T5Config:
    """The model, and how it is trained."""

    vocabulary_size: int = 2 + len(ALPHABET)
    sequence_length: int = 6
    hidden_size: int = 32
    head_size: int = 8
    heads: int = 4
    intermediate_size: int = 64
    layers: int = 1
    buckets: int = 8
    max_distance: int = 16
    micro_batch_size: int = 64
    dtype: popxl.dtype = popxl.float32
    loss_scaling: float = 1.0


class RMSNorm(addons.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; the mean in float32."""

    def build(self, x: popxl.Tensor, eps: float = 1e-6) -> popxl.Tensor:
        """[B*S, H] -> [B*S, H]."""
        weight = self.add_variable_input("weight", lambda: np.ones(x.shape[-1]), x.dtype)
        wide = ops.cast(x, popxl.float32)
        scale = (ops.mean(wide * wide, axis=-1, keepdims=True) + eps) ** -0.5
        return ops.cast(wide * scale, x.dtype) * weight


class DistanceBias(addons.Module):
    """What attention adds to its scores: a learned number for each head and each bucket of
    distances.
    """

    def __init__(self, config: T5Config, both_ways: bool):
        super().__init__()
        self.config, self.both_ways = config, both_ways
        self.table = Embedding(config.dtype, config.buckets, config.heads)

    def build(self, length: int) -> popxl.Tensor:
        """[1, heads, length, length], query by key."""
        rows = popxl.constant(self.bucket_of(length).flatten(), popxl.int32, "buckets")
        return self.table(rows).T.reshape((1, self.config.heads, length, length))

    def bucket_of(self, length: int) -> np.ndarray:
        """Near distances have a bucket each, far ones share them on a logarithmic scale; [length,
        length].
        """
        ahead = np.arange(length) - np.arange(length)[:, None]
        count, first = self.config.buckets, np.zeros_like(ahead)
        if self.both_ways:  # half of the buckets for what follows
            count //= 2
            first, distance = np.where(ahead > 0, count, 0), np.abs(ahead)
        else:
            distance = np.maximum(-ahead, 0)
        near = count // 2
        share = np.log(np.maximum(distance, 1) / near) / np.log(self.config.max_distance / near)
        far = np.minimum(near + (share * (count - near)).astype(int), count - 1)
        return first + np.where(distance < near, distance, far)


class Attention(addons.Module):
    """Attention of one sequence to another, or to itself."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.config, inner = config, config.heads * config.head_size
        self.query, self.key, self.value = (Linear(inner, bias=False) for _ in range(3))
        self.output = Linear(config.hidden_size, bias=False)

    def build(self, x: popxl.Tensor, memory: popxl.Tensor, bias: popxl.Tensor) -> popxl.Tensor:
        """x [B*T, H], memory [B*S, H], bias broadcast to [B, heads, T, S] -> [B*T, H]."""
        heads = (self.config.micro_batch_size, -1, self.config.heads, self.config.head_size)
        query, key, value = (
            t.reshape(heads).transpose((0, 2, 1, 3))  # [B, heads, T or S, D]
            for t in (self.query(x), self.key(memory), self.value(memory))
        )
        mixed = ops.softmax(query @ key.transpose((0, 1, 3, 2)) + bias, axis=-1) @ value
        return self.output(mixed.transpose((0, 2, 1, 3)).reshape((x.shape[0], -1)))


class FeedForward(addons.Module):
    """relu(x @ up) @ down."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.up, self.down = (
            Linear(config.intermediate_size, False),
            Linear(config.hidden_size, False),
        )

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """[B*S, H] -> [B*S, H]."""
        return self.down(ops.relu(self.up(x)))


class Layer(addons.Module):
    """Attention to itself, then (in a decoder) to the encoder's outputs, then feed-forward; each
    one is added.
    """

    def __init__(self, config: T5Config, is_decoder: bool):
        super().__init__()
        self.norm, self.attention = RMSNorm(), Attention(config)
        if is_decoder:
            self.cross_norm, self.cross_attention = RMSNorm(), Attention(config)
        self.feed_forward_norm, self.feed_forward = RMSNorm(), FeedForward(config)

    def build(
        self,
        x: popxl.Tensor,
        bias: popxl.Tensor,
        memory: popxl.Tensor | None = None,
        memory_bias: popxl.Tensor | None = None,
    ) -> popxl.Tensor:
        """x [B*T, H], memory [B*S, H] -> [B*T, H]."""
        y = self.norm(x)
        x = x + self.attention(y, y, bias)
        if memory is not None:
            x = x + self.cross_attention(self.cross_norm(x), memory, memory_bias)
        # A graph of its own.
        (y,) = self.call_module(self.feed_forward, name="feed_forward")(self.feed_forward_norm(x))
        return x + y


class Stack(addons.Module):
    """The layers of the encoder or of the decoder, which share the biases of distances."""

    def __init__(self, config: T5Config, is_decoder: bool):
        super().__init__()
        self.distance = DistanceBias(config, both_ways=not is_decoder)
        self.layers = addons.Module.from_list(
            [Layer(config, is_decoder) for _ in range(config.layers)]
        )
        self.norm = RMSNorm()

    def build(self, x: popxl.Tensor, mask: popxl.Tensor, *memory: popxl.Tensor) -> popxl.Tensor:
        """x [B*S, H], mask broadcast to [B, heads, S, S] -> [B*S, H]."""
        bias = self.distance(mask.shape[-1]) + mask
        for layer in self.layers:
            x = layer(x, bias, *memory)
        return self.norm(x)


class T5(addons.Module):
    """Encoder and decoder, and one table of words [V, H] for what both read and for the scores."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Stack(config, False), Stack(config, True)

    def table(self) -> popxl.Tensor:
        """The table of words."""
        shape = (self.config.vocabulary_size, self.config.hidden_size)
        return self.add_variable_input(
            "words", lambda: np.random.normal(0, 0.1, shape), self.config.dtype
        )

    def encode(self, ids: popxl.Tensor, table: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
        """ids [B, S] -> memory [B*S, H], its mask [B, 1, 1, S]."""
        is_padding = ops.equal(ids, popxl.constant(PAD, popxl.int32))
        mask = (
            ops.cast(is_padding, self.config.dtype).reshape((ids.shape[0], 1, 1, ids.shape[1]))
            * -10_000
        )
        return self.encoder(ops.gather(table, ids.flatten()), mask), mask

    def decode(
        self, written: popxl.Tensor, table: popxl.Tensor, *memory: popxl.Tensor
    ) -> popxl.Tensor:
        """written [B, T], memory [B*S, H] and its mask -> scores of what follows each word [B*T,
        V].
        """
        length = written.shape[1]
        future = popxl.constant(
            np.triu(np.full((length, length), -10_000), 1), self.config.dtype, "future"
        )
        x = self.decoder(ops.gather(table, written.flatten()), future, *memory)
        return (x * self.config.hidden_size**-0.5) @ table.T


class Loss(T5):
    """Mean cross entropy of what should be written."""

    def build(
        self, ids: popxl.Tensor, written: popxl.Tensor, following: popxl.Tensor
    ) -> popxl.Tensor:
        """ids, written, following [B, S] -> []."""
        table = self.table()
        scores = self.decode(written, table, *self.encode(ids, table))
        return addons.cross_entropy(scores, following.flatten(), ignore_index=PAD)


class Encode(T5):
    """The encoder alone."""

    def build(self, ids: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
        """ids [B, S] -> memory [B*S, H], its mask [B, 1, 1, S]."""
        return self.encode(ids, self.table())


class WriteNext(T5):
    """The body of a loop that writes the most likely next word of each sequence."""

    def build(
        self,
        written: popxl.Tensor,
        position: popxl.Tensor,
        memory: popxl.Tensor,
        memory_mask: popxl.Tensor,
    ):
        """written [B, T], position of the last one written [1] -> the same, one further."""
        batch, length = written.shape
        scores = self.decode(written, self.table(), memory, memory_mask).reshape(
            (batch, length, -1)
        )
        # [B, 1]
        chosen = ops.argmax(
            ops.dynamic_slice(scores, position, axes=[1], sizes=[1], no_overlap=True), dim=2
        )
        position = position + 1
        return ops.dynamic_update(
            written, position, chosen, axes=[1], sizes=[1], no_overlap=True
        ), position


def training_session(config: T5Config) -> addons.TaskSession:
    """A session that does one step of AdamW with each run, at the learning rate that the run is
    given.
    """
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        words = ((config.micro_batch_size, config.sequence_length), popxl.int32)
        inputs = InputStreams(ids=words, written=words, following=words, rate=((), popxl.float32))
        outputs = OutputStreams(loss=((), config.dtype))
        *batch, rate = (ops.host_load(stream) for stream in inputs)

        facts, graph = Loss(config).create_graph(*batch)
        variables = NamedTensors(fwd=facts.init())
        weights = graph.args.to_dict()
        gradient = addons.autodiff(graph, grads_required=weights.values())
        call = graph.bind(variables.fwd).call_with_info(*batch)
        ops.host_store(outputs.loss, call.outputs[0])
        scale = popxl.constant(config.loss_scaling, config.dtype)
        gradients = gradient.call(scale, args=gradient.grad_graph_info.inputs_dict(call))
        adam = AdamOptimizerStep(cache=True)  # weights of one shape share a graph
        for name, weight_gradient in zip(weights, gradients):
            optim_facts, update = adam.create_graph(
                variables.fwd[name],
                weight_gradient,
                lr=rate,
                weight_decay=0.0,
                loss_scaling=config.loss_scaling,
                first_order_dtype=popxl.float32,
            )
            state = optim_facts.init()
            variables.insert(f"optim.{name}", state, overwrite=True)
            update.bind(state).call(variables.fwd[name], weight_gradient, rate)
    return addons.TaskSession(inputs, outputs, variables, ir=ir, device_desc="cpu")


def answering_session(config: T5Config) -> addons.TaskSession:
    """A session that reads once, and then writes word by word."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        words = ((config.micro_batch_size, config.sequence_length), popxl.int32)
        inputs, outputs = InputStreams(ids=words), OutputStreams(written=words)
        ids = ops.host_load(inputs.ids)
        facts, encode = Encode(config).create_graph(ids)
        memory = encode.graph.outputs

        start = (
            popxl.constant(np.full(ids.shape, PAD), popxl.int32),
            popxl.constant([0], popxl.uint32),
        )
        body_facts, body = WriteNext(config).create_graph(*start, *memory)
        facts.insert("decoder", body_facts.decoder)  # both have the same words
        variables = NamedTensors(fwd=facts.init())

        memory = encode.bind(variables.fwd).call(ids)
        mapping = body.args.to_mapping(variables.fwd)
        written, _ = ops.repeat(body.graph, ids.shape[1] - 1, *start, *memory, inputs_dict=mapping)
        ops.host_store(outputs.written, written)
    return addons.TaskSession(inputs, outputs, variables, ir=ir, device_desc="cpu")


def batch(rng: np.random.Generator, config: T5Config) -> dict[str, np.ndarray]:
    """Letters in any order, what the decoder has written before each step, and what it should
    write: each [B, S].
    """
    names = ("ids", "written", "following")
    found = {
        name: np.full((config.micro_batch_size, config.sequence_length), PAD, np.int32)
        for name in names
    }
    for row in range(config.micro_batch_size):
        count = rng.integers(2, config.sequence_length - 1)
        letters = rng.permutation(len(ALPHABET))[:count] + 2
        found["ids"][row, : count + 1] = [*letters, END]
        found["following"][row, : count + 1] = [*sorted(letters), END]
        found["written"][row, 1 : count + 1] = sorted(letters)
    return found


def train(session: addons.TaskSession, data: dict[str, np.ndarray], rate: float) -> float:
    """One step: the loss."""
    fed = {**data, "rate": np.float32(rate)}
    return float(
        session.run({stream: fed[name] for name, stream in session.inputs.items()})[
            session.outputs.loss
        ]
    )


def main() -> None:
    """Learn to sort, and sort."""
    np.random.seed(0)
    rng, config, steps = np.random.default_rng(0), T5Config(), 201
    with training_session(config) as training:
        for step in range(steps):
            loss = train(training, batch(rng, config), rate=1.2e-2 * (1 - step / steps))
            if step % 50 == 0:
                print(f"step {step:3}: loss {loss:.1f}")
    with answering_session(config) as answering:
        answering.load_from_session(training)
        data = batch(rng, config)
        written = answering.run({answering.inputs.ids: data["ids"]})[answering.outputs.written]
    for asked, said in zip(data["ids"][:3], written[:3, 1:]):
        print(
            *(ALPHABET[i - 2] for i in asked if i > END),
            "->",
            *(ALPHABET[i - 2] for i in said if i > END),
        )


if __name__ == "__main__":
    main()
