"""Programs that are nearly what a pass looks for: one thing is not as its pattern says."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import popxl
from helpers.attention_by_hand import twisted
from helpers.pass_programs import Build, normal
from popxl import Tensor, ops
from popxl.extensions import attention as attend_op
from popxl.ops import var_updates
from popxl.ops.normalisation import softmax_grad
from popxl.ops.transformer import softcap, softcap_grad
from popxl.transforms.autodiff import autodiff
from popxl_addons.ops.cross_entropy_sharded_loss import logsumexp_and_pick, logsumexp_and_pick_grad

SWAPPED = (0, 1, 3, 2)


def var(*shape: int, seed: int = 0, dtype: popxl.dtype = popxl.float32) -> Tensor:
    """A variable of normal numbers."""
    return popxl.variable(normal(*shape, seed=seed), dtype)


def number(value: float) -> Tensor:
    """A variable of one element."""
    return popxl.variable(np.float32(value))


def zeros(*shape: int) -> Tensor:
    """Fresh zeros."""
    return ops.init(shape, popxl.float32, "zeros")


def mean_(total: Tensor, x: Tensor, count: Any = None) -> Tensor:
    """A mean over steps that goes on."""
    return var_updates.accumulate_mean_(total, x, number(2) if count is None else count)


def of(function: Callable[[], Sequence[Tensor]]) -> Build:
    """A program from a function without parameters."""
    return lambda ir: function()


def added_to_a_product(x: Sequence[int], w: Sequence[int], added: Sequence[int]) -> Build:
    """x @ w + added, of these shapes."""
    return of(lambda: [var(*x) @ var(*w, seed=1) + var(*added, seed=2)])


def bias_of_integers() -> list[Tensor]:
    x, w, b = (popxl.variable(np.arange(n).reshape(s), popxl.int32) for n, s in SHAPES)
    return [x @ w + b]


SHAPES = ((12, (3, 4)), (20, (4, 5)), (5, (5,)))


def masked(
    q: Sequence[int], k: Sequence[int], mask: Sequence[int], scale: float | None = 0.5
) -> Build:
    """q @ k * scale + mask, of these shapes; without a scale, times a variable."""

    def make() -> list[Tensor]:
        by = number(0.5) if scale is None else scale
        return [var(*q) @ var(*k, seed=1) * by + var(*mask, seed=2)]

    return of(make)


def scaled_by_an_array() -> list[Tensor]:
    """Scores that are wider than their product."""
    y = var(2, 6, 6) @ var(2, 6, 6, seed=1)
    return [ops.mul(y, popxl.constant(np.full((1, 1, 1, 1), 0.5, np.float32))) + var(6, 6, seed=2)]


def scaled_by_what_is_written() -> list[Tensor]:
    """Scores scaled by a constant that has another value then."""
    scale = popxl.constant(2.0)
    ops.add_(scale, scale)
    return [var(2, 6, 6) @ var(2, 6, 6, seed=1) * scale + var(6, 6, seed=2)]


def transposed(x: Sequence[int], w: Sequence[int], permutation: Sequence[int]) -> Build:
    """A permutation of a product."""
    return of(lambda: [(var(*x) @ var(*w, seed=1)).transpose(tuple(permutation))])


def typed(x: Tensor, y: Tensor) -> Tensor:
    """A product of float16 that comes out as float32."""
    return ops.matmul(x, y, output_type=popxl.float32)


def half(*shape: int, seed: int = 0) -> Tensor:
    """A float32 variable cast to float16, so that results are compared as float32."""
    return ops.cast(var(*shape, seed=seed), popxl.float16)


# Accumulators


def read_between(name: str) -> list[Tensor]:
    """The accumulator, or its counter, is read between a product and its mean."""
    total, count, x, dy = var(6, 6), number(2), var(6, 6, seed=1), var(6, 6, seed=2)
    product = x @ dy
    seen = (total if name == "total" else count) * 2.0
    mean_(total, product, count)
    return [seen]


def rows(axis: int, *shape: int) -> list[Tensor]:
    """A mean of gathered rows along an axis of a table with this shape."""
    ids = popxl.variable(np.array([0, 2, 2], np.int32))
    of_rows = (*shape[:axis], 3, *shape[axis + 1 :])
    gradient = ops.indexing.gather_grad(var(*of_rows, seed=1), ids, shape, axis, True)
    return [mean_(var(*shape), gradient)]


def shared(name: str) -> list[Tensor]:
    """What is added to an accumulator is made of it."""
    total = var(6, 6)
    if name == "sum":
        row = total[0].reshape_((6,))
        return [mean_(row, ops.broadcasting.sum_to(total, (6,)))]
    return [mean_(total, total.T @ var(6, 6, seed=1))]


def fresh_twice(name: str) -> list[Tensor]:
    """Means into fresh zeros which something else meets, too."""
    if name == "one for both":
        total = zeros()
        return [mean_(total, number(3), total)]
    total, count = zeros(6, 6), zeros()
    if name == "a counter that is a number":
        mean_(total, var(6, 6) @ var(6, 6, seed=1), 1.0)
    elif name == "a value that is the target":
        mean_(total, total @ var(6, 6, seed=1), count)
    elif name == "a target that is its own value":
        mean_(total, total, count)
    elif name == "a counter from elsewhere":
        mean_(total, var(6, 6), number(2))
    else:
        ops.add_(count, popxl.constant(1.0))
        mean_(total, var(6, 6), count)
    return [total]


def in_a_loop(name: str) -> Build:
    """A loop's body that meets its accumulator otherwise than as the target of a first mean."""

    def make(ir: popxl.Ir) -> list[Tensor]:
        total, count, x, other = zeros(6, 6), zeros(), var(6, 6), var(6, 6, seed=1)
        body = ir.create_empty_graph("body")
        with body, popxl.in_sequence():
            given = (total, count, x, other)
            t, n, y, o = (popxl.graph_input(v.shape, v.dtype, by_ref=True) for v in given)
            if name == "another mean first":
                var_updates.accumulate_mean_(o, y, n)
                ops.add_(t, y)
            if name == "counted first":
                ops.add_(n, popxl.constant(1.0))
            if name in ("a call", "counted in a loop first"):
                written = n if name == "counted in a loop first" else t
                inner = ir.create_empty_graph("inner")
                with inner:
                    i = popxl.graph_input(written.shape, written.dtype, by_ref=True)
                    ops.add_(i, popxl.constant(1.0))
                ops.repeat(inner, 2, written)
            if name == "added first":
                ops.add_(t, y)
            value = {"its own value": t, "read through a view": t.T}.get(name, y)
            counts = {"a number": 2.0, "a new counter": n + 2.0}.get(name, n)
            var_updates.accumulate_mean_(t, value, counts)
            ops.add_(n, popxl.constant(1.0))
        ops.repeat(body, 2, total, count, x, other)
        return [total]

    return make


def squares(name: str) -> list[Tensor]:
    """Squares of what a product was accumulated into, but not all of them to one number."""
    dtype = popxl.float16 if name == "float16" else popxl.float32
    total, x, dy = (var(6, 6, seed=i, dtype=dtype) for i in range(3))
    mean_(total, x.T @ dy)
    if name == "written":
        ops.add_(total, total)
    t = {
        "a part": ops.slice_(total, 1, 5),
        "a view": total.T,
        "a part's view": total.reshape_((4, 9)),
    }.get(name, total)
    how = {"an axis": {"axis": 0}, "kept axes": {"keepdims": True}}.get(name, {})
    return [ops.sumsquare(t, **how)]  # type: ignore[arg-type]


def looked_up(name: str) -> list[Tensor]:
    """The gradient of a table, added to something, with one thing otherwise."""
    ids = popxl.variable(np.array([1, 5, 1, 0, 2, 2], np.int32))
    table, dy = var(6, 6), var(6, 6, seed=1)
    total, count = zeros(*((1, 6) if name == "one row for all" else (6, 6))), zeros()
    if name == "total from elsewhere":
        total = popxl.variable(normal(6, 6, seed=7)) * 2.0
    rest: list[Tensor] = []
    if name == "total is a part":
        total, second = ops.split(var(12, 6, seed=7), 2)
        rest = [second * 2.0]
    if name == "counter from elsewhere":
        count = number(1) + 1.0
    if name == "counted":
        ops.add_(count, popxl.constant(2.0))
    step = 0.5 if name == "a number counts" else count
    given = table if name == "rows of the table" else dy
    mean_(total, ops.indexing.gather_grad(given, ids, total.shape, 0, True), step)
    if name == "the other way":
        return [ops.add_(total, table)]
    if name == "subtracted":
        return [ops.sub(table, total)]
    if name == "an output":
        return [total]
    if name == "copied":
        return [var_updates.copy_var_update_(table, total)]
    if name == "narrow":
        narrow = var(6, 6, dtype=popxl.bfloat16)
        return [ops.add_(narrow, ops.cast(total, popxl.bfloat16))]
    if name == "broadcast":
        return [ops.add_(var(2, 6, 6), total)]
    if name == "added to itself":
        return [ops.add_(total, total)]
    return [ops.add_(table, total), *rest]


# Adam


def adam(name: str) -> list[Tensor]:
    """An update with one thing otherwise."""
    weight, grad, other, m, step = (*(var(6, 6, seed=i) for i in range(4)), number(3))
    v = popxl.variable(normal(6, 6, seed=4) ** 2)
    if name == "a moment of float64":
        m = popxl.variable(normal(6, 6), popxl.float64)
    if name == "a weight of float64":
        weight = popxl.variable(normal(6, 6), popxl.float64)
    if name == "moments are one":
        m = v
    if name == "gradient is the weight":
        grad = weight
    factors = {"a matrix": var(6, 6, seed=8), "wider": var(1, 1, seed=8), "the step": step}
    by = factors.get(name)
    source = grad[0] if name == "wider by rows" else grad
    g = source * (other if name == "wider by rows" else by) if by is not None or (
        name == "wider by rows"
    ) else grad * 0.5  # fmt: skip
    seen: list[Tensor] = []
    if name != "only the second moment":
        f = 0.8 if name == "another beta1" else 0.9
        result = var_updates.accumulate_moving_average_(m, g, f=f)
        seen = [result] if name == "a moment is seen" else []
    if name == "another moment is next":
        var_updates.accumulate_moving_average_(var(6, 6, seed=9), g, f=0.9)
    squared = other if name == "another gradient" else g
    if name != "only the first moment":
        f = 0.9 if name == "another beta2" else 0.99
        var_updates.accumulate_moving_average_square_(v, squared, f=f)
    u = var_updates.adam_updater(
        m,
        v,
        weight=other if name == "another weight" else weight,
        time_step=None if name == "no step" else step,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.99,
        epsilon=1e-5,
    )  # fmt: skip
    a = 0.5 if name == "a part of the weight" else 1.0
    return [ops.scaled_add_(weight, u, a=a, b=-0.01), *(t * 2.0 for t in seen)]


def taken_adam(name: str) -> list[Tensor]:
    """An update whose condition is true, with one thing otherwise."""
    return guarded_adam(name, True)


def guarded_adam(name: str, is_taken: bool = False) -> list[Tensor]:
    """An update that is undone where a condition is false, with one thing otherwise."""
    weight, grad, m, step = (*(var(6, 6, seed=i) for i in range(3)), number(3))
    v = popxl.variable(normal(6, 6, seed=4) ** 2)
    state, condition = (weight, m, v), popxl.variable(np.array(is_taken))
    other = popxl.variable(np.array(not is_taken))
    early = []
    if name == "chosen before":
        early = [ops.where(condition, m, ops.identity(m))]
    if name == "restored before":
        var_updates.copy_var_update_(weight, ops.where(condition, weight, ops.identity(weight)))
    kept = [ops.identity(t) for t in state]
    if name == "another is kept":
        kept[1] = ops.identity(grad)
    if name == "kept when it is written":
        ops.add_(m, grad)
    var_updates.accumulate_moving_average_(m, grad, f=0.9)
    if name == "kept after it is written":
        kept[1] = ops.identity(m)
    var_updates.accumulate_moving_average_square_(v, grad, f=0.99)
    u = var_updates.adam_updater(
        m, v, weight=weight, time_step=step, weight_decay=0.1, beta1=0.9, beta2=0.99, epsilon=1e-5
    )
    ops.scaled_add_(weight, u, b=-0.01)
    if name == "a condition that is made late":
        condition = ops.equal(ops.sum(weight), number(0))
    if name == "a condition that is made late of another":
        condition = ops.equal(ops.sum(grad), number(0))
    if name == "a condition for each":
        condition = popxl.variable(normal(6, 6) > 0)
    if name == "written then restored":
        ops.add_(m, grad)
    seen: list[Tensor] = []
    restored: list[Tensor] = []
    for n, (t, before) in enumerate(zip(state, kept)):
        if name == "one is not restored" and n == 1:
            continue
        asked = other if name == "two conditions" and n == 1 else condition
        new = grad if name == "another is chosen" and n == 1 else t
        chosen = early[0] if early and n == 1 else ops.where(asked, new, before)
        if name == "chosen the other way" and n == 1:
            chosen = ops.where(asked, before, new)
        result = var_updates.copy_var_update_(t, chosen)
        if name == "the restored is seen" and n == 1:
            restored.append(result)
        if name == "condition written in between" and n == 0:
            var_updates.copy_var_update_(condition, other)
        if name == "written in between" and n == 0:
            ops.add_(grad, grad)
        if name == "read in between" and n == 0:
            seen.append(v * 2.0)
    return [weight * 1.0, *seen, *(t * 2.0 for t in restored)]


def twice_by_reference(name: str) -> Build:
    """An update in a graph that takes some of its state by reference twice, and reads the second
    reference between."""

    def make(ir: popxl.Ir) -> list[Tensor]:
        shape = () if name == "a number" else (6, 6)
        weight, grad, m, step = (*(var(*shape, seed=i) for i in range(3)), number(3))
        v, condition = popxl.variable(normal(*shape, seed=4) ** 2), popxl.variable(np.array(False))
        seen = {
            "a moment": lambda: m,
            "a number": lambda: m,
            "a part of a moment": lambda: ops.slice_(m, 0, 2, 1, 0),
            "a weight that is restored": lambda: weight,
        }[name]()
        given = (weight, m, v, seen, grad, step, condition)
        body = ir.create_empty_graph("update")
        with body, popxl.in_sequence():
            w, first, second, other = (
                popxl.graph_input(t.shape, t.dtype, by_ref=True) for t in given[:4]
            )
            g, n, asked = (popxl.graph_input(t.shape, t.dtype) for t in given[4:])
            kept = [ops.identity(t) for t in (w, first, second)]
            var_updates.accumulate_moving_average_(first, g, f=0.9)
            var_updates.accumulate_moving_average_square_(second, g, f=0.99)
            early = other * 2.0
            u = var_updates.adam_updater(
                first, second, weight=w, time_step=n, weight_decay=0.1, beta1=0.9, beta2=0.99,
                epsilon=1e-5,
            )  # fmt: skip
            ops.scaled_add_(w, u, b=-0.01)
            late = other * 2.0
            if name == "a weight that is restored":
                for t, before in zip((w, first, second), kept):
                    var_updates.copy_var_update_(t, ops.where(asked, t, before))
            popxl.graph_output(early)
            popxl.graph_output(late)
        return [*ops.call(body, *given), weight * 1.0]

    return make


def a_factor_that_is_a_moment() -> list[Tensor]:
    """An update of one element whose rate is its first moment."""
    weight, grad, m, v = (var(1, seed=i) ** 2.0 * 1.0 for i in range(4))
    var_updates.accumulate_moving_average_(m, grad, f=0.9)
    var_updates.accumulate_moving_average_square_(v, grad, f=0.99)
    u = var_updates.adam_updater(
        m, v, weight=weight, time_step=number(3), weight_decay=0.1, beta1=0.9, beta2=0.99,
        epsilon=1e-5,
    )  # fmt: skip
    return [ops.scaled_add_(weight, u, 1.0, m)]


def hidden_by(mask: np.ndarray) -> Build:
    """Attention with a constant mask [queries, keys]."""
    queries, keys = mask.shape
    shapes = ((1, 2, queries, 8), (1, 2, keys, 8), (1, 2, keys, 8))
    return of(
        lambda: [attend_op(*(var(*s, seed=i) for i, s in enumerate(shapes)), popxl.constant(mask))]
    )


# Loss


def loss(name: str) -> list[Tensor]:
    """A cross entropy of upcast logits, with one thing otherwise."""
    dtype = popxl.bfloat16
    narrow = popxl.float16 if name == "another narrow type" else dtype
    x = ops.cast(var(6, 11), popxl.int32 if name == "from integers" else narrow)
    labels = popxl.variable(np.array([0, 10, 3, 3, 7, 1], np.int32))
    y = x + x
    wide = ops.cast(y, popxl.float64 if name == "wider" else popxl.float32)
    if name == "multiplied":
        wide = ops.cast(x, popxl.float32) * 2.0
    if name == "from float32":
        wide = ops.cast(var(6, 11, dtype=popxl.float32), popxl.float16)
    total, picked = logsumexp_and_pick(wide, labels)
    if name == "narrow logits are written":
        ops.add_(y, y)
    if name == "wide logits are written":
        ops.add_(wide, wide)
    d = logsumexp_and_pick_grad(total, picked, total, wide, labels)
    if name == "a gradient that is multiplied":
        return [total, d * 2.0]
    if name == "narrow logits are written":
        return [total, ops.cast(d, dtype), y]
    return [total, ops.cast(d, popxl.float16 if name == "cast to another type" else dtype)]


def bounded_loss(name: str) -> list[Tensor]:
    """A cross entropy of bounded logits, with one thing otherwise."""
    x = var(6, 11)
    labels = popxl.variable(np.array([0, 10, 3, 3, 7, 1], np.int32))
    logits = x * 2.0
    y = softcap(logits, 2.0)
    other = softcap(logits * 0.5, 2.0)
    seen = ops.identity(y) if name.startswith("a copy") else y
    if name == "a copy is written":
        ops.add_(seen, seen)
    total, picked = logsumexp_and_pick(seen, labels)
    if name == "logits are written":
        ops.add_(logits, logits)
    if name == "bounded logits are written":
        ops.add_(y, y)
    of = other if name == "a gradient of others" else seen
    gradient = logsumexp_and_pick_grad(total, picked, total, of, labels)
    if name == "the sum is written":
        ops.add_(total, total)
    dy = ops.cos(gradient) if name == "another gradient" else gradient
    at = other if name == "a slope of others" else seen
    slope = softcap_grad(dy, at, 3.0 if name == "another bound" else 2.0)
    results = [total, picked, slope, other]
    if name == "bounded logits are read":
        results.append(ops.exp(y))
    if name == "logits are written":
        results.append(logits)
    if name == "a gradient that is read":
        results.append(ops.exp(gradient))
    if name == "bounded logits are a gradient":
        results.append(softcap_grad(y, other, 2.0))
    if name == "a second gradient":
        again = logsumexp_and_pick_grad(picked, total, total, y, labels)
        results.append(softcap_grad(again, y, 2.0))
    return results


def bounded_loss_with_a_loop(ir: popxl.Ir) -> list[Tensor]:
    """A cross entropy whose gradient's factor a loop writes before the slope."""
    y, factor = softcap(var(6, 11), 2.0), var(6, seed=1) + 0.0
    labels = popxl.variable(np.array([0, 10, 3, 3, 7, 1], np.int32))
    total, _ = logsumexp_and_pick(y, labels)
    gradient = logsumexp_and_pick_grad(factor, factor, total, y, labels)
    body = ir.create_empty_graph("body")
    with body:
        ops.add_(popxl.graph_input((6,), popxl.float32, by_ref=True), popxl.constant(normal(6)))
    ops.repeat(body, 2, factor)
    return [softcap_grad(gradient, y, 2.0), factor]


def bounded_logits_leave_a_loop(ir: popxl.Ir) -> list[Tensor]:
    """A cross entropy in a loop whose body gives its bounded logits."""
    logits, before = var(6, 11), var(6, 11, seed=1)
    labels = popxl.variable(np.array([0, 10, 3, 3, 7, 1], np.int32))
    graph = ir.create_empty_graph("bounded")
    with graph:
        x, _, at = (popxl.graph_input(t.shape, t.dtype) for t in (logits, before, labels))
        y = softcap(x, 2.0)
        total, picked = logsumexp_and_pick(y, at)
        gradient = logsumexp_and_pick_grad(total, picked, total, y, at)
        popxl.graph_output(y)
        popxl.graph_output(softcap_grad(gradient, y, 2.0))
    return list(ops.repeat(graph, 2, logits, before, inputs_dict={at: labels}))


def mean_loss(name: str) -> list[Tensor]:
    """A cross entropy whose gradient's factor does not depend on it, with one thing otherwise."""
    labels = popxl.variable(np.array([0, 10, 3, 3, 7, 1], np.int32))
    logits, factor, other = var(6, 11) * 2.0, var(6, seed=1) + 0.0, var(6, seed=2) + 0.0
    of = var(6, 11, seed=3) * 2.0 if "of others" in name else logits
    if name == "a gradient of others, all written":
        ops.add_(logits, of)
        ops.add_(of, logits)
    total, picked = logsumexp_and_pick(logits, labels)
    results = [total * other]
    if name == "what its reader reads is written":
        ops.add_(other, other)
        results.append(other)
    if name == "a factor of it":
        factor = ops.identity(total)
    if name == "two at once":
        logits_2 = var(6, 11, seed=4) * 2.0
        total_2, picked_2 = logsumexp_and_pick(logits_2, labels)
        results += [total * total_2]
    results += [picked, logsumexp_and_pick_grad(factor, -factor, total, of, labels)]
    if name == "two at once":
        results += [logsumexp_and_pick_grad(factor, -factor, total_2, logits_2, labels), picked_2]
    if name == "two gradients":
        results += [logsumexp_and_pick_grad(-factor, factor, total, of, labels)]
    return results


def mean_loss_names_a_row(ir: popxl.Ir, in_a_loop: bool) -> list[Tensor]:
    """A cross entropy that a row's number is made of, which is loaded before it is stored."""
    labels = popxl.variable(np.array([0, 10, 3, 3, 7, 1], np.int32))
    logits, factor, row = var(6, 11) * 2.0, var(6, seed=1) + 0.0, var(6, seed=2) + 0.0
    buffer = popxl.RemoteBuffer((6,), popxl.float32, 1)
    ops.remote_store(buffer, 0, row)
    total, picked = logsumexp_and_pick(logits, labels)
    number = ops.cast(ops.slice_(picked, 0, 1) * 0.0, popxl.uint32)
    if in_a_loop:
        graph = ir.create_graph(lambda t, n: ops.remote_load(buffer, n), row, number)
        (loaded,) = ops.repeat(graph, 2, row, inputs_dict={graph.inputs[1]: number})
    else:
        loaded = ops.remote_load(buffer, number)
    ops.remote_store(buffer, 0, row * 2.0)
    return [loaded, total, logsumexp_and_pick_grad(factor, -factor, total, logits, labels)]


# Attention

CAUSAL = np.triu(np.full((6, 6), -np.inf, np.float32), 1)
MASKS: dict[str, np.ndarray] = {
    "no mask": np.zeros((6, 6), np.float32),
    "the next is seen": np.triu(np.full((6, 6), -np.inf, np.float32), 2),
    "faint": np.triu(np.full((6, 6), -1.0, np.float32), 1),
    "banded": CAUSAL + np.tril(np.full((6, 6), -1e4, np.float32), -4),
    "more than a mask": CAUSAL + np.linspace(0, 3, 6, dtype=np.float32),
}
MORE = np.tril(np.full((6, 6), -np.inf, np.float32), -2)
DRAWS = ("another seed", "another p", "no dropout", "dropout of the gradient", "p of nearly 0")


def gradient(name: str) -> list[Tensor]:
    """Attention whose result nobody reads, and its gradient, with one thing otherwise."""
    return attention(name)[1:]


def attention(name: str) -> list[Tensor]:
    """Attention and its gradient in one graph, with one thing otherwise."""
    width = 6 if name == "heads that do not fit" else 8
    queries = 4 if name == "fewer queries" else 6
    query, dy = var(2, 2, queries, width), var(2, 2, queries, width, seed=3)
    key, value, other = (var(2, 2, 6, width, seed=i) for i in (1, 2, 4))
    if name == "values of another width":
        value, dy = var(2, 2, 6, 16, seed=2), var(2, 2, queries, 16, seed=3)
    mask = popxl.constant(MASKS.get(name, CAUSAL)[-queries:])
    if name in ("mask is a variable", "mask is written"):
        mask = popxl.variable(CAUSAL)
    if name == "one batch of values":
        value = var(1, 2, 6, width, seed=2)
    seed, seed_2 = (popxl.variable(np.array([3, n], np.uint32)) for n in (4, 5))
    draws = name in (*DRAWS, "dropout", "dropped probs only", "seed is written", "probs as factors")
    p = 1e-9 if name == "p of nearly 0" else 0.3
    axis = 2 if name == "another axis" else -1
    scores = query @ key.transpose(SWAPPED) * 0.3 + mask
    probs = ops.softmax(scores, axis=axis)
    if name == "dropout of the gradient" or name == "no dropout":
        draws_forward = name == "no dropout"
    else:
        draws_forward = draws
    dropped = ops.dropout(probs, seed, p) if draws_forward else probs
    y = dropped @ value
    seen = [probs * 2.0] if name == "probs are seen" else []
    if name == "probs are written":
        ops.add_(probs, probs)
    if name == "result is written":
        seen.append(y * 1.0)
        ops.add_(y, y)
    if name == "mask is written":
        ops.add_(mask, popxl.constant(MORE))
    if name == "seed is written":
        ops.add_(seed, popxl.constant(1, popxl.uint32))
    if name == "query is written":
        ops.add_(query, query)
    at = other if name == "another value" else value
    d = dy @ at.transpose(SWAPPED)
    if draws and name != "no dropout":
        drawn = seed_2 if name == "another seed" else seed
        d = ops.dropout(d, drawn, 0.5 if name == "another p" else p)
    given = {"dropped probs only": dropped, "other probs": ops.softmax(other @ key.transpose(SWAPPED), -1)}.get(name, probs) if name in ("dropped probs only", "other probs") else probs  # fmt: skip
    grad = softmax_grad(d, given, 2 if name == "another axis of the gradient" else -1)
    by: Any = {"another scale": 0.4}.get(name, 0.3)
    if name == "scaled by an array":
        by = popxl.constant(np.full((1,) * 5, 0.3, np.float32))
    if name == "scaled by a variable":
        by = number(0.3)
    d = by * grad if name == "scaled from the left" else grad * by
    if name == "not a product":
        d_query = d + 1.0
    elif name != "only the key's":
        d_query = d @ (other if name == "another key" else key)
    if name == "a gradient is seen at once":
        seen.append(d_query * 2.0)
    asked = other[:, :, :queries] if name == "another query" else query
    found = [] if name == "only the key's" else [d_query]
    if name != "only the query's":
        found.append(asked.transpose(SWAPPED) @ d)
    if name == "not the value's":
        return [y, *seen, *found]
    factors = {"probs as factors": probs}.get(name, dropped)
    if name == "other factors":
        factors = ops.softmax(other @ key.transpose(SWAPPED), -1)
    if name == "factors of another order":
        of_value = factors.transpose((1, 0, 3, 2)) @ dy
    elif name == "factors that are not permuted":
        of_value = factors @ dy
    elif name == "dy from the left":
        of_value = dy.transpose(SWAPPED) @ factors
    else:
        of_value = factors.transpose(SWAPPED) @ dy
    return [y, *seen, *found, of_value]


def key_first() -> list[Tensor]:
    """Gradients in another order, of a dy that is a transpose."""
    query, key, value, z = (var(2, 2, 6, 6, seed=i) for i in range(4))
    dy = z.transpose(SWAPPED)
    probs = ops.softmax(query @ key.transpose(SWAPPED) * 0.3 + popxl.constant(CAUSAL), axis=-1)
    d = softmax_grad(dy @ value.transpose(SWAPPED), probs, -1) * 0.3
    d_key = query.transpose(SWAPPED) @ d
    return [d @ key, d_key, probs.transpose(SWAPPED) @ dy]


def long_factors(is_given: bool) -> list[Tensor]:
    """Factors that are no zeros where a mask hides whole blocks of keys."""
    query, key, value, dy = (var(1, 1, 64, 8, seed=i) for i in range(4))
    hidden = np.zeros((64, 64), np.float32)
    hidden[:, 32:] = -np.inf
    mask = popxl.constant(hidden) if is_given else popxl.variable(np.zeros((64, 64), np.float32))
    probs = ops.softmax(query @ key.transpose(SWAPPED) * 0.3 + mask, axis=-1)
    y = probs @ value
    if not is_given:
        ops.add_(mask, popxl.constant(hidden))
    d = softmax_grad(dy @ value.transpose(SWAPPED), probs, -1) * 0.3
    factors = var(1, 1, 64, 64, seed=5) if is_given else probs
    d_query, d_key = d @ key, query.transpose(SWAPPED) @ d
    return [y, d_query, d_key, factors.transpose(SWAPPED) @ dy, mask * 0.0]


def bounded_scores(ir: popxl.Ir) -> list[Tensor]:
    """Causal attention whose scores are bounded, and its gradient."""
    query, key, value, dy = (var(2, 2, 6, 8, seed=i) for i in range(4))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_op(query, key, value, causal=True, softcap=0.5)

    graph = ir.create_graph(attend, query, key, value)
    info, call = autodiff(graph), ops.call_with_info(graph, query, key, value)
    return [call.outputs[0], *ops.call(info.graph, dy, inputs_dict=info.inputs_dict(call))]


def two_calls(ir: popxl.Ir) -> list[Tensor]:
    """A graph of attention that is called twice; one call's probabilities are read."""
    query = var(1, 1, 6, 8)
    graph = ir.create_empty_graph("attend")
    with graph:
        q = popxl.graph_input(query.shape, query.dtype)
        probs = ops.softmax(q @ q.transpose(SWAPPED) * 0.3 + popxl.constant(CAUSAL), axis=-1)
        popxl.graph_output(probs @ q)
        popxl.graph_output(probs)
    (y, _), (z, probs) = ops.call(graph, query), ops.call(graph, query)
    return [(y - z) * 1e6, y, probs]


def probs_leave_a_loop(ir: popxl.Ir) -> list[Tensor]:
    """Attention in a loop whose body gives its probabilities."""
    query = var(1, 1, 6, 8)
    graph = ir.create_empty_graph("attend")
    with graph:
        q, _ = (popxl.graph_input((1, 1, 6, n), popxl.float32) for n in (8, 6))
        probs = ops.softmax(q @ q.transpose(SWAPPED) * 0.3 + popxl.constant(CAUSAL), axis=-1)
        popxl.graph_output(probs @ q)
        popxl.graph_output(probs)
    return list(ops.repeat(graph, 2, query, popxl.constant(CAUSAL[None, None])))


def remote() -> list[Tensor]:
    """A row that is loaded twice, with another in between."""
    buffer = popxl.remote_buffer((1,), popxl.float32, 1)
    popxl.remote_variable(np.ones(1, np.float32), buffer, 0)
    first = ops.remote_load(buffer, 0)
    ops.remote_store(buffer, 0, first * 3.0)
    second = ops.remote_load(buffer, 0)
    return [first + 0.0, second + 0.0]


def wide_attention() -> list[Tensor]:
    """Attention in float64."""
    q, k, v = (ops.cast(var(2, 2, 6, 8, seed=i), popxl.float64) for i in range(3))
    mask = popxl.constant(CAUSAL.astype(np.float64), popxl.float64)
    return [ops.softmax(q @ k.transpose(SWAPPED) * 0.25 + mask, axis=-1) @ v]


def of_typed_products(name: str) -> list[Tensor]:
    """Attention of float16 with a product that comes out as float32."""
    q, k, v, dy = (half(2, 2, 6, 8, seed=i) for i in range(4))
    s = q @ k.transpose(SWAPPED)
    probs = ops.softmax(s * 0.25 + popxl.constant(CAUSAL, popxl.float16), axis=-1)
    y = typed(probs, v) if name == "result" else probs @ v
    d = dy @ v.transpose(SWAPPED)
    d = softmax_grad(d, probs, -1) * 0.25
    d_query = typed(d, k) if name == "gradient" else d @ k
    return [y, d_query, q.transpose(SWAPPED) @ d, probs.transpose(SWAPPED) @ dy]


def of_rank_3(name: str) -> list[Tensor]:
    """Attention without a batch."""
    q, k, v, dy = (var(2, 6, 8, seed=i) for i in range(4))
    swapped = (0, 2, 1)
    probs = ops.softmax(q @ k.transpose(swapped) * 0.25 + popxl.constant(CAUSAL), axis=-1)
    d = softmax_grad(dy @ v.transpose(swapped), probs, -1) * 0.25
    return [probs @ v, d @ k, q.transpose(swapped) @ d, probs.transpose(swapped) @ dy]


HEADS_THIRD = (0, 2, 1, 3)


def packed(name: str) -> list[Tensor]:
    """Three gradients of attention, side by side, with one thing otherwise."""
    query, key, value, dy = (var(2, 2, 6, 8, seed=i) for i in range(4))
    probs = ops.softmax(query @ key.transpose(SWAPPED) * 0.25 + popxl.constant(CAUSAL), axis=-1)
    d = softmax_grad(dy @ value.transpose(SWAPPED), probs, -1) * 0.25
    d_q, d_k, d_v = d @ key, query.transpose(SWAPPED) @ d, probs.transpose(SWAPPED) @ dy
    y = probs @ value
    d_k = d_k.transpose(SWAPPED)
    third = (2, 0, 1, 3) if name == "another order of axes" else HEADS_THIRD
    if name == "other rows":
        parts = [t.reshape((12, 16)) for t in (d_q, d_k, d_v)]
    elif name == "other columns":
        parts = [t.transpose(third).reshape((24, 8)) for t in (d_q, d_k, d_v)]
    else:
        parts = [t.transpose(third).reshape((12, 16)) for t in (d_q, d_k, d_v)]
    if name == "another order":
        parts = [parts[1], parts[0], parts[2]]
    if name == "four":
        parts.append(var(12, 16, seed=7))
    if name == "two":
        parts = parts[:2]
    if name == "three of a split":
        pieces = ops.split(var(6, 2, 8, 8, seed=8), 3)
        pieces[1] = pieces[1].transpose(SWAPPED)
        parts = [t.transpose(HEADS_THIRD).reshape((16, 16)) for t in pieces]
        return [y, d_q, d_k, d_v, ops.concat(parts, axis=1)]
    if name == "one is written":
        ops.add_(parts[2], parts[2])
    if name == "one from elsewhere":
        parts[0] = popxl.variable(normal(12, 16, seed=9))
    if name == "a gradient is seen":
        return [y, d_q * 2.0, ops.concat(parts, axis=1)]
    return [y, ops.concat(parts, axis=0 if name == "another axis" else 1)]


def numbers(name: str) -> list[Tensor]:
    """Numbers that are made twice, but not of the same."""
    x = number(2)
    if name == "rows":
        t = popxl.variable(np.array([[2.0]], np.float32))
        w = popxl.variable(np.ones((1, 3), np.float32))
        return [t @ w, t @ w]
    if name == "written":
        first = ops.maximum(x, popxl.constant(-0.5)) * 3.0
        ops.add_(first, first)
        return [first, ops.maximum(x, popxl.constant(-0.5)) * 3.0]
    if name == "views":
        t = var(1, 1)
        views = [t.reshape_((1,)), t.reshape_((1,))]
        ops.add_(views[0], views[0])
        return [*views, t]
    if name == "constants":
        return [x * c for c in (popxl.constant(0.0), popxl.constant(-0.0))]
    if name == "long constants":
        ones, twos = (
            popxl.constant(np.ones(3, np.float32)),
            popxl.constant(np.full(3, 2.0, np.float32)),
        )
        return [ops.sum(ones * x), ops.sum(twos * x)]
    if name == "two results":
        t = popxl.variable(np.array([1.0, 2.0], np.float32))
        return [part * 2.0 for _ in range(2) for part in ops.split(t, 2)]
    if name == "written twice":
        a = ops.add_(number(1), x)
        b = ops.add_(number(1), x)
        return [a, b, ops.add_(x, x), ops.add_(x, x)]
    if name == "axes":
        t = var(2, 3, 3)
        return [ops.sum(t.transpose((0, 2, 1))[0, 0]), ops.sum(t.transpose((0, 1, 2))[0, 0])]
    if name == "random":
        seed = popxl.variable(np.array([3, 4], np.uint32))
        t = number(1)
        return [ops.dropout(t, seed, 0.5), ops.dropout(t, seed, 0.5)]
    return [x * 2.0, x * 2.0]


def host(name: str) -> list[Tensor]:
    """Integers that live on the host, written and read."""
    i = popxl.variable(np.int32(1), popxl.int32)
    return [ops.add_(i, i), i * 2]


def every(function: Callable[[str], Sequence[Tensor]], *names: str) -> dict[str, Build]:
    """A program for each name."""
    label = function.__name__.replace("_", " ")
    return {f"{label}: {name}": lambda ir, name=name: function(name) for name in names}


CHANGED = (
    *MASKS, *DRAWS, "dropout", "dropped probs only", "seed is written",
    "probs as factors", "heads that do not fit", "fewer queries", "values of another width",
    "mask is a variable", "mask is written", "one batch of values", "another axis",
    "probs are seen", "probs are written", "result is written", "query is written",
    "another value", "other probs", "another axis of the gradient", "another scale",
    "scaled by a variable", "scaled by an array", "scaled from the left", "another key",
    "another query",
    "other factors", "factors of another order", "factors that are not permuted",
    "dy from the left", "only the query's", "only the key's", "not the value's",
    "not a product", "a gradient is seen at once",
)  # fmt: skip
UNDONE = ( "another is kept", "kept when it is written", "kept after it is written",
        "a condition that is made late", "a condition for each", "written then restored",
        "two conditions", "another is chosen", "chosen the other way", "one is not restored",
        "the restored is seen", "written in between", "read in between", "chosen before",
        "restored before", "condition written in between",
    "a condition that is made late of another",
)  # fmt: skip

NEAR_MISSES: dict[str, Build] = {
    "bias: of a stack": added_to_a_product((2, 3, 6, 6), (2, 3, 6, 6), (6,)),
    "bias: of a vector": added_to_a_product((1, 6), (6, 6), (1,)),
    "bias: two axes": added_to_a_product((6, 6), (6, 6), (1, 6)),
    "bias: a matrix": added_to_a_product((6, 6), (6, 6), (6, 6)),
    "bias: wider": added_to_a_product((6, 6), (6, 1), (6,)),
    "bias: a batch": added_to_a_product((6, 6), (6, 6), (2, 6, 6)),
    "bias: integers": of(bias_of_integers),
    "bias: typed": of(lambda: [typed(half(6, 6), half(6, 6, seed=1)) + var(6)]),
    "tiles: typed": of(
        lambda: [
            ops.matmul(
                var(512, 64, dtype=popxl.bfloat16),
                var(64, 64, dtype=popxl.bfloat16),
                output_type=popxl.float32,
            )
        ]
    ),
    "tiles: few columns": of(
        lambda: [var(512, 64, dtype=popxl.bfloat16) @ var(64, 8, dtype=popxl.bfloat16)]
    ),
    "scores: of one row": masked((2, 6, 6), (2, 6, 6), (6,)),
    "scores: of matrices": masked((6, 6), (6, 6), (6, 6)),
    "scores: wide mask": masked((2, 1, 6), (2, 6, 6), (6, 6)),
    "scores: mask of a row": masked((2, 6, 6), (2, 6, 6), (1, 6)),
    "scores: scaled by a variable": masked((2, 6, 6), (2, 6, 6), (6, 6), None),
    "scores: broadcast": masked((2, 6, 6), (1, 6, 6), (6, 6)),
    "scores: other ranks": masked((2, 6, 6), (6, 6), (6, 6)),
    "scores: scaled by an array": of(scaled_by_an_array),
    "scores: scaled by what is written": of(scaled_by_what_is_written),
    "scores: integers": of(
        lambda: [
            popxl.variable(np.arange(24).reshape(2, 3, 4), popxl.int64)
            @ popxl.variable(np.arange(40).reshape(2, 4, 5), popxl.int64)
            * popxl.constant(2**55 + 1, popxl.int64)
            + popxl.variable(np.arange(15).reshape(3, 5), popxl.int64)
        ]
    ),
    **{
        f"adam: seen twice, {name}": twice_by_reference(name)
        for name in ("a moment", "a number", "a part of a moment", "a weight that is restored")
    },
    "adam: a factor that is a moment": of(a_factor_that_is_a_moment),
    "attention: every key is hidden": hidden_by(np.full((4, 4), -1e4, np.float32)),
    "attention: no queries": hidden_by(np.zeros((0, 4), np.float32)),
    "scores: typed": of(
        lambda: [typed(half(2, 6, 6), half(2, 6, 6, seed=1)) * 0.5 + var(6, 6)]
    ),
    "transposed: of itself": of(lambda: [(lambda x: (x @ x).T)(var(6, 6))]),
    "transposed: of two": transposed((6, 6), (6, 6), (1, 0)),
    "transposed: of a factor that stays": of(
        lambda: [(var(6, 6).transpose((0, 1)) @ var(6, 6, seed=1)).T]
    ),
    "scores: times a matrix": of(
        lambda: [var(2, 6, 6) @ var(2, 6, 6, seed=1) * popxl.constant(normal(6, 6)) + var(6, 6)]
    ),
    "transposed: a stack": transposed((2, 6, 6), (2, 6, 6), (0, 2, 1)),
    "transposed: not at all": transposed((6, 6), (6, 6), (0, 1)),
    "transposed: of a vector": transposed((2, 6, 6), (6,), (1, 0)),
    "product: of stacks": of(
        lambda: [mean_(var(2, 6, 6), var(2, 6, 6, seed=1) @ var(2, 6, 6, seed=2))]
    ),
    "product: typed": of(lambda: [mean_(var(6, 6), typed(half(6, 6), half(6, 6, seed=1)))]),
    "sum: of a stack": of(
        lambda: [mean_(var(6), ops.broadcasting.sum_to(var(2, 6, 6), (6,)))]
    ),
    "sum: over columns": of(
        lambda: [mean_(var(6, 1), ops.broadcasting.sum_to(var(6, 6), (6, 1)))]
    ),
    "sum: over columns of a square": of(
        lambda: [mean_(var(6), ops.broadcasting.sum_to(var(6, 6), (6,), (1,)))]
    ),
    "sum: one row": of(lambda: [mean_(var(1, 6), ops.broadcasting.sum_to(var(6, 6), (1, 6)))]),
    **every(read_between, "total", "count"),
    **every(shared, "sum", "product"),
    "rows: another axis": of(lambda: rows(1, 6, 6)),
    "rows: three axes": of(lambda: rows(0, 6, 2, 3)),
    **every(
        fresh_twice, "one for both", "a counter that is a number", "a value that is the target",
        "a target that is its own value", "a counter from elsewhere", "a counter that is written",
    ),
    **{
        f"loop: {name}": in_a_loop(name)
        for name in (
            "counted first", "counted in a loop first", "a call", "added first", "its own value",
            "read through a view",
            "a number", "a new counter", "another mean first", "",
        )
    },
    **every(
        squares, "a part", "a view", "a part's view", "an axis", "kept axes", "float16", "written"
    ),
    **every(
        looked_up, "total from elsewhere", "counter from elsewhere", "counted", "a number counts",
        "rows of the table", "the other way", "subtracted", "an output", "narrow", "broadcast",
        "added to itself", "copied", "total is a part", "one row for all",
    ),
    **every(
        adam, "a moment of float64", "a weight of float64", "moments are one", "the step",
        "gradient is the weight", "a matrix",
        "wider", "wider by rows", "another beta1", "another beta2", "another gradient",
        "only the second moment", "only the first moment", "another weight", "no step",
        "a part of the weight", "a moment is seen", "another moment is next",
    ),
    **every(taken_adam, *UNDONE),
    **every(guarded_adam, *UNDONE),
    **every(
        loss, "another narrow type", "from integers", "wider", "multiplied", "from float32",
        "narrow logits are written", "wide logits are written", "a gradient that is multiplied",
        "cast to another type",
    ),
    **every(
        bounded_loss, "a copy", "a copy is written", "logits are written", "the sum is written",
        "bounded logits are written", "a gradient of others", "another gradient", "another bound",
        "a slope of others", "bounded logits are read", "a gradient that is read",
        "bounded logits are a gradient", "a second gradient",
    ),
    "bounded loss: a loop between": bounded_loss_with_a_loop,
    "bounded loss: bounded logits leave a loop": bounded_logits_leave_a_loop,
    **every(
        mean_loss, "what its reader reads is written", "a factor of it", "a gradient of others",
        "a gradient of others, all written", "two at once", "two gradients",
    ),
    "mean loss: a row": lambda ir: mean_loss_names_a_row(ir, False),
    "mean loss: a row in a loop": lambda ir: mean_loss_names_a_row(ir, True),
    **every(attention, *CHANGED),
    **every(gradient, *CHANGED),
    "attention: key first, dy a transpose": of(key_first),
    "attention: long factors": of(lambda: long_factors(True)),
    "attention: long mask is written": of(lambda: long_factors(False)),
    "attention: float64": of(wide_attention),
    "attention: two calls": two_calls,
    "attention: bounded scores": bounded_scores,
    "attention: probs leave a loop": probs_leave_a_loop,
    "numbers: remote": of(remote),
    **{
        f"by hand, result {'is' if is_read else 'not'} read: {name}": twisted(name, is_read)
        for is_read in (True, False)
        for name in (
            "probs are read", "mask is changed", "seed is changed", "query is changed",
            "a part of the query is changed", "another seed", "another p", "another scale",
            "another key", "probs as factors", "other probs", "other factors",
            "probs come dropped",
        )
    },
    **every(of_typed_products, "result", "gradient"),
    **every(of_rank_3, "no batch"),
    **every(
        packed, "another order of axes", "other rows", "other columns", "another order", "four",
        "two", "three of a split", "one is written", "a gradient is seen", "one from elsewhere", "another axis",
    ),
    **every(
        numbers, "rows", "written", "views", "constants", "long constants", "two results",
        "written twice", "axes", "random",
    ),
    **every(host, "written"),
}  # fmt: skip
