"""The training job in several processes: the same run as in one, whoever holds which replica."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.source_tree import left_out

from popxl_gpt.data import example
from popxl_gpt.data.records import RecordWriter
from tests import warm
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

pytestmark = pytest.mark.multi

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "demo" / "pretraining.py"
REPLICAS = 8
SECONDS = 180
FLAGS = (
    "--config tiny --global_batch_size 16 --widening 2 --dropout 0.1 --steps 4 "
    "--checkpoint.every 2 --checkpoint.keep 2 --validate_every 2 --validation_batches 1 "
    "--log_every 1"
).split()


def command(instances, *flags, options=()):
    program = [warm.python(), str(SCRIPT), *FLAGS, *map(str, flags)]
    sizes = ["--num-replicas", REPLICAS, "--num-instances", instances]
    return [warm.launcher(), "-m", "poprun", *map(str, sizes), *options, *program]


def environment():
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RANK", "WORLD_SIZE", "POPDIST_"))
    }
    return {**plain, "OMP_NUM_THREADS": "1", "POPDIST_SECRET": "that of these tests"}


def train(folder, instances, *flags):
    words = command(instances, "--run_folder", folder, *flags)
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, env=environment())
    assert done.returncode == 0, done.stderr
    return done


def train_as_machines(folder, instances, *flags):
    """Each process takes itself for one on a machine of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    started = []
    for number in range(instances):
        places = ("--nnodes", instances, "--node-rank", number, "--rdzv-endpoint", endpoint)
        words = command(instances, "--run_folder", folder, *flags, options=map(str, places))
        started.append(
            subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment())
        )
    errors = [process.communicate(timeout=SECONDS)[1] for process in started]
    assert [process.returncode for process in started] == [0] * instances, errors


def files_of(run, step):
    """Contents of a checkpoint, of all that is not about how it was made."""
    folder = run / "tiny" / "checkpoints" / f"step_{step:08d}"
    tensors = {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
    manifest = json.loads((folder / "checkpoint.json").read_text())
    return tensors, {key: manifest[key] for key in ("step", "seed", "data", "files")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of eight replicas in one process, this one."""
    folder = tmp_path_factory.mktemp("alone")
    run_job(*FLAGS, "--run_folder", folder)
    return folder


def test_two_processes_with_state_in_files_give_the_run_of_one_bitwise(alone, tmp_path):
    done = train(tmp_path, 2, "--memmap_dir", tmp_path / "state", "--interleaving", 2)
    metrics = metrics_of(tmp_path / "tiny")
    assert metrics == metrics_of(alone / "tiny")
    assert len(metrics.splitlines()) == 4
    for step in (2, 4):
        assert files_of(tmp_path, step) == files_of(alone, step)
    assert [
        line.split("  ")[0] for line in done.stdout.splitlines() if line.startswith("step ")
    ] == [f"step {step}/4" for step in (1, 2, 3, 4)]
    assert any((tmp_path / "state").iterdir())


def test_four_machines_go_on_where_one_process_has_stopped_bitwise(alone, tmp_path):
    stopped = alone / "tiny" / "checkpoints" / "step_00000002"
    train_as_machines(tmp_path, 4, "--checkpoint.load", stopped, "--interleaving", 2)
    metrics = metrics_of(tmp_path / "tiny").splitlines()
    assert metrics == metrics_of(alone / "tiny").splitlines()[2:]
    assert files_of(tmp_path, 4) == files_of(alone, 4)


@pytest.mark.slow
def test_gradients_that_travel_in_16_bits_are_rounded_alike_in_one_process_and_several(tmp_path):
    narrow = "--reduce_precision bfloat16 --data_parallel 4 --tensor_parallel_2 1".split()
    run_job(*FLAGS, *narrow, "--run_folder", tmp_path / "one")
    train(tmp_path / "two", 2, *narrow)
    stopped = tmp_path / "two" / "tiny" / "checkpoints" / "step_00000002"
    train_as_machines(tmp_path / "four", 4, *narrow, "--checkpoint.load", stopped)
    metrics = [metrics_of(tmp_path / name / "tiny").splitlines() for name in ("one", "two", "four")]
    assert metrics[0] == metrics[1] == [*metrics[0][:2], *metrics[2]]
    files = [files_of(tmp_path / name, 4) for name in ("one", "two", "four")]
    assert files[0] == files[1] == files[2]


def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path):
    words = command(
        2,
        "--run_folder",
        tmp_path,
        "--steps",
        10000,
        "--checkpoint.every",
        0,
        "--validate_every",
        0,
    )
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    metrics = tmp_path / "tiny" / "metrics.jsonl"
    until = time.monotonic() + SECONDS
    try:
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < until:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGTERM)
        out, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM, said
    steps = len(metrics.read_text().splitlines())
    assert [path.name for path in (tmp_path / "tiny" / "checkpoints").iterdir()] == [
        f"step_{steps:08d}"
    ]
    assert f"After step {steps}:" in out


def said_by_two(program, folder):
    """Two processes that run a command line of the shell, in a folder that is new."""
    words = [*command(2)[:7], "sh", "-c", f"exec {program}"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=SECONDS, env=environment(), cwd=folder
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "flags, says",
    [
        (
            ["--data_parallel", "1"],
            "replicas: got 8 from the launcher; expected data_parallel * tensor_parallel_1",
        ),
        (
            ["--learning_rate", "0.00${RANK}1"],
            "expected one configuration. Start all with the same command line.",
        ),
    ],
    ids=["replicas", "configurations"],
)
def test_what_does_not_fit_together_is_said_once_and_writes_nothing(flags, says, tmp_path):
    said = said_by_two(
        " ".join([warm.python(), str(SCRIPT), *FLAGS, "--run_folder runs", *flags]), tmp_path
    )
    assert says in said and len(said.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_other_code_in_a_process_is_found_before_anything_is_built(tmp_path):
    for package in ("popxl_gpt", "config", "data", "demo", "execution", "modelling", "utils"):
        ignored = left_out("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / "1" / package, symlinks=True, ignore=ignored)
    (tmp_path / "0").symlink_to(ROOT)
    with open(tmp_path / "1/modelling/layout.py", "a") as file:
        file.write("# another version\n")
    program = (
        f"{warm.python()} {tmp_path}/${{RANK}}/demo/pretraining.py {' '.join(FLAGS)} "
        "--run_folder runs"
    )
    said = said_by_two(program, tmp_path)
    assert (
        "error: instances: got another modelling/layout.py in instance 1 than in instance 0 "
        "(1 files"
    ) in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_checkpoint_that_only_instance_0_sees_is_refused(alone, tmp_path):
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    (tmp_path / "0/saved").symlink_to(alone / "tiny/checkpoints/step_00000002")
    program = (
        f"{warm.python()} {SCRIPT} {' '.join(FLAGS)} --run_folder runs --checkpoint.load saved"
    )
    said = said_by_two(f"env --chdir=${{RANK}} {program}", tmp_path)
    assert said.count("error: ") == 1
    assert (
        "error: instance 1: saved: got no checkpoint" in said
        and "on a file system that all machines see" in said
    )
    assert [path.name for rank in "01" for path in (tmp_path / rank).iterdir()] == ["saved"]


def test_files_of_one_name_with_other_tokens_in_a_process_are_refused(tmp_path):
    for rank, seed in (("0", 1), ("1", 2)):
        (tmp_path / rank).mkdir()
        with RecordWriter(tmp_path / rank / "train.tfrecord") as writer:
            for row in np.random.default_rng(seed).integers(0, 100, (64, 9)):
                for payload in example.encode(row[np.newaxis]):
                    writer.write(payload)
    files = "--input_files train.tfrecord --validation_files train.tfrecord"
    program = f"{warm.python()} {SCRIPT} {' '.join(FLAGS)} --run_folder runs {files}"
    said = said_by_two(f"env --chdir=${{RANK}} {program}", tmp_path)
    assert said.count("error: ") == 1
    assert "error: --input_files: got other data in instance 1 than in instance 0" in said
    assert not [*tmp_path.glob("*/runs")]
