"""8-bit floating point: both formats against their published definition, on the host, in casts and
in sessions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import popart
import popxl
import pytest
import torch
from helpers.addons_programs import run_program, run_session, store_all
from popxl import fp8_utils, ops
from popxl.errors import DTypeError
from popxl.fp8_utils import (
    host_fp8_mse_scale,
    host_pow2scale_cast_from_fp8,
    host_pow2scale_cast_to_fp8,
)
from popxl.utils import to_numpy

FLOAT8 = (popxl.float8_143, popxl.float8_152)
BITS = {popxl.float8_143: (3, 8), popxl.float8_152: (2, 16)}
"""Mantissa bits and bias of the exponent, as Noune et al. 2022 (arXiv:2206.02915) define the
types.
"""
TORCH = {popxl.float8_143: torch.float8_e4m3fnuz, popxl.float8_152: torch.float8_e5m2fnuz}
CODES = np.arange(256, dtype=np.uint8)

over_types = pytest.mark.parametrize("dtype", FLOAT8, ids=lambda d: d.name)
either_way = pytest.mark.parametrize("interpret", ["0", "1"], ids=["compiled", "interpreted"])


def number(code: int, dtype: popxl.dtype) -> float:
    """What a code stands for."""
    mantissa_bits, bias = BITS[dtype]
    if code == 0x80:
        return float("nan")
    exponent, fraction = (
        (code & 0x7F) >> mantissa_bits,
        (code % 2**mantissa_bits) / 2**mantissa_bits,
    )
    size = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
    return -size if code & 0x80 else size


def numbers(dtype: popxl.dtype) -> np.ndarray:
    return np.array([number(code, dtype) for code in CODES.tolist()])


def coded(codes: Any, dtype: popxl.dtype) -> np.ndarray:
    """Codes as an array of the host's type."""
    return np.asarray(codes, np.uint8).view(dtype.as_numpy())


def codes_of(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)


def to_float8(x: np.ndarray, log2_scale: int, dtype: popxl.dtype) -> np.ndarray:
    """Codes that the op gives in a program."""

    def build(ir: popxl.Ir) -> list[popxl.Tensor]:
        by = popxl.constant(log2_scale, popxl.int32)
        return [ops.pow2scale_cast_to_fp8(popxl.variable(x), by, dtype)]

    return codes_of(run_program(build)[0])


def from_float8(array: np.ndarray, log2_scale: int, dtype: popxl.dtype) -> np.ndarray:
    """Numbers that the op gives in a program."""

    def build(ir: popxl.Ir) -> list[popxl.Tensor]:
        by = popxl.constant(log2_scale, popxl.int32)
        return [ops.pow2scale_cast_from_fp8(popxl.variable(array), by, dtype)]

    return run_program(build)[0]


def on_host(x: np.ndarray, log2_scale: int, dtype: popxl.dtype) -> np.ndarray:
    return codes_of(host_pow2scale_cast_to_fp8(x, dtype, log2_scale, nan_on_overflow=False))


casts = pytest.mark.parametrize("cast", [on_host, to_float8], ids=["host", "op"])
Cast = Callable[[np.ndarray, int, popxl.dtype], np.ndarray]

# Formats


@over_types
@pytest.mark.parametrize("log2_scale", [-32, -5, 0, 7])
@pytest.mark.parametrize("wide", [popxl.float16, popxl.float32], ids=lambda d: d.name)
def test_every_code_is_the_number_that_the_definition_gives(
    dtype: popxl.dtype, log2_scale: int, wide: popxl.dtype
) -> None:
    with np.errstate(over="ignore"):
        expected = (numbers(dtype) * 2.0**log2_scale).astype(wide.as_numpy())
    np.testing.assert_array_equal(
        host_pow2scale_cast_from_fp8(coded(CODES, dtype), wide, log2_scale), expected
    )
    np.testing.assert_array_equal(from_float8(coded(CODES, dtype), log2_scale, wide), expected)


@over_types
def test_the_largest_and_the_smallest_number_are_those_of_the_table(dtype: popxl.dtype) -> None:
    finite = numbers(dtype)[1:128]
    wanted = {popxl.float8_143: (240, 2.0**-10), popxl.float8_152: (57344, 2.0**-17)}[dtype]
    assert (finite.max(), finite.min()) == wanted == (fp8_utils.largest(dtype), finite[0])


@over_types
@casts
def test_every_number_gets_its_code(dtype: popxl.dtype, cast: Cast) -> None:
    np.testing.assert_array_equal(cast(numbers(dtype).astype(np.float32), 0, dtype), CODES)
    np.testing.assert_array_equal(
        cast((numbers(dtype) * 2.0**20).astype(np.float32), -20, dtype), CODES
    )


@over_types
@casts
def test_numbers_between_two_go_to_the_nearer_and_halfway_to_the_even_code(
    dtype: popxl.dtype, cast: Cast
) -> None:
    below = np.arange(127)
    halfway = ((numbers(dtype)[below] + numbers(dtype)[below + 1]) / 2).astype(np.float32)
    even = below + below % 2
    for sign, bit in ((1, 0), (-1, 0x80)):
        for x, expected in (
            (halfway, even),
            (np.nextafter(halfway, np.float32(0)), below),
            (np.nextafter(halfway, np.float32(np.inf)), below + 1),
        ):
            signed = np.where(expected > 0, expected + bit, 0)
            np.testing.assert_array_equal(cast(sign * x, 0, dtype), signed)


@over_types
def test_the_host_and_the_op_round_a_product_with_the_scale_once(dtype: popxl.dtype) -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=4000) * 2.0 ** rng.integers(-20, 8, 4000)).astype(np.float32)
    for by in (-11, 0, 3):
        limited = np.clip(
            x.astype(np.float64) * 2.0**by, -fp8_utils.largest(dtype), fp8_utils.largest(dtype)
        )
        expected = torch.from_numpy(limited).to(TORCH[dtype]).view(torch.uint8).numpy()
        np.testing.assert_array_equal(on_host(x, by, dtype), expected)
        np.testing.assert_array_equal(to_float8(x, by, dtype), expected)
    np.testing.assert_array_equal(on_host(x.astype(np.float64), 0, dtype), on_host(x, 0, dtype))


@over_types
def test_overflow_is_nan_or_the_largest_number_on_the_host_and_the_largest_in_programs(
    dtype: popxl.dtype,
) -> None:
    largest = fp8_utils.largest(dtype)
    spacing = largest - numbers(dtype)[126]
    x = np.array(
        [largest + 0.49 * spacing, largest + 0.5 * spacing, 1e30, np.inf, np.nan], np.float32
    )
    both = np.concatenate([x, -x])
    clipped = [0x7F, 0x7F, 0x7F, 0x7F, 0x80, 0xFF, 0xFF, 0xFF, 0xFF, 0x80]
    np.testing.assert_array_equal(on_host(both, 0, dtype), clipped)
    np.testing.assert_array_equal(to_float8(both, 0, dtype), clipped)
    lost = codes_of(host_pow2scale_cast_to_fp8(both, dtype))
    np.testing.assert_array_equal(
        lost, [0x7F, 0x80, 0x80, 0x80, 0x80, 0xFF, 0x80, 0x80, 0x80, 0x80]
    )


@over_types
@casts
def test_what_rounds_to_zero_has_no_sign(dtype: popxl.dtype, cast: Cast) -> None:
    np.testing.assert_array_equal(
        cast(np.array([-1e-9, -0.0, 0.0, 1e-45], np.float32), 0, dtype), [0, 0, 0, 0]
    )


# Refusals


@pytest.mark.parametrize("log2_scale", [-33, 32])
def test_scales_out_of_range_are_refused_on_the_host_and_when_a_program_runs(
    log2_scale: int,
) -> None:
    x, narrow = np.ones(2, np.float32), coded([1, 2], FLOAT8[0])
    for call in (
        lambda: host_pow2scale_cast_to_fp8(x, FLOAT8[0], log2_scale),
        lambda: host_pow2scale_cast_from_fp8(narrow, popxl.float32, log2_scale),
    ):
        with pytest.raises(
            RuntimeError, match=r"got log2_scale -?\d+; expected -32 <= log2_scale < 32"
        ):
            call()
    for run in (
        lambda: to_float8(x, log2_scale, FLOAT8[0]),
        lambda: from_float8(narrow, log2_scale, popxl.float32),
    ):
        with pytest.raises(
            popart.poplar_application_runtime_error,
            match=r"got log2_scale -?\d+; expected -32 <= log2_scale < 32",
        ):
            run()


def test_conversions_on_the_host_refuse_other_types() -> None:
    x, narrow = np.ones(2, np.float32), coded([1, 2], FLOAT8[0])
    refusals: Any = (
        (
            lambda: host_pow2scale_cast_to_fp8(x, popxl.float16),
            "got dtype popxl.dtypes.float16; expected popxl.float8",
        ),
        (lambda: host_pow2scale_cast_to_fp8(x), "got dtype None"),
        (lambda: host_pow2scale_cast_to_fp8(np.ones(2, np.int32), FLOAT8[0]), "got src of int32"),
        (lambda: host_pow2scale_cast_to_fp8([1.0], FLOAT8[0]), "got src of list"),
        (
            lambda: host_pow2scale_cast_from_fp8(narrow, FLOAT8[1]),
            "expected popxl.float16, float32 or float64",
        ),
        (lambda: host_pow2scale_cast_from_fp8(x, popxl.float32), "got src of float32"),
        (lambda: host_pow2scale_cast_from_fp8([1], popxl.float32), "got src of list"),
        (lambda: host_fp8_mse_scale(x, popxl.float32), "got dtype popxl.dtypes.float32"),
        (lambda: host_fp8_mse_scale(np.array([np.nan]), FLOAT8[0]), "expected finite numbers"),
    )
    for call, says in refusals:
        with pytest.raises(RuntimeError, match=says):
            call()


# Scales


@over_types
@pytest.mark.parametrize("spread", [1, 20])
def test_no_scale_has_a_smaller_squared_error_than_the_one_found(
    dtype: popxl.dtype, spread: int
) -> None:
    largest, found = fp8_utils.largest(dtype), set()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=50) * 2.0 ** rng.uniform(-2 * spread, 0, 50)
        # at twice the fitting scale no worse clipped than rounded, and underflows are halved
        if seed % 2:
            x[0] = 1.02 * largest / 2.0 ** (np.floor(np.log2(largest)) - 3)
        errors = []
        for by in range(-31, 32):
            narrow = host_pow2scale_cast_to_fp8(x, dtype, by, nan_on_overflow=False)
            errors.append(
                np.mean((host_pow2scale_cast_from_fp8(narrow, popxl.float64, -by) - x) ** 2)
            )
        metric, scale = host_fp8_mse_scale(x, dtype)
        assert (
            metric
            == pytest.approx(min(errors), rel=1e-14)
            == pytest.approx(errors[scale + 31], rel=1e-14)
        )
        assert fp8_utils.host_fp8_mse_scale_pb(x, dtype) == (metric, scale)
        found.add(scale - np.floor(np.log2(largest / np.abs(x).max())))
    assert found <= {0, 1}
    # float8_152 has so many binades that what underflows is lost in the sum
    if dtype is popxl.float8_143:
        assert found == ({0, 1} if spread == 20 else {0})


def test_scales_of_zeros_and_of_extreme_numbers_are_in_range() -> None:
    assert host_fp8_mse_scale(np.zeros(3), FLOAT8[0]) == (0, 31)
    assert host_fp8_mse_scale(np.array([1e-300]), FLOAT8[0])[1] == 31
    assert host_fp8_mse_scale(np.array([1e30]), FLOAT8[0])[1] == -31


# Host data


@over_types
def test_numbers_and_codes_become_variables_and_constants(dtype: popxl.dtype) -> None:
    x = np.array([0.5, -3.0, 60000], np.float16)
    narrow = host_pow2scale_cast_to_fp8(x, dtype, 2)
    assert narrow.dtype == dtype.as_numpy() and narrow.shape == x.shape
    np.testing.assert_array_equal(to_numpy(x, dtype, log2_scale=2), narrow)
    np.testing.assert_array_equal(to_numpy(narrow, dtype), narrow)
    clipped = to_numpy(x, dtype, log2_scale=2, nan_on_overflow=False)
    np.testing.assert_array_equal(codes_of(clipped)[2], 0x7F)
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        buffer = popxl.remote_buffer((3,), dtype)
        shards = popxl.replica_sharded_buffer((3,), dtype)
        whole = [
            popxl.variable(x, dtype, log2_scale=2),
            popxl.variable(narrow),
            popxl.remote_variable(x, buffer, dtype=dtype, log2_scale=2),
            popxl.remote_replica_sharded_variable(x, shards, dtype=dtype, log2_scale=2),
            popxl.replica_sharded_variable(x, dtype, log2_scale=2)[0],
            popxl.constant(x, dtype, log2_scale=2),
            popxl.constant(narrow, dtype),
            popxl.variable(np.broadcast_to(np.float32(0.5), (3,)), dtype, log2_scale=1),
        ]
        assert all(t.dtype is dtype and t.shape == (3,) for t in whole)
        store_all([whole[0]])
    with popxl.Session(ir) as session:
        session.run()
        for t in whole[:-1]:
            np.testing.assert_array_equal(session.get_tensor_data(t), narrow)
        ones = host_pow2scale_cast_to_fp8(np.ones(3, np.float32), dtype)
        np.testing.assert_array_equal(session.get_tensor_data(whole[-1]), ones)


def test_host_data_that_is_no_float8_is_refused() -> None:
    narrow = coded([1, 2], FLOAT8[0])
    with popxl.Ir().main_graph:
        refusals: Any = (
            (
                lambda: popxl.variable(np.arange(3), FLOAT8[0]),
                TypeError,
                "got int64 data for popxl.dtypes.float8_143",
            ),
            (
                lambda: popxl.variable(narrow, FLOAT8[1]),
                TypeError,
                "expected float16, float32 or float64",
            ),
            (
                lambda: popxl.constant(narrow),
                TypeError,
                "expected float8_143 or float8_152. Pass it",
            ),
            (lambda: popxl.variable(1.0, log2_scale=1), RuntimeError, "only with float8 types"),
            (
                lambda: popxl.constant(1.0, nan_on_overflow=True),
                RuntimeError,
                "only with float8 types",
            ),
            (
                lambda: popxl.variable(narrow, FLOAT8[0], log2_scale=1),
                RuntimeError,
                "expected them with numbers",
            ),
            (
                lambda: popxl.variable(1.0, FLOAT8[0], log2_scale=32),
                RuntimeError,
                "got log2_scale 32",
            ),
        )
        for call, error, says in refusals:
            with pytest.raises(error, match=says):
                call()


# Programs


@over_types
@either_way
def test_sessions_stream_read_and_write_codes(
    dtype: popxl.dtype, interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    first, second = (
        coded([[0, 1, 0x80], [0x7F, 0xFF, 3]], dtype),
        coded([[9, 8, 7], [6, 5, 4]], dtype),
    )
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        inputs, outputs = popxl.h2d_stream((2, 3), dtype), popxl.d2h_stream((2, 3), dtype)
        v = popxl.variable(first, dtype, "v")
        ops.host_store(outputs, v)
        ops.var_updates.copy_var_update_(v, ops.host_load(inputs))
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run({inputs: second})[outputs], first)
        np.testing.assert_array_equal(session.get_tensor_data(v), second)
        session.write_variable_data(v, first)
        given = host_pow2scale_cast_from_fp8(second, popxl.float32)
        np.testing.assert_array_equal(session.run({inputs: given})[outputs], first)
        np.testing.assert_array_equal(session.get_tensor_data(v), second)
        with pytest.raises(TypeError, match="got float32 data for %v"):
            session.write_variable_data(v, given)


def test_a_file_of_codes_is_a_remote_variables_memory(tmp_path: Path) -> None:
    dtype, codes = FLOAT8[0], CODES[:6].reshape(2, 3)
    (tmp_path / "v").write_bytes(codes.tobytes())
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((2, 3), dtype)
        data = np.memmap(tmp_path / "v", dtype.as_numpy(), "r+", shape=(2, 3))
        v = popxl.remote_variable(data, buffer)
        ops.remote_store(buffer, 0, ops.remote_load(buffer, 0)[::-1])
    with popxl.Session(ir) as session:
        session.run()
        np.testing.assert_array_equal(codes_of(session.get_tensor_data(v)), codes[::-1])
    np.testing.assert_array_equal(np.fromfile(tmp_path / "v", np.uint8), codes[::-1].ravel())


MOVES: Any = {
    "reshape": (lambda t: t.reshape((2, 128)), lambda a: a.reshape(2, 128)),
    "transpose": (lambda t: t.T, lambda a: a.T),
    "slice": (lambda t: t[3:9:2, 1], lambda a: a[3:9:2, 1]),
    "reversed slice": (lambda t: t[::-1], lambda a: a[::-1]),
    "concat": (lambda t: ops.concat([t, t], 1), lambda a: np.concatenate([a, a], 1)),
    "split": (lambda t: ops.split(t, 2)[1], lambda a: np.split(a, 2)[1]),
    "gather": (lambda t: t[np.array([5, 0, 5], np.int32)], lambda a: a[[5, 0, 5]]),
    "mask": (lambda t: t[np.eye(16) > 0], lambda a: np.where(np.eye(16) > 0, a, 0)),
    "dynamic slice": (
        lambda t: ops.dynamic_slice(t, popxl.constant([4], popxl.uint32), [0], [2], True),
        lambda a: a[4:6],
    ),
    "dynamic update": (
        lambda t: ops.dynamic_update(t, popxl.constant([4], popxl.uint32), t[0:2], [0], [2], True),
        lambda a: np.concatenate([a[:4], a[:2], a[6:]]),
    ),
    "scatter": (
        lambda t: ops.scatter(t, popxl.constant(np.zeros((1, 16)), popxl.int32), t[3:4]),
        lambda a: np.concatenate([a[3:4], a[1:]]),
    ),
    "init": (lambda t: ops.init((3,), t.dtype), lambda a: np.zeros(3, np.uint8)),
}


@over_types
@either_way
def test_ops_that_only_move_elements_move_codes(
    dtype: popxl.dtype, interpret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    codes = CODES.reshape(16, 16)
    ir = popxl.Ir()
    with ir.main_graph:
        t = popxl.variable(coded(codes, dtype))
        buffer = popxl.remote_buffer((16, 16), dtype, 2)
        ops.remote_store(buffer, 1, t)
        graph = ir.create_graph(lambda x: x.T, t)
        (called,) = ops.call(graph, t)
        (repeated,) = ops.repeat(graph, 3, t)
        results = [move(t) for move, _ in MOVES.values()]
        streams = store_all([*results, called, repeated, ops.remote_load(buffer, 1)])
    found, _ = run_session(ir, {})
    expected = [*(oracle(codes) for _, oracle in MOVES.values()), codes.T, codes.T, codes]
    for stream, want, name in zip(streams, expected, [*MOVES, "call", "repeat", "remote"]):
        np.testing.assert_array_equal(codes_of(found[stream]), want, err_msg=name)


@either_way
def test_replicas_slice_and_gather_codes(interpret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    codes = CODES[:12].reshape(2, 6)
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        each = ir.replica_grouping(group_size=1)
        t = popxl.variable(coded(codes, FLOAT8[0]), replica_grouping=each)
        _, shard = popxl.replica_sharded_variable(coded(codes[0], FLOAT8[0]))
        gathered = ops.collectives.replicated_all_gather
        streams = store_all(
            [gathered(t), ops.collectives.replica_sharded_slice(t), gathered(shard)]
        )
    found, _ = run_session(ir, {})
    for stream, want in zip(
        streams, ([codes.ravel()] * 2, [codes[0, :3], codes[1, 3:]], [codes[0]] * 2)
    ):
        np.testing.assert_array_equal(codes_of(found[stream]), want)


def test_casts_of_float8_are_refused_when_the_program_is_built() -> None:
    with popxl.Ir().main_graph:
        with pytest.raises(DTypeError, match=r"got .*expected"):
            ops.cast(popxl.variable(1.0, FLOAT8[0]), popxl.float32)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t + t,
        lambda t: ops.matmul(t, t),
        lambda t: ops.relu(t),
        lambda t: ops.sum(t),
        lambda t: ops.equal(t, t),
        lambda t: ops.greater(t, t),
        lambda t: ops.isnan(t),
        lambda t: ops.logical_not(t),
        lambda t: ops.topk(t, 1, 0, True, True),
    ],
    ids=["add", "matmul", "relu", "sum", "equal", "greater", "isnan", "logical_not", "topk"],
)
def test_arithmetic_on_float8_is_refused_by_sessions(call: Any) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        call(popxl.variable([1.0], FLOAT8[0], name="x"))
    with pytest.raises(DTypeError, match=r"cannot execute .*%x.*got .* float8_143\[1\]; expected"):
        popxl.Session(ir)


def test_printing_shows_numbers(capfd: pytest.CaptureFixture) -> None:
    run_program(lambda ir: [ops.print_tensor(popxl.variable([0.5, -3.0], FLOAT8[0]), "t")])
    assert "t: [ 0.5 -3. ]" in capfd.readouterr().err


@over_types
def test_the_types_are_floating_point_of_one_byte_that_torch_does_not_compute_with(
    dtype: popxl.dtype,
) -> None:
    assert dtype.is_floating_point and dtype.is_signed and not dtype.is_int and dtype.itemsize == 1
    assert popxl.dtype.as_dtype(dtype.as_numpy()) is dtype
    with pytest.raises(TypeError, match="expected a type that torch computes with"):
        dtype.as_torch()


def test_double_is_float64() -> None:
    assert popxl.double is popxl.dtypes.double is popxl.float64
