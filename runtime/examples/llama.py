"""A LLaMA-style decoder: rotary positions, RMS norms, gated feed-forward, key and value heads that
queries share.

It learns a sentence by heart, letter by letter, and then says it. Training keeps the inputs of its
blocks only, and computes the rest again for the gradient; four micro-batches make one clipped step
of AdamW.

B micro-batch, S sequence, H hidden size, D size of a head, V vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import InputStreams, NamedTensors, OutputStreams
from popxl_addons.layers import Embedding, Linear
from popxl_addons.ops.grad_reduce_square_add import grad_reduce_square_add
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants
from popxl_addons.optimizers import AdamOptimizerStep

SENTENCE = "sphinx of black quartz, judge my vow. "
LETTERS = sorted(set(SENTENCE))


@dataclass(frozen=True)
class LlamaConfig:
    """The model, and how it is trained."""

    vocabulary_size: int = len(LETTERS)
    sequence_length: int = 24
    hidden_size: int = 32
    intermediate_size: int = 64
    heads: int = 4
    key_value_heads: int = 2
    layers: int = 2
    micro_batch_size: int = 4
    micro_batches: int = 4
    learning_rate: float = 4e-3
    weight_decay: float = 0.01
    max_norm: float = 1.0
    dtype: popxl.dtype = popxl.float32


class RMSNorm(addons.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; the mean in float32."""

    def build(self, x: popxl.Tensor, eps: float = 1e-6) -> popxl.Tensor:
        """[B*S, H] -> [B*S, H]."""
        weight = self.add_variable_input("weight", lambda: np.ones(x.shape[-1]), x.dtype)
        wide = ops.cast(x, popxl.float32)
        scale = (ops.mean(wide * wide, axis=-1, keepdims=True) + eps) ** -0.5
        return ops.cast(wide * scale, x.dtype) * weight


class Attention(addons.Module):
    """Causal attention; each head of keys and values serves heads / key_value_heads heads of
    queries.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, self.features = config, config.hidden_size // config.heads
        self.query = Linear(config.heads * self.features, bias=False)
        self.key = Linear(config.key_value_heads * self.features, bias=False)
        self.value = Linear(config.key_value_heads * self.features, bias=False)
        self.output = Linear(config.hidden_size, bias=False)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """[B*S, H] -> [B*S, H]."""
        sequence, shared, features = (
            self.config.sequence_length,
            self.config.key_value_heads,
            self.features,
        )
        query, key, value = (
            t.reshape((-1, sequence, t.shape[-1] // features, features))  # [B, S, heads, D]
            for t in (self.query(x), self.key(x), self.value(x))
        )
        sin, cos = trig_table_constants(sequence, features)
        query, key = rotary_pos_embed(query, sin, cos), rotary_pos_embed(key, sin, cos)
        query = query.reshape((-1, sequence, shared, self.config.heads // shared, features))
        query = query.transpose((0, 2, 3, 1, 4))  # [B, shared, heads / shared, S, D]
        key, value = (
            t.reshape((-1, sequence, shared, 1, features)).transpose((0, 2, 3, 1, 4))
            for t in (key, value)
        )

        future = popxl.constant(
            np.triu(np.full((sequence, sequence), -10_000), 1), x.dtype, "future"
        )
        scores = query @ key.transpose((0, 1, 2, 4, 3)) * (1 / math.sqrt(features)) + future
        mixed = ops.softmax(scores, axis=-1) @ value
        return self.output(mixed.transpose((0, 3, 1, 2, 4)).reshape(x.shape))


class Block(addons.Module):
    """Attention and gated feed-forward, each on a normalised copy of what it is added to."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(), Attention(config)
        self.feed_forward_norm = RMSNorm()
        self.gate, self.up = (Linear(config.intermediate_size, bias=False) for _ in range(2))
        self.down = Linear(config.hidden_size, bias=False)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """[B*S, H] -> [B*S, H]."""
        x = x + self.attention(self.attention_norm(x))
        y = self.feed_forward_norm(x)
        return x + self.down(ops.swish(self.gate(y)) * self.up(y))


class Llama(addons.Module):
    """Scores of the word that follows each position."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.words = Embedding(config.dtype, config.vocabulary_size, config.hidden_size)
        self.norm, self.head = RMSNorm(), Linear(config.vocabulary_size, bias=False)

    def scores(self, words: popxl.Tensor) -> popxl.Tensor:
        """words [B, S] -> [B*S, V]."""
        x = self.words(words.flatten())
        # one graph, called with the weights of each layer
        facts, self.block = Block(self.config).create_graph(x)
        for layer in range(self.config.layers):
            (x,) = self.block.bind(self.add_variable_inputs(layer, facts)).call(x)
        return self.head(self.norm(x))


class LlamaLoss(Llama):
    """Mean cross entropy of the words that follow."""

    def build(self, words: popxl.Tensor, following: popxl.Tensor) -> popxl.Tensor:
        """words, following [B, S] -> []."""
        return addons.cross_entropy(self.scores(words), following.flatten())


class MicroBatch(addons.Module):
    """Forward and backward on the next element of the streams; gradients go to the mean."""

    def __init__(self, config: LlamaConfig, inputs: InputStreams, outputs: OutputStreams):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        model = LlamaLoss(config)
        self.facts, self.forward = model.create_graph(*(stream.spec for stream in inputs))
        block_gradient = addons.recompute_graph(addons.autodiff(model.block))
        self.mean_facts, self.backward = addons.autodiff_with_accumulation(
            self.forward,
            self.forward.args.tensors,
            called_graphs_grad_info={model.block.graph: block_gradient.grad_graph_info},
        )

    def build(self) -> None:
        """Add one step of the loop to the current graph."""
        weights = self.add_variable_inputs("fwd", self.facts)
        mean = self.add_variable_inputs("mean", self.mean_facts)
        call = self.forward.bind(weights).call_with_info(
            *(ops.host_load(stream) for stream in self.inputs)
        )
        ops.host_store(self.outputs.loss, call.outputs[0])
        one = popxl.constant(1.0, call.outputs[0].dtype)
        self.backward.bind(mean).call(one, args=self.backward.grad_graph_info.inputs_dict(call))


def training_session(config: LlamaConfig) -> addons.TaskSession:
    """A session that does one step of AdamW with each run, on config.micro_batches elements of its
    streams.
    """
    ir = popxl.Ir()
    ir.num_host_transfers = config.micro_batches
    with ir.main_graph, popxl.in_sequence():
        shape = (config.micro_batch_size, config.sequence_length)
        inputs = InputStreams(words=(shape, popxl.int32), following=(shape, popxl.int32))
        outputs = OutputStreams(loss=((), config.dtype))
        facts, micro_batch = MicroBatch(config, inputs, outputs).create_graph()
        variables = facts.init()
        ops.repeat(
            micro_batch.graph,
            config.micro_batches,
            inputs_dict=micro_batch.args.to_mapping(variables),
        )

        gradients = variables.mean.accum
        norm = ops.sqrt(
            ops.sum(
                ops.concat([grad_reduce_square_add(t, 1).reshape((1,)) for t in gradients.tensors])
            )
        )
        adam = AdamOptimizerStep(cache=True)  # weights of one shape share a graph
        for name, weight in variables.fwd.to_dict().items():
            optim_facts, update = adam.create_graph(
                weight,
                gradients[name],
                lr=config.learning_rate,
                weight_decay=config.weight_decay if weight.rank > 1 else 0.0,
                first_order_dtype=popxl.float32,
                global_norm=norm,
                global_norm_max=config.max_norm,
            )
            state = optim_facts.init()
            variables.insert(f"optim.{name}", state, overwrite=True)
            update.bind(state).call(weight, gradients[name], norm)
        # the next mean starts afresh
        ops.var_updates.accumulator_zero_(variables.mean.mean_accum_counter)
    return addons.TaskSession(inputs, outputs, variables, ir=ir, device_desc="cpu")


class SayNext(Llama):
    """The body of a loop that writes the most likely next word behind those that are there."""

    def build(
        self, words: popxl.Tensor, position: popxl.Tensor
    ) -> tuple[popxl.Tensor, popxl.Tensor]:
        """words [1, S], position of the last one said [1] -> the same, one further."""
        # [1, V]
        scores = ops.dynamic_slice(
            self.scores(words), position, axes=[0], sizes=[1], no_overlap=True
        )
        position = position + 1
        chosen = ops.argmax(scores, dim=1).reshape((1, 1))
        return ops.dynamic_update(
            words, position, chosen, axes=[1], sizes=[1], no_overlap=True
        ), position


def answering_session(config: LlamaConfig, prompt: int) -> addons.TaskSession:
    """A session that goes on from the first `prompt` words until the sequence is full."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        inputs = InputStreams(words=((1, config.sequence_length), popxl.int32))
        outputs = OutputStreams(words=((1, config.sequence_length), popxl.int32))
        words, position = ops.host_load(inputs.words), popxl.constant([prompt - 1], popxl.uint32)
        facts, body = SayNext(config).create_graph(words, position)
        variables = NamedTensors(fwd=facts.init())
        mapping = body.args.to_mapping(variables.fwd)
        said, _ = ops.repeat(
            body.graph, config.sequence_length - prompt, words, position, inputs_dict=mapping
        )
        ops.host_store(outputs.words, said)
    return addons.TaskSession(inputs, outputs, variables, ir=ir, device_desc="cpu")


def batch(rng: np.random.Generator, config: LlamaConfig) -> dict[str, np.ndarray]:
    """Parts of the sentence, and their next letters: each [micro_batches, B, S]."""
    length, text = config.sequence_length, SENTENCE * 2
    starts = rng.integers(0, len(SENTENCE), (config.micro_batches, config.micro_batch_size, 1))
    letters = np.array([LETTERS.index(letter) for letter in text], np.int32)[
        starts + np.arange(length + 1)
    ]
    return {"words": letters[..., :-1], "following": letters[..., 1:]}


def train(session: addons.TaskSession, data: dict[str, np.ndarray]) -> float:
    """One step: the mean loss of its micro-batches."""
    outputs = session.run({stream: data[name] for name, stream in session.inputs.items()})
    return float(outputs[session.outputs.loss].mean())


def main() -> None:
    """Learn the sentence, and say it."""
    np.random.seed(0)
    rng, config = np.random.default_rng(0), LlamaConfig()
    with training_session(config) as training:
        for step in range(61):
            loss = train(training, batch(rng, config))
            if step % 15 == 0:
                print(f"step {step:2}: loss {loss:.2f}")
    with answering_session(config, prompt=6) as answering:
        answering.load_from_session(training)
        words = batch(rng, config)["words"][0, :1]
        said = answering.run({answering.inputs.words: words})[answering.outputs.words][0]
    letters = "".join(LETTERS[i] for i in said)
    print(f"prompt: {letters[:6]!r}\ngoes on: {letters[6:]!r}")


if __name__ == "__main__":
    main()
