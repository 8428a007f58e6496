"""Tensor-parallel inference: a GPT-J-style decoder, whose matrices are cut over groups of replicas,
writes words.

Two replicas hold a half of every matrix each, four a quarter; or two groups of two work on
different sequences. The words are the same. Nobody trained this model: its weights are random.

B sequences per group, S sequence, H hidden size, D size of a head, V vocabulary, tp replicas of a
group.
"""

import math
from dataclasses import dataclass

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import InputStreams, NamedTensors, OutputStreams
from popxl_addons.array_munging import shard, tensor_parallel_input, tensor_parallel_output
from popxl_addons.layers import Embedding, LayerNorm, Linear
from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce_identical_grad_inputs
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants


@dataclass(frozen=True)
class GPTJConfig:
    """The model, and over how many replicas it goes."""

    vocabulary_size: int = 64
    sequence_length: int = 12
    hidden_size: int = 32
    heads: int = 4
    rotary_features: int = 4
    layers: int = 2
    micro_batch_size: int = 2
    tensor_parallel: int = 1
    data_parallel: int = 1
    dtype: popxl.dtype = popxl.float32

    def group(self) -> popxl.ReplicaGrouping:
        """The replicas that compute one result together."""
        return popxl.gir().replica_grouping(stride=1, group_size=self.tensor_parallel)

    def shards(self) -> popxl.ReplicaGrouping:
        """The replicas that hold the same shard."""
        return self.group().transpose()


class Block(addons.Module):
    """Attention and feed-forward side by side, on one normalised copy of what both are added to.

    Each replica has some of the heads and some of the inner features; what they make is summed
    once, over the group.
    """

    def __init__(self, config: GPTJConfig):
        super().__init__()
        self.config, size, tp = config, config.hidden_size, config.tensor_parallel
        shards = config.shards()
        self.norm = LayerNorm()
        self.query, self.key, self.value = (
            Linear(size // tp, bias=False, replica_grouping=shards) for _ in range(3)
        )
        self.output = Linear(size, bias=False, replica_grouping=shards)
        self.up = Linear(4 * size // tp, replica_grouping=shards)
        self.down = Linear(size, bias=False, replica_grouping=shards)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """[B*S, H], identical over the group -> the same."""
        y = self.norm(x)
        # [B*S, H], partial sums over the group
        parts = self.attention(y) + self.down(ops.gelu(self.up(y)))
        # once, not on every replica
        bias = self.add_variable_input("bias", lambda: np.zeros(x.shape[-1]), x.dtype)
        return (
            x + replicated_all_reduce_identical_grad_inputs(parts, group=self.config.group()) + bias
        )

    def attention(self, y: popxl.Tensor) -> popxl.Tensor:
        """[B*S, H] -> [B*S, H], partial sums over the group."""
        sequence, features = (
            self.config.sequence_length,
            self.config.hidden_size // self.config.heads,
        )
        query, key, value = (
            t.reshape((-1, sequence, t.shape[-1] // features, features)) for t in self.qkv(y)
        )
        sin, cos = trig_table_constants(sequence, self.config.rotary_features)
        query, key = (
            rotary_pos_embed(t, sin, cos, self.config.rotary_features) for t in (query, key)
        )
        # [B, heads/tp, S, D]
        query, key, value = (t.transpose((0, 2, 1, 3)) for t in (query, key, value))
        future = popxl.constant(
            np.triu(np.full((sequence, sequence), -10_000), 1), y.dtype, "future"
        )
        scores = query @ key.transpose((0, 1, 3, 2)) * (1 / math.sqrt(features)) + future
        mixed = ops.softmax(scores, axis=-1) @ value
        return self.output(mixed.transpose((0, 2, 1, 3)).reshape((y.shape[0], -1)))

    def qkv(self, y: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
        """Three of [B*S, H/tp]."""
        return self.query(y), self.key(y), self.value(y)


class GPTJ(addons.Module):
    """Scores of the word that follows one position. Words and scores are cut by vocabulary."""

    def __init__(self, config: GPTJConfig):
        super().__init__()
        self.config, shards = config, config.shards()
        self.words = Embedding(
            config.dtype, config.vocabulary_size, config.hidden_size, replica_grouping=shards
        )
        self.norm = LayerNorm()
        self.head = Linear(
            config.vocabulary_size // config.tensor_parallel, replica_grouping=shards
        )

    def build(self, words: popxl.Tensor, position: popxl.Tensor) -> popxl.Tensor:
        """words [B, S], position [1] -> scores [B, V], identical over the group."""
        config, group = self.config, self.config.group()
        firsts = iter(Embedding.get_offsets(config.vocabulary_size, config.tensor_parallel))
        first = self.add_variable_input(
            "first", firsts, popxl.int32, replica_grouping=config.shards()
        )
        x = self.words(words.flatten() - first)  # zeros where another replica has the word
        x = replicated_all_reduce_identical_grad_inputs(x, group=group)
        facts, block = Block(config).create_graph(x)
        for layer in range(config.layers):
            (x,) = block.bind(self.add_variable_inputs(layer, facts)).call(x)
        x = self.norm(x).reshape((*words.shape, config.hidden_size))
        x = ops.dynamic_slice(x, position, axes=[1], sizes=[1], no_overlap=True).reshape(
            (words.shape[0], -1)
        )
        scores = self.head(x)  # [B, V/tp]
        return ops.collectives.replicated_all_gather(scores, axis=1, group=group)


class WriteNext(addons.Module):
    """The body of a loop that writes the most likely next word of each sequence."""

    def __init__(self, config: GPTJConfig):
        super().__init__()
        self.model = GPTJ(config)

    def build(
        self, words: popxl.Tensor, position: popxl.Tensor
    ) -> tuple[popxl.Tensor, popxl.Tensor]:
        """words [B, S], position of the last one written [1] -> the same, one further."""
        chosen = ops.argmax(self.model(words, position), dim=1).reshape((words.shape[0], 1))
        position = position + 1
        return ops.dynamic_update(
            words, position, chosen, axes=[1], sizes=[1], no_overlap=True
        ), position


def inference_session(config: GPTJConfig, prompt: int) -> addons.TaskSession:
    """A session that goes on from the first `prompt` words of each sequence until it is full."""
    ir = popxl.Ir(replication=config.tensor_parallel * config.data_parallel)
    with ir.main_graph, popxl.in_sequence():
        shape = (config.micro_batch_size, config.sequence_length)
        inputs, outputs = (
            InputStreams(words=(shape, popxl.int32)),
            OutputStreams(words=(shape, popxl.int32)),
        )
        words, position = ops.host_load(inputs.words), popxl.constant([prompt - 1], popxl.uint32)
        facts, body = WriteNext(config).create_graph(words, position)
        variables = NamedTensors(fwd=facts.model.init())
        mapping = body.args.model.to_mapping(variables.fwd)
        words, _ = ops.repeat(
            body.graph, config.sequence_length - prompt, words, position, inputs_dict=mapping
        )
        ops.host_store(outputs.words, words)
    return addons.TaskSession(inputs, outputs, variables, ir=ir, device_desc="cpu")


def load_weights(
    session: addons.TaskSession, config: GPTJConfig, whole: dict[str, np.ndarray]
) -> None:
    """Give a session the weights of the unsharded model, cut as each variable is."""
    values, tp = addons.WeightsDict(), config.tensor_parallel
    for name, variable in session.state.fwd.to_dict().items():
        if name != "first":
            # Vectors and tables of words are cut by rows; matrices by what they make, or by what
            # they take.
            axis = (
                0
                if whole[name].ndim == 1
                or name.endswith(("words.weight", "output.weight", "down.weight"))
                else 1
            )
            is_cut = variable.replica_grouping.num_groups > 1
            array = shard(whole[name], tp, axis) if is_cut else whole[name]
            values[variable] = array.astype(variable.dtype.as_numpy())
    session.write_variables_data(values)


def write(session: addons.TaskSession, config: GPTJConfig, words: np.ndarray) -> np.ndarray:
    """words [sequences, S] -> the same, full; the sequences are dealt to the groups in order."""
    tp, replicas = config.tensor_parallel, session.ir.replication_factor
    shape = (config.micro_batch_size, config.sequence_length)
    fed = tensor_parallel_input(words.reshape((-1, *shape)), tp, replicas)
    said = session.run({session.inputs.words: fed})[session.outputs.words]
    return tensor_parallel_output(said, 1, tp, replicas, shape).reshape(words.shape)


def main() -> None:
    """The same words from one replica, from two and four that share the weights, and from two
    groups of two.
    """
    rng = np.random.default_rng(0)
    # four prompts of five words
    words = np.pad(rng.integers(0, 64, (4, 5)), ((0, 0), (0, 7))).astype(np.int32)
    whole: dict[str, np.ndarray] = {}
    for tensor_parallel, data_parallel in ((1, 1), (2, 1), (4, 1), (2, 2)):
        config = GPTJConfig(
            micro_batch_size=4 // data_parallel,
            tensor_parallel=tensor_parallel,
            data_parallel=data_parallel,
        )
        with inference_session(config, prompt=5) as session:
            variables = session.state.fwd.to_dict()
            whole = whole or {
                name: rng.normal(0, 0.5 if v.rank > 1 else 0.1, v.shape)
                for name, v in variables.items()
            }
            load_weights(session, config, whole)
            said = write(session, config, words)
        held = sum(v.nelms for v in variables.values())
        print(
            f"{data_parallel} x {tensor_parallel} replicas, {held} elements each: {said[0]} "
            f"{said[3]}"
        )


if __name__ == "__main__":
    main()
