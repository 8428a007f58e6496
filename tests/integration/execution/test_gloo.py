"""Training over Gloo, behind the interface of GPUs' collectives, has the bits of training over ours."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import gloo_pretraining, warm
from tests.metrics_text import metrics_of

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[3]
SECONDS = 180
FLAGS = """
    --config tiny --global_batch_size 16 --widening 2 --dropout 0.1 --steps 4 --checkpoint.every 2
    --checkpoint.keep 2 --validate_every 2 --validation_batches 1 --log_every 1
""".split()
LAYOUTS: "dict[str, tuple[tuple[int, int, int], str]]" = {
    "dp": ((2, 1, 1), "--device_iterations 2"),
    "tp1": ((1, 2, 1), "--interleaving 2"),
    "dp x tp1": ((2, 2, 1), ""),
    "dp, 16 bits": ((4, 1, 1), "--reduce_precision bfloat16 --precision bfloat16"),
}
"""Replicas, and what else."""


def train(script: Path, folder: Path, grid: "tuple[int, int, int]", *flags: str) -> Path:
    """The folder of a run in as many processes as there are replicas."""
    dp, tp1, tp2 = grid
    layout = f"--data_parallel {dp} --tensor_parallel_1 {tp1} --tensor_parallel_2 {tp2}".split()
    given = ("RANK", "WORLD_SIZE", "POPDIST_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    count = str(dp * tp1 * tp2)
    launcher = ["-m", "poprun", "--num-replicas", count, "--num-instances", count, warm.python()]
    words = [*launcher, str(script), *FLAGS, *layout, *flags, "--run_folder", str(folder)]
    done = subprocess.run(
        [warm.launcher(), *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**plain, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder / "tiny"


def checkpoints(run: Path) -> "dict[str, tuple[dict[str, bytes], dict[str, object]]]":
    """Tensors of each checkpoint, and where it is in the data."""
    found = {}
    for folder in sorted((run / "checkpoints").iterdir()):
        tensors = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
        manifest = json.loads((folder / "checkpoint.json").read_text())
        found[folder.name] = tensors, {name: manifest[name] for name in ("step", "data", "files")}
    return found


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_checkpoints_are_those_of_our_messages(name: str, tmp_path: Path) -> None:
    grid, flags = LAYOUTS[name]
    ours = train(ROOT / "demo" / "pretraining.py", tmp_path / "ours", grid, *flags.split())
    theirs = train(Path(gloo_pretraining.__file__), tmp_path / "theirs", grid, *flags.split())
    assert len(metrics_of(ours).splitlines()) == 4
    assert metrics_of(theirs) == metrics_of(ours)
    saved = checkpoints(ours)
    assert [*saved] == ["step_00000002", "step_00000004"]
    assert checkpoints(theirs) == saved
