"""What must hold on a GPU, as a plain script: it needs torch, numpy and pyyaml, and no pytest.

    python tests/gpu_checks.py                      # on the first GPU; exit code 2 where there is none
    python tests/gpu_checks.py --device cpu         # the script itself, on a processor

Every op's kernels give what they give on the processor, float32 to rounding; attention that keeps no probabilities has
the textbook's numbers, and the same bits every time; rows survive the way to page-locked memory and back; training has
the processor's losses, and the same bits whatever part of its state is on the device.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "runtime" / "tests")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products whose sums have one order

import importlib  # noqa: E402
import pkgutil  # noqa: E402

import numpy as np  # noqa: E402
import samples  # noqa: E402
import torch  # noqa: E402
from helpers import build, make_case  # noqa: E402
from popxl.opdef import Op, call_arguments, map_tensors  # noqa: E402
from popxl.values import Tensor  # noqa: E402
from popxl_engine.interpreter import constant_tensor  # noqa: E402
from popxl_engine.kernels.registry import kernel_for  # noqa: E402
from popxl_engine.machine.device import Device, device_named  # noqa: E402
from popxl_engine.machine.tier import HostStore  # noqa: E402
from popxl_engine.rewrites.streamed_attention import streamed_attention, streamed_attention_grad  # noqa: E402

from config import Config, override, preset  # noqa: E402
from execution.host import run_steps  # noqa: E402
from execution.pretraining import pretraining, training_program  # noqa: E402
from execution.variables import read_weights  # noqa: E402
from utils.runtime import planner  # noqa: E402

Check = tuple[str, Callable[[], None]]

NEAR = {"rtol": 2e-4, "atol": 2e-5}
"""Between kernels of two devices, in float32."""

STREAMED = {torch.float32: 1e-5, torch.bfloat16: 0.012, torch.float16: 0.002}
"""Distance from exact results, as a part of them."""


def op_checks(device: Device) -> Iterator[Check]:
    """One check for each sample of each op that needs nothing but its kernel."""
    for table in (importlib.import_module(f"samples.{m.name}") for m in pkgutil.iter_modules(samples.__path__)):
        for number, sample in enumerate(getattr(table, "SAMPLES", ())):
            yield (
                f"{sample.op}, sample {number} of {table.__name__}",
                lambda sample=sample: same_kernels(sample, device),
            )


def same_kernels(sample: object, device: Device) -> None:
    """Each kernel of a sample's graph on the device and on the processor, with the same operands."""
    case = make_case(sample, sample.dtype)
    graph = build(case).graph
    values = dict(zip(graph.inputs, case.tensors)) | {c: constant_tensor(c) for c in graph.constants}
    for op in graph.ops:
        if op.called() or op.definition.effects:  # kernels of other graphs, or of the machine
            return
        expected, got = (results_of(op, values, where) for where in (torch.device("cpu"), device.where))
        for here, there in zip(expected, got):
            same_numbers(there.cpu(), here)
        values |= dict(zip(op.outputs, expected))


def results_of(op: Op, values: dict[Tensor, torch.Tensor], where: torch.device) -> list[torch.Tensor]:
    """What an op's kernel for a device gives; it may write to its operands, which are copies."""
    placed = {n: map_tensors(v, lambda t: values[t].clone().to(where)) for n, v in op.arguments.items()}
    args, kwargs = call_arguments(op.definition, placed)
    with torch.no_grad(), where:
        result = kernel_for(op.definition, where.type)(*args, **kwargs)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def same_numbers(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, or in floating point as near as two devices are."""
    if expected.dtype.is_floating_point and expected.itemsize == 1:
        got, expected = got.float(), expected.float()
    torch.testing.assert_close(got, expected, **NEAR if expected.dtype == torch.float32 else {}, equal_nan=True)


def streams_attention(device: Device, dtype: torch.dtype, width: int) -> None:
    """Causal attention and its gradients against autograd in float64; once more they have the same bits."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 4, 600, 3, width, generator=random).to(dtype)  # heads lie within rows, as projections leave
    query, key, value, dy = (t.permute(0, 2, 1, 3) for t in rows.permute(1, 0, 2, 3, 4).to(device.where))
    scale = 0.7 / width**0.5

    def run() -> list[torch.Tensor]:
        y, logsumexp = streamed_attention(query, key.transpose(2, 3), value, scale)
        operands = (dy, query.transpose(2, 3), key, value.transpose(2, 3), y, logsumexp)
        d_query, d_key_t, d_value = streamed_attention_grad(*operands, scale)
        return [y, d_query, d_key_t.transpose(2, 3), d_value]

    exact = [t.detach().cpu().double().requires_grad_() for t in (query, key, value)]
    hidden = torch.ones(600, 600, dtype=torch.bool).triu(1)
    scores = (exact[0] @ exact[1].transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))
    y = torch.softmax(scores, -1) @ exact[2]
    expected = [y.detach(), *torch.autograd.grad(y, exact, dy.cpu().double())]
    found = run()
    for one, other in zip(found, expected):
        distance = float((one.cpu().double() - other).norm() / other.norm())
        assert distance < STREAMED[dtype], f"distance {distance}; expected less than {STREAMED[dtype]}"
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


TRAINED = {
    **{"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1, "global_batch_size": 8},
    **{"micro_batch_size": 2, "hidden_size": 48, "layers": 3, "schedule": "constant", "learning_rate": 1e-3},
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


def same_losses(device: str, **changes: object) -> None:
    """Training has the processor's losses."""
    config = override(preset("tiny"), **{**TRAINED, "dropout": 0.1, **changes})
    expected, _ = trained(override(config, device="cpu"))
    losses, _ = trained(override(config, device=device))
    np.testing.assert_allclose(losses, expected, rtol=1e-4 if config.model.precision == "float32" else 2e-2)


def same_bits(device: str, **changes: object) -> None:
    """Whatever part of the state is on the device, the losses and weights are the same."""
    config = override(preset("tiny"), **{**TRAINED, "device": device, "dropout": 0.1, **changes})
    needs = planner().device_needs(training_program(config)[0], device_named(device).where.type)
    limits = (needs.resident * 2, (needs.least + needs.resident) // 2, needs.least)
    expected, *others = [trained(override(config, device_memory=limit)) for limit in limits]
    for losses, weights in others:
        assert losses == expected[0], f"losses {losses}; expected {expected[0]}"
        for name, array in expected[1].items():
            np.testing.assert_array_equal(weights[name], array, err_msg=name)


def checks(name: str, device: Device) -> Iterator[Check]:
    """Everything that is checked."""
    yield "rows survive the way to the host's memory and back", lambda: rows_survive(device)
    yield from op_checks(device)
    for dtype, width in ((torch.float32, 20), (torch.bfloat16, 80), (torch.float16, 128), (torch.bfloat16, 256)):
        yield (
            f"attention without probabilities in {dtype}, heads of {width}",
            lambda dtype=dtype, width=width: streams_attention(device, dtype, width),
        )
    sixteen = {"precision": "bfloat16", "stochastic_rounding": True}
    streamed = {"dropout": 0.0, "heads": 3}
    yield "training in float32 has the processor's losses", lambda: same_losses(name)
    yield "training in bfloat16 has the processor's losses", lambda: same_losses(name, **sixteen)
    yield "training without recomputation has them, too", lambda: same_losses(name, recomputation=False)
    yield "training without probabilities has them, too", lambda: same_losses(name, **streamed)
    yield "training without probabilities in bfloat16 has them", lambda: same_losses(name, **streamed, **sixteen)
    yield "two replicas on one device have them, too", lambda: same_losses(name, data_parallel=2)
    yield "any part of the state on the device gives the same bits", lambda: same_bits(name)
    yield "the same in bfloat16, rounding stochastically", lambda: same_bits(name, **sixteen)
    yield "the same without probabilities", lambda: same_bits(name, **streamed)
    yield "the same without probabilities in bfloat16", lambda: same_bits(name, **streamed, **sixteen)


def main() -> int:
    """Run them; exit code 1 where one fails, 2 where there is no such device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="checks whose name has one of these")
    arguments = parser.parse_args()
    try:
        device = device_named(arguments.device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    torch.use_deterministic_algorithms(True, warn_only=True)
    passed, failed, begin = 0, [], time.perf_counter()
    chosen = [(n, check) for n, check in checks(arguments.device, device) if any(text in n for text in arguments.only)]
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
