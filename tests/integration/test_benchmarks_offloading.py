"""The baselines that offload take plain PyTorch's steps, and the benchmark holds the phased step to
them.
"""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.quick import Later

from benchmarks import train_step
from benchmarks.harness import Measurement
from benchmarks.plain_gpt import PlainGPT, PlainModel, PlainTrainer, PlainTraining
from tests import warm

offloading, hugging_face_gpt = Later("benchmarks.offloading"), Later("benchmarks.hugging_face_gpt")
ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = {"layers": 2, "hidden_size": 24, "heads": 3, "sequence_length": 10, "vocabulary_size": 37}
TRAINING = PlainTraining(
    steps=9, learning_rate=1e-2, schedule="linear", weight_decay=0.1, max_norm=0.05
)

ACCUMULATION = 3
HERE = [
    peer for peer in train_step.PEERS if peer == "FSDP2" or importlib.util.find_spec("deepspeed")
]
"""DeepSpeed is no requirement; where it is installed, it is held to the same."""


@pytest.fixture(scope="module")
def group():
    offloading.start_alone()
    yield
    torch.distributed.destroy_process_group()


def losses(make, model: str, **options) -> list[float]:
    """Six steps from random parameters, gains and biases too; clipping must be active for them to
    mean something.
    """
    torch.manual_seed(0)
    gpt = (PlainGPT if model == "PlainGPT" else hugging_face_gpt.HuggingFaceGPT)(
        PlainModel(**SIZES)
    )
    with torch.no_grad():
        for p in gpt.parameters():
            p.copy_(torch.randn_like(p) * 0.2)
    trainer = make(gpt, TRAINING, **options)
    steps = torch.randint(
        0, 37, (6, ACCUMULATION, 2, 11), generator=torch.Generator().manual_seed(1)
    )
    found = [trainer.step([(ids[:, :-1], ids[:, 1:]) for ids in step]) for step in steps]
    assert trainer.gradient_norm > TRAINING.max_norm
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("model", ["PlainGPT", "HuggingFaceGPT"])
@pytest.mark.parametrize("peer", HERE)
# DeepSpeed calls what PyTorch has given other names
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_peer_that_offloads_takes_the_steps_of_plain_pytorch(peer, model):
    make, options = offloading.TRAINERS[peer], {"compiled": False, "accumulation": ACCUMULATION}
    expected = losses(PlainTrainer, model)
    assert losses(make, model, dtype=torch.float32, **options) == pytest.approx(expected, rel=1e-6)
    assert losses(make, model, dtype=torch.bfloat16, **options) == pytest.approx(expected, rel=0.02)


def test_the_bar_compares_what_recomputes_with_what_offloads():
    def verdict(**seconds: float) -> dict | None:
        times = {"stepping_bytes": 1, "steps": ({"loss": 1.0},), "finish": {}, "peak_bytes": 10}
        found = [
            Measurement(name=name.replace("_", ", "), seconds=(s,), cpu_seconds=(2 * s,), **times)
            for name, s in seconds.items()
        ]
        return train_step.offloading_verdict(train_step.compare(found, 10)[1])

    rest = {"eager": 0.1, "phased": 0.2}
    assert verdict(
        **rest,
        FSDP2=5.0,
        DeepSpeed_compiled=2.2,
        phased_recomputing=1.5,
        phased_wide_recomputing=1.0,
    ) == {
        "speed_ratio": 2.2,
        "cpu_ratio": 2.2,
        "memory_ratio": 1.0,
        "met": True,
    }
    assert not verdict(**rest, FSDP2=1.9, phased_recomputing=1.0)["met"]
    assert verdict(**rest, FSDP2=1.0) is None and verdict(**rest, phased_recomputing=1.0) is None


@pytest.mark.multi
def test_train_step_goes_on_without_a_peer_that_does_not_import(tmp_path):
    (tmp_path / "deepspeed.py").write_text('raise ImportError("no compiler")')
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    flags = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    command = [
        warm.python(),
        "benchmarks/train_step.py",
        *flags,
        "--rounds",
        "1",
        "--warmup",
        "1",
        "--offloading",
    ]
    command += [
        "--dtypes",
        "float32",
        "--variants",
        "eager",
        "FSDP2",
        "DeepSpeed",
        "phased, recomputing",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**warm.with_children(), "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert (
        "goes on without DeepSpeed (ImportError: no compiler). Try: pip install deepspeed"
        in done.stderr
    )
    assert (
        "bar: phased and recomputing at least 2.0x the speed of the fastest that offloads"
        in done.stdout
    )
    figures = json.loads(done.stdout.strip().splitlines()[-1])["dtypes"]["float32"]
    assert figures["variants"].keys() == {"eager", "FSDP2", "phased, recomputing"}
    assert figures["offloading_bar"]["speed_ratio"] > 0
    plain, sharded = (figures["variants"][name]["loss"] for name in ("eager", "FSDP2"))
    assert sharded == pytest.approx(plain, rel=1e-6)
