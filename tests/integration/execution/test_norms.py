"""Norms of weights, gradients and updates: those of the tensors that checkpoints hold, and the same
on every layout.
"""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import load_file

from popxl_gpt.demo.job.norms import distribution
from popxl_gpt.execution.reports.metrics import read_metrics
from tests.integration.runs import run_job

FLAGS = "--config tiny --name run --dropout 0 --steps 4 --warmup_steps 0 --validate_every 0"
ONE = "--data_parallel 1 --tensor_parallel_1 1 --tensor_parallel_2 1"
LAYOUTS = {
    "data parallel": "--data_parallel 2 --tensor_parallel_1 1 --tensor_parallel_2 1",
    "tensor parallel, in parts": "--data_parallel 1 --tensor_parallel_1 2 --tensor_parallel_2 2 "
    "--embedding_serialisation 2",
}


def norms_of(folder, *words):
    run_job(*FLAGS.split(), *words, "--norms_every", 2, "--samples", 0, "--run_folder", folder)
    return [json.loads(line) for line in (folder / "run/norms.jsonl").read_text().splitlines()]


def weights_of(folder, step):
    """The weights of a checkpoint by layer and name."""
    saved = folder / f"run/checkpoints/step_{step:08}"
    return {
        (path.stem, name): array.astype(np.float64)
        for path in sorted(saved.glob("*.safetensors"))
        for name, array in load_file(path).items()
        if name.startswith("weights.")
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    keep = "--checkpoint.every", 1, "--checkpoint.keep", 9
    return folder, norms_of(folder, *ONE.split(), *keep, "--tensorboard")


def flat(line):
    return {
        (kind, layer, role): norm
        for kind in ("weights", "gradients", "updates")
        for layer, roles in line[kind].items()
        for role, norm in roles.items()
    }


@pytest.mark.multi
def test_norms_are_those_of_what_is_saved_and_of_the_global_norm(plain):
    folder, lines = plain
    assert [line["step"] for line in lines] == [2, 4]
    metrics = {line["step"]: line for line in read_metrics(folder / "run/metrics.jsonl")}
    for line in lines:
        found, step = flat(line), line["step"]
        gradients = [norm for (kind, *_), norm in found.items() if kind == "gradients"]
        assert math.hypot(*gradients) == pytest.approx(metrics[step]["gradient_norm"], rel=1e-5)
        before, after = weights_of(folder, step - 1), weights_of(folder, step)
        layers = {layer for layer, _ in after}
        assert layers == {"embedding", "decoder.0", "decoder.1", "head"}
        updates = {key: after[key] - before[key] for key in after}
        for kind, arrays in (("weights", after), ("updates", updates)):
            for layer in layers:
                own = (np.square(array).sum() for (of, _), array in arrays.items() if of == layer)
                told = math.hypot(
                    *(n for (k, of, _), n in found.items() if (k, of) == (kind, layer))
                )
                assert told == pytest.approx(math.sqrt(sum(own)), rel=1e-6), (kind, layer)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_do_not_depend_on_the_layout(plain, layout, tmp_path):
    for expected, line in zip(plain[1], norms_of(tmp_path, *LAYOUTS[layout].split())):
        found = flat(line)
        assert found == pytest.approx(flat(expected), rel=2e-3)
        assert found.keys() == flat(expected).keys()


@pytest.mark.multi
def test_the_report_draws_them_and_tensorboard_has_histograms(plain):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, lines = plain
    report = (folder / "run/report.html").read_text()
    assert "<h2>Norms</h2>" in report and "<h3>updates: weight</h3>" in report
    expected = lines[-1]["gradients"]["decoder.1"]["weight"]
    assert f"<title>step 4, decoder.1: {expected:.4g}</title>" in report
    shown = EventAccumulator(str(folder / "run/tensorboard")).Reload()
    event = shown.Histograms("gradients/decoder.1/weight")[-1]
    assert event.step == 4 and sum(event.histogram_value.bucket) == event.histogram_value.num
    assert math.sqrt(event.histogram_value.sum_squares) == pytest.approx(expected)
    (*_, scalar) = shown.Scalars("norms/gradients/decoder.1/weight")
    assert scalar.value == pytest.approx(expected)


def test_a_distribution_is_numpys():
    arrays = [np.random.default_rng(n).standard_normal((30, 7), np.float32) for n in range(3)]
    found, whole = distribution(arrays, has_histogram=True), np.concatenate(arrays)
    counts, edges = np.histogram(whole.astype(np.float64), 64)
    assert found.norm == pytest.approx(np.linalg.norm(whole.astype(np.float64)))
    assert (found.count, list(found.counts)) == (whole.size, counts.tolist())
    np.testing.assert_allclose(found.edges, edges, rtol=1e-6)
    assert found.total == pytest.approx(whole.sum(dtype=np.float64))
    assert math.isnan(distribution([np.array([np.nan])], has_histogram=True).norm)


@pytest.mark.parametrize("ulps", [0, 1, 9, 63])
@pytest.mark.parametrize("low", [0.0, 1.0, -1.0, 1e-40, 3e38], ids=str)
def test_numbers_as_near_as_float32_has_them_have_a_distribution(low, ulps):
    bits = np.float32(low).view(np.uint32) + np.array([0, ulps], np.uint32)
    array = np.sort(bits.view(np.float32)).repeat(7)
    found = distribution([array, array[::2]], has_histogram=True)
    assert (sum(found.counts), len(found.edges)) == (21, 65)
    assert list(found.edges) == sorted(set(found.edges))
    if ulps:
        assert (found.counts[0], found.counts[-1]) == (11, 10)
        assert (found.edges[0], found.edges[-1]) == (float(array[0]), float(array[-1]))
