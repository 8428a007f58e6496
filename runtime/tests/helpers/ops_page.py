"""The reference page of ops, `docs/ops.md`: `make docs` writes it anew.

Everything on it is asked of the declarations and of the sample tables: an op has the data types in
which a sample of it is accepted and its kernel computes, the gradient it declares, and the cost of
a sample.
"""

import importlib
import inspect
import itertools
import json
import pkgutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import popxl
import popxl_engine.kernels  # noqa: F401 - registers every kernel
from helpers import samples
from helpers.op_cases import build, make_case, run
from helpers.samples.sample import Operand, Sample
from popxl import dtypes, ops
from popxl.errors import DTypeError
from popxl.op_records import OPS, OpDefinition, op_cost
from popxl_engine.checks import refused
from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.kernels.registry import ALTERNATES, KERNELS, Kernel

PAGE = Path(__file__).parents[3] / "docs" / "ops.md"
NAMES = json.loads((Path(__file__).parent / "public_names.json").read_text(encoding="utf-8"))[
    "modules"
]
HEADER = """# Ops

Written by `make docs` from the declarations in `runtime/popxl/ops/` and `runtime/popxl_addons/ops/`, the kernels in
`runtime/popxl_engine/kernels/` and the samples in `runtime/tests/helpers/samples/`.

- **Data types** are those of the first operand, or of the results of its samples where there is none. Sessions refuse
  the others.
- **Result**: `same` is the data type of the first operand; `-` is no result.
- **Gradient**: `yes`, `zero` or `none`. Each is compared with central differences.
- **Kernel**: the file, and that of a faster one for a device. In-place forms and views share that of the op they come
  from. The engine itself runs graphs.
- **Cost** of one execution on one replica: FLOPs, and bytes read and written, for operands of the types shown.
  `popxl.opdef.op_cost` gives it for any op of a program.
"""
GROUPS = {
    "floating point": [dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64],
    "float8": [dtypes.float8_143, dtypes.float8_152],
    "signed integers": [dtypes.int8, dtypes.int16, dtypes.int32, dtypes.int64],
    "unsigned integers": [dtypes.uint8, dtypes.uint16, dtypes.uint32, dtypes.uint64],
    "bool": [dtypes.bool],
    "complex": [dtypes.complex64, dtypes.complex128],
}
DTYPES = list(itertools.chain(*GROUPS.values()))


def every_sample() -> "dict[str, list[Sample]]":
    """The samples of each op."""
    found: dict[str, list[Sample]] = {}
    for module in pkgutil.iter_modules(samples.__path__):
        for sample in getattr(
            importlib.import_module(f"helpers.samples.{module.name}"), "SAMPLES", ()
        ):
            found.setdefault(sample.op, []).append(sample)
    return found


def cases(sample: Sample, dtype: popxl.dtype) -> "Iterator[tuple[Sample, popxl.dtype]]":
    """A sample and the data type of its operands, with a type wherever it may be given: of
    operands, of the first one, of the result.
    """
    yield sample, dtype
    for key in {"dtype", "data_type"} & set(sample.attrs):
        yield replace(sample, attrs={**sample.attrs, key: dtype}), sample.dtype
    if isinstance(sample.operands, tuple) and sample.operands:
        first, *others = sample.operands
        if isinstance(first, Operand):
            yield replace(sample, operands=(replace(first, dtype=dtype), *others)), sample.dtype
        elif (
            isinstance(first, np.ndarray)
            and first.dtype.kind in "iu"
            and (dtype.is_int or dtype.is_floating_point)
        ):
            array = np.abs(first).astype(dtype.as_numpy() if dtype.is_int else np.float32)
            of = sample.dtype if dtype.is_int else dtype
            yield replace(sample, operands=(array, *others)), of


def distinction(sample: Sample, dtype: popxl.dtype) -> "tuple[object, ...]":
    """What an op accepts a case by: which operands there are, their types, and the arguments, by
    their values where these are no numbers.
    """

    def of(operand: Any) -> object:
        if isinstance(operand, list):
            return [of(each) for each in operand][:2]
        if isinstance(operand, np.ndarray):
            return dtype if operand.dtype.kind == "f" else operand.dtype
        return getattr(operand, "dtype", None) or dtype

    named = sample.operands if isinstance(sample.operands, dict) else {}
    operands = [of(each) for each in (named.values() if named else sample.operands)]
    chosen = (str, bool, popxl.dtype, type(None))
    attributes = (
        (name, repr(value) if isinstance(value, chosen) else type(value))
        for name, value in sample.attrs.items()
    )
    return repr(operands), *named, *attributes


def computed(tried: "list[Sample]") -> "dict[popxl.dtype, set[popxl.dtype]]":
    """Data types of the first operand in which an op is accepted and computes, with those of its
    results.
    """
    found: dict[popxl.dtype, set[popxl.dtype]] = {}
    distinct = {
        distinction(*case): case
        for sample in reversed(tried)
        for dtype in DTYPES
        for case in cases(sample, dtype)
    }
    for case in itertools.starmap(make_case, distinct.values()):
        try:
            with warnings.catch_warnings():  # of operands that are no integers
                warnings.simplefilter("ignore", RuntimeWarning)
                program = build(case)
        except (DTypeError, TypeError, ValueError):
            continue
        if any(refused(program.graph)):
            continue
        results = {t.dtype for t in program.op.outputs}
        first = case.dtypes[0] if case.dtypes else next(iter(results), None)
        if first is None or (first in found and results <= found[first]):
            continue
        for value, t in zip(run(program.graph, case.tensors), program.graph.outputs):
            assert value.dtype == torch_dtype(t.dtype), (
                f"{program.op}: computed {value.dtype}, inferred {t.spec}"
            )
        found.setdefault(first, set()).update(results)
    return found


def described(found: "set[popxl.dtype]") -> str:
    """Data types in words."""
    if all(set(group) <= found for name, group in GROUPS.items() if name != "complex"):
        return "any"
    words = []
    for name, group in GROUPS.items():
        words += [name] if set(group) <= found else [f"`{t.name}`" for t in group if t in found]
    return ", ".join(words).replace("signed integers, unsigned integers", "integers") or "-"


def result(found: "dict[popxl.dtype, set[popxl.dtype]]") -> str:
    """Data types of the results in words."""
    if not any(found.values()):
        return "-"
    if all(results == {first} for first, results in found.items()):
        return "same"
    return described(set().union(*found.values()))


def gradient(definition: OpDefinition, tried: "list[Sample]") -> str:
    """Whether there is a gradient, or why not."""
    if definition.differentiable and all(sample.grads == () for sample in tried):
        return "zero"
    if definition.writes:
        return "none: writes in place"
    return "yes" if definition.differentiable else "none"


def kernel(definition: OpDefinition) -> str:
    """The file of the kernel, and the devices that have another."""
    if "control" in definition.effects:
        return "the engine"
    name = (
        definition.name
        if definition.name in KERNELS or definition.base is None
        else definition.base.name
    )
    devices = [
        (device, kernels[name]) for device, kernels in sorted(ALTERNATES.items()) if name in kernels
    ]
    return ", ".join(
        [file_of(KERNELS[name]), *(f"{device}: {file_of(fn)}" for device, fn in devices)]
    )


def file_of(fn: Kernel) -> str:
    """The file that a kernel is in."""
    return f"`{fn.__module__.rpartition('.')[2]}`"


def cost(definition: OpDefinition, sample: Sample) -> str:
    """FLOPs and bytes of a sample."""
    if "control" in definition.effects:
        return "that of the graphs it calls"
    op = build(make_case(sample)).op
    work, operands = op_cost(op), ", ".join(str(t.spec) for t in op.inputs)
    return f"{work.flops} FLOPs, {work.bytes} bytes" + (f": {operands}" if operands else "")


def function(name: str) -> Any:
    """The function of the API with this name, or None."""
    found = (getattr(module, name, None) for module in (ops, ops.collectives, ops.var_updates))
    return next((fn for fn in found if inspect.isfunction(fn)), None)


def names_of_the_api() -> "list[str]":
    """Functions that add ops, by name."""
    modules = ("popxl.ops", "popxl.ops.collectives", "popxl.ops.var_updates")
    return sorted({name for module in modules for name in NAMES[module] if function(name)})


def table(title: str, head: "list[str]", rows: "list[list[str]]") -> str:
    """A section with one Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return f"## {title}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def row(name: str, tried: "list[Sample]") -> "list[str]":
    """The line of an op of the API."""
    definition, found = OPS[name], computed(tried)
    is_control = "control" in definition.effects
    types = ["those of the graphs"] * 2 if is_control else [described(set(found)), result(found)]
    words = [*types, gradient(definition, tried), kernel(definition)]
    return [f"`{name}`", *words, cost(definition, tried[0])]


def page() -> str:
    """The whole page."""
    tried, api = every_sample(), names_of_the_api()
    parts = [HEADER]
    head = ["op", "data types", "result", "gradient", "kernel", "cost"]
    in_api = sorted(
        (name for name in OPS if name in api), key=lambda name: (OPS[name].module, name)
    )
    for module, names in itertools.groupby(in_api, lambda name: OPS[name].module):
        parts.append(table(module, head, [row(name, tried[name]) for name in names]))
    others = sorted(
        (name for name in OPS if name not in api), key=lambda name: (OPS[name].module, name)
    )
    inner = [
        [
            f"`{name}`",
            OPS[name].module,
            gradient(OPS[name], tried[name]),
            kernel(OPS[name]),
            cost(OPS[name], tried[name][0]),
        ]
        for name in others
    ]
    parts.append(
        table(
            "Ops of popxl.extensions, of gradients and of add-ons",
            ["op", "declared in", *head[3:]],
            inner,
        )
    )
    composed = [
        [f"`{n}`", " ".join(inspect.getdoc(function(n)).partition("\n\n")[0].split())]
        for n in api
        if n not in OPS
    ]
    parts.append(
        table("Functions made of other ops, or of none", ["function", "what it does"], composed)
    )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
