"""Modules with a `build_grad`: what it is given, what it may give, and whose autodiff finds it."""

import warnings

import numpy as np
import popxl
import popxl_addons as addons
import pytest
from helpers.addons_programs import normal, run_program
from popart import popart_exception
from popxl import ops
from popxl_addons.transforms.recomputation import recompute_rest

X = normal(2, 3)
SPEC = popxl.TensorSpec((2, 3), popxl.float32)


class Doubling(addons.Module):
    """y = x * w whose hand-written gradients are twice the true ones, so that a test sees which
    were used.
    """

    def build(self, x):
        w = self.add_variable_input("w", lambda: np.full(3, 4.0), x.dtype)
        self.aux["x"], self.aux["w"] = x, w
        return x * w

    def build_grad(self, dy):
        self.var_grad["w"] = ops.sum(dy * self.aux["x"], axis=0) * 2
        return dy * self.aux["w"] * 2


class Outer(addons.Module):
    """Calls a module in a graph of its own."""

    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.options = inner, options

    def build(self, x):
        return self.call_module(self.inner, **self.options)(x)[0] * 3


class Inline(addons.Module):
    """Calls a module inline."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, x):
        return self.inner(x) * 5


def gradients(module, infos=lambda graph: None):
    """dx and the gradients of the variables for x = X and dy = 1: (dx, {name: gradient})."""
    names = []

    def build(ir):
        x, dy = popxl.variable(X), popxl.variable(np.ones_like(X))
        facts, graph = module.create_graph(x)
        info = graph.autodiff(called_graphs_grad_info=infos(graph)).grad_graph_info
        call = graph.bind(facts.init()).call_with_info(x)
        by_tensor = {t: name for name, t in graph.args.to_dict().items()}
        names.extend(by_tensor[t] for t in info.outputs[1:])
        return ops.call(info.graph, dy, inputs_dict=info.inputs_dict(call))

    dx, *others = run_program(build)
    return dx, dict(zip(names, others))


def check_doubled(found, name, times):
    dx, (dw,) = found[0], found[1].values()
    assert list(found[1]) == [name]
    np.testing.assert_allclose(dx, np.full_like(X, 8.0 * times))
    np.testing.assert_allclose(dw, X.sum(0) * 2 * times, rtol=1e-6)


def refuses(module, error, says, **options):
    with popxl.Ir().main_graph:
        _, graph = module.create_graph(SPEC)
        with pytest.raises(error, match=says):
            graph.autodiff(**{name: value(graph) for name, value in options.items()})


def test_a_gradient_written_by_hand_is_preferred_alone_and_inside_other_modules():
    def build(ir):
        x, dy = popxl.variable(X), popxl.variable(np.ones_like(X))
        results = []
        for module in (Doubling(), Outer(Doubling())):
            facts, graph = module.create_graph(x)
            variables = facts.init()
            grad = graph.autodiff()
            call = graph.bind(variables).call_with_info(x)
            info = grad.grad_graph_info
            results += grad.call(dy, args=info.inputs_dict(call))
            with pytest.raises(Exception, match="differentiated before"):
                graph.autodiff()
        return results

    dx, dw, outer_dx, outer_dw = run_program(build)
    np.testing.assert_allclose(dx, np.full_like(X, 8.0))
    np.testing.assert_allclose(dw, X.sum(0) * 2, rtol=1e-6)
    np.testing.assert_allclose(outer_dx, np.full_like(X, 24.0))
    np.testing.assert_allclose(outer_dw, X.sum(0) * 6, rtol=1e-6)


# Without the base's __init__


def test_a_module_need_not_call_the_bases_init():
    class Plain(addons.Module):
        def __init__(self, size):
            self.size = size
            self.inner = Doubling()

        def build(self, x):
            self.add_variable_input("b", lambda: np.zeros(self.size), x.dtype)
            return self.call_module(self.inner, "inner")(x)[0]

    dx, others = gradients(Plain(3))
    np.testing.assert_array_equal(others.pop("b"), np.zeros(3))
    check_doubled((dx, others), "inner.w", 1)


def test_submodules_that_are_set_before_the_bases_init_stay():
    class Late(addons.Module):
        def __init__(self):
            self.inner = addons.layers.Linear(3)
            super().__init__()

        def build(self, x):
            return self.inner(x)

    with popxl.Ir().main_graph:
        facts, _ = Late().create_graph(SPEC)
    assert facts.keys_flat() == ["inner.weight", "inner.bias"]


# Calls of modules


def test_a_module_that_is_called_without_a_name_goes_by_its_class():
    check_doubled(gradients(Outer(Doubling())), "Doubling.w", 3)
    check_doubled(gradients(Outer(Doubling(), name="mine")), "mine.w", 3)


def test_gradients_that_a_called_module_collected_are_inherited():
    check_doubled(gradients(Outer(Outer(Doubling()))), "Outer.Doubling.w", 9)
    check_doubled(gradients(Outer(Outer(Outer(Doubling())))), "Outer.Outer.Doubling.w", 27)


def test_gradients_that_an_inline_module_collected_are_passed_on():
    check_doubled(gradients(Inline(Outer(Doubling()))), "inner.Doubling.w", 15)
    check_doubled(
        gradients(Outer(Inline(Inline(Outer(Doubling()))))), "Inline.inner.inner.Doubling.w", 225
    )


class Calling(addons.Module):
    """Calls a graph with a gradient by hand as any other."""

    def build(self, x):
        facts, self.graph = Doubling().create_graph(x)
        return self.graph.bind(self.add_variable_inputs("d", facts)).call(x)[0] * 3


def test_autodiff_of_a_caller_refuses_without_the_gradient_by_hand_and_takes_it():
    refuses(
        Calling(),
        popart_exception,
        r"got a call of graph 'Doubling\S*', whose gradient is written by hand",
    )
    module = Calling()
    check_doubled(gradients(module, lambda _: {module.graph: module.graph.autodiff()}), "d.w", 3)
    with popxl.Ir().main_graph:
        _, graph = Calling().create_graph(SPEC)
        with pytest.raises(ValueError, match="expected it in called_graphs_grad_info"):
            popxl.transforms.autodiff(graph.graph)
        with pytest.raises(ValueError, match="expected it in called_graphs_grad_info"):
            _, outer = Outer(Doubling(), autodiff="none").create_graph(SPEC)
            outer.autodiff()


def test_the_derived_gradient_of_such_a_module_is_there_when_it_is_asked_for():
    dx, _ = gradients(Outer(Doubling(), autodiff="autodiff"))
    np.testing.assert_allclose(dx, np.full_like(X, 12.0))


# aux and var_grad


def test_every_tensor_in_aux_is_an_output_of_the_forward_graph():
    class Keeping(Doubling):
        def build(self, x):
            y = super().build(x)
            self.aux["y"], self.aux["again"], self.aux["square"] = y, y, y * y
            return y

        def build_grad(self, dy):
            assert "square" in self.aux and "z" not in self.aux
            with pytest.raises(
                KeyError, match="aux: got 'z'; expected one of x, w, y, again, square"
            ):
                self.aux["z"]
            return super().build_grad(dy)

    with popxl.Ir().main_graph:
        _, graph = Keeping().create_graph(SPEC)
        (y,) = graph.graph.outputs
        info = graph.autodiff().grad_graph_info
        x, w = graph.graph.inputs
        square = graph.graph.outputs[-1]
        assert graph.graph.outputs == (y, x, w, square) and square._op.inputs == (y, y)
        assert info.inputs == (y, x, w, y, square)
        assert graph.autodiff(force=True).grad_graph_info.inputs == info.inputs
        assert graph.graph.outputs == (y, x, w, square)
    check_doubled(gradients(Keeping()), "w", 1)


@pytest.mark.parametrize(
    "use",
    [
        lambda m, t: m.aux["x"],
        lambda m, t: "x" in m.aux,
        lambda m, t: m.var_grad["w"],
        lambda m, t: "w" in m.var_grad,
        lambda m, t: m.var_grad.__setitem__("w", t),
    ],
)
def test_aux_is_read_and_var_grad_used_in_build_grad_alone(use):
    class Early(addons.Module):
        def build(self, x):
            self.aux["x"] = x
            with pytest.raises(RuntimeError, match="outside build_grad"):
                use(self, x)
            return x

    with popxl.Ir().main_graph:
        module = Early()
        module.create_graph(SPEC)
        with pytest.raises(RuntimeError, match="outside build_grad"):
            use(module, popxl.constant(1.0))


@pytest.mark.parametrize("value", [3.0, np.ones(3, np.float32), None, [], "reduce"])
def test_aux_gives_back_any_value_and_var_grad_takes_tensors_alone(value):
    class Keeping(Doubling):
        def build(self, x):
            self.aux["kept"] = value
            return super().build(x)

        def build_grad(self, dy):
            assert self.aux["kept"] is value
            return super().build_grad(dy)

    class Wrong(Doubling):
        def build_grad(self, dy):
            self.var_grad["unknown"] = value
            return dy

    with popxl.Ir().main_graph:
        _, graph = Keeping().create_graph(SPEC)
        graph.autodiff()
        assert len(graph.graph.outputs) == 3  # y, and the tensors x and w
    check_doubled(gradients(Keeping()), "w", 1)
    refuses(Wrong(), TypeError, "expected a tensor")


@pytest.mark.parametrize("names", [[0], [0, 2], [2, 0, 1]])
def test_gradients_of_variables_that_nobody_asks_for_are_ignored(names):
    """dx = 2 dy a b, da = sum(2 dy x b), db = sum(2 dy x a)."""

    class Products(addons.Module):
        def build(self, x):
            a = self.add_variable_input("a", lambda: np.full(3, 3.0), x.dtype)
            b = self.add_variable_input("b", lambda: np.full(3, 5.0), x.dtype)
            self.aux["all"] = "x a b".split()
            self.aux["x"], self.aux["a"], self.aux["b"] = x, a, b
            return 2 * x * a * b

        def build_grad(self, dy):
            x, a, b = (self.aux[name] for name in self.aux["all"])
            self.var_grad["a"] = ops.sum(2 * dy * x * b, axis=0)
            self.var_grad["b"] = ops.sum(2 * dy * x * a, axis=0)
            return 2 * dy * a * b

    def build(ir):
        x = popxl.variable(X)
        facts, graph = Products().create_graph(x)
        required = [graph.graph.inputs[i] for i in names]
        gradient = graph.autodiff(grads_required=required)
        bound = graph.bind(facts.init())
        info = bound.call_with_info(x)
        activations = gradient.grad_graph_info.inputs_dict(info)
        return gradient.call(popxl.constant(np.ones_like(X)), args=activations)

    expected = [np.full_like(X, 30.0), 10 * X.sum(0), 6 * X.sum(0)]
    for found, i in zip(run_program(build), names, strict=True):
        np.testing.assert_allclose(found, expected[i], rtol=1e-6)


def test_var_grad_tells_which_gradients_are_required_and_gives_what_was_set():
    class Asking(Doubling):
        def build_grad(self, dy):
            assert ("w" in self.var_grad) is self.is_required and "v" not in self.var_grad
            dx = dy
            if "w" in self.var_grad:
                dx = super().build_grad(dy)
                assert self.var_grad["w"].shape == (3,)
            return dx if self.var_grad.inputs else None

    with popxl.Ir().main_graph:
        for required, names in ((True, [1, 0]), (True, [1]), (False, [0])):
            module = Asking()
            module.is_required = required
            _, graph = module.create_graph(SPEC)
            tensors = [graph.graph.inputs[i] for i in names]
            assert list(graph.autodiff(grads_required=tensors).grad_graph_info.outputs) == tensors


# Signatures, gradients and results


class Two(addons.Module):
    """Two inputs, two outputs."""

    def build(self, a, b):
        w = self.add_variable_input("w", lambda: np.ones(3), a.dtype)
        return a * w, b + w

    def build_grad(self, da, db):
        self.var_grad["w"] = ops.sum(da, axis=0)
        return da * 2, db * 3


def test_results_belong_to_the_required_inputs_that_are_no_variables_in_their_order():
    def build(ir):
        a, b = popxl.variable(X), popxl.variable(X)
        _, graph = Two().create_graph(a, b)
        first, second = graph.graph.inputs[:2]
        info = graph.autodiff(grads_required=[second, graph.args.w, first]).grad_graph_info
        return ops.call(info.graph, a, b)

    db, dw, da = run_program(build)
    np.testing.assert_allclose(db, X * 2)  # the first result is that of the first required input
    np.testing.assert_allclose(da, X * 3)
    np.testing.assert_allclose(dw, X.sum(0), rtol=1e-6)


def variant(build_grad):
    return type("Variant", (Doubling,), {"build_grad": build_grad})()


@pytest.mark.parametrize(
    "build_grad",
    [
        lambda self, *dys: dys[0],
        lambda self, dy, *others: dy,
        lambda self, dy, **o: dy,
        lambda self, *, dy: dy,
    ],
)
def test_parameters_that_are_not_positional_are_a_type_error(build_grad):
    refuses(variant(build_grad), TypeError, "expected positional parameters alone")


def test_another_number_of_gradients_than_build_grad_takes_is_refused():
    refuses(variant(lambda self: None), ValueError, "got 1 gradients for 0 parameters")
    refuses(variant(lambda self, dy, dz: dy), ValueError, "got 1 gradients for 2 parameters")
    refuses(Doubling(), ValueError, "got 0 gradients for 1", grads_provided=lambda graph: [])


def test_tensors_of_another_graph_are_refused():
    def of_main(_):
        return [popxl.constant(1.0)]

    refuses(Doubling(), ValueError, "in grads_provided; expected", grads_provided=of_main)
    refuses(Doubling(), ValueError, "in grads_required; expected", grads_required=of_main)
    module = variant(lambda self, dy: self.foreign)
    with popxl.Ir().main_graph:
        module.foreign = popxl.variable(X)
        _, graph = module.create_graph(SPEC)
        with pytest.raises(ValueError, match="expected a tensor of graph"):
            graph.autodiff(grads_required=graph.graph.inputs[:1])


def test_too_many_results_and_results_that_are_no_tensors_are_refused():
    refuses(variant(lambda self, dy: (dy, dy)), ValueError, "got 2 results; expected at most 1")
    refuses(
        Doubling(),
        ValueError,
        "got 1 results; expected at most 0",
        grads_required=lambda g: g.args.tensors,
    )
    refuses(variant(lambda self, dy: (1.0,)), TypeError, "got float among its results")
    refuses(variant(lambda self, dy: 1.0), TypeError, "got float among its results")


def test_wrong_gradients_by_hand_are_refused():
    class Wrong(Doubling):
        def build_grad(self, dy):
            self.var_grad["w"] = dy

    class Unknown(Doubling):
        def build_grad(self, dy):
            self.var_grad["v"] = dy

    class Misshapen(Doubling):
        def build_grad(self, dy):
            return super().build_grad(dy)[0]

    refuses(Wrong(), ValueError, "the variable's")
    refuses(Unknown(), KeyError, "expected one of w")
    refuses(Misshapen(), ValueError, r"as gradient of %x; expected shape \[2, 3\]")
    refuses(variant(lambda self, dy: dy), ValueError, "got no gradient of %w")


def test_a_body_of_a_repeat_cannot_keep_intermediates():
    class Kept(Doubling):
        def build(self, x):
            y = super().build(x)
            self.aux["z"] = y + 1
            return y

    for module, is_fine in ((Doubling(), True), (Kept(), False)):
        with popxl.Ir().main_graph:
            facts, graph = module.create_graph(SPEC)
            ops.repeat(
                graph.graph, 2, popxl.variable(X), inputs_dict=graph.args.to_mapping(facts.init())
            )
            if is_fine:
                assert len(graph.autodiff().grad_graph_info.inputs) == 3
            else:
                with pytest.raises(
                    ValueError,
                    match="the body of a repeat or conditional; expected inputs alone in aux",
                ):
                    graph.autodiff()


# Inline calls


@pytest.mark.parametrize("kind", ["error", "warning", "none"])
def test_an_inline_call_of_a_module_with_a_gradient_by_hand_is_told_of(kind):
    class Choosing(Doubling):
        def __init__(self):
            super().__init__(grad_inlining_error=kind)

    with popxl.Ir().main_graph:
        if kind == "error":
            with pytest.raises(ValueError, match="inline call of a module with build_grad"):
                Inline(Choosing()).create_graph(SPEC)
        elif kind == "warning":
            with pytest.warns(UserWarning, match="inline call of a module with build_grad"):
                Inline(Choosing()).create_graph(SPEC)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                Inline(Choosing()).create_graph(SPEC)


def test_another_way_of_telling_is_refused():
    with pytest.raises(
        ValueError, match="got grad_inlining_error 'warn'; expected 'error', 'warning' or 'none'"
    ):
        addons.Module(grad_inlining_error="warn")


# Values that build changes in place


class Moving(addons.Module):
    """y = (x + 1) * w, where x + 1 takes x's place and is kept."""

    def build(self, x):
        w = self.add_variable_input("w", lambda: np.full(3, 4.0), x.dtype)
        x += 1
        self.aux["x"], self.aux["w"] = x, w
        return x * w

    def build_grad(self, dy):
        self.var_grad["w"] = ops.sum(dy * self.aux["x"], axis=0)
        return dy * self.aux["w"]


def test_a_gradient_is_given_what_its_forward_graph_made_of_an_input_in_place():
    def build(ir):
        x, dy = popxl.variable(X), popxl.variable(np.ones_like(X))
        facts, graph = Moving().create_graph(x)
        grad = graph.autodiff()
        call = graph.bind(facts.init()).call_with_info(x)
        info = grad.grad_graph_info
        gradients = grad.call_with_info(dy, args=info.inputs_dict(call))
        assert x in info.fwd_parent_ins_to_grad_parent_outs(call, gradients)
        return [x, *gradients.outputs]

    x, dx, dw = run_program(build)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(dx, np.full_like(X, 4))
    np.testing.assert_allclose(dw, (X + 1).sum(0), rtol=1e-6)


def test_a_forward_graph_that_writes_to_an_input_in_place_is_not_run_again():
    with popxl.Ir().main_graph:
        _, graph = Moving().create_graph(SPEC)
        grad = graph.autodiff()
        for keep in ((), graph.graph.outputs[:1]):
            with pytest.raises(popart_exception, match="recompute_rest: got .*add_.*out-of-place"):
                recompute_rest(grad, keep)


def test_the_derived_gradient_of_a_caller_is_given_that_too():
    dx, others = gradients(Outer(Moving()))
    np.testing.assert_allclose(dx, np.full_like(X, 12))
    np.testing.assert_allclose(others["Moving.w"], (X + 1).sum(0) * 3, rtol=1e-6)


def test_an_input_that_a_graph_takes_by_reference_or_leaves_as_it_is_is_the_callers():
    ir = popxl.Ir()
    with ir.main_graph:

        def change(x: popxl.TensorByRef, y):
            x += y
            y.reshape_((6,))
            return x, y

        x, y = popxl.variable(X), popxl.variable(X)
        graph = ir.create_graph(change, x, y)
        call = ops.call_with_info(graph, x, y)
        assert call.graph_to_parent(graph.inputs[0]) is x
        same = ir.create_graph(lambda x: [x, x + 1], x)
        call = ops.call_with_info(same, x)
        assert call.graph_to_parent(same.inputs[0]) is x


# Modules that keep their graphs


class Square(addons.Module):
    """tanh(x) * tanh(x), a graph for all calls."""

    def __init__(self):
        super().__init__(cache=True)

    def build(self, x):
        y = ops.tanh(x)
        return y * y


class Twice(addons.Module):
    """Calls one module twice."""

    def __init__(self):
        super().__init__()
        self.inner = Square()

    def build(self, x):
        (first,) = self.call_module(self.inner, "first", autodiff="autodiff")(x)
        (second,) = self.call_module(self.inner, "second", autodiff="autodiff")(first)
        return second


def test_calls_of_one_graph_give_its_results_alone_after_its_autodiff():
    dx, _ = gradients(Twice())
    first = np.tanh(X) ** 2
    by_hand = [2 * np.tanh(x) * (1 - np.tanh(x) ** 2) for x in (X, first)]
    np.testing.assert_allclose(dx, by_hand[0] * by_hand[1], rtol=1e-4, atol=1e-6)
