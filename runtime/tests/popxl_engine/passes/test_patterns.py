"""Fusion: each rule finds its pattern, gives the interpreter's numbers, and leaves alone what it
must not touch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.fused_programs import both_types, check, fused_steps, normal, observe
from helpers.quick import cases
from helpers.tolerance import assert_close
from popxl import ops
from popxl.ops import var_updates
from popxl.ops.arithmetic import scale
from popxl.tensor import Tensor
from popxl_addons.layers import Embedding, Linear
from popxl_addons.ops.cross_entropy_sharded_loss import logsumexp_and_pick, logsumexp_and_pick_grad
from popxl_addons.optimizers import AdamOptimizerStep
from popxl_engine import compiler
from popxl_engine.passes import LEGALIZATION, OPTIMIZATIONS
from popxl_engine.planner.costs import CostCounter

PER_GRAPH = [each for each in OPTIMIZATIONS if each.per_graph]


# Patterns. Each is a function of its operands that calls ``between(n, *intermediates)`` where other
# ops may come.

Between = Callable[..., None]


def bias(between: Between, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x @ w
    between(y)
    return y + b


def bias_first(between: Between, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x @ w
    between(y)
    return b + y


def scores(between: Between, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    y = q @ k
    between(y)
    z = y * 0.125
    between(z)
    return z + mask


def transposed_product(between: Between, x: Tensor, w: Tensor) -> Tensor:
    y = x.T @ w
    between(y)
    return y.T


def accumulated_product(
    between: Between, accumulator: Tensor, x: Tensor, dy: Tensor, count: Tensor
) -> Tensor:
    g = x.T @ dy
    between(g)
    return var_updates.accumulate_mean_(accumulator, g, count)


def accumulated_rows(
    between: Between, accumulator: Tensor, dy: Tensor, ids: Tensor, count: Tensor
) -> Tensor:
    g = ops.indexing.gather_grad(dy, ids, accumulator.shape, 0, True)
    between(g)
    return var_updates.accumulate_mean_(accumulator, g, count)


def accumulated_sum(between: Between, accumulator: Tensor, dy: Tensor, count: Tensor) -> Tensor:
    g = ops.broadcasting.sum_to(dy, accumulator.shape)
    between(g)
    return var_updates.accumulate_mean_(accumulator, g, count)


def adam(between: Between, var: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: Tensor) -> Tensor:
    g = ops.cast(grad, popxl.float32) * 0.5
    between(g)
    var_updates.accumulate_moving_average_(m, g, f=0.9)
    between()
    var_updates.accumulate_moving_average_square_(v, g, f=0.99)
    between()
    u = var_updates.adam_updater(
        m, v, weight=var, time_step=step, weight_decay=0.1, beta1=0.9, beta2=0.99, epsilon=1e-5
    )
    between(u)
    return ops.scaled_add_(var, u, b=-0.01)


def guarded_adam(
    between: Between,
    var: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    condition: Tensor,
) -> Tensor:
    kept = [ops.identity(t) for t in (var, m, v)]
    between(*kept)
    result = adam(lambda *made: None, var, grad, m, v, step)
    between()
    for t, before in zip((var, m, v), kept):
        chosen = ops.where(condition, t, before)
        between(chosen)
        var_updates.copy_var_update_(t, chosen)
        between()
    return result


FLOAT32 = {"count", "m", "v", "step"}
IDS = np.array([[1, 0], [3, 1], [7, -1]], np.int32)
PATTERNS: dict[str, tuple[Callable[..., Tensor], str, dict[str, np.ndarray]]] = {
    # name: (pattern, fused step, operands)
    "bias": (bias, "gemm_bias", {"x": normal(4, 6), "w": normal(6, 5), "b": normal(5)}),
    "bias_first": (bias_first, "gemm_bias", {"x": normal(4, 6), "w": normal(6, 5), "b": normal(5)}),
    "scores": (
        scores,
        "masked_scores",
        {"q": normal(2, 3, 4, 8), "k": normal(2, 3, 8, 4), "mask": normal(4, 4)},
    ),
    "accumulated_product": (
        accumulated_product,
        "accumulate_gemm",
        {
            "accumulator": normal(6, 6),
            "x": normal(6, 6, seed=1),
            "dy": normal(6, 6, seed=2),
            "count": np.float32(2),
        },
    ),
    "accumulated_rows": (
        accumulated_rows,
        "accumulate_gather_grad",
        {"accumulator": normal(7, 4), "dy": normal(3, 2, 4), "ids": IDS, "count": np.float32(2)},
    ),
    "accumulated_sum": (
        accumulated_sum,
        "accumulate_column_sum",
        {"accumulator": normal(5), "dy": normal(9, 5), "count": np.float32(2)},
    ),
    "adam": (
        adam,
        "adamw",
        {
            "var": normal(5, 7),
            "grad": normal(5, 7, seed=1),
            "m": normal(5, 7, seed=2),
            "v": normal(5, 7, seed=3) ** 2,
            "step": np.float32(3),
        },
    ),
}
GUARDED = {
    taken: (
        guarded_adam,
        "adamw_where",
        {**PATTERNS["adam"][2], "condition": np.array(taken == "taken")},
    )
    for taken in ("taken", "skipped")
}
PATTERNS.update({f"adam, {taken}": pattern for taken, pattern in GUARDED.items()})
patterns = pytest.mark.parametrize("name", sorted(PATTERNS))
patterns_of_few_places = pytest.mark.parametrize(
    "name", cases(sorted(PATTERNS), lambda name: not name.startswith("adam"))
)


def element_type(name: str, value: np.ndarray, dtype: popxl.dtype) -> popxl.dtype:
    """Counts and moments are float32 whatever the weights are."""
    if value.dtype in (np.int32, np.bool_):
        return popxl.dtype.as_dtype(value.dtype)
    return popxl.float32 if name in FLOAT32 else dtype


def program(
    name: str, dtype: popxl.dtype, disturb: Callable[..., list[Tensor]], among_outputs: bool = False
) -> Any:
    """A pattern in a called graph whose operands are variables by reference.

    ``disturb(place, operands, intermediates)`` is called between the pattern's ops; what it returns
    are more outputs.
    """
    pattern, _, data = PATTERNS[name]

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        variables = {
            n: popxl.variable(a, element_type(n, a, dtype), name=n) for n, a in data.items()
        }
        graph = ir.create_empty_graph("pattern")
        with graph:
            inputs = {
                n: popxl.graph_input(v.shape, v.dtype, n, by_ref=True) for n, v in variables.items()
            }
            more: list[Tensor] = []
            places = iter(range(100))
            result = pattern(
                lambda *made: more.extend(disturb(next(places), inputs, made)), **inputs
            )
            popxl.graph_output(result + 0.0)
            for t in more:
                popxl.graph_output(t)
        return ops.call(graph, *variables.values())

    return build


@both_types
@patterns
def test_each_rule_finds_its_pattern_and_gives_the_interpreters_numbers(
    name: str, dtype: popxl.dtype
) -> None:
    assert check(program(name, dtype, lambda *_: []), dtype, runs=3, scale=4) == {PATTERNS[name][1]}


@patterns
def test_a_fused_op_counts_as_the_work_of_what_it_stands_for(name: str) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        for t in program(name, popxl.float32, lambda *_: [])(ir):
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)
    blocks = (
        compiler.compile(ir, passes=passes).block
        for passes in ([*PER_GRAPH, *LEGALIZATION], LEGALIZATION)
    )
    fused, plain = (sum(CostCounter(b).count(b.instrs).flops.values()) for b in blocks)
    assert fused == plain > 0


def places_of(name: str) -> int:
    """How many places between the ops of a pattern there are."""
    count = [0]

    def note(place: int, inputs: Any, made: Any) -> list[Tensor]:
        count[0] = place + 1
        return []

    observe(program(name, popxl.float32, note), False)
    return count[0]


@pytest.mark.quick_every(3)
@patterns
@pytest.mark.parametrize("use", ["used twice", "an output"])
def test_a_value_that_others_see_is_not_fused_away(name: str, use: str) -> None:
    for chosen in range(places_of(name)):
        seen: list[Tensor] = []

        def disturb(place: int, inputs: Any, made: Any) -> list[Tensor]:
            if place != chosen:
                return []
            seen.extend(made)
            return [t * 2.0 if use == "used twice" else t for t in made]

        found = check(program(name, popxl.float32, disturb), popxl.float32, runs=2, scale=4)
        is_update = name == "adam" and chosen == 0 or name.startswith("adam,")
        assert not seen or found == ({"adamw"} if is_update else set())


@pytest.mark.sampled(2)
@patterns_of_few_places
def test_an_operand_that_is_written_in_between_is_read_before(name: str) -> None:
    _, step, data = PATTERNS[name]
    for chosen in range(places_of(name)):
        for operand in data:
            if data[operand].dtype != np.float32:
                continue

            def disturb(place: int, inputs: Any, made: Any) -> list[Tensor]:
                if place == chosen:
                    var_updates.accumulate_(inputs[operand], inputs[operand], f=0.5)
                return []

            check(program(name, popxl.float32, disturb), popxl.float32, runs=2, scale=4)


@pytest.mark.sampled(2)
@patterns_of_few_places
def test_an_operand_that_is_read_in_between_has_the_value_of_that_place(name: str) -> None:
    for chosen in range(places_of(name)):
        for operand in PATTERNS[name][2]:

            def disturb(place: int, inputs: Any, made: Any) -> list[Tensor]:
                return [ops.cast(inputs[operand], popxl.float32) * 2.0] if place == chosen else []

            check(program(name, popxl.float32, disturb), popxl.float32, runs=2, scale=4)


@pytest.mark.parametrize("weight", [popxl.float32, popxl.bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize(
    "m_type, v_type",
    [
        (popxl.bfloat16, popxl.bfloat16),
        (popxl.float16, popxl.float32),
        (popxl.float32, popxl.bfloat16),
    ],
    ids=lambda d: d.name,
)
def test_adam_is_one_step_whatever_the_types_of_its_moments(
    m_type: popxl.dtype, v_type: popxl.dtype, weight: popxl.dtype
) -> None:
    types = {"m": m_type, "v": v_type, "step": popxl.float32}

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        data = PATTERNS["adam"][2]
        variables = {n: popxl.variable(a, types.get(n, weight), name=n) for n, a in data.items()}
        return [adam(lambda *_: None, **variables) + 0.0]

    assert check(build, popxl.bfloat16, runs=3, scale=4) == {"adamw"}


@pytest.mark.parametrize("name", ["accumulated_product", "adam"])
def test_operands_may_be_the_very_tensor_that_is_updated(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("popxl_engine.kernels.accumulate.ROWS_AT_A_TIME", 2)
    pattern, step, data = PATTERNS[name]
    target = next(iter(data))
    for operand in list(data)[1:]:
        if data[operand].shape != data[target].shape:
            continue

        def build(ir: popxl.Ir) -> Sequence[Tensor]:
            variables = {n: popxl.variable(a, popxl.float32, name=n) for n, a in data.items()}
            return [pattern(lambda *_: None, **{**variables, operand: variables[target]}) + 0.0]

        check(build, popxl.float32, runs=2, scale=4)


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_operands_may_be_transposed_views(name: str) -> None:
    pattern, _, data = PATTERNS[name]

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        operands = {}
        for n, a in data.items():
            order = (
                (*range(a.ndim - 2), a.ndim - 1, a.ndim - 2) if a.ndim > 1 else tuple(range(a.ndim))
            )
            v = popxl.variable(
                np.ascontiguousarray(a.transpose(order)), element_type(n, a, popxl.float32), name=n
            )
            operands[n] = v.transpose_(order) if a.ndim > 1 else v
        return [pattern(lambda *_: None, **operands) + 0.0]

    check(build, popxl.float32, runs=2, scale=4)


def test_scores_that_are_scaled_by_a_complex_number_are_not_fused() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        q, k, mask = (
            popxl.variable((normal(*s) * (1 + 2j)).astype(np.complex64), popxl.complex64)
            for s in ((2, 3, 4), (2, 4, 3), (3, 3))
        )
        return [q @ k * popxl.constant(1 + 2j, popxl.complex64) + mask]

    expected, _ = observe(build, True)
    found, engine = observe(build, False)
    for name, (value, _) in expected.items():
        np.testing.assert_array_equal(found[name][0], value)
    assert fused_steps(engine) == set()


# Steps that do nothing


@both_types
def test_a_transposed_product_is_made_in_the_order_of_its_use(dtype: popxl.dtype) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        x, w = popxl.variable(normal(4, 6), dtype), popxl.variable(normal(4, 5), dtype)
        return [transposed_product(lambda *_: None, x, w)]

    check(build, dtype)
    text = observe(build, False)[1].program.source.text()
    assert text.index("k_transpose") < text.index("k_matmul") and text.count("k_transpose") == 1


def test_a_cast_to_the_same_type_copies_nothing_unless_its_result_is_written() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        x = popxl.variable(normal(4))
        y, z = ops.cast(x, popxl.float32), ops.cast(x, popxl.float32)
        ops.add_(z, z)
        return [x, y, z, ops.cast(x, popxl.float16)]

    check(build, popxl.float32, runs=2)
    assert observe(build, False)[1].program.source.text().count("k_cast") == 1


# Real programs


def training(dtype: popxl.dtype) -> Callable[[popxl.Ir], Sequence[Tensor]]:
    """Two micro-batches and an update of every variable, as `popxl_addons` builds them."""

    class Net(addons.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = Embedding(dtype, 11, 8)
            self.query, self.key, self.value, self.head = (Linear(n) for n in (8, 8, 8, 11))

        def build(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embedding(ids)
            q, k, v = (layer(x).reshape((2, 3, 8)) for layer in (self.query, self.key, self.value))
            mask = popxl.constant(np.triu(np.full((3, 3), -1e4, np.float32), 1), dtype)
            s = (q @ k.transpose((0, 2, 1))) * 0.35 + mask
            y = (ops.softmax(s, axis=-1) @ v).reshape((6, 8))
            return ops.nll_loss(ops.softmax(self.head(y + x), axis=-1), labels, reduction="mean")

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        ids = [
            popxl.variable(np.array(a, np.int32)) for a in ([1, 4, 1, 0, 7, 10], [2, 2, 2, 9, 3, 5])
        ]
        np.random.seed(0)
        facts, graph = Net().create_graph(ids[0], ids[0])
        variables = facts.init()
        accumulators, grad = addons.autodiff_with_accumulation(
            graph, graph.args.tensors, accumulator_dtype=popxl.float32
        )
        state = accumulators.init()
        bound, losses = graph.bind(variables), []
        for data in ids:
            call = bound.call_with_info(data, data)
            losses.append(call.outputs[0])
            seed = popxl.constant(1.0, dtype)
            grad.bind(state).call(seed, args=grad.grad_graph_info.inputs_dict(call))
        names = variables.to_dict()
        for name, variable in names.items():
            gradient = state.accum.to_dict()[name]
            adam_facts, step = AdamOptimizerStep().create_graph(
                variable, gradient, lr=0.01, loss_scaling=4.0, first_order_dtype=popxl.float32
            )
            step.bind(adam_facts.init()).call(variable, gradient)
        var_updates.accumulator_zero_(state.mean_accum_counter)
        return losses

    return build


def test_an_update_on_condition_that_the_addons_build_is_one_step() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        w, scalar = popxl.variable(normal(4, 6)), popxl.TensorSpec((), popxl.float32)
        facts, step = AdamOptimizerStep().create_graph(
            w, w.spec, lr=scalar, first_order_dtype=popxl.float32, loss_scaling=4.0, global_norm=scalar,
            global_norm_max=0.5, update_if=popxl.TensorSpec((), popxl.bool),
        )  # fmt: skip
        state = facts.init()
        for norm in (2.0, np.inf, 0.25):
            norm = popxl.variable(np.float32(norm))
            gradient = popxl.variable(normal(4, 6, seed=1)) * norm
            step.bind(state).call(
                w, gradient, popxl.variable(np.float32(1e-2)), norm, ops.isfinite(norm)
            )
        return [w, *state.values_flat()]

    assert check(build, popxl.float32, runs=2, scale=4) == {"adamw_where"}


@pytest.mark.parametrize(
    "dtype",
    cases(
        [popxl.float32, popxl.bfloat16],
        lambda dtype: dtype is popxl.bfloat16,
        ["float32", "bfloat16"],
    ),
)
def test_a_training_step_built_by_the_addons_is_fused_and_right(dtype: popxl.dtype) -> None:
    found = check(training(dtype), dtype, runs=3, scale=20)
    assert found == {
        "gemm_bias",
        "masked_scores",
        "accumulate_gemm",
        "accumulate_gather_grad",
        "accumulate_column_sum",
        "adamw",
    }


# Logits that are upcast for their cross entropy


def double(t: popxl.TensorByRef) -> list[Tensor]:
    ops.add_(t, t)
    return []


def loss_and_gradient(dtype: popxl.dtype, twist: str) -> Callable[[popxl.Ir], Sequence[Tensor]]:
    """Log-sum-exp of upcast logits and its gradient, with a twist that the rule must see."""

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        y = popxl.variable(normal(6, 11), dtype, name="x") * 2.0
        labels = popxl.variable(np.array([0, 10, 3, 3, 7, 1], np.int32))
        wide = ops.cast(y, popxl.float32)
        total, picked = logsumexp_and_pick(wide, labels)
        if twist == "narrow is written":
            ops.add_(y, y)
        if twist == "wide is written":
            ops.add_(wide, wide)
        if twist == "a loop writes wide":
            ops.repeat(ir.create_graph(double, wide), 2, wide)
        gradient = logsumexp_and_pick_grad(total, picked, total, wide, labels)
        if twist == "gradient is written":
            ops.add_(gradient, gradient)
        result = ops.cast(gradient, dtype)
        read = {"wide is read": [wide], "narrow is written": [y], "gradient is read": [gradient]}
        return [total, picked, result, *read.get(twist, [])]

    return build


@pytest.mark.parametrize(
    "dtype", [popxl.float16, popxl.bfloat16, popxl.float32], ids=lambda d: d.name
)
@pytest.mark.parametrize(
    "twist, left",
    [
        ("", 0),
        ("wide is read", 1),
        ("narrow is written", 2),
        ("wide is written", 2),
        ("a loop writes wide", 2),
        ("gradient is read", 2),
        ("gradient is written", 2),
    ],
)
def test_logits_that_are_upcast_for_their_loss_stay_narrow(
    dtype: popxl.dtype, twist: str, left: int
) -> None:
    build = loss_and_gradient(dtype, twist)
    expected, _ = observe(build, True)
    found, engine = observe(
        build,
        False,
        passes=[p for p in OPTIMIZATIONS if p.name == "narrow_logits"] + [*LEGALIZATION],
    )
    for name, (value, kind) in expected.items():
        assert_close(found[name][0], value, kind, name)
    assert engine.program.source.text().count("k_cast") == (2 if dtype is popxl.float32 else left)


# Zeros that nobody reads


def means_in_a_loop(kind: str, twist: str, times: int) -> Callable[[popxl.Ir], Sequence[Tensor]]:
    """A loop that accumulates a mean into fresh zeros, with a twist that the rule must see."""

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        x, dy = popxl.variable(normal(5, 6), name="x"), popxl.variable(normal(5, 4), name="dy")
        ids = popxl.variable(np.array([1, 5, 1, 0, 2], np.int32))

        def body(
            total: popxl.TensorByRef, count: popxl.TensorByRef, x: Tensor, dy: Tensor, ids: Tensor
        ) -> list[Tensor]:
            if twist == "counted before":
                ops.add_(count, popxl.constant(1.0))
            if twist == "read before":
                dy = dy + total[:5]
            if kind == "product":
                var_updates.accumulate_mean_(total, x.T @ dy, count)
            elif kind == "rows":
                var_updates.accumulate_mean_(
                    total, ops.indexing.gather_grad(dy, ids, total.shape, 0, True), count
                )
            else:
                var_updates.accumulate_mean_(total, ops.concat([dy, dy[:1]]), count)
            if twist != "counted before":
                ops.add_(count, popxl.constant(1.0))
            return []

        total = ops.init((6, 4), popxl.float32, "total")
        count = ops.init((), popxl.float32, "count")
        graph = ir.create_graph(body, total, count, x, dy, ids)
        if twist == "counter is not zero":
            ops.add_(count, popxl.constant(2.0))
        if twist == "read between":
            ops.add_(x, ops.sum(total) + 1.0)
        ops.repeat(graph, times, total, count, x, dy, ids)
        return [total]

    return build


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("kind", ["product", "rows", "mean"])
@pytest.mark.parametrize(
    "twist", ["", "counted before", "read before", "counter is not zero", "read between"]
)
@pytest.mark.parametrize("times", [1, 3])
def test_accumulators_are_cleared_only_where_their_zeros_are_read(
    times: int, kind: str, twist: str
) -> None:
    build = means_in_a_loop(kind, twist, times)
    expected, _ = observe(build, True)
    torch.use_deterministic_algorithms(True)  # memory that is not cleared holds NaN
    try:
        found, engine = observe(build, False)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, (value, dtype) in expected.items():
        assert_close(found[name][0], value, dtype, name)
    assert engine.program.source.text().count("'undef'") == (0 if twist else 1)


# Switching off


def test_rules_are_switched_off_by_name(monkeypatch: Any) -> None:
    build = program("bias", popxl.float32, lambda *_: [])
    monkeypatch.setenv("POPXL_PASSES", "-fuse_gemm_bias")
    assert fused_steps(observe(build, False)[1]) == set()
    monkeypatch.setenv("POPXL_PASSES", "-fuse_adamw,-drop_casts")
    assert fused_steps(observe(build, False)[1]) == {"gemm_bias"}
    monkeypatch.setenv("POPXL_PASSES", "-all")
    assert fused_steps(observe(build, False)[1]) == set()
    for name in ("-fast", "scalar_cse"):
        monkeypatch.setenv("POPXL_PASSES", name)
        with pytest.raises(
            ValueError,
            match=f"POPXL_PASSES: got {name}; expected '-name' for some of {OPTIMIZATIONS[0].name}",
        ):
            observe(build, False)


def test_programs_are_printed_after_a_pass_by_name(monkeypatch: Any, capsys: Any) -> None:
    build = program("bias", popxl.float32, lambda *_: [])
    monkeypatch.setenv("POPXL_PRINT_AFTER", "lower,fuse_gemm_bias")
    observe(build, False)
    before, after = capsys.readouterr().err.split("// after lower")
    assert "= fused_gemm_bias(" in before and "// after fuse_gemm_bias\nblock" in before
    assert after.startswith("\nblock") and "}" in after
    monkeypatch.setenv("POPXL_PRINT_AFTER", "fast")
    with pytest.raises(ValueError, match="POPXL_PRINT_AFTER: got fast; expected some of lower, "):
        observe(build, False)


# Numbers that are computed again


def repeated(between: Callable[[Tensor, Tensor], None], again: Callable[[Tensor], Tensor]) -> Any:
    """A number made from a variable in one graph and, after something in between, in another."""

    def make(
        name: str, formula: Callable[[Tensor], Tensor]
    ) -> Callable[[popxl.Ir, Tensor], Tensor]:
        def call(ir: popxl.Ir, x: Tensor) -> Tensor:
            graph = ir.create_empty_graph(name)
            with graph:
                popxl.graph_output(formula(popxl.graph_input(x.shape, x.dtype, "x", by_ref=True)))
            return ops.call(graph, x)[0]

        return call

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        x = popxl.variable(np.float32(-0.25), popxl.float32, name="x")
        first = make("first", clipped)(ir, x)
        between(x, first)
        return first + 0.0, make("second", again)(ir, x)

    return build


def clipped(x: Tensor) -> Tensor:
    return ops.maximum(x, popxl.constant(-0.5, popxl.float32)) * 3.0


def increase(t: Tensor) -> None:
    ops.add_(t, popxl.constant(1.0, popxl.float32))


def increase_in_a_loop(t: Tensor) -> None:
    graph = popxl.gcg().ir.create_empty_graph("loop")
    with graph:
        increase(popxl.graph_input(t.shape, t.dtype, "t", by_ref=True))
    ops.repeat(graph, 3, t)


REPEATED: dict[str, tuple[Callable[[Tensor, Tensor], None], Callable[[Tensor], Tensor], int]] = {
    # name: (what comes in between, the other number, how often a maximum is made)
    "again": (lambda x, first: None, clipped, 1),
    "its operand changes": (lambda x, first: increase(x), clipped, 2),
    "its operand changes in a loop": (lambda x, first: increase_in_a_loop(x), clipped, 2),
    "the first changes in a loop": (lambda x, first: increase_in_a_loop(first), clipped, 1),
    "the first changes": (lambda x, first: increase(first), clipped, 1),
    "another constant": (
        lambda x, first: None,
        lambda x: ops.maximum(x, popxl.constant(0.5, popxl.float32)) * 3.0,
        2,
    ),
}


@pytest.mark.parametrize("name", sorted(REPEATED))
def test_a_number_that_is_computed_again_from_the_same_is_computed_once(name: str) -> None:
    between, again, times = REPEATED[name]
    build = repeated(between, again)
    expected, _ = observe(build, True)
    found, engine = observe(build, False)
    assert {n: v.tolist() for n, (v, _) in found.items()} == {
        n: v.tolist() for n, (v, _) in expected.items()
    }
    assert (
        engine.program is not None and engine.program.source.text().count(" = k_maximum_") == times
    )


@pytest.mark.parametrize("factors", [(0.0, -0.0), (1, True), (2.0, 3.0)], ids=str)
def test_numbers_that_only_compare_equal_are_not_the_same(factors: tuple[Any, Any]) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        x = popxl.variable(np.float32(2), popxl.float32, name="x")
        return [x / scale(x, f) for f in factors]

    expected, _ = observe(build, True)
    found, _ = observe(build, False)
    for n, (value, _) in expected.items():
        assert np.array_equal(value, found[n][0])
