"""Autoregressive decoding: each token that comes out goes in again, and keys and values of the past
are kept.

The model is one attention layer that nobody trained. Its weights are those of an *induction head*:
look for the word before the last time this one was seen, and say what followed it. Keys are the
previous word, values the present one.
"""

import numpy as np
import popxl
from popxl import TensorByRef, ops

PROMPT = "do re mi fa so la do re mi".split()
LENGTH = 20  # words, those of the prompt included
WORDS = sorted(set(PROMPT))
SIZE = len(WORDS)


def attend(token, previous, position, keys: TensorByRef, values: TensorByRef):
    """The most likely next word after `token` [1]; writes this position's row of both caches, each
    [LENGTH, SIZE].
    """
    table = popxl.constant(np.eye(SIZE), popxl.float32, name="embedding")
    now, before = ops.gather(table, token), ops.gather(table, previous)  # [1, SIZE]
    ops.dynamic_update_(keys, position, before, axes=[0], sizes=[1], no_overlap=True)
    ops.dynamic_update_(values, position, now, axes=[0], sizes=[1], no_overlap=True)

    recent = popxl.constant(np.arange(LENGTH), popxl.float32, name="recent")
    # [1, LENGTH]; rows that are not yet written match nothing
    scores = (now @ keys.T) * 100 + recent
    mixed = ops.softmax(scores, axis=-1) @ values
    return ops.argmax(mixed, dim=1)


def step(token, previous, position, prompt, keys: TensorByRef, values: TensorByRef):
    """One position: the prompt's word while there is one, the model's own after that."""
    chosen = attend(token, previous, position, keys, values)
    following = position + 1
    given = ops.dynamic_slice(prompt, following, axes=[0], sizes=[1], no_overlap=True)
    is_given = ops.greater(given, popxl.constant(-1, popxl.int32))
    next_token = ops.where(is_given, given, chosen)
    ops.host_store(words, next_token)
    return next_token, token, following


ir = popxl.Ir()
ir.num_host_transfers = LENGTH - 1
with ir.main_graph, popxl.in_sequence():
    words = popxl.d2h_stream((1,), popxl.int32, name="words")
    prompt_data = np.full(LENGTH, -1, np.int32)
    prompt_data[: len(PROMPT)] = [WORDS.index(word) for word in PROMPT]
    prompt = popxl.variable(prompt_data, name="prompt")

    token, position = prompt[:1], popxl.constant(np.zeros(1), popxl.uint32)
    keys, values = (
        ops.init((LENGTH, SIZE), popxl.float32, "keys"),
        ops.init((LENGTH, SIZE), popxl.float32, "values"),
    )
    # Token and position are carried from step to step; both caches are the loop's own, by
    # reference.
    carried = (token, token, position)
    graph = ir.create_graph(step, *carried, prompt, keys, values)
    ops.repeat(graph, LENGTH - 1, *carried, prompt, keys, values)

with popxl.Session(ir) as session:
    said = [PROMPT[0], *(WORDS[i] for i in session.run()[words].flatten())]
print("prompt:", *PROMPT)
print("goes on:", *said[len(PROMPT) :])
