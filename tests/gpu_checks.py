"""What must hold on a GPU, as a plain script: it needs torch, numpy and pyyaml, and no pytest.

    python tests/gpu_checks.py                  # on the first GPU; exit code 2 where there is none
    python tests/gpu_checks.py --device cpu     # the script itself, on a processor

Every op's kernels give what they give on the processor, float32 to rounding, and what is compiled
what it gives step by step; attention that keeps no probabilities has the textbook's numbers, and
the same bits every time; rows survive the way to page-locked memory and back; nothing waits for the
device in the middle of a run; training has the processor's losses, and the same bits whatever part
of its state is on the device.
"""

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import TestCase, mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "runtime" / "tests")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products whose sums have one order

import importlib  # noqa: E402
import pkgutil  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from helpers import samples  # noqa: E402
from helpers.op_cases import build, make_case  # noqa: E402
from popxl.dtypes import float32  # noqa: E402
from popxl.errors import RemoteMemoryError  # noqa: E402
from popxl.extensions import bfloat16, measure, profile  # noqa: E402
from popxl.opdef import OPS, Op, call_arguments, map_tensors  # noqa: E402
from popxl.tensor import Tensor  # noqa: E402
from popxl_engine import engine  # noqa: E402
from popxl_engine.interpreter import constant_tensor  # noqa: E402
from popxl_engine.kernels import attention as kernels_of_attention  # noqa: E402
from popxl_engine.kernels import generator  # noqa: E402
from popxl_engine.kernels.adamw import adamw_, adamw_where_  # noqa: E402
from popxl_engine.kernels.attention import attention_grad, attention_no_probs  # noqa: E402
from popxl_engine.kernels.compiled import compiles  # noqa: E402
from popxl_engine.kernels.flash_attention import flash_attention, flash_attention_grad  # noqa: E402
from popxl_engine.kernels.gemm import gemm_bias  # noqa: E402
from popxl_engine.kernels.registry import kernel_for  # noqa: E402
from popxl_engine.kernels.rounding import Updates  # noqa: E402
from popxl_engine.machine.device import Device, device_named  # noqa: E402
from popxl_engine.machine.paging import HostStore  # noqa: E402
from popxl_engine.support import uploader  # noqa: E402

from popxl_gpt.config.presets import override, preset  # noqa: E402
from popxl_gpt.config.schema import Config  # noqa: E402
from popxl_gpt.execution.host import run_steps  # noqa: E402
from popxl_gpt.execution.pretraining import pretraining, training_program  # noqa: E402
from popxl_gpt.execution.variables import read_weights  # noqa: E402
from popxl_gpt.utils.runtime import planner  # noqa: E402

Check = tuple[str, Callable[[], None]]

NEAR = {"rtol": 2e-4, "atol": 2e-5}
"""Between kernels of two devices, in float32."""

ONE_ROUNDING = 2**-9
"""Distance of a bfloat16 product from the exact one, as a part of it; two roundings are farther."""

FLOAT8_SUMS = 2**-10
"""Distance of a sum of products of float8 from the exact one, as a part of the largest one."""

WINDOW, SOFTCAP = 130, 1.5
"""Tokens of a window and the bound of scores where attention hides by blocks."""
STREAMED = {torch.float32: 1e-5, torch.bfloat16: 0.012, torch.float16: 0.002}
"""Distance from exact results, as a part of them."""


def op_checks(device: Device) -> Iterator[Check]:
    """One check for each sample of each op that needs nothing but its kernel."""
    for table in (
        importlib.import_module(f"helpers.samples.{m.name}")
        for m in pkgutil.iter_modules(samples.__path__)
    ):
        for number, sample in enumerate(getattr(table, "SAMPLES", ())):
            yield (
                f"{sample.op}, sample {number} of {table.__name__}",
                lambda sample=sample: same_kernels(sample, device),
            )


def same_kernels(sample: object, device: Device) -> None:
    """Each kernel of a sample's graph on the device and on the processor, with the same
    operands.
    """
    case = make_case(sample, sample.dtype)
    graph = build(case).graph
    values = dict(zip(graph.inputs, case.tensors)) | {
        c: constant_tensor(c) for c in graph.constants
    }
    for op in graph.ops:
        if op.called() or op.definition.effects:  # kernels of other graphs, or of the machine
            return
        expected, got = (
            results_of(op, values, where) for where in (torch.device("cpu"), device.where)
        )
        for here, there in zip(as_ordered(op, expected), as_ordered(op, got)):
            same_numbers(there.cpu(), here)
        values |= dict(zip(op.outputs, expected))


def as_ordered(op: Op, results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results in one order, where the op promises none: the largest of `topk` when not sorted."""
    if op.definition.name != "topk" or op.arguments["sorted"]:
        return results
    values, positions = results
    order = values.argsort(op.arguments["axis"])
    return [t.gather(op.arguments["axis"], order) for t in (values, positions)]


def results_of(
    op: Op, values: dict[Tensor, torch.Tensor], where: torch.device
) -> list[torch.Tensor]:
    """What an op's kernel for a device gives; it may write to its operands, which are copies."""
    placed = {
        n: map_tensors(v, lambda t: values[t].clone().to(where)) for n, v in op.arguments.items()
    }
    args, kwargs = call_arguments(op.definition, placed)
    with torch.no_grad(), where if not op.inputs else nullcontext():
        result = kernel_for(op.definition, where.type)(*args, **kwargs)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def same_numbers(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, or in floating point as near as two devices are."""
    if expected.dtype.is_floating_point and expected.itemsize == 1:
        got, expected = got.float(), expected.float()
    torch.testing.assert_close(
        got, expected, **NEAR if expected.dtype == torch.float32 else {}, equal_nan=True
    )


def streams_attention(device: Device, dtype: torch.dtype, width: int) -> None:
    """Causal attention by PyTorch's kernels."""

    def run(
        scale: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor
    ) -> list[torch.Tensor]:
        y, logsumexp = flash_attention(query, key.transpose(2, 3), value, scale)
        operands = (dy, query.transpose(2, 3), key, value.transpose(2, 3), y, logsumexp)
        d_query, d_key_t, d_value = flash_attention_grad(*operands, scale)
        return [y, d_query, d_key_t.transpose(2, 3), d_value]

    same_attention(device, dtype, width, run)


def hides_by_blocks(device: Device) -> None:
    """Attention with a window, documents and a soft cap, of some queries at a time."""
    positions = (torch.arange(600, dtype=torch.int32) % 170).expand(2, 600).contiguous()
    hides = positions.to(device.where), True, WINDOW, SOFTCAP

    def run(
        scale: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor
    ) -> list[torch.Tensor]:
        drawn = (scale, None, 0.0)
        y = attention_no_probs(query, key.transpose(2, 3), value, None, *drawn, *hides)
        operands = (dy, query.transpose(2, 3), key, value.transpose(2, 3), None, None)
        d_query, d_key_t, d_value = attention_grad(*operands, *drawn, None, *hides)
        return [y, d_query, d_key_t.transpose(2, 3), d_value]

    own = torch.arange(600)
    distance = own[:, None] - own
    hidden = (distance >= WINDOW) | (distance > positions[0, :, None])
    with mock.patch.object(kernels_of_attention, "BLOCK", 2 * 4 * 600 * 64):
        same_attention(device, torch.float32, 20, run, hidden, SOFTCAP)


def same_attention(
    device: Device,
    dtype: torch.dtype,
    width: int,
    run_on: Callable[..., list[torch.Tensor]],
    hidden: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> None:
    """Causal attention and its gradients against autograd in float64; once more they have the same
    bits.

    Args:
        hidden: what else is.
    """
    random = torch.Generator().manual_seed(0)
    # heads lie within rows, as projections leave
    rows = torch.randn(2, 4, 600, 3, width, generator=random).to(dtype)
    query, key, value, dy = (
        t.permute(0, 2, 1, 3) for t in rows.permute(1, 0, 2, 3, 4).to(device.where)
    )
    scale = 0.7 / width**0.5

    def run() -> list[torch.Tensor]:
        return run_on(scale, query, key, value, dy)

    exact = [t.detach().cpu().double().requires_grad_() for t in (query, key, value)]
    later = torch.ones(600, 600, dtype=torch.bool).triu(1)
    scores = exact[0] @ exact[1].transpose(2, 3) * scale
    scores = (scores / softcap).tanh() * softcap if softcap else scores
    scores = scores.masked_fill(later if hidden is None else later | hidden, float("-inf"))
    y = torch.softmax(scores, -1) @ exact[2]
    expected = [y.detach(), *torch.autograd.grad(y, exact, dy.cpu().double())]
    found = run()
    for one, other in zip(found, expected):
        distance = float((one.cpu().double() - other).norm() / other.norm())
        assert distance < STREAMED[dtype], (
            f"distance {distance}; expected less than {STREAMED[dtype]}"
        )
    for _ in range(5):
        for one, other in zip(run(), found):
            assert torch.equal(one, other), "the bits of two runs differ"


def rows_survive(device: Device) -> None:
    """Bytes to the device and back by the copies that rows travel with."""
    store, memory = HostStore(1 << 20, device), device.memory(1 << 20).bytes
    random = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    memory.copy_(random)
    store.write(0, memory)
    memory.zero_()
    if (fence := device.fence()) is not None:  # copies wait for nobody
        fence.wait()
    store.read(0, memory)
    assert torch.equal(memory.cpu(), random)


def memory_is_page_locked(device: Device) -> None:
    """Memory that rows wait in is known to the device's copies; else they are slower."""
    part = HostStore(1 << 20, device).part(4096, 4096)
    assert device.where.type == "cpu" or part.is_pinned(), "it is not; see the warnings of the log"


def windows_are_the_memory(device: Device) -> None:
    """A window has the memory itself, says when nobody has it any more, and holds what it is of."""
    memory, gone = device.memory(8192).bytes, []
    memory.zero_()
    window = device.window(memory[4096:], lambda: gone.append(True))
    numbers = window.view(torch.float32)
    numbers.fill_(1.0)
    assert float(memory[4096:].view(torch.float32).sum()) == 1024 and not memory[:4096].any()
    del window
    gc.collect()
    assert not gone, "a view has it still"
    del numbers
    gc.collect()
    assert gone == [True]


def too_much_is_refused(device: Device) -> None:
    """More memory than there is raises the error that says what to do, and the device goes on."""
    with TestCase().assertRaises(RemoteMemoryError):
        device.memory(1 << 50)
    assert float(torch.ones(8, device=device.where).sum()) == 8


def make_busy(device: Device) -> None:
    """Ask a GPU for what takes it about a second, and a processor for nothing."""
    if device.where.type == "cuda":
        matrix, result = torch.zeros(2, 8192, 8192, device=device.where)
        for _ in range(40):
            torch.mm(matrix, matrix, out=result)


def uploads_are_right(device: Device) -> None:
    """Host values reach the device as they were, though their memory is used again, and the host
    waits for none.
    """
    upload = uploader(device.where)
    for _ in range(2):  # the first time, libraries are loaded
        make_busy(device)
        # fewer than a GPU's queue takes
        placed = [upload(np.array([i, i + 1], np.uint32)) for i in range(200)]
        fence = device.fence()
        is_behind = fence is not None and not fence.is_done
    for i, t in enumerate(placed):
        assert t.tolist() == [i, i + 1]
    assert is_behind or device.where.type == "cpu", "the host has waited for its uploads"


def kernel_on(where: torch.device, name: str) -> Callable[..., Any]:
    """An op's kernel on a device."""
    return kernel_for(OPS[name], where.type)


def same_draws(device: Device) -> None:
    """Draws have the processor's bits, over several blocks and far from the first."""
    seed = torch.tensor([2**31 + 5, 7], dtype=torch.uint32)
    for count, offset in (
        (2 * generator.LARGE_BLOCK + 12_345, 0),
        (generator.LARGE_BLOCK * 3, 2**35 + 1),
        (1, 3),
    ):
        expected = generator.draws(seed, count, offset)
        assert torch.equal(generator.draws(seed.to(device.where), count, offset).cpu(), expected), (
            count,
            offset,
        )


def same_wide_products(device: Device) -> None:
    """Logits of a number of classes that is odd, and what is made of their gradient: every number
    is rounded once.
    """
    random = torch.Generator().manual_seed(0)
    rows, table, added = (
        torch.randn(shape, generator=random).to(torch.bfloat16)
        for shape in ((300, 64), (50257, 64), (50257,))
    )
    x, w, b = (t.to(device.where) for t in (rows, table, added))
    multiply, add = kernel_on(device.where, "matmul"), gemm_bias
    y = multiply(x, w.t(), None, None, None)
    for got, lhs, rhs, bias in (
        (y, x, w.t(), None),
        (add(x, w.t(), b), x, w.t(), b),
        (multiply(y.t(), x, None, None, None), y.t(), x, None),
        (multiply(y, w, None, None, None), y, w, None),
        (add(y, w, b[:64]), y, w, b[:64]),
        (multiply(y[:, :1], y[:1], None, None, None), y[:, :1], y[:1], None),
    ):
        exact = lhs.double() @ rhs.double()
        exact = exact if bias is None else exact + bias.double()
        distance = float((got.double() - exact).norm() / exact.norm())
        assert distance < ONE_ROUNDING, f"distance {distance}; expected less than {ONE_ROUNDING}"


def same_steps_of_adamw(device: Device) -> None:
    """Weights and moments of 16 bits, rounded stochastically, are the processor's, but for those
    few that lie where another device's last bit decides.
    """
    random = torch.Generator().manual_seed(0)
    old = torch.randn(4, 200_001, generator=random)
    old[3].square_()
    for weights, moments, rounds in (
        (torch.float32, torch.float32, True),
        (torch.bfloat16, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float16, torch.float32, True),
    ):
        results = []
        for where in (torch.device("cpu"), device.where):
            weight, grad, first, second = (
                t.to(where, dtype, copy=True)
                for t, dtype in zip(old, (weights, torch.float32, moments, moments))
            )
            scale, step, minus_lr = (torch.tensor(n).to(where) for n in (0.5, 4.0, -1e-2))
            seeds = iter((torch.tensor([n, 7], dtype=torch.uint32), 5) for n in range(6))
            operands = (weight, grad, scale, first, second, step, minus_lr, 0.9, 0.95, 1e-8, 0.1)
            draws = Updates.drawing(lambda: next(seeds)) if rounds else nullcontext()  # noqa: B023
            with draws:
                adamw_(*operands)
                adamw_where_(torch.zeros((), dtype=torch.bool).to(where), *operands)
            results.append([t.cpu() for t in (weight, first, second)])
        for here, there in zip(*results):
            near = (there.double() - here.double()).abs() <= 1e-6 * here.double().abs() + 1e-7
            assert near.double().mean() > 0.999, (weights, moments, near.double().mean())
            torch.testing.assert_close(there, here)  # the others are neighbours


def same_large_cross_entropy(device: Device) -> None:
    """Several chunks of rows, in which labels are none of the classes and all is hidden, in the
    logits' own type.
    """
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(1500, 50257, generator=random).to(torch.bfloat16)
    logits[3] = float("-inf")
    labels = torch.randint(-1, 50258, (1500,), generator=random, dtype=torch.int32)
    scales, picked = (torch.randn(1500, generator=random) for _ in range(2))
    results = []
    for where in (torch.device("cpu"), device.where):
        placed = [t.to(where) for t in (scales, picked, logits, labels)]
        total, at_labels = kernel_on(where, "logsumexp_and_pick")(*placed[2:])
        gradient = kernel_on(where, "logsumexp_and_pick_grad")(*placed[:2], total, *placed[2:])
        results.append([t.cpu() for t in (total, at_labels, gradient)])
    for here, there in zip(*results):
        same_numbers(there, here)


def compiled_is_right(device: Device) -> None:
    """Where Triton is there, chains are compiled, and nothing is said of passes; with it or not,
    the numbers are right.

    In sizes of several kinds, as programs have them.
    """
    random = torch.Generator().manual_seed(0)
    told = TestCase().assertNoLogs("popxl", "WARNING")
    with torch.no_grad(), device.running(), told:
        for shape in ((70_001,), (300, 41), (1,), (64, 128)):
            state = [torch.randn(shape, generator=random, device="cpu") for _ in range(4)]
            state[3].square_()
            numbers = [torch.tensor(x, device="cpu") for x in (0.5, 4.0, -1e-3)]
            results = []
            for where in (torch.device("cpu"), device.where):
                weight, grad, first, second = (t.clone().to(where) for t in state)
                scale, step, minus_lr = (t.to(where) for t in numbers)
                mean = kernel_on(where, "accumulate_mean_")(
                    grad.clone(), weight.to(torch.bfloat16), step
                )
                adamw_(weight, grad, scale, first, second, step, minus_lr, 0.9, 0.95, 1e-8, 0.1)
                results.append([t.cpu() for t in (weight, first, second, mean)])
            for here, there in zip(*results):
                same_numbers(there, here)
    assert device.where.type == "cpu" or compiles(), "torch has no Triton, or POPXL_COMPILE=0"


TRAINED = {
    **{"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1, "global_batch_size": 8},
    **{
        "micro_batch_size": 2,
        "hidden_size": 48,
        "layers": 3,
        "schedule": "constant",
        "learning_rate": 1e-3,
    },
}


def trained(config: Config, steps: int = 4) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of some steps, and the weights after them."""
    random, losses = np.random.default_rng(0), []
    session = pretraining(config)
    with session:
        for _ in range(steps):
            shape = (config.training.global_batch_size, config.model.sequence_length + 1)
            tokens = random.integers(0, config.model.vocabulary_size, shape)
            (result,) = run_steps(session, config, tokens[:, :-1], tokens[:, 1:], [1e-3])
            losses.append(result.loss)
    return losses, read_weights(session, config)


def large_float8_products(device: Device) -> None:
    """Forward, and both of the backward pass, with operands as they lie there: sums of tensor cores
    have 14 bits or more, which is `FLOAT8_SUMS`.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (256, 1024), (1024, 520), (256, 520)
    narrow = torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2
    x, w, dy = (torch.randn(s, generator=generator).to(of) for s, of in zip(shapes, narrow))
    amax = torch.tensor(3.0)
    for lhs, rhs in ((x, w), (dy, w.t()), (x.t(), dy)):
        expected = kernel_for(OPS["float8_matmul"])(lhs, rhs, amax, amax, float32)
        there = [t.to(device.where) for t in (lhs, rhs, amax, amax)]
        got = kernel_for(OPS["float8_matmul"], device.where.type)(*there, float32).cpu()
        np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT8_SUMS * expected.abs().max())


def same_losses(device: str, **changes: object) -> None:
    """Training has the processor's losses."""
    config = override(preset("tiny"), **{**TRAINED, "dropout": 0.1, **changes})
    expected, _ = trained(override(config, device="cpu"))
    losses, _ = trained(override(config, device=device))
    np.testing.assert_allclose(
        losses, expected, rtol=1e-4 if config.model.precision == "float32" else 2e-2
    )


def same_bits(device: str, **changes: object) -> None:
    """Whatever part of the state is on the device, the losses and weights are the same."""
    config = override(preset("tiny"), **{**TRAINED, "device": device, "dropout": 0.1, **changes})
    program, _, _ = training_program(override(config, device_memory=2**40))
    needs = planner().device_needs(program, device_named(device).where.type)
    limits = (needs.resident * 2, (needs.least + needs.resident) // 2, needs.least)
    expected, *others = [trained(override(config, device_memory=limit)) for limit in limits]
    for losses, weights in others:
        assert losses == expected[0], f"losses {losses}; expected {expected[0]}"
        for name, array in expected[1].items():
            np.testing.assert_array_equal(weights[name], array, err_msg=name)


def nothing_waits(device: str, **changes: object) -> None:
    """With all state on the device, a run copies nothing that the host waits for between its
    beginning and its end.
    """
    config = override(preset("tiny"), **{**TRAINED, "device": device, **changes})
    is_gpu = device_named(device).where.type == "cuda"
    tokens = np.zeros(
        (config.training.global_batch_size, config.model.sequence_length + 1), np.int64
    )
    plain, runs = engine.run_lockstep, []

    @contextmanager
    def refusing() -> Iterator[None]:
        if is_gpu:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if is_gpu:
                torch.cuda.set_sync_debug_mode("default")

    def watched(*arguments: object) -> object:
        with refusing():
            runs.append(plain(*arguments))
        return runs[-1]

    session = pretraining(config)
    with session:
        # compiles, and loads libraries
        run_steps(session, config, tokens[:, :-1], tokens[:, 1:], [1e-3])
        with mock.patch.object(engine, "run_lockstep", watched):
            run_steps(session, config, tokens[:, :-1], tokens[:, 1:], [1e-3])
    assert runs, "no run was watched"


def profiles_tell_times(device: str) -> None:
    """A profile's phases take time, together no more than the host saw, and memory."""
    config = override(preset("tiny"), **{**TRAINED, "device": device})
    tokens = np.zeros(
        (config.training.global_batch_size, config.model.sequence_length + 1), np.int64
    )
    session = pretraining(config)
    with session:
        begin = time.perf_counter()
        with profile(session) as profiles:
            run_steps(session, config, tokens[:, :-1], tokens[:, 1:], [1e-3])
        seconds = time.perf_counter() - begin
    (found,) = profiles
    taken = [phase.seconds for phase in found.phases]
    assert min(taken) >= 0 and 0 < sum(taken) < 1.01 * seconds, (taken, seconds)
    if session._engine.device.where.type == "cuda":
        memory = {phase.name: phase.memory.tensors or 0 for phase in found.phases}
        assert memory["decoder_bwd_phase"] > memory["decoder_optim_phase"] >= 0, memory


def speeds_are_the_devices(name: str) -> None:
    """What a plan is timed with: products of narrow types are faster than float32's, and a copy
    within the memory than one from the host.
    """
    wide, narrow = (measure(dtype, name) for dtype in (float32, bfloat16))
    assert min(wide.flops, wide.link, wide.remote) > 0
    if device_named(name).where.type == "cuda":
        assert narrow.flops > 2 * wide.flops and narrow.link > 2 * narrow.remote, (wide, narrow)


def checks(name: str, device: Device) -> Iterator[Check]:
    """Everything that is checked."""
    yield "rows survive the way to the host's memory and back", lambda: rows_survive(device)
    yield "the host's memory for rows is page-locked", lambda: memory_is_page_locked(device)
    yield "windows are the memory that they are of", lambda: windows_are_the_memory(device)
    yield "more memory than there is is refused", lambda: too_much_is_refused(device)
    yield "uploads are right, and nobody waits for them", lambda: uploads_are_right(device)
    yield "draws are the processor's", lambda: same_draws(device)
    yield "wide products are exact but for one rounding", lambda: same_wide_products(device)
    yield "large products in 8 bits are exact but for sums", lambda: large_float8_products(device)
    yield "AdamW's steps in 16 bits are the processor's", lambda: same_steps_of_adamw(device)
    yield "a large cross entropy is the processor's", lambda: same_large_cross_entropy(device)
    yield "what is compiled is right", lambda: compiled_is_right(device)
    yield from op_checks(device)
    for dtype, width in (
        (torch.float32, 20),
        (torch.bfloat16, 80),
        (torch.float16, 128),
        (torch.bfloat16, 256),
    ):
        yield (
            f"attention without probabilities in {dtype}, heads of {width}",
            lambda dtype=dtype, width=width: streams_attention(device, dtype, width),
        )
    yield "attention that hides by blocks is the textbook's", lambda: hides_by_blocks(device)
    sixteen = {"precision": "bfloat16", "stochastic_rounding": True}
    streamed = {"dropout": 0.0, "heads": 3}
    yield "training in float32 has the processor's losses", lambda: same_losses(name)
    yield "training in bfloat16 has the processor's losses", lambda: same_losses(name, **sixteen)
    yield (
        "training without recomputation has them, too",
        lambda: same_losses(name, recomputation=False),
    )
    yield "training without probabilities has them, too", lambda: same_losses(name, **streamed)
    yield (
        "training without probabilities in bfloat16 has them",
        lambda: same_losses(name, **streamed, **sixteen),
    )
    yield "nothing waits in a run with dropout", lambda: nothing_waits(name, dropout=0.1)
    narrow = {**sixteen, "gradient_precision": "bfloat16"}
    yield "nothing waits in a run in bfloat16", lambda: nothing_waits(name, **streamed, **narrow)
    eight = {**sixteen, "products": "fp8", "layers": 4}
    yield "training with products in 8 bits has them", lambda: same_losses(name, **eight)
    yield "nothing waits in a run with these", lambda: nothing_waits(name, **streamed, **eight)
    yield "speeds are the device's", lambda: speeds_are_the_devices(name)
    yield "profiles tell times", lambda: profiles_tell_times(name)
    yield "two replicas on one device have them, too", lambda: same_losses(name, data_parallel=2)
    yield "any part of the state on the device gives the same bits", lambda: same_bits(name)
    yield "the same in bfloat16, rounding stochastically", lambda: same_bits(name, **narrow)
    yield "the same with products in 8 bits", lambda: same_bits(name, **eight)
    yield "the same without probabilities", lambda: same_bits(name, **streamed)
    yield (
        "the same without probabilities in bfloat16",
        lambda: same_bits(name, **streamed, **sixteen),
    )


def main() -> int:
    """Run them; exit code 1 where one fails, 2 where there is no such device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="checks whose name has one of these"
    )
    arguments = parser.parse_args()
    try:
        device = device_named(arguments.device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    torch.use_deterministic_algorithms(True, warn_only=True)
    passed, failed, begin = 0, [], time.perf_counter()
    chosen = [
        (n, check)
        for n, check in checks(arguments.device, device)
        if any(text in n for text in arguments.only)
    ]
    for text in arguments.only:
        if not any(text in name for name, _ in chosen):
            parser.error(f"--only: got {text!r}; expected a part of a check's name")
    for name, check in chosen:
        try:
            check()
            passed += 1
        except Exception:
            failed.append(name)
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
    seconds = time.perf_counter() - begin
    print(f"{passed} checks passed, {len(failed)} failed on {arguments.device} in {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
