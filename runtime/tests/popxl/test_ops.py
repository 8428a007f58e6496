"""Every op against its samples: specs, values, gradients, costs, host evaluation, refusals."""

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import popxl
import popxl_engine.kernels  # noqa: F401 - registers every kernel
import pytest
import torch
from helpers.op_cases import (
    INDIRECT,
    Case,
    Program,
    build,
    laid_out,
    make_case,
    needs_machine,
    public_function,
    run,
    same_bits,
    to_numpy,
)
from helpers.op_samples import REFUSALS, SAMPLES, ids, over
from helpers.quick import cases, of_each
from helpers.samples.sample import Refusal, Sample
from helpers.tolerance import FINITE_DIFFERENCES, assert_close
from popxl import ops
from popxl.errors import DTypeError, GraphError
from popxl.opdef import OPS, call_arguments, map_tensors, op_cost
from popxl.testing import get_all_int_dtypes
from popxl.transforms.autodiff import autodiff
from popxl_engine.checks import refused
from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.kernels.registry import KERNELS, OVERWRITES, kernel_for

NARROW = (popxl.float16, popxl.bfloat16)
STEP = 1e-5


over_ops = pytest.mark.parametrize("name", sorted(OPS))


def over_dtypes(*dtypes: popxl.dtype) -> Any:
    """A parametrisation over data types, of which bfloat16 is quick."""
    names = [dtype.name for dtype in dtypes]
    return pytest.mark.parametrize(
        "dtype", cases(dtypes, lambda dtype: dtype is popxl.bfloat16, names)
    )


def expected_results(program: Program) -> list[tuple[str, list[np.ndarray]]]:
    """(which oracle, its results) for each oracle of the sample."""
    case, found = program.case, []
    for name, widen in (
        ("oracle", to_numpy),
        ("autograd", lambda t: t.double() if t.is_floating_point() else t.clone()),
    ):
        oracle = getattr(case.sample, name)
        if oracle is not None:
            args, kwargs = case.arguments([widen(t) for t in case.tensors])
            result = oracle(*args, **kwargs, **program.attrs)
            results = result if isinstance(result, (list, tuple)) else [result]
            found.append(
                (
                    name,
                    [
                        to_numpy(r.detach()) if isinstance(r, torch.Tensor) else np.asarray(r)
                        for r in results
                    ],
                )
            )
    return found


def check_values(sample: Sample, dtype: popxl.dtype) -> None:
    case = make_case(sample, dtype)
    program = build(case)
    expected = expected_results(program)
    operands = [to_numpy(t) for t in case.tensors]
    results = run(program.graph, case.tensors)
    for output, result in zip(program.graph.outputs, results):
        assert tuple(result.shape) == output.shape, (
            f"computed shape {tuple(result.shape)}, inferred {output.spec}"
        )
        assert result.dtype == torch_dtype(output.dtype), (
            f"computed dtype {result.dtype}, inferred {output.spec}"
        )
    for name, wanted in expected:
        assert len(wanted) == len(results), (
            f"{name}: {len(wanted)} results, the op has {len(results)}"
        )
        for i, (result, want) in enumerate(zip(results, wanted)):
            of = program.graph.outputs[i].dtype if i < len(program.graph.outputs) else dtype
            rounded = (
                torch.from_numpy(np.array(want, np.float64)).to(result.dtype)
                if of.is_floating_point
                else want
            )
            want = to_numpy(rounded) if of.is_floating_point else want
            loosest = (
                max((of, case.dtype), key=lambda d: d in NARROW) if case.dtype in NARROW else of
            )
            tight = case.dtype is sample.dtype
            rtol, atol = (sample.rtol, sample.atol) if tight else (None, None)
            assert_close(
                to_numpy(result),
                want,
                loosest,
                f"{sample.op} output {i} against {name}",
                rtol,
                atol,
            )
    if sample.check is not None:
        args, kwargs = case.arguments(operands)
        sample.check([to_numpy(r) for r in results], *args, **kwargs, **program.attrs)


@over(SAMPLES)
def test_values_and_inferred_specs_are_those_of_the_oracle(sample: Sample) -> None:
    check_values(sample, sample.dtype)


@pytest.mark.quick_every(4)
@over_dtypes(*NARROW)
@over([s for s in SAMPLES if s.dtype is popxl.float32 and s.in_16_bits])
def test_16_bit_values_are_those_of_the_oracle_on_rounded_operands(
    sample: Sample, dtype: popxl.dtype
) -> None:
    check_values(sample, dtype)


@pytest.mark.quick_every(4)
@pytest.mark.parametrize("layout", ["transposed", "strided"])
@over(SAMPLES)
def test_results_do_not_depend_on_how_operands_lie_in_memory(sample: Sample, layout: str) -> None:
    results = []
    for how in ("contiguous", layout):
        case = make_case(sample)
        case.tensors = [laid_out(t.contiguous(), how) if t.dim() else t for t in case.tensors]
        graph = build(case).graph
        results.append(list(zip(graph.outputs, run(graph, case.tensors))))
    for (output, plain), (_, found) in zip(*results):
        what = f"{sample.op} on {layout} operands"
        assert_close(to_numpy(found), to_numpy(plain), output.dtype, what, sample.rtol, sample.atol)


WRITING = [s for s in SAMPLES if OPS[s.op].writes]


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("sample", WRITING, ids=ids(WRITING))
def test_ops_that_write_change_the_operand_itself(sample: Sample) -> None:
    case = make_case(sample)
    program = build(case)
    if needs_machine(program.graph):
        (index,) = {program.graph.inputs.index(t) for t in program.op.written}
        program.graph._by_ref_inputs.add(program.graph.inputs[index])
    results = run(program.graph, case.tensors)
    target = case.tensors[program.graph.inputs.index(program.op.written[0])]
    if program.op.outputs:
        position = program.graph.outputs.index(program.op.outputs[0])
        assert same_bits(target, results[position])


# Gradients


def has_gradients(sample: Sample) -> bool:
    """Whether there is something to differentiate by, and the op says that it can be done."""
    definition = OPS[sample.op]
    floats = any(of.is_floating_point for of in make_case(sample).dtypes)
    return (
        definition.differentiable and not definition.writes and floats and sample.grads is not None
    )


DIFFERENTIABLE = [s for s in SAMPLES if has_gradients(s)]


def parameter_of(case: Case, index: int) -> str:
    """The op's parameter that a tensor is given for."""
    if isinstance(case.places, dict):
        items = list(case.places.items())
    else:
        parameters = list(inspect.signature(public_function(case.sample.op)).parameters.values())
        variadic = bool(parameters) and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
        names = [parameters[0 if variadic else i].name for i in range(len(case.places))]
        items = list(zip(names, case.places))
    return next(
        name
        for name, place in items
        if index == place or (isinstance(place, list) and index in place)
    )


class Gradients:
    """A sample's program and its gradient program, in one dtype."""

    def __init__(self, sample: Sample, dtype: popxl.dtype):
        self.case = make_case(sample, dtype)
        self.program = build(self.case)
        graph = self.program.graph
        self.floats = [i for i, of in enumerate(self.case.dtypes) if of.is_floating_point]
        self.seeded = [i for i, t in enumerate(graph.outputs) if t.dtype.is_floating_point]
        self.outputs = len(graph.outputs)
        rng = np.random.default_rng(sample.seed + 1)
        self.dy = {
            i: torch.from_numpy(np.asarray(rng.uniform(-1, 1, graph.outputs[i].shape)))
            for i in self.seeded
        }
        provided = [graph.outputs[i] for i in self.seeded]
        self.info = autodiff(graph, provided, [graph.inputs[i] for i in self.floats])

    def values(self) -> list[np.ndarray]:
        """The gradient of each floating-point operand, by the graph that autodiff made."""
        results = run(self.program.graph, [t.clone() for t in self.case.tensors])
        forward = dict(zip(self.program.graph.outputs, results))
        forward.update(zip(self.program.graph.inputs, self.case.tensors))
        given = [
            self.dy[self.program.graph.outputs.index(c.fwd_tensor)].to(
                torch_dtype(c.fwd_tensor.dtype)
            )
            if c.connection_type.name == "FwdGrad"
            else forward[c.fwd_tensor]
            for c in self.info.expected_inputs
        ]
        return [to_numpy(g) for g in run(self.info.graph, given)]

    def loss(self, tensors: Sequence[torch.Tensor]) -> float:
        """The results weighted by their gradients."""
        results = run(self.program.graph, tensors)
        return sum(float((self.dy[i] * results[i].double()).sum()) for i in self.seeded)

    def central_differences(self) -> list[np.ndarray]:
        """The gradient of each floating-point operand, two evaluations for each element."""
        found = []
        for i in self.floats:
            gradient = np.zeros(self.case.tensors[i].shape)
            for position in np.ndindex(*gradient.shape):
                losses = []
                for step in (STEP, -STEP):
                    tensors = [t.clone() for t in self.case.tensors]
                    tensors[i][position] += step
                    losses.append(self.loss(tensors))
                gradient[position] = (losses[0] - losses[1]) / (2 * STEP)
            found.append(gradient)
        return found

    def torch_autograd(self) -> list[np.ndarray]:
        """The gradient of each floating-point operand, by torch through the sample's oracle."""
        leaves = [
            t.double().clone().requires_grad_() if t.is_floating_point() else t
            for t in self.case.tensors
        ]
        args, kwargs = self.case.arguments(leaves)
        result = self.case.sample.autograd(*args, **kwargs, **self.program.attrs)
        results = result if isinstance(result, (list, tuple)) else [result]
        loss = sum((self.dy[i] * results[i]).sum() for i in self.seeded)
        wanted = [leaves[i] for i in self.floats]
        gradients = (
            torch.autograd.grad(loss, wanted, allow_unused=True)
            if loss.requires_grad
            else [None] * len(wanted)
        )
        return [np.zeros(t.shape) if g is None else g.numpy() for g, t in zip(gradients, wanted)]


@over(DIFFERENTIABLE)
def test_gradients_are_central_differences_and_torchs(sample: Sample) -> None:
    gradients = Gradients(sample, popxl.float64)
    assert gradients.seeded, f"{sample.op}: no floating-point result; give grads=None"
    actual = gradients.values()
    numeric = gradients.central_differences()
    for index, value, wanted in zip(gradients.floats, actual, numeric):
        parameter = parameter_of(gradients.case, index)
        if sample.grads != "auto" and parameter not in sample.grads:
            assert not value.any(), f"{sample.op}: got a gradient of {parameter}; expected none"
            continue
        rtol, atol = FINITE_DIFFERENCES
        assert_close(
            value,
            wanted,
            popxl.float64,
            f"gradient of {parameter} against central differences",
            rtol,
            atol,
        )
    if sample.autograd is not None:
        for index, value, wanted in zip(gradients.floats, actual, gradients.torch_autograd()):
            what = f"gradient of {parameter_of(gradients.case, index)} against torch"
            assert_close(value, wanted, popxl.float64, what, 1e-9, 1e-10)


FLOAT32 = [s for s in DIFFERENTIABLE if s.dtype is popxl.float32]


@pytest.mark.quick_every(4)
@over_dtypes(popxl.float32, popxl.bfloat16)
@over(FLOAT32)
def test_gradients_in_narrow_types_are_near_those_in_float64(
    sample: Sample, dtype: popxl.dtype
) -> None:
    if dtype in NARROW and not sample.in_16_bits:
        dtype = popxl.float32
    narrow = Gradients(sample, dtype)
    exact = Gradients(sample, popxl.float64)
    # The very operands of the narrow run: differences in their rounding are no error of the rule.
    exact.case.tensors = [
        t.to(e.dtype) if t.is_floating_point() else t
        for t, e in zip(narrow.case.tensors, exact.case.tensors)
    ]
    slack = 10 if dtype is popxl.float32 else 4  # a gradient chains several roundings
    for value, wanted in zip(narrow.values(), exact.values()):
        size = max(1.0, float(np.abs(wanted).max(initial=0)))
        tolerance = {popxl.float32: 2e-6, popxl.bfloat16: 1.6e-2}[dtype]
        assert_close(
            value,
            wanted,
            popxl.float64,
            f"{sample.op} in {dtype.name}",
            slack * tolerance,
            slack * tolerance * size,
        )


def integer_gradients(
    sample: Sample, dtype: popxl.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """Results of a sample in an integer type, and gradients of its operands; None where the op, or
    its gradient, is refused.
    """
    case, plain = make_case(sample, dtype), build(make_case(sample)).graph
    try:
        with warnings.catch_warnings():  # of operands that are no integers
            warnings.simplefilter("ignore", RuntimeWarning)
            graph = build(case).graph
        provided, wanted = (
            [t for t, of in zip(found, floats) if of.dtype.is_floating_point and t.dtype is dtype]
            for found, floats in ((graph.outputs, plain.outputs), (graph.inputs, plain.inputs))
        )
        info = autodiff(graph, provided, wanted)
    except (DTypeError, ValueError):  # GraphError
        return None
    if any(refused(graph)) or any(refused(info.graph)):
        return None
    results = run(graph, [t.clone() for t in case.tensors])
    known = dict(zip(graph.outputs, results))
    known.update(zip(graph.inputs, case.tensors))
    rng = np.random.default_rng(sample.seed + 1)
    given = [
        torch.from_numpy(rng.integers(1, 7, c.fwd_tensor.shape)).to(torch_dtype(dtype))
        if c.connection_type.name == "FwdGrad"
        else known[c.fwd_tensor]
        for c in info.expected_inputs
    ]
    return results, run(info.graph, given)


@pytest.mark.quick_every(8)
@over([s for s in DIFFERENTIABLE if s.dtype is popxl.float32])
def test_gradients_of_all_integers_are_integers_and_the_same_up_to_wrapping(
    sample: Sample,
) -> None:
    expected = integer_gradients(sample, popxl.int64)
    for dtype in get_all_int_dtypes():
        found, what = integer_gradients(sample, dtype), f"gradient of {sample.op} of {dtype.name}"
        assert (found is None) == (expected is None), what
        if found is None or expected is None:
            continue
        # what is beyond the type was wrapped before a gradient, of a power, took its logarithm
        fits = all(torch.equal(t.to(torch.int64), u) for t, u in zip(found[0], expected[0]))
        for value, wanted in zip(found[1], expected[1]):
            assert value.dtype == torch_dtype(dtype), f"{what}: computed {value.dtype}"
            wrapped = wanted.to(value.dtype)
            assert not fits or torch.equal(value, wrapped), f"{what}: {value}, not {wrapped}"


@of_each(sorted(n for n, d in OPS.items() if d.differentiable and not d.effects & INDIRECT))
def test_every_differentiable_op_has_its_gradient_compared(name: str) -> None:
    assert any(s.op == name for s in DIFFERENTIABLE), (
        f"{name}: no sample with a gradient, though it is not declared without one"
    )


NOT_DIFFERENTIABLE = sorted(n for n, d in OPS.items() if not d.differentiable)


@pytest.mark.parametrize("name", NOT_DIFFERENTIABLE)
def test_gradients_through_ops_without_one_are_refused_or_do_not_arise(name: str) -> None:
    program = build(make_case(next(s for s in SAMPLES if s.op == name)))
    floats = [
        t for t in program.op.inputs if t.dtype.is_floating_point and t in program.graph.inputs
    ]
    outputs = [t for t in program.op.outputs if t.dtype.is_floating_point]
    if floats and outputs:
        with pytest.raises(GraphError, match=r"not differentiable|writes in place"):
            autodiff(program.graph, outputs, floats)
    else:
        assert OPS[name].vjp is None


# Declarations


@of_each(sorted(OPS))
def test_every_op_has_a_sample(name: str) -> None:
    assert any(s.op == name for s in SAMPLES), (
        f"{name}: no sample; add one to runtime/tests/helpers/samples"
    )


@of_each(sorted(OPS))
def test_every_op_has_a_kernel_with_its_parameters(name: str) -> None:
    definition = OPS[name]
    if "control" in definition.effects:
        assert name not in KERNELS, (
            f"{name}: calls of graphs are executed by the engine, not by a kernel"
        )
        return
    kernel = kernel_for(definition)
    if name not in KERNELS:
        assert definition.base is not None
        return
    parameters = list(inspect.signature(kernel).parameters)
    if definition.effects & {"host", "remote", "clock"}:
        assert parameters[0] == "replica"
        parameters = parameters[1:]
    if kernel in OVERWRITES:
        assert parameters.pop() == "into"
    assert parameters == list(definition.signature.parameters)


@over_ops
def test_every_op_has_a_cost(name: str) -> None:
    definition = OPS[name]
    if "control" in definition.effects:
        return
    assert definition.cost is not None, f"{name}: no cost rule in {definition.file}"
    for sample in (s for s in SAMPLES if s.op == name):
        cost = op_cost(build(make_case(sample)).op)
        assert isinstance(cost.flops, int) and cost.flops >= 0
        assert isinstance(cost.bytes, int) and cost.bytes >= 0


@of_each(sorted(OPS))
def test_every_op_says_what_it_does(name: str) -> None:
    assert inspect.getdoc(public_function(name)), f"{name}: no docstring"


HOST = sorted(n for n, d in OPS.items() if d.host is not None)


def integer_programs(name: str) -> Iterator[Program]:
    """The samples of an op over all integer types, where it takes and gives integers alone."""
    for sample in (s for s in SAMPLES if s.op == name):
        for dtype in [sample.dtype] if sample.dtype.is_int else get_all_int_dtypes():
            program = build(make_case(sample, dtype))
            values = (*program.graph.inputs, *program.op.outputs)
            if (
                program.op.refusal is None  # this sample is for floating point alone
                and not any(t.dtype.is_floating_point for t in values)
                and set(program.op.inputs) <= set(program.graph.inputs)
            ):
                yield program


def extreme(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The ends of each integer type, numbers that float32 lacks, and small ones, in place of the
    elements: each tensor begins with others.
    """
    found = []
    for number, t in enumerate(tensors):
        array = t.clone().numpy()
        if array.dtype.kind in "iu":
            ends = np.iinfo(array.dtype)
            wanted = (0, ends.max, 2**24 + 1, ends.min, -1, 3, ends.max - 1, 2**31, ends.min + 1)
            values = [n for n in wanted if ends.min <= n <= ends.max]
            for place, position in enumerate(np.ndindex(array.shape)):
                array[position] = values[(place + 2 * number) % len(values)]
        found.append(torch.from_numpy(array))
    return found


def by_rule(rule: Any, program: Program, tensors: Sequence[Any]) -> list[Any] | str:
    """The results of the op by its host rule or its kernel; or why it has none."""
    env = dict(zip(program.graph.inputs, tensors))
    args, kwargs = call_arguments(
        program.op.definition,
        {n: map_tensors(v, env.__getitem__) for n, v in program.op.arguments.items()},
    )
    try:
        result = rule(*args, **kwargs)
    except ZeroDivisionError as error:
        return str(error)
    return list(result) if isinstance(result, (list, tuple)) else [result]


@pytest.mark.quick_every(3)
@pytest.mark.parametrize(
    "name, values",
    [
        pytest.param(name, values, id=f"{name}-{kind}")
        for name in HOST
        for values, kind in ((list, "of the sample"), (extreme, "extreme"))
        if not (name == "jump_seed" and values is extreme)  # a step for each of 2^31 - 1 counts
    ],
)
def test_host_evaluation_gives_the_kernels_integers(
    name: str, values: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
) -> None:
    compared = 0
    for program in integer_programs(name):
        tensors = values(program.case.tensors)
        hosted = by_rule(OPS[name].host, program, [t.clone().numpy() for t in tensors])
        computed = by_rule(kernel_for(OPS[name]), program, tensors)
        compared += 1
        if isinstance(hosted, str) or isinstance(computed, str):
            assert hosted == computed
            continue
        assert len(hosted) == len(computed)
        for on_host, on_device, output in zip(hosted, computed, program.op.outputs):
            what = f"{program.op}: {[t.tolist() for t in tensors]}"
            assert np.asarray(on_host).dtype == output.dtype.as_numpy(), what
            np.testing.assert_array_equal(on_host, on_device.numpy(), what)
    assert compared, (
        f"{name}: no sample with integer operands, though the op has a host rule; add one"
    )


# Refusals


@pytest.mark.slow
@pytest.mark.parametrize("refusal", REFUSALS, ids=ids(REFUSALS))
def test_refusals_refuse_in_their_own_words(refusal: Refusal) -> None:
    with pytest.raises(refusal.error) as caught:
        make_session(build(make_case(refusal)))
    message = str(caught.value)
    assert re.search(refusal.says, message), f"says {refusal.says!r} is not in: {message}"
    assert re.search(r"\bgot\b.*\bexpected\b", message, re.DOTALL), (
        f"lacks got or expected: {message}"
    )


def make_session(program: Program) -> None:
    """A session of a program that loads the operands and calls the graph."""
    graph = program.graph
    with graph.ir.main_graph:
        ops.call(graph, *(ops.host_load(popxl.h2d_stream(t.shape, t.dtype)) for t in graph.inputs))
    popxl.Session(graph.ir, "cpu")


KINDS = "expected (numbers|real numbers|floating point|integers|bool)"
IN_ONE_DTYPE = ("scaled_add", "scatter", "conv", "roi_align", "dynamic_update_", "matmul")
OF_A_KIND = [
    r
    for r in REFUSALS
    if re.search(KINDS, r.says) or ("equal dtypes" in r.says and r.op in IN_ONE_DTYPE)
]


@pytest.mark.parametrize("refusal", OF_A_KIND, ids=ids(OF_A_KIND))
def test_numbers_that_an_op_cannot_compute_with_are_built_and_refused_by_sessions(
    refusal: Refusal,
) -> None:
    program = build(make_case(refusal))
    with pytest.raises(DTypeError, match="cannot execute .* in graph 'sample.*built at ") as caught:
        make_session(program)
    assert f"{program.op}" in str(caught.value), "the op, and the tensors that it is given"
    assert f"{program.op.source[0]}:{program.op.source[1]}" in str(caught.value), "the user's line"
