"""The training program on a GPU: proven without one, on tensors that have a device and no memory.

And on a processor whose memory is cut in two, with rows that move between the parts as they would
on a GPU.
"""

import functools

import numpy as np
import pytest
from helpers.fake_gpu import run_on_fake_gpu
from popxl_engine.kernels import float8

from popxl_gpt.config.presets import override, preset
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.runtime import (
    file_traffic,
    runtime_errors_are_told,
    session_device,
)
from tests.integration import runs
from tests.integration.runs import batches, train

TRAINED = override(runs.TRAINED, steps=3, gradient_precision="bfloat16")
ONE = {"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1}
CASES = {
    "float32 on four replicas": {
        "precision": "float32",
        "tensor_parallel_1": 2,
        "tensor_parallel_2": 2,
    },
    "bfloat16": {
        "precision": "bfloat16",
        "stochastic_rounding": True,
        "gradient_precision": "bfloat16",
    },
    "float16": {"precision": "float16", "loss_scaling": 1024.0},
    "dropout": {"dropout": 0.1, "attention_serialisation": 2},
    "dropout of micro-batches together": {"dropout": 0.1, "global_batch_size": 4, "widening": 2},
    "products in 8 bits": {"precision": "bfloat16", "layers": 3, "products": "fp8"},
    "without recomputation": {"recomputation": False, "precision": "bfloat16"},
}
"""Each with two layers, and two runs of each phase: a first and one that goes on."""


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_mixes_no_devices_and_waits_for_no_number_of_the_device(name, monkeypatch):
    # torch says of the operands of tensor cores' products whether these would take them
    monkeypatch.setattr(float8, "multiplies_float8", lambda device: True)
    config = override(preset("tiny"), **{**ONE, "global_batch_size": 2, **CASES[name]})
    assert run_on_fake_gpu(training_program(config)[0]) > 10


def smallest_memory(config):
    """What the message says that suffices."""
    with pytest.raises(
        UserError, match="got 1000 bytes of cpu; expected at least .* in phase"
    ) as refused:
        with runtime_errors_are_told():
            pretraining(override(config, device_memory=1000))
    return int(str(refused.value).split("at least ")[1].split(":")[0])


@functools.cache
def without_a_limit(replicas):
    """Losses and weights of a run, and the smallest device memory that it could do with."""
    config = override(TRAINED, data_parallel=replicas)
    return *train(config), smallest_memory(config)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2], ids=["one replica", "two replicas"])
@pytest.mark.parametrize("share", [1, 1.3, None], ids=["least", "more", "all"])
def test_losses_are_bitwise_the_same_with_any_device_memory(share, replicas):
    expected, expected_weights, least = without_a_limit(replicas)
    memory = int(share * least) if share else 2**30
    results, weights = train(override(TRAINED, data_parallel=replicas, device_memory=memory))
    assert results == expected
    for name, array in expected_weights.items():
        np.testing.assert_array_equal(weights[name], array, err_msg=name)


@pytest.mark.slow
def test_more_device_memory_means_fewer_transfers_down_to_none():
    least, moved = smallest_memory(TRAINED), []
    for memory in (least, int(1.5 * least), 2**30):
        config = override(TRAINED, device_memory=memory)
        session = pretraining(config)
        with session:
            for batch in batches(config):
                before = file_traffic(session).read_bytes
                run_steps(session, config, *batch, [1e-3])
        traffic = file_traffic(session)
        assert traffic.store == "host memory" and traffic.memory_bytes < memory
        moved.append(traffic.read_bytes - before)
    assert moved[0] > moved[1] > moved[2] == 0


def test_a_gpu_that_is_not_there_is_refused_with_what_to_do():
    with pytest.raises(
        UserError,
        match="--device: got 'cuda:99' on a machine with .*; expected a GPU that is there",
    ):
        session_device("cuda:99")
