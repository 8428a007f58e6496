"""The order of samples: permutations, the split over instances, resuming anywhere, the prefetching
loader.
"""

import threading
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popxl_gpt.data.in_memory import SyntheticDataset
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.data.sampling import BatchSampler, derive_key, mix, permute
from popxl_gpt.utils.errors import DataError


class Numbers:
    """Sample n is the tokens n, n + 1, n + 2. Counts reads; sample `broken` cannot be read."""

    sequence_length = 2
    vocabulary_size = 2**31 - 1
    mixture = None

    def __init__(self, samples: int, broken: int = -1) -> None:
        self.samples, self.broken, self.reads, self.threads = samples, broken, 0, set()

    def __len__(self) -> int:
        return self.samples

    def read(self, samples: np.ndarray) -> np.ndarray:
        self.reads += 1
        self.threads.add(threading.current_thread().name)
        if self.broken in samples:
            raise DataError("numbers.tfrecord, record 7: got damage")
        return (samples[:, None] + np.arange(3)).astype(np.int32)


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size, key):
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 2**40), st.integers(0, 2**64 - 1), st.data())
def test_permute_sends_a_position_to_one_place_however_it_is_asked(size, key, data):
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    together = permute(positions, size, key)
    assert np.all((together >= 0) & (together < size))
    assert together.tolist() == [
        int(permute(np.array([position]), size, key)[0]) for position in positions
    ]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5, 10])
def test_permutations_of_many_keys_are_uniform(size):
    keys = 1500
    placed = np.zeros((size, size))
    for key in range(keys):
        placed[np.arange(size), permute(np.arange(size), size, derive_key(key))] += 1
    # Each cell is binomial(keys, 1/size): five standard deviations.
    assert np.abs(placed - keys / size).max() < 5 * np.sqrt(keys / size * (1 - 1 / size))


def test_neighbours_do_not_stay_neighbours():
    order = permute(np.arange(10_000), 10_000, 1)
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.05


def test_mix_is_splitmix64():
    # First outputs of SplitMix64 seeded with 1234567, as published with the algorithm's reference
    # code.
    golden = 0x9E3779B97F4A7C15
    inputs = [(1234567 + golden * (draw + 1) - 1) % 2**64 for draw in range(3)]
    assert mix(np.array(inputs, dtype=np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_keys_depend_on_every_part_and_the_order():
    keys = {derive_key(*parts) for parts in [(1, 2), (2, 1), (1, 3), (1,), (1, 2, 0), (-1, 2)]}
    assert len(keys) == 6


@pytest.mark.slow
@settings(deadline=None)
@given(
    samples=st.integers(1, 40),
    batch=st.integers(1, 50),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_the_stream_shows_every_sample_once_per_epoch_and_loses_no_tail(
    samples, batch, seed, shuffle
):
    sampler = BatchSampler(samples=samples, global_batch_size=batch, seed=seed, shuffle=shuffle)
    steps = -(-3 * samples // batch)
    stream = np.concatenate([sampler.indices(step) for step in range(steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples].tolist()) == list(
            range(samples)
        )
    if not shuffle:
        assert np.array_equal(stream, np.arange(steps * batch) % samples)


def test_epochs_and_seeds_are_ordered_differently():
    order = {
        (seed, step): tuple(BatchSampler(samples=50, global_batch_size=50, seed=seed).indices(step))
        for seed in range(3)
        for step in range(3)
    }
    assert len(set(order.values())) == 9
    assert BatchSampler(samples=50, global_batch_size=20).epochs(5) == 2.0


@pytest.mark.slow
@settings(deadline=None)
@given(
    instances=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    share=st.integers(1, 3),
    samples=st.integers(1, 30),
    step=st.integers(0, 1000),
)
def test_instances_together_read_the_global_batch_in_order(
    instances, accumulation, share, samples, step
):
    shape = {"samples": samples, "global_batch_size": instances * accumulation * share, "seed": 3}
    whole = BatchSampler(**shape).indices(step)
    parts = [
        BatchSampler(
            **shape, instance=i, instances=instances, accumulation_steps=accumulation
        ).indices(step)
        for i in range(instances)
    ]
    joined = np.concatenate([part.reshape(accumulation, share) for part in parts], axis=1)
    assert np.array_equal(joined.reshape(-1), whole)


def test_a_far_step_costs_no_more_than_the_first():
    sampler = BatchSampler(samples=10**9, global_batch_size=512)
    start = time.process_time()
    far = sampler.indices(10**15)
    assert time.process_time() - start < 1
    assert len(np.unique(far)) == 512


def test_the_order_of_a_thousand_million_samples_takes_no_memory_and_draws_each_once():
    sampler = BatchSampler(samples=10**9, global_batch_size=2**14, seed=5)
    tracemalloc.start()
    begin = [sampler.indices(step) for step in range(3)]
    end = sampler.indices(10**9 // 2**14)  # has the first epoch's last samples
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * 2**20, "a few times a batch, and not the samples"
    drawn = np.concatenate([*begin, end[: 10**9 % 2**14]])
    assert len(np.unique(drawn)) == len(drawn) and 0 <= drawn.min() <= drawn.max() < 10**9
    counts = np.bincount(drawn // 10**8, minlength=10)
    assert np.abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean()), "all over the data"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch_size": 0}, "global_batch_size: got 0; expected at least 1"),
        ({"samples": 0}, "samples: got 0"),
        ({"global_batch_size": 9, "instances": 2}, r"got 9; expected a multiple of .* = 2 \* 1"),
        ({"instances": 2, "instance": 2}, "instance: got 2; expected 0 to 1"),
        ({"accumulation_steps": 3}, r"expected a multiple of .* = 1 \* 3"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused(changes, words):
    with pytest.raises(DataError, match=words):
        BatchSampler(**{"samples": 10, "global_batch_size": 8, **changes})


def test_a_negative_step_is_refused():
    with pytest.raises(DataError, match="step: got -1"):
        BatchSampler(samples=10, global_batch_size=8).indices(-1)


def test_batches_are_inputs_and_the_next_tokens():
    with BatchLoader(Numbers(10), 4, shuffle=False) as loader:
        ids, labels = loader.batch(2)
    assert ids.tolist() == [[8, 9], [9, 10], [0, 1], [1, 2]]
    assert labels.tolist() == [[9, 10], [10, 11], [1, 2], [2, 3]]
    assert (ids.dtype, labels.dtype, ids.flags.c_contiguous, labels.flags.c_contiguous) == (
        "int32",
        "int32",
        True,
        True,
    )


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=12), st.integers(0, 3))
def test_prefetching_never_changes_a_batch(steps, prefetch):
    plain = BatchLoader(Numbers(11), 4, seed=5, prefetch=0)
    with BatchLoader(Numbers(11), 4, seed=5, prefetch=prefetch) as loader:
        for step in steps:
            for got, expected in zip(loader.batch(step), plain.batch(step)):
                assert np.array_equal(got, expected)


def test_consecutive_steps_are_each_read_once_and_in_the_thread():
    numbers = Numbers(100)
    with BatchLoader(numbers, 4, prefetch=2) as loader:
        for step in range(10):
            loader.batch(step)
    assert 10 <= numbers.reads <= 12
    assert all(name.startswith("batches") for name in numbers.threads)


def test_an_error_in_the_thread_reaches_the_call_that_needs_the_batch():
    numbers = Numbers(8, broken=5)
    with BatchLoader(numbers, 4, shuffle=False) as loader:
        loader.batch(0)
        with pytest.raises(DataError, match="numbers.tfrecord, record 7"):
            loader.batch(1)
        loader.batch(2)


def test_close_ends_the_thread_and_the_loader():
    before = threading.active_count()
    loader = BatchLoader(Numbers(8), 4)
    loader.batch(0)
    assert threading.active_count() == before + 1
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(DataError, match="after close"):
        loader.batch(1)


def test_synthetic_samples_depend_on_seed_and_number_alone():
    first = SyntheticDataset(sequence_length=8, vocabulary_size=100, seed=1)
    again = SyntheticDataset(sequence_length=8, vocabulary_size=100, seed=1)
    other = SyntheticDataset(sequence_length=8, vocabulary_size=100, seed=2)
    samples = np.array([5, 2**32 - 1, 5, 0])
    tokens = first.read(samples)
    assert tokens.shape == (4, 9) and tokens.dtype == np.int32
    assert np.array_equal(tokens, again.read(samples)) and np.array_equal(tokens[0], tokens[2])
    assert not np.array_equal(tokens, other.read(samples))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    with BatchLoader(first, 4, seed=1) as one, BatchLoader(again, 4, seed=1, prefetch=0) as two:
        assert np.array_equal(one.batch(7)[0], two.batch(7)[0])
        assert not np.array_equal(one.batch(7)[0], one.batch(8)[0])


def test_synthetic_tokens_are_uniform_over_the_vocabulary():
    tokens = SyntheticDataset(sequence_length=99, vocabulary_size=50).read(np.arange(1000))
    counts = np.bincount(tokens.reshape(-1), minlength=50)
    assert counts.size == 50 and np.abs(counts - 2000).max() < 5 * np.sqrt(2000)


def test_batches_of_other_sizes_go_on_where_those_before_have_ended():
    shape = {"samples": 50, "seed": 3}
    stream = BatchSampler(**shape, global_batch_size=120).indices(0)
    first = [BatchSampler(**shape, global_batch_size=4).indices(step) for step in range(5)]
    larger = BatchSampler(**shape, global_batch_size=12, shift=20 - 5 * 12)
    second = [larger.indices(step) for step in range(5, 10)]
    smaller = BatchSampler(**shape, global_batch_size=8, shift=80 - 10 * 8)
    third = [smaller.indices(step) for step in range(10, 15)]
    assert np.concatenate([*first, *second, *third]).tolist() == stream.tolist()
    assert larger.epochs(5) == 20 / 50
    with pytest.raises(DataError, match="step: got 3; expected 0 or more"):
        larger.indices(3)
