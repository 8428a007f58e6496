"""Stochastic rounding of updates: between the neighbours, without bias, the same for the same
seed.
"""

from itertools import count

import numpy as np
import pytest
import torch
from popxl_engine.kernels.registry import KERNELS
from popxl_engine.kernels.rounding import TORCH_HALF_DTYPES, Updates, round_to, update

TRIALS = 4096
over_types = pytest.mark.parametrize("dtype", TORCH_HALF_DTYPES, ids=str)
NUMBERS = [1.2345678, -1.2345678, 0.3333333, -1999.3, 3.1e-5, -6.1e-6, 2.9e-7, 65000.7, 0.99999]


def seed(n: int) -> torch.Tensor:
    return torch.tensor([7, n], dtype=torch.uint32)


def neighbours(x: float, dtype: torch.dtype) -> tuple[float, float]:
    """The largest number of the type not above x, and the smallest not below."""
    nearest = torch.tensor(x, dtype=torch.float64).to(dtype)
    step = torch.tensor(-float("inf") if float(nearest) > x else float("inf"))
    bits = nearest.view(torch.int16)
    other = float((bits + (1 if (float(nearest) >= 0) == (float(step) > 0) else -1)).view(dtype))
    low, high = sorted((float(nearest), other))
    assert low <= x <= high
    return low, high


@over_types
@pytest.mark.parametrize("x", NUMBERS)
def test_stochastic_rounding_gives_a_neighbour_and_is_unbiased(
    x: float, dtype: torch.dtype
) -> None:
    wide = torch.full((TRIALS,), x, dtype=torch.float32)
    exact = float(wide[0])
    rounded = round_to(dtype, wide, seed(1)).double()
    low, high = neighbours(exact, dtype)
    assert set(rounded.tolist()) <= {low, high}
    # The number of times that it goes up is binomial: six standard deviations, and 2**-13 for the
    # bits of the draws.
    chance = (exact - low) / (high - low)
    spread = 6 * (chance * (1 - chance) / TRIALS) ** 0.5 + 2**-13
    assert abs(float((rounded == high).double().mean()) - chance) <= spread


@over_types
def test_stochastic_rounding_keeps_what_the_type_holds(dtype: torch.dtype) -> None:
    held = torch.tensor(
        [
            0.0,
            -0.0,
            1.0,
            -1.5,
            2.0**-24,
            -(2.0**-14),
            65504.0 if dtype == torch.float16 else 2.0**127,
            3.0,
        ]
    )
    for n in range(50):
        rounded = round_to(dtype, held, seed(n)).float()
        assert torch.equal(rounded.view(torch.int32), held.view(torch.int32))
    special = round_to(dtype, torch.tensor([float("inf"), -float("inf"), float("nan")]), seed(0))
    assert special[:2].tolist() == [float("inf"), -float("inf")] and special[2].isnan()


@over_types
def test_the_same_seed_rounds_alike_and_another_differs(dtype: torch.dtype) -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(30, 70)).astype(np.float32))
    first = round_to(dtype, x, seed(1))
    assert torch.equal(first, round_to(dtype, x, seed(1)))
    assert not torch.equal(first, round_to(dtype, x, seed(2)))


@over_types
def test_a_shard_rounds_as_its_part_of_the_whole(dtype: torch.dtype) -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=60).astype(np.float32))
    whole = round_to(dtype, x, seed(1))
    assert torch.equal(whole[35:], round_to(dtype, x[35:], seed(1), offset=35))


@over_types
def test_without_a_seed_rounding_is_to_nearest(dtype: torch.dtype) -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=500).astype(np.float32))
    assert torch.equal(round_to(dtype, x), x.to(dtype))


@pytest.mark.slow
@over_types
def test_small_updates_are_not_lost_when_they_are_rounded_stochastically(
    dtype: torch.dtype,
) -> None:
    """A thousand steps, each a twentieth of the spacing of bfloat16 at one: rounding to nearest
    would lose them all.
    """
    step, steps = 2.0**-7 / 20, 1000
    delta = torch.full((4096,), step)
    weight = torch.ones(4096, dtype=dtype)
    counter = count()
    with Updates.rounded_stochastically(lambda: seed(next(counter))):
        for _ in range(steps):
            KERNELS["scaled_add_"](weight, delta, 1.0, 1.0)
    assert next(counter) == steps
    assert float(weight.double().mean()) == pytest.approx(1 + steps * step, rel=2e-3)
    stuck = torch.ones(4096, dtype=torch.bfloat16)
    for _ in range(steps):
        KERNELS["scaled_add_"](stuck, delta, 1.0, 1.0)
    assert torch.equal(stuck, torch.ones(4096, dtype=torch.bfloat16))


UPDATES = {
    "add_": lambda t, X: (t, X),
    "scaled_add_": lambda t, X: (t, X, 1.0, 0.5),
    "accumulate_": lambda t, X: (t, X, 0.5),
    "accumulate_square_": lambda t, X: (t, X, 0.5),
    "accumulate_mean_": lambda t, X: (t, X, 3.0),
    "accumulate_moving_average_": lambda t, X: (t, X, 0.9),
    "accumulate_moving_average_square_": lambda t, X: (t, X, 0.9),
    "accumulator_scale_": lambda t, X: (t, 0.3),
    "copy_var_update_": lambda t, X: (t, X),
    "adam_var_update": lambda t, X: (t, X, torch.tensor(1.0), torch.tensor(3.0), 0.1, None),
}


@over_types
@pytest.mark.parametrize("name", sorted(UPDATES))
def test_every_update_of_16_bits_follows_the_seed_and_wider_ones_do_not(
    name: str, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(0)
    t, X = (torch.from_numpy(rng.normal(size=400).astype(np.float32)) for _ in range(2))

    def result(of: torch.dtype, n: int) -> torch.Tensor:
        with Updates.rounded_stochastically(lambda: seed(n)):
            return KERNELS[name](*UPDATES[name](t.to(of), X.clone()))

    assert not torch.equal(result(dtype, 1), result(dtype, 2))
    assert torch.equal(result(dtype, 1), result(dtype, 1))
    assert torch.equal(result(torch.float32, 1), result(torch.float32, 2))


def test_leaving_the_context_restores_rounding_to_nearest() -> None:
    with (
        pytest.raises(RuntimeError, match="inside"),
        Updates.rounded_stochastically(lambda: seed(0)),
    ):
        raise RuntimeError("inside")
    t = torch.zeros(100, dtype=torch.bfloat16)
    assert torch.equal(
        update(t, torch.full((100,), 1.003)), torch.full((100,), 1.003).to(torch.bfloat16)
    )
