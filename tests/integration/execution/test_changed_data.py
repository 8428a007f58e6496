"""Token files that change while a run trains on them, or before it goes on."""

import os

import numpy as np
import pytest

from popxl_gpt.data import example
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.demo.pretraining import main
from popxl_gpt.execution.checkpoints.checkpoint_folder import checkpoints_in
from popxl_gpt.execution.host import run_steps
from popxl_gpt.utils.errors import UserError

FLAGS = """
    --config tiny --name run --hidden_size 24 --heads 3 --steps 4 --warmup_steps 0 --samples 0
    --global_batch_size 2 --micro_batch_size 2 --sequence_length 8 --data_parallel 1
    --tensor_parallel_1 1 --tensor_parallel_2 1 --layers 1
""".split()


def write_tokens(path, seed: int) -> None:
    """Twelve records, of which a run of four steps reads eight."""
    with RecordWriter(path) as writer:
        for row in np.random.default_rng(seed).integers(0, 100, (12, 9)):
            for payload in example.encode(row[np.newaxis]):
                writer.write(payload)


@pytest.mark.slow
def test_data_that_changes_under_a_run_ends_it_with_all_steps_saved(tmp_path, monkeypatch, capsys):
    data = tmp_path / "train.tfrecord"
    write_tokens(data, seed=1)
    words = [*FLAGS, "--run_folder", str(tmp_path), "--input_files", str(data)]
    steps = []

    def changing(*arguments):
        steps.append(run_steps(*arguments))
        if len(steps) == 1:
            write_tokens(tmp_path / "other.tfrecord", seed=2)
            data.write_bytes((tmp_path / "other.tfrecord").read_bytes())  # the file that is open
            os.utime(data, ns=(0, 0))
        return steps[-1]

    monkeypatch.setattr("popxl_gpt.demo.job.run.run_steps", changing)
    with pytest.raises(UserError, match=r"train.tfrecord: got .* it (was opened|had when)"):
        main(words)
    (saved,) = checkpoints_in(tmp_path / "run" / "checkpoints")
    done = len(steps)
    assert saved.name == f"step_{done:08d}" and 1 <= done < 4

    assert main([*words, "--checkpoint.load", "auto"]) == 0
    assert "training data with other contents than the checkpoint's" in capsys.readouterr().err
    assert len(steps) == 4
