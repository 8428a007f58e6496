"""The random number generator: published vectors, host against engine, statistics."""

import numpy as np
import popxl
import pytest
import torch
from helpers.interpreted import run_graph
from popxl import generator, ops
from popxl_engine.kernels import generator as engine
from popxl_engine.kernels import native
from popxl_engine.kernels.registry import KERNELS

SEEDS = [(0, 0), (0, 1), (1, 0), (12345, 678910), (2**32 - 1, 2**32 - 1)]
over_seeds = pytest.mark.parametrize("words", SEEDS)
MASK64 = 2**64 - 1


def seed_of(*words):
    return np.array(words, np.uint32)


def as_torch(array):
    return torch.from_numpy(np.asarray(array))


# Known answers


def test_splitmix64_gives_the_published_sequence():
    # Seed 1234567; Vigna's reference program, prng.di.unimi.it/splitmix64.c.
    states = [(1234567 + i * generator.GOLDEN) & MASK64 for i in range(5)]
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert [generator.splitmix64(s) for s in states] == published
    signed = torch.tensor([engine.signed(s) for s in states])
    assert [x & MASK64 for x in engine.splitmix64(signed).tolist()] == published


def test_murmur32_gives_murmurhash3_of_nothing():
    # MurmurHash3_x86_32 of the empty string is its finalizer of the seed; known answers of that
    # hash.
    known = {0: 0, 1: 0x514E28B7, 0xFFFFFFFF: 0x81F16F39}
    for x, h in known.items():
        assert generator.murmur32(x) == h
        assert int(engine.murmur32(torch.tensor(x))) == h


def published_squares64(ctr, key):
    """The C function in Widynski's paper (arXiv:2004.06278), in Python integers."""
    y = x = (ctr * key) & MASK64
    z = (y + key) & MASK64
    x = (x * x + y) & MASK64
    x = (x >> 32) | (x << 32) & MASK64
    x = (x * x + z) & MASK64
    x = (x >> 32) | (x << 32) & MASK64
    x = (x * x + y) & MASK64
    x = (x >> 32) | (x << 32) & MASK64
    t = x = (x * x + z) & MASK64
    x = (x >> 32) | (x << 32) & MASK64
    return t ^ (((x * x + y) & MASK64) >> 32)


@pytest.mark.parametrize("key", [0x548C9DECBCE65297, 1, MASK64])
def test_squares64_is_the_papers_function(key):
    counters = [0, 1, 2, 1000, 2**32 - 1, 2**32, 2**63 + 5]
    published = [published_squares64(c, key) for c in counters]
    assert generator.squares64(np.array(counters, np.uint64), key).tolist() == published
    for counter, word in zip(counters, published):
        ((first, words),) = engine.squares64(
            engine.signed(counter), 1, torch.tensor(engine.signed(key)), torch.device("cpu")
        )
        assert first == engine.signed(counter) and int(words) & MASK64 == word


# Host and engine


@over_seeds
@pytest.mark.parametrize("count, offset", [(1, 0), (7, 3), (100, 2**33 + 1), (140_001, 5), (0, 4)])
def test_host_and_engine_draw_the_same_bits(words, count, offset):
    on_host = generator.draws(seed_of(*words), count, offset)
    on_device = engine.draws(as_torch(seed_of(*words)), count, offset)
    assert on_host.tolist() == on_device.numpy().view(np.uint32).tolist()


@over_seeds
def test_a_part_of_the_elements_is_drawn_as_in_the_whole(words):
    whole = engine.draws(as_torch(seed_of(*words)), 1000)
    for start, stop in ((0, 1), (1, 2), (3, 8), (499, 1000)):
        assert torch.equal(
            engine.draws(as_torch(seed_of(*words)), stop - start, start), whole[start:stop]
        )


@over_seeds
@pytest.mark.parametrize("modifier", [0, 1, 77, 2**32 - 1])
def test_host_and_engine_make_the_same_child_seeds(words, modifier):
    on_host = generator.child_seed(seed_of(*words), np.uint32(modifier))
    on_device = engine.child_seed(as_torch(seed_of(*words)), torch.tensor(modifier))
    assert on_host.tolist() == on_device.tolist()
    assert on_host[0] == words[0]


def test_block_size_does_not_change_the_draws(monkeypatch):
    seed = as_torch(seed_of(1, 2))
    before = engine.draws(seed, 5001, 3)
    monkeypatch.setattr(engine, "CPU_BLOCK", 64)
    assert torch.equal(engine.draws(seed, 5001, 3), before)


# Seeds


def test_children_of_a_seed_differ_from_each_other_and_from_their_parent():
    for words in SEEDS:
        children = {
            tuple(generator.child_seed(seed_of(*words), np.uint32(i)).tolist()) for i in range(2000)
        }
        assert len(children) == 2000 and words not in children


@pytest.mark.slow
def test_a_long_chain_of_splits_does_not_repeat():
    # With a random function instead of a permutation a cycle is expected within some 80 000 steps.
    seed, seen = seed_of(9, 0), set()
    for _ in range(200_000):
        seen.add(int(seed[1]))
        seed = generator.child_seed(seed, 0)
    assert len(seen) == 200_000


def test_stacked_seeds_have_the_children_of_each():
    seeds = np.array(SEEDS, np.uint32)
    for modifier in (0, 77, 2**32 - 1):
        alone = [generator.child_seed(seed, np.uint32(modifier)).tolist() for seed in seeds]
        assert generator.child_seed(seeds, np.uint32(modifier)).tolist() == alone
        assert engine.child_seed(as_torch(seeds), torch.tensor(modifier)).tolist() == alone


def test_split_seeds_are_those_of_create_random_seed():
    def program(seed):
        made = [ops.create_random_seed(seed, popxl.constant(i, popxl.uint32)) for i in range(3)]
        return [*ops.split_random_seed(seed, 3), *made]

    graph = popxl.Ir().create_graph(program, popxl.TensorSpec((2,), popxl.uint32))
    results = [r.tolist() for r in run_graph(graph, [as_torch(seed_of(3, 4))])]
    assert results[:3] == results[3:]


# Statistics: 200 000 draws, five standard deviations


COUNT = 200_000


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1e-3])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(p):
    ones = torch.ones(COUNT)
    for words in SEEDS:
        result = KERNELS["dropout"](ones, as_torch(seed_of(*words)), p)
        dropped = float((result == 0).double().mean())
        assert abs(dropped - p) < 5 * np.sqrt(p * (1 - p) / COUNT)
        assert set(result.unique().tolist()) <= {0.0, float(torch.tensor(1.0) * (1 / (1 - p)))}


def test_masks_of_different_seeds_are_independent():
    masks = [KERNELS["dropout"](torch.ones(COUNT), as_torch(seed_of(*w)), 0.5) > 0 for w in SEEDS]
    children = [generator.child_seed(seed_of(3, 4), np.uint32(i)) for i in range(4)]
    masks += [KERNELS["dropout"](torch.ones(COUNT), as_torch(c), 0.5) > 0 for c in children]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert abs(float((first == second).double().mean()) - 0.5) < 5 * 0.5 / np.sqrt(COUNT)


@pytest.mark.parametrize("rows", [5, 10, 15_005])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_stacked_seeds_drop_in_each_part_what_its_seed_drops_alone(rows, dtype):
    seeds, t = as_torch(np.array(SEEDS, np.uint32)), torch.ones(rows, 7, dtype=dtype)
    for dropout in (KERNELS["dropout"], native.dropout):
        whole = dropout(t, seeds, 0.3)
        for part, seed, values in zip(whole.split(rows // 5), seeds, t.split(rows // 5)):
            assert torch.equal(part, dropout(values, seed, 0.3))


@over_seeds
def test_bytes_of_the_draws_are_uniform(words):
    draws = generator.draws(seed_of(*words), COUNT)
    for shift in (0, 8, 16, 24):
        counts = np.bincount((draws >> np.uint32(shift)) & 255, minlength=256)
        expected = COUNT / 256
        chi_squared = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_squared - 255) < 5 * np.sqrt(2 * 255)


@over_seeds
def test_neighbouring_draws_are_not_correlated(words):
    draws = generator.draws(seed_of(*words), COUNT).astype(np.float64)
    for lag in (1, 2, 3, 64, 65536):
        assert abs(np.corrcoef(draws[lag:], draws[:-lag])[0, 1]) < 5 / np.sqrt(COUNT - lag)


@over_seeds
def test_normal_numbers_have_the_moments_of_the_normal_distribution(words):
    values = (
        KERNELS["random_normal"](as_torch(seed_of(*words)), (COUNT,), 0.0, 1.0, popxl.float32)
        .double()
        .numpy()
    )
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((values**power).mean() - moment) < 5 * np.sqrt(variance / COUNT)


@pytest.mark.parametrize(
    "dtype", [popxl.float16, popxl.bfloat16, popxl.float32, popxl.float64], ids=lambda d: d.name
)
@pytest.mark.parametrize("low, high", [(0.0, 1.0), (-1.0, 3.0), (0.3, 0.7)])
def test_uniform_numbers_stay_below_their_upper_limit(dtype, low, high):
    values = KERNELS["random_uniform"](as_torch(seed_of(5, 6)), (COUNT,), low, high, dtype).double()
    assert float(values.max()) < high and float(values.min()) >= float(
        torch.tensor(low, dtype=dtype.as_torch())
    )
    tolerance = 5 * (high - low) / np.sqrt(12 * COUNT) + {2: 0.02, 4: 1e-6, 8: 1e-6}[
        dtype.itemsize
    ] * (high - low)
    assert abs(float(values.mean()) - (low + high) / 2) < tolerance
