"""Several data sets as one: shares, order, resuming anywhere."""

import json

import numpy as np
import pytest

from popxl_gpt.config.presets import preset
from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.in_memory import SyntheticDataset
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.data.mixture import MixedDataset
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.data.sampling import BLOCK, BatchSampler, Mixture, shares_of
from popxl_gpt.data.sources import text_source
from popxl_gpt.demo.job.description import describe
from popxl_gpt.demo.job.run_folder import RunFolder
from popxl_gpt.demo.job.training_data import open_data
from popxl_gpt.utils.errors import ConfigError, DataError, UserError
from tests.integration.runs import run_job


def dataset(samples, seed):
    return SyntheticDataset(5, 1000, seed, samples)


@pytest.mark.parametrize(
    ("sizes", "weights", "seed", "far"),
    [
        ((300,), (1.0,), 0, 2**40),
        ((97, 400, 250), (0.2, 0.5, 0.3), 7, 12_345_678),
        ((5000, 60), (9.0, 1.0), 1, 999),
    ],
)
def test_every_block_has_each_source_by_its_weight_and_every_epoch_each_sample_once(
    sizes, weights, seed, far
):
    mixture = Mixture(sizes, shares_of(weights))
    found = mixture.samples(np.arange(2 * BLOCK), seed)
    ends = np.cumsum(sizes)
    of = np.searchsorted(ends, found, side="right")
    for number, (size, share) in enumerate(zip(sizes, mixture.shares)):
        assert share == pytest.approx(weights[number] / sum(weights) * BLOCK, abs=1)
        counts = (of.reshape(2, BLOCK) == number).sum(axis=1)
        assert (counts == share).all()
        taken = np.bincount(found[of == number] - (ends[number] - size), minlength=size)
        assert taken.sum() == 2 * share and taken.max() - taken.min() <= 1 + BLOCK // size
    places = far + np.arange(7)
    alone = [int(mixture.samples(np.array([place]), seed)[0]) for place in places]
    assert mixture.samples(places, seed).tolist() == alone


def test_whole_epochs_of_a_source_have_each_sample_once_and_another_order():
    mixture = Mixture((500, 250), (500, 500))
    found = mixture.samples(np.arange(2 * BLOCK), seed=3)
    # a block takes the first source once and the second twice
    first, second = (np.sort(part[part < 500]).tolist() for part in np.split(found, 2))
    assert first == second == list(range(500))
    assert np.bincount(found[found >= 500] - 500).tolist() == [4] * 250
    assert (found[:BLOCK] != found[BLOCK:]).mean() > 0.9


def test_a_mixture_reads_the_samples_of_its_sources():
    sources = [dataset(7, 1), dataset(3, 2)]
    mixed = MixedDataset(sources, [0.7, 0.3])
    assert len(mixed) == 10
    np.testing.assert_array_equal(
        mixed.read(np.array([8, 0, 6, 9, 1])),
        np.concatenate(
            [
                source.read(np.array([n]))
                for source, n in zip([sources[k] for k in (1, 0, 0, 1, 0)], [1, 0, 6, 2, 1])
            ]
        ),
    )
    assert mixed.counted(np.array([8, 0])).tolist() == [[0, 5], [0, 5]]
    assert mixed.fingerprint != MixedDataset(sources, [0.6, 0.4]).fingerprint


def test_batches_are_a_function_of_seed_and_step_and_instances_share_them():
    mixed = MixedDataset([dataset(70, 1), dataset(30, 2)], [1, 3])
    with BatchLoader(mixed, 8, seed=5) as loader, BatchLoader(mixed, 8, seed=5) as again:
        batches = [loader.batch(step)[0] for step in range(4)]
        np.testing.assert_array_equal(again.batch(3)[0], batches[3])
    whole = BatchSampler(samples=100, global_batch_size=8, seed=5, mixture=mixed.mixture)
    parts = [
        BatchSampler(
            samples=100,
            global_batch_size=8,
            seed=5,
            mixture=mixed.mixture,
            instance=instance,
            instances=2,
            accumulation_steps=2,
        ).indices(9)
        for instance in (0, 1)
    ]
    joined = np.concatenate([part.reshape(2, 2) for part in parts], axis=1).reshape(-1)
    np.testing.assert_array_equal(joined, whole.indices(9))


def test_weights_are_rounded_to_a_thousandth_and_none_is_lost():
    assert shares_of([1, 1, 1]) == (334, 333, 333)
    assert shares_of([0.7, 0.3]) == (700, 300)
    with pytest.raises(DataError, match="mix: got weight 1e-06 of 1; expected at least 1/1000"):
        shares_of([0.999999, 1e-6])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mix": ("a",)}, "mix: got 'a'; expected FOLDER=WEIGHT"),
        ({"mix": ("a=0",)}, "mix: got 'a=0'"),
        ({"mix": ("a=1", "a=2")}, "mix: got 'a=2'"),
        ({"mix": ("a=nan",)}, "mix: got 'a=nan'"),
        ({"mix": ("a=1",), "input_files": ("b",)}, "expected one of the two"),
    ],
)
def test_what_is_no_mixture_is_told(values, words):
    with pytest.raises(ConfigError) as caught:
        preset("tiny", **values)
    assert words in str(caught.value)


def test_a_run_says_what_it_mixes(tmp_path):
    data, folder = (
        MixedDataset([dataset(70, 1), dataset(30, 2)], [3, 1]),
        RunFolder(*[tmp_path] * 2),
    )
    data.sources[1].info = {"vocabulary_size": 7}
    describe(folder, preset("tiny", mix=("a=3", "b=1")), data, dataset(5, 3))
    found = json.loads(folder.about.read_text())
    assert found["training_data"] == {
        "mixture": {
            "a": {
                "weight": 3.0,
                "files": ["a"],
                "samples": 70,
                "fingerprint": data.sources[0].fingerprint,
            },
            "b": {
                "weight": 1.0,
                "files": ["b"],
                "samples": 30,
                "fingerprint": data.sources[1].fingerprint,
                "vocabulary_size": 7,
            },
        },
        "samples": 100,
        "fingerprint": data.fingerprint,
    }
    describe(folder, preset("tiny"), data.sources[0], None)
    assert json.loads(folder.about.read_text())["training_data"]["files"] == "random tokens"


@pytest.mark.slow
def test_a_run_mixes_prepared_folders_and_goes_on_bitwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("a", "abcdefgh " * 200), ("b", "hgfedcba " * 100)):
        (tmp_path / f"{name}.txt").write_text(text)
        source = text_source([f"{name}.txt"])
        prepared = Settings(sequence_length=8, characters=True)
        prepare(source, tmp_path / name, prepared, report=lambda line: None)
    config = preset("tiny", mix=("a=3", "b/train-*.tfrecord=1"))
    data, _ = open_data(config)
    train = [TokenDataset(f"{name}/train-*.tfrecord", 8, 128) for name in "ab"]
    assert data.mixture.shares == (750, 250) and data.mixture.sizes == tuple(map(len, train))
    with pytest.raises(UserError, match="which matches no file"):
        open_data(preset("tiny", mix=("c=1",)))
    alone = ["--config", "tiny", "--mix", "a=3", "b=1", "--samples", "0", "--data_parallel", "1"]
    alone += ["--tensor_parallel_1", "1", "--tensor_parallel_2", "1", "--layers", "1"]
    run_job(*alone, "--name", "whole", "--steps", "4", "--checkpoint.every", "2")
    cut = "runs/whole/checkpoints/step_00000002"
    run_job(*alone, "--name", "cut", "--steps", "4", "--checkpoint.load", cut)
    files = ["decoder.0.safetensors", "embedding.safetensors", "head.safetensors"]
    for file in files:
        both = [tmp_path / f"runs/{n}/checkpoints/step_00000004/{file}" for n in ("whole", "cut")]
        assert both[0].read_bytes() == both[1].read_bytes()
