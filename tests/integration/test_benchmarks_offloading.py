"""The baseline that offloads takes plain PyTorch's steps, and the benchmark holds the phased step to
them.
"""

import functools

import pytest
import torch
from helpers.quick import Later

from benchmarks import train_step
from benchmarks.harness import Measurement
from benchmarks.plain_gpt import PlainGPT, PlainModel, PlainTrainer, PlainTraining

offloading, hugging_face_gpt = (
    Later("benchmarks.offloading"),
    Later("tests.integration.hugging_face_gpt"),
)
SIZES = {"layers": 2, "hidden_size": 24, "heads": 3, "sequence_length": 10, "vocabulary_size": 37}
TRAINING = PlainTraining(
    steps=9, learning_rate=1e-2, schedule="linear", weight_decay=0.1, max_norm=0.05
)

ACCUMULATION = 3


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
def test_a_peer_that_offloads_takes_the_steps_of_plain_pytorch(model):
    make = functools.partial(offloading.ShardedTrainer, compiled=False)
    expected = losses(PlainTrainer, model)
    assert losses(make, model, dtype=torch.float32) == pytest.approx(expected, rel=1e-6)
    assert losses(make, model, dtype=torch.bfloat16) == pytest.approx(expected, rel=0.02)


def test_the_bar_compares_what_recomputes_with_what_offloads():
    def verdict(**seconds: float) -> dict | None:
        times = {"steps": ({"loss": 1.0},), "finish": {}, "peak_bytes": 10}
        found = [
            Measurement(name=name.replace("_", ", "), seconds=(s,), cpu_seconds=(2 * s,), **times)
            for name, s in seconds.items()
        ]
        variants = train_step.compare(found, 10)["variants"]
        return train_step.verdict(variants, *train_step.BARS["offloading_bar"])

    rest = {"eager": 0.1, "phased": 0.2}
    assert verdict(
        **rest,
        FSDP2=5.0,
        FSDP2_compiled=2.2,
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
