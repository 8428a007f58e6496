"""A BERT-style encoder learns to fill in a masked number: sequences count up in steps of one or two.

B batch, S sequence, H hidden size, D size of a head, V vocabulary.
"""

import math

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.layers import Embedding, LayerNorm, Linear
from popxl_addons.optimizers import AdamOptimizerStep

B, S, H, HEADS, LAYERS, V, MASK = 64, 8, 32, 4, 2, 24, 23


class Attention(addons.Module):
    """Every position looks at every other: no causal mask in an encoder."""

    def __init__(self):
        super().__init__()
        self.qkv = Linear(3 * H)
        self.output = Linear(H)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """[B*S, H] -> [B*S, H]."""
        query, key, value = (
            t.reshape((B, S, HEADS, H // HEADS)).transpose((0, 2, 1, 3))  # [B, HEADS, S, D]
            for t in ops.split(self.qkv(x), 3, axis=1)
        )
        scores = query @ key.transpose((0, 1, 3, 2)) * (1 / math.sqrt(H // HEADS))
        mixed = ops.softmax(scores, axis=-1) @ value
        return self.output(mixed.transpose((0, 2, 1, 3)).reshape((B * S, H)))


class Block(addons.Module):
    """Attention and feed-forward, each added to its input and then normalised."""

    def __init__(self):
        super().__init__()
        self.attention, self.attention_norm = Attention(), LayerNorm()
        self.up, self.down, self.feed_forward_norm = Linear(4 * H), Linear(H), LayerNorm()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """[B*S, H] -> [B*S, H]."""
        x = self.attention_norm(x + self.attention(x))
        return self.feed_forward_norm(x + self.down(ops.gelu(self.up(x))))


class Encoder(addons.Module):
    """Embeddings, blocks, and the loss of the masked positions."""

    def __init__(self):
        super().__init__()
        self.words = Embedding(popxl.float32, V, H)
        self.places = Embedding(popxl.float32, S, H)
        self.blocks = addons.Module.from_list([Block() for _ in range(LAYERS)])
        self.head = Linear(V)

    def build(self, ids: popxl.Tensor, labels: popxl.Tensor):
        """ids, labels [B*S], labels -1 where nothing is masked -> mean loss [], most likely words [B*S]."""
        places = popxl.constant(np.tile(np.arange(S), B), popxl.int32)
        x = self.words(ids) + self.places(places)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        return addons.cross_entropy(scores, labels, ignore_index=-1), ops.argmax(scores, dim=-1)


np.random.seed(0)
ir = popxl.Ir()
with ir.main_graph, popxl.in_sequence():
    ids, labels = (popxl.h2d_stream((B * S,), popxl.int32, name) for name in ("ids", "labels"))
    facts, graph = Encoder().create_graph(ids.spec, labels.spec)
    variables = facts.init()
    print(facts.len_flat(), "variables of", sum(v.nelms for v in variables.tensors), "elements")

    call = graph.bind(variables).call_with_info(ops.host_load(ids), ops.host_load(labels))
    loss, words = (addons.host_store(t) for t in call.outputs[:2])
    weights = graph.args.to_dict()
    grad = addons.autodiff(graph, grads_provided=graph.graph.outputs[:1], grads_required=weights.values())
    one = popxl.constant(1.0, popxl.float32)
    gradients = grad.call(one, args=grad.grad_graph_info.inputs_dict(call))
    for name, gradient in zip(weights, gradients):
        adam = AdamOptimizerStep(cache=True)  # weights of one shape share a graph
        state, update = adam.create_graph(variables[name], gradient, lr=4e-3, weight_decay=0.0)
        update.bind(state.init()).call(variables[name], gradient)


def batch(rng: np.random.Generator):
    """Sequences with one masked position each: (ids, labels, whole sequences), each [B, S]."""
    start, stride = rng.integers(0, 8, (B, 1)), rng.integers(1, 3, (B, 1))
    whole = start + stride * np.arange(S)
    masked = np.arange(S) == rng.integers(0, S, (B, 1))
    return np.where(masked, MASK, whole), np.where(masked, whole, -1), whole


rng = np.random.default_rng(0)
with popxl.Session(ir) as session:
    for step in range(201):
        shown, wanted, whole = batch(rng)
        results = session.run({ids: shown.flatten().astype(np.int32), labels: wanted.flatten().astype(np.int32)})
        if step % 40 == 0:
            right = (results[words].reshape(B, S) == whole)[shown == MASK].mean()
            print(f"step {step:3}: loss {results[loss]:.2f}, right {right:.0%}")
print("shown  ", *("_" if i == MASK else i for i in shown[0]))
print("says   ", results[words].reshape(B, S)[0][shown[0] == MASK][0])
