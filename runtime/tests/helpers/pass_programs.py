"""Random programs for passes: the pattern of each, perturbed so that it must or must not match."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import popxl
import popxl_addons as addons
from popxl import Tensor, ops
from popxl.extensions import attention as attend_op
from popxl.ops import var_updates
from popxl.ops.normalisation import softmax_grad
from popxl.ops.transformer import softcap, softcap_grad
from popxl_addons.ops.cross_entropy_sharded_loss import logsumexp_and_pick, logsumexp_and_pick_grad

SWAPPED, HEADS_THIRD = (0, 1, 3, 2), (0, 2, 1, 3)

# Patterns. Each is a function of its operands; between its ops it calls `between`, which may put
# other ops there and gives back what goes on.


class Between:
    """What a pattern calls between its ops: disturbs it as a scene's perturbations say."""

    def __init__(self, scene: "Scene", operands: Mapping[str, Tensor]):
        self.scene, self.operands = scene, operands
        self.place, self.seen = 0, []  # type: tuple[int, list[Tensor]]

    def __call__(self, *made: Tensor) -> Any:
        """Disturb this place; returns what was made, or views or copies of it."""
        results = list(made)
        for each in self.scene.perturbations:
            if each.place == self.place and each.kind in AT_PLACES:
                if each.kind in OF_OPERANDS:
                    names = sorted(n for n, t in self.operands.items() if t.dtype.is_floating_point)
                    if names:
                        OF_OPERANDS[each.kind](self, self.operands[names[each.which % len(names)]])
                elif results:
                    n = each.which % len(results)
                    results[n] = OF_RESULTS[each.kind](self, results[n])
        self.place += 1
        return results[0] if len(results) == 1 else tuple(results)


def doubled(t: Tensor) -> Tensor:
    return t * 2.0 if t.dtype.is_floating_point else t


def _used(between: Between, t: Tensor) -> Tensor:
    between.seen.append(doubled(t))
    return t


def _made_an_output(between: Between, t: Tensor) -> Tensor:
    between.seen.append(t)
    return t


def _written(between: Between, t: Tensor) -> Tensor:
    return var_updates.accumulate_(t, t, f=0.5) if t.dtype.is_floating_point else t


def _written_through_a_view(between: Between, t: Tensor) -> Tensor:
    if t.rank and t.dtype.is_floating_point:
        part = ops.slice_(t, 0, 1, axis=0)
        var_updates.accumulate_(part, part, f=0.5)
    return t


def _viewed(between: Between, t: Tensor) -> Tensor:
    return t.reshape_(t.shape)


def _permuted_twice(between: Between, t: Tensor) -> Tensor:
    axes = (*range(t.rank - 2), t.rank - 1, t.rank - 2)
    return t.transpose(axes).transpose(axes) if t.rank > 1 else t


def _copied(between: Between, t: Tensor) -> Tensor:
    return ops.identity(t)


def _cast_to_its_type(between: Between, t: Tensor) -> Tensor:
    return ops.cast(t, t.dtype)


def _operand_written(between: Between, t: Tensor) -> None:
    var_updates.accumulate_(t, t, f=0.5)


def _operand_written_in_a_loop(between: Between, t: Tensor) -> None:
    graph = popxl.gcg().ir.create_empty_graph("writes")
    with graph:
        x = popxl.graph_input(t.shape, t.dtype, "x", by_ref=True)
        var_updates.accumulate_(x, x, f=0.5)
    ops.repeat(graph, 2, t)


def _operand_read(between: Between, t: Tensor) -> None:
    between.seen.append(doubled(t))


OF_RESULTS: dict[str, Callable[[Between, Tensor], Tensor]] = {
    "another user": _used,
    "an output": _made_an_output,
    "written": _written,
    "written through a view": _written_through_a_view,
    "a view": _viewed,
    "permuted twice": _permuted_twice,
    "a copy": _copied,
    "a cast": _cast_to_its_type,
}
OF_OPERANDS: dict[str, Callable[[Between, Tensor], None]] = {
    "operand written": _operand_written,
    "operand written in a loop": _operand_written_in_a_loop,
    "operand read": _operand_read,
}
AT_PLACES = {**OF_RESULTS, **OF_OPERANDS}
OF_WHOLE = ("another type", "operand twice", "operand transposed")
KINDS = (*AT_PLACES, *OF_WHOLE)
WRAPS = ("main", "call", "two calls", "loop", "branch")

Outputs = list[Tensor]
Body = Callable[..., Outputs]


class Pattern(NamedTuple):
    """What a pass looks for."""

    body: Body
    data: dict[str, np.ndarray]
    free: tuple[str, ...] = ()
    """Operands that may be of any floating-point type."""
    float32: tuple[str, ...] = ()
    """Types that always are."""
    dtypes: tuple[popxl.dtype, ...] = (popxl.float32, popxl.bfloat16, popxl.float16)
    kept: tuple[str, ...] = ()
    """Operands that stay what they are: others in their place make no sense."""


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def cast_(between: Between, x: Tensor) -> Outputs:
    y = between(ops.cast(x, x.dtype))
    return [y * 2.0, y]


def transposed(between: Between, x: Tensor, w: Tensor) -> Outputs:
    left = between(x.T)
    return [between(left @ w).T]


def bias(between: Between, x: Tensor, w: Tensor, b: Tensor) -> Outputs:
    return [ops.add(*same_type(between(x @ w), b))]


def bias_first(between: Between, x: Tensor, w: Tensor, b: Tensor) -> Outputs:
    return [ops.add(*same_type(b, between(x @ w)))]


def same_type(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What an author writes where types differ."""
    return x, y if y.dtype is x.dtype else ops.cast(y, x.dtype)


def scores(between: Between, q: Tensor, k: Tensor, mask: Tensor) -> Outputs:
    y = between(q @ k)
    return [ops.add(*same_type(between(y * 0.125), mask))]


def tiles(between: Between, x: Tensor, w: Tensor) -> Outputs:
    return [between(between(x * 1.5) @ w)]


def accumulated_product(
    between: Between, t: Tensor, x: Tensor, dy: Tensor, count: Tensor
) -> Outputs:
    g = between(between(x.T) @ dy)
    return [between(var_updates.accumulate_mean_(t, g, count))]


def accumulated_rows(
    between: Between, t: Tensor, dy: Tensor, ids: Tensor, count: Tensor
) -> Outputs:
    g = between(ops.indexing.gather_grad(dy, ids, t.shape, 0, True))
    return [between(var_updates.accumulate_mean_(t, g, count))]


def accumulated_sum(between: Between, t: Tensor, dy: Tensor, count: Tensor) -> Outputs:
    g = between(ops.broadcasting.sum_to(dy, t.shape))
    return [between(var_updates.accumulate_mean_(t, g, count))]


def norm(between: Between, x: Tensor, dy: Tensor, count: Tensor, t: Tensor) -> Outputs:
    (y,) = accumulated_product(between, t, x, dy, count)
    return [ops.sumsquare(y), y]


def from_zeros(between: Between, x: Tensor, dy: Tensor) -> Outputs:
    t = between(ops.init((6, 6), popxl.float32, "total"))
    count = between(ops.init((), popxl.float32, "count"))
    for n in range(2):
        var_updates.accumulate_mean_(t, between(x.T @ dy), count)
        ops.add_(count, popxl.constant(1.0))
        between(t, count)
    return [t]


def from_zeros_in_a_loop(between: Between, x: Tensor, dy: Tensor) -> Outputs:
    t = ops.init((6, 6), popxl.float32, "total")
    count = ops.init((), popxl.float32, "count")
    between(t, count)
    graph = popxl.gcg().ir.create_empty_graph("mean")
    with graph:
        of = (popxl.graph_input(v.shape, v.dtype, by_ref=True) for v in (t, count, x, dy))
        total, n, left, right = of
        var_updates.accumulate_mean_(total, ops.cast(left.T @ right, popxl.float32), n)
        ops.add_(n, popxl.constant(1.0))
    ops.repeat(graph, 2, t, count, x, dy)
    return [t]


def embedding(between: Between, table: Tensor, dy: Tensor, ids: Tensor) -> Outputs:
    total = between(ops.init(table.shape, popxl.float32, "total"))
    count = between(ops.init((), popxl.float32, "count"))
    rows = between(ops.indexing.gather_grad(dy, ids, table.shape, 0, True))
    var_updates.accumulate_mean_(total, rows, count)
    between(total, count)
    return [ops.add_(table, total)]


def numbers(between: Between, x: Tensor, y: Tensor) -> Outputs:
    def clipped(t: Tensor, least: float) -> Tensor:
        return ops.maximum(t, popxl.constant(least, t.dtype)) * 3.0

    first = between(clipped(x, -0.5))
    second = between(clipped(x, -0.5))
    return [first + second, between(clipped(y, -0.5)), clipped(x, 0.5)]


def adam(
    between: Between, var: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Tensor
) -> Outputs:
    g = between(ops.cast(grad, popxl.float32) * 0.5)
    var_updates.accumulate_moving_average_(m, g, f=0.9)
    between()
    var_updates.accumulate_moving_average_square_(v, g, f=0.99)
    between()
    u = var_updates.adam_updater(
        m, v, weight=var, time_step=step, weight_decay=0.1, beta1=0.9, beta2=0.99, epsilon=1e-5
    )
    return [between(ops.scaled_add_(var, between(u), b=-0.01))]


def guarded_adam(
    between: Between,
    var: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    condition: Tensor,
) -> Outputs:
    kept = between(*(ops.identity(t) for t in (var, m, v)))
    adam(lambda *made: made[0] if made else None, var, grad, m, v, step)  # type: ignore[arg-type]
    between()
    for t, before in zip((var, m, v), kept):
        var_updates.copy_var_update_(t, between(ops.where(condition, t, before)))
        between()
    return [var]


def loss(between: Between, x: Tensor, labels: Tensor) -> Outputs:
    y = between(x * 2.0)
    wide = between(ops.cast(y, popxl.float32))
    total, picked = between(*logsumexp_and_pick(wide, labels))
    gradient = between(logsumexp_and_pick_grad(total, picked, total, wide, labels))
    return [total, picked, ops.cast(gradient, x.dtype)]


def bounded_loss(between: Between, x: Tensor, labels: Tensor) -> Outputs:
    y = between(x * 2.0)
    bounded = between(softcap(between(ops.cast(y, popxl.float32)), 2.0))
    total, picked = between(*logsumexp_and_pick(bounded, labels))
    gradient = between(logsumexp_and_pick_grad(total, picked, total, bounded, labels))
    slope = between(softcap_grad(gradient, bounded, 2.0))
    return [total, picked, ops.cast(slope, x.dtype)]


def mean_loss(between: Between, x: Tensor, labels: Tensor) -> Outputs:
    logits = between(ops.cast(between(x * 2.0), popxl.float32))
    total, picked = between(*logsumexp_and_pick(logits, labels))
    loss = between(total - picked)
    factor = between(popxl.constant(np.full(6, 0.25, np.float32)) * 2.0)
    gradient = between(logsumexp_and_pick_grad(factor, -factor, total, logits, labels))
    return [ops.mean(loss), ops.cast(gradient, x.dtype)]


CAUSAL = np.triu(np.full((6, 6), -np.inf, np.float32), 1)


def _attend(
    between: Between, q: Tensor, k: Tensor, v: Tensor, seed: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(probs, what dropout leaves of them, result)."""
    s = between(between(q @ k.transpose(SWAPPED)) * 0.25)
    probs = between(ops.softmax(s + popxl.constant(CAUSAL, s.dtype), axis=-1))
    dropped = between(ops.dropout(probs, seed, 0.3)) if seed is not None else probs
    return probs, dropped, dropped @ v


def _gradients(
    between: Between, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, probs: Tensor, dropped: Tensor,
    seed: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients as autodiff builds them: of query, transposed key, and value."""
    d = between(dy @ v.transpose(SWAPPED))
    if seed is not None:
        d = between(ops.dropout(d, seed, 0.3))
    probs, d = same_type(probs, d)
    d = between(between(softmax_grad(d, probs, -1)) * 0.25)
    d_v = dropped.transpose(SWAPPED) @ dy
    return d @ k, q.transpose(SWAPPED) @ d, d_v


def attention(between: Between, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    return [_attend(between, q, k, v, None)[-1]]


def attention_dropping(between: Between, q: Tensor, k: Tensor, v: Tensor, seed: Tensor) -> Outputs:
    return [_attend(between, q, k, v, seed)[-1]]


def attention_op(between: Between, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    return [between(attend_op(q, k, v, popxl.constant(CAUSAL, q.dtype), scale=0.25))]


def attention_op_gradients(
    between: Between, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, seed: Tensor, at: Tensor
) -> Outputs:
    """All that hides keys, and gradients in a graph that computes probabilities again."""

    def attend(q: Tensor, k: Tensor, v: Tensor, seed: Tensor, at: Tensor) -> Tensor:
        hiding: Any = {"causal": True, "window": 3, "positions": at, "softcap": 1.5}
        return attend_op(q, k, v, seed_tensor=seed, p=0.3, **hiding)

    graph = popxl.gcg().ir.create_graph(attend, q, k, v, seed, at)
    grad = addons.recompute_graph(
        addons.autodiff(addons.GraphWithNamedArgs(graph), grads_required=graph.inputs[:3])
    )
    call = ops.call_with_info(graph, q, k, v, seed, at)
    given = grad.grad_graph_info.inputs_dict(call)
    return [call.outputs[0], *between(*ops.call(grad.graph, dy, inputs_dict=given))]


def _with_gradients(
    between: Between, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, seed: Any, recomputes: bool
) -> Outputs:
    """A graph of the result, and one of the gradients."""
    given = [t for t in (q, k, v, seed) if t is not None]
    forward = popxl.gcg().ir.create_empty_graph("attend")
    with forward:
        inner = [popxl.graph_input(t.shape, t.dtype) for t in given]
        of = (*inner, None)[:4]
        for t in _attend(lambda *made: made[0], *of):  # type: ignore[arg-type]
            popxl.graph_output(t)
    probs, dropped, y = ops.call(forward, *given)
    if recomputes:
        probs, dropped = ops.call(forward, *given)[:2]
    probs, dropped = between(probs, dropped)
    backward = popxl.gcg().ir.create_empty_graph("gradients")
    operands = [dy, q, k, v, probs, dropped, *given[3:]]
    with backward:
        inner = [popxl.graph_input(t.shape, t.dtype) for t in operands]
        of = (*inner, None)[:7]
        for t in _gradients(lambda *made: made[0], *of):  # type: ignore[arg-type]
            popxl.graph_output(t)
    return [y, *between(*ops.call(backward, *operands))]


def gradients(between: Between, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Outputs:
    probs, dropped, y = _attend(between, q, k, v, None)
    return [y, *_gradients(between, dy, q, k, v, probs, dropped, None)]


def gradients_dropping(
    between: Between, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, seed: Tensor
) -> Outputs:
    return _with_gradients(between, q, k, v, dy, seed, False)


def gradients_recomputing(between: Between, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Outputs:
    return _with_gradients(between, q, k, v, dy, None, True)


def gradients_dropping_recomputing(
    between: Between, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, seed: Tensor
) -> Outputs:
    return _with_gradients(between, q, k, v, dy, seed, True)


def packed(between: Between, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Outputs:
    y, d_q, d_kt, d_v = _with_gradients(between, q, k, v, dy, None, False)
    parts = (d_q, between(d_kt.transpose(SWAPPED)), d_v)
    rows = [between(t.transpose(HEADS_THIRD)).reshape((12, 16)) for t in parts]
    return [y, ops.concat(rows, axis=1)]


X, Y, Z = (normal(6, 6, seed=i) for i in range(3))
ONE, TWO = np.float32(1), np.float32(2)
HEADS = {n: normal(2, 2, 6, 8, seed=i) for i, n in enumerate(("q", "k", "v"))}
LEARNING = {**HEADS, "dy": normal(2, 2, 6, 8, seed=5)}
SEED = {"seed": np.array([3, 4], np.uint32)}
AT = np.array([0, 1, 9, 0, 1, 2, *range(6)], np.int32).reshape(2, 1, 6, 1)
IDS = {"ids": np.array([[1, 0], [3, 1], [5, -1]], np.int32)}
ADAM = {"var": X, "grad": Y, "m": Z, "v": normal(6, 6, seed=4) ** 2, "step": np.float32(3)}
MEAN = {"t": X, "x": Y, "dy": Z, "count": TWO}
MOMENTS = ("v", "step", "m")
PATTERNS: dict[str, Pattern] = {
    "cast": Pattern(cast_, {"x": X}),
    "transposed": Pattern(transposed, {"x": X, "w": Y}, ("x", "w")),
    "bias": Pattern(bias, {"x": X, "w": Y, "b": normal(6)}, ("x", "w", "b")),
    "bias first": Pattern(bias_first, {"x": X, "w": Y, "b": normal(6)}, ("x", "w", "b")),
    "scores": Pattern(
        scores,
        {"q": normal(2, 3, 6, 6), "k": normal(2, 3, 6, 6, seed=1), "mask": X},
        ("q", "k", "mask"),
    ),
    "tiles": Pattern(
        tiles, {"x": normal(512, 64), "w": normal(64, 64)}, ("w",), dtypes=(popxl.bfloat16,)
    ),
    "accumulated product": Pattern(accumulated_product, MEAN, ("t", "x", "dy"), ("count",)),
    "accumulated rows": Pattern(
        accumulated_rows,
        {"t": X, "dy": normal(3, 2, 6), **IDS, "count": TWO},
        ("t", "dy"),
        ("count",),
    ),
    "accumulated sum": Pattern(
        accumulated_sum, {"t": normal(6), "dy": Y, "count": TWO}, ("t", "dy"), ("count",)
    ),
    "norm": Pattern(norm, MEAN, ("x", "dy"), ("t", "count")),
    "from zeros": Pattern(from_zeros, {"x": X, "dy": Y}, ("x", "dy")),
    "from zeros in a loop": Pattern(from_zeros_in_a_loop, {"x": X, "dy": Y}, ("x", "dy")),
    "embedding": Pattern(
        embedding, {"table": X, "dy": normal(3, 2, 6), **IDS}, ("dy",), ("table",)
    ),
    "numbers": Pattern(numbers, {"x": ONE, "y": TWO}, ("x", "y")),
    "adam": Pattern(adam, ADAM, ("var", "grad"), MOMENTS, kept=("v", "step")),
    "guarded adam": Pattern(
        guarded_adam, {**ADAM, "condition": np.array(True)}, ("grad",), MOMENTS, kept=("v", "step")
    ),
    "skipped adam": Pattern(
        guarded_adam, {**ADAM, "condition": np.array(False)}, ("grad",), MOMENTS, kept=("v", "step")
    ),
    "loss": Pattern(loss, {"x": normal(6, 11), "labels": np.array([0, 10, 3, 3, 7, 1], np.int32)}),
    "bounded loss": Pattern(
        bounded_loss, {"x": normal(6, 11), "labels": np.array([0, 10, 3, 3, 7, 1], np.int32)}
    ),
    "mean loss": Pattern(
        mean_loss, {"x": normal(6, 11), "labels": np.array([0, 10, 3, 3, 7, 1], np.int32)}
    ),
    "attention": Pattern(attention, HEADS, ("q", "k", "v")),
    "attention, dropping": Pattern(attention_dropping, {**HEADS, **SEED}, ("q", "k", "v")),
    "attention op": Pattern(attention_op, HEADS),
    "attention op, gradients": Pattern(attention_op_gradients, {**LEARNING, **SEED, "at": AT}),
    "gradients": Pattern(gradients, LEARNING, ("q", "k", "v", "dy")),
    "gradients, dropping": Pattern(gradients_dropping, {**LEARNING, **SEED}, tuple(LEARNING)),
    "gradients, recomputing": Pattern(gradients_recomputing, LEARNING, tuple(LEARNING)),
    "gradients, both": Pattern(
        gradients_dropping_recomputing, {**LEARNING, **SEED}, tuple(LEARNING)
    ),
    "packed gradients": Pattern(packed, LEARNING, tuple(LEARNING)),
}
FLOATS = (popxl.float32, popxl.float16, popxl.bfloat16)


# Scenes


@dataclass(frozen=True)
class Perturbation:
    """Something that is not as the pattern says."""

    kind: str
    place: int = 0
    which: int = 0
    other: int = 0


@dataclass(frozen=True)
class Scene:
    """A pattern with its perturbations, and where it stands."""

    name: str
    dtype: str
    wrap: str
    perturbations: tuple[Perturbation, ...] = ()

    @property
    def pattern(self) -> Pattern:
        """The pattern."""
        return PATTERNS[self.name]


Program = tuple[Scene, ...]
Build = Callable[[popxl.Ir], Sequence[Tensor]]


@cache
def places_of(name: str) -> int:
    """How many places between the ops of a pattern there are."""
    ir = popxl.Ir()
    with ir.main_graph:
        scene = Scene(name, "float32", "main")
        between = Between(scene, variables_of(scene, ""))
        scene.pattern.body(between, **between.operands)
    return between.place


def random_program(seed: int) -> Program:
    """One or two scenes; the first ones show every pattern as it is, in each wrap and type."""
    rng = random.Random(seed)
    names = sorted(PATTERNS)
    first = names[seed % len(names)]
    chosen = [first] if seed < len(names) else [first, *rng.sample(names, rng.randrange(2))]
    return tuple(random_scene(name, rng, rng.choice((0, 1, 1, 2, 3)) if seed >= len(names) else 0)
                 for name in chosen)  # fmt: skip


def random_scene(name: str, rng: random.Random, perturbations: int) -> Scene:
    """A pattern with some perturbations."""
    return Scene(
        name,
        rng.choice(PATTERNS[name].dtypes).name,
        rng.choice(WRAPS),
        tuple(
            Perturbation(
                rng.choice((*KINDS, *OF_WHOLE)),  # those of the whole are few
                rng.randrange(places_of(name)),
                rng.randrange(12),
                rng.randrange(12),
            )
            for _ in range(perturbations)
        ),
    )


def shrunk(program: Program) -> Iterator[Program]:
    """Smaller programs: without a scene, without a perturbation, in the main graph."""
    for i, scene in enumerate(program):
        before, after = program[:i], program[i + 1 :]
        if len(program) > 1:
            yield (*before, *after)
        for n in range(len(scene.perturbations)):
            rest = scene.perturbations[:n] + scene.perturbations[n + 1 :]
            yield (*before, replace(scene, perturbations=rest), *after)
        if scene.wrap != "main":
            yield (*before, replace(scene, wrap="main"), *after)


# Programs


def build(program: Program) -> tuple[popxl.Ir, list[popxl.DeviceToHostStream]]:
    """(a program whose main graph runs the scenes, streams of all that they make)."""
    return built_by(
        lambda ir: [t for n, scene in enumerate(program) for t in _add_scene(ir, scene, f"{n}.")]
    )


def built_by(function: Build) -> tuple[popxl.Ir, list[popxl.DeviceToHostStream]]:
    """(a program whose main graph a function builds, streams of all that it returns)."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        results = function(ir)
        streams = [popxl.d2h_stream(t.shape, t.dtype) for t in results]
        for stream, t in zip(streams, results):
            ops.host_store(stream, t)
    return ir, streams


def variables_of(scene: Scene, prefix: str) -> dict[str, Tensor]:
    """The operands of a scene: variables, or views of such."""
    pattern, types = scene.pattern, types_of(scene)
    permuted = {
        sorted(types)[p.which % len(types)]
        for p in scene.perturbations
        if p.kind == "operand transposed"
    }
    operands: dict[str, Tensor] = {}
    for name, a in pattern.data.items():
        is_permuted = name in permuted and np.ndim(a) > 1
        given = np.ascontiguousarray(np.swapaxes(a, -1, -2)) if is_permuted else a
        v = popxl.variable(given, types[name], name=prefix + name)
        axes = (*range(v.rank - 2), v.rank - 1, v.rank - 2)
        operands[name] = v.transpose_(axes) if is_permuted else v
    for p in scene.perturbations:
        if p.kind == "operand twice":
            _used_twice(operands, p, pattern.kept)
    return operands


def types_of(scene: Scene) -> dict[str, popxl.dtype]:
    """The types of a scene's operands."""
    pattern, types = scene.pattern, {}
    for name, a in pattern.data.items():
        is_float = np.asarray(a).dtype == np.float32
        of_scene = popxl.float32 if name in pattern.float32 else getattr(popxl, scene.dtype)
        types[name] = of_scene if is_float else popxl.dtype.as_dtype(np.asarray(a).dtype)
    for p in scene.perturbations:
        if p.kind == "another type" and pattern.free:
            types[pattern.free[p.which % len(pattern.free)]] = FLOATS[p.other % len(FLOATS)]
    return types


def _used_twice(operands: dict[str, Tensor], p: Perturbation, kept: Sequence[str]) -> None:
    pairs = [
        (one, other)
        for one, t in operands.items()
        for other, s in operands.items()
        if one != other and one not in kept and t.spec == s.spec
    ]
    if pairs:
        one, other = pairs[p.which % len(pairs)]
        operands[one] = operands[other]


def _add_scene(ir: popxl.Ir, scene: Scene, prefix: str) -> Sequence[Tensor]:
    """Add a scene to the main graph; returns what it makes."""
    operands = variables_of(scene, prefix)
    if scene.wrap == "main":
        return _body(scene, operands)
    distinct = {id(t): t for t in operands.values()}
    graph = ir.create_empty_graph("scene")
    with graph, popxl.in_sequence():
        inputs = {
            key: popxl.graph_input(t.shape, t.dtype, by_ref=scene.wrap != "branch")
            for key, t in distinct.items()
        }
        if scene.wrap == "branch":  # which may not write what it is given
            inputs = {key: ops.identity(t) for key, t in inputs.items()}
        within = {name: inputs[id(t)] for name, t in operands.items()}
        for t in dict.fromkeys(_body(scene, within)):
            popxl.graph_output(t)
    given = list(distinct.values())
    if scene.wrap == "loop":
        return _repeated(ir, graph, given)
    if scene.wrap == "branch":
        return _chosen(ir, graph, given)
    calls = 2 if scene.wrap == "two calls" else 1
    return [t for _ in range(calls) for t in ops.call(graph, *given)]


def _body(scene: Scene, operands: Mapping[str, Tensor]) -> list[Tensor]:
    between = Between(scene, operands)
    return [*scene.pattern.body(between, **operands), *between.seen]


def _repeated(ir: popxl.Ir, graph: popxl.Graph, given: Sequence[Tensor]) -> Sequence[Tensor]:
    """The outputs of the second of two iterations."""
    body = ir.create_empty_graph("body")
    with body, popxl.in_sequence():
        for t in graph.outputs:
            popxl.graph_input(t.shape, t.dtype)
        inputs = [popxl.graph_input(t.shape, t.dtype, by_ref=True) for t in given]
        for t in ops.call(graph, *inputs):
            popxl.graph_output(t)
    return ops.repeat(body, 2, *(_zeros(t) for t in graph.outputs), *given)


def _chosen(ir: popxl.Ir, graph: popxl.Graph, given: Sequence[Tensor]) -> Sequence[Tensor]:
    """The outputs of a branch that is taken."""
    other = ir.create_empty_graph("other")
    with other:
        for t in graph.outputs:
            popxl.graph_output(_zeros(t))
    return ops.conditional(popxl.variable(True, popxl.bool), graph, other, list(given), [])


def _zeros(t: Tensor) -> Tensor:
    return popxl.constant(np.zeros(t.shape, np.float32), t.dtype)
