"""Random programs that use any op with a sample, on values of the program, beside what
random_programs does.

Kernels may round differently on operands that lie differently in memory, so results go on in two
ways: as they are, into `Pool.raw`, where they are written, viewed, and compared to a tolerance; and
settled on a coarse grid, into the pool, where everything is compared bit for bit.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import popxl
from helpers.op_cases import Case, make_case, public_function
from helpers.random_programs import KINDS, SHAPES, Builder, Built, Pool, Step
from helpers.samples.sample import Built as BuiltAttribute
from helpers.samples.sample import Operand, Same, Sample
from popxl import ops
from popxl.extensions import float8_e4m3fn, float8_e5m2, float8_matmul, to_float8
from popxl.op_records import OPS
from popxl.tensor import Tensor

ELSEWHERE = frozenset({"control", "host", "remote", "collective", "print", "clock"})
"""Effects of ops that random_programs has kinds for, and printing."""
MAGNITUDES = {float8_e4m3fn: 448.0, float8_e5m2: 57344.0}
"""The largest numbers of the types that `to_float8` makes."""
FLOAT8 = (popxl.float8_143, popxl.float8_152)
JOINING = "concat_"
"""A view of several tensors, of which none may be written any more."""
LIMIT = 8.0
"""Largest absolute value of operands: sums of them are exact, and powers are finite."""
BETWEEN = 0.3711
"""The grid's boundaries, where no sum or product of small halves falls."""
OP_KINDS = (*KINDS, *("sample",) * len(KINDS), *("write_raw",) * 4, *("view_raw",) * 2)


def usable(samples: Sequence[Sample]) -> list[Sample]:
    """Samples of ops that need no other graph, stream, buffer or replica."""
    return [s for s in samples if not OPS[s.op].effects & ELSEWHERE]


def widened(t: Tensor) -> Tensor:
    """The codes of a tensor of `to_float8` as float32: its product with a one."""
    one, largest = popxl.constant([[1.0]], popxl.float32), popxl.constant(448.0, popxl.float32)
    plain = popxl.constant(MAGNITUDES[t.dtype], popxl.float32)
    code = to_float8(one, largest, float8_e4m3fn)  # the scale of the type's largest is 1
    found = float8_matmul(t.reshape((t.nelms, 1)), code, plain, largest, popxl.float32)
    return found.reshape(t.shape)


def places(operands: Any) -> Iterator[Any]:
    """The operands that have a tensor of their own, in the order of `Case.tensors`."""
    for spec in operands.values() if isinstance(operands, dict) else operands:
        if isinstance(spec, list):
            yield from places(spec)
        elif not isinstance(spec, Same):
            yield spec


class OpBuilder(Builder):
    """Builds programs with steps ("sample", a, b, c): sample number 32 * a + b, on tensors from
    number c on.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        steps: Sequence[Step],
        graphs: Sequence[Sequence[Step]],
        replicas: int,
        dtype: popxl.dtype,
    ):
        self.samples = usable(samples)
        self.raw: dict[popxl.Graph, list[Tensor]] = {}
        super().__init__(steps, graphs, replicas, dtype)

    def raw_here(self) -> list[Tensor]:
        """Results in the current graph that are known up to rounding."""
        return self.raw.setdefault(popxl.gcg(), [])

    def do_sample(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        sample = self.samples[(32 * a + b) % len(self.samples)]
        narrow = sample.dtype is popxl.float32 and sample.in_16_bits
        case = make_case(sample, self.dtype if narrow else sample.dtype)
        values = [
            self.operand(pool, case, i, spec, c + i)
            for i, spec in enumerate(places(sample.operands))
        ]
        args, kwargs = case.arguments(values)
        attrs = {
            n: v.make() if isinstance(v, BuiltAttribute) else v for n, v in sample.attrs.items()
        }
        made = (sample.build or public_function(sample.op))(*args, **kwargs, **attrs)
        for t in [] if made is None else [made] if isinstance(made, Tensor) else made:
            if t.nelms and t.dtype in FLOAT8:
                t = ops.pow2scale_cast_from_fp8(t, popxl.constant(0, popxl.int32), popxl.float16)
            if t.nelms and t.dtype in MAGNITUDES:
                t = widened(t)
            if t.nelms:
                self.raw_here().append(t)
                pool.add(self.settled(t, SHAPES[c % 3]))

    def operand(self, pool: Pool, case: Case, i: int, spec: Any, c: int) -> Tensor:
        """The case's own values where the op asks for certain ones, else values of the program."""
        shape, of = tuple(case.tensors[i].shape), case.dtypes[i]
        if of in FLOAT8:
            x = ops.cast(ops.clip(pool.pick(c), -LIMIT, LIMIT), popxl.float32)
            return ops.pow2scale_cast_to_fp8(fitted(x, shape), popxl.constant(0, popxl.int32), of)
        if of in MAGNITUDES:
            x = ops.cast(ops.clip(pool.pick(c), -LIMIT, LIMIT), popxl.float32)
            return to_float8(fitted(x, shape), popxl.constant(LIMIT, popxl.float32), of)
        if isinstance(spec, np.ndarray) or of is not self.dtype or not case.tensors[i].numel():
            values = case.tensors[i]
            return popxl.constant(
                values.float().numpy() if of is popxl.bfloat16 else values.numpy(), of
            )
        x = pool.pick(c)
        # operands that nothing else may have
        own = bool(OPS[case.sample.op].writes) or case.sample.op == JOINING
        if c % 2 and not own:
            # what else has it sees the change
            ops.var_updates.copy_var_update_(x, ops.clip(x, -LIMIT, LIMIT))
        else:
            x = ops.clip(x, -LIMIT, LIMIT)
        low = spec.low if isinstance(spec, Operand) else -1.0
        x = fitted(ops.abs(x) + low if low >= 0 else x, shape)
        return x.reshape(shape) if own else x

    def settled(self, t: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The nearest halves at most `LIMIT` from 0, in the pool's dtype and a shape of the pool; 0
        for NaN.
        """
        t = ops.cast(t, self.dtype)
        t = ops.clip(ops.where(ops.isnan(t), popxl.constant(0.0, self.dtype), t), -LIMIT, LIMIT)
        return fitted(ops.floor(t * 2.0 + BETWEEN) * 0.5, shape)

    def do_write_raw(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        """Write into a result, or a view of one, where that is allowed."""
        found = [t for t in self.raw_here() if t.dtype is self.dtype and not is_joined(t)]
        if found:
            ops.add_(found[a % len(found)], popxl.constant(float(b % 3), self.dtype))

    def do_view_raw(self, pool: Pool, a: int, b: int, c: int, main: bool) -> None:
        found = self.raw_here()
        if found:
            t = found[a % len(found)]
            found.append(t.transpose_() if b % 2 else t.transpose().flatten())

    def observe(self, pool: Pool) -> None:
        super().observe(pool)
        for t in self.raw_here():
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype, "raw"), t)


def is_joined(t: Tensor) -> bool:
    """Whether a tensor is, or is a view of, several tensors joined: it may not be written."""
    made = t._op
    return made is not None and (
        made.definition.name == JOINING
        or any(is_joined(s) for s in made.inputs if made.definition.views)
    )


def fitted(t: Tensor, shape: Sequence[int]) -> Tensor:
    """The elements of a tensor, cut or repeated to fill a shape."""
    if t.shape == tuple(shape):
        return t
    count, flat = int(np.prod(shape, dtype=np.int64)), t.reshape((-1,))
    if count == 0:
        return ops.init(shape, t.dtype)
    if flat.nelms < count:
        flat = ops.concat([flat] * -(-count // flat.nelms))
    return flat[:count].reshape(shape) if shape else flat[0]


def build(
    samples: Sequence[Sample],
    steps: Sequence[Step],
    graphs: Sequence[Sequence[Step]],
    replicas: int = 1,
    dtype: popxl.dtype = popxl.float32,
) -> Built:
    """The program that a description gives."""
    builder = OpBuilder(samples, steps, graphs, replicas, dtype)
    return Built(builder.ir, builder.inputs)
