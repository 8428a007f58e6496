"""Replicas that come to differ in what they must hold alike end the run."""

import subprocess
import textwrap
from pathlib import Path

import pytest
from helpers.processes import environment

from popxl_gpt.config.presets import override
from popxl_gpt.demo.pretraining import main
from popxl_gpt.execution.checkpoints.checkpoint_folder import checkpoints_in
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.replicas import check_replicas
from popxl_gpt.utils.errors import CorruptedError
from tests import warm
from tests.integration.bit_flips import NAME, flip
from tests.integration.runs import TRAINED, batches

ROOT = Path(__file__).parents[3]
GRID = override(
    TRAINED,
    data_parallel=2,
    tensor_parallel_1=2,
    tensor_parallel_2=2,
    micro_batch_size=1,
    replicated_tensor_sharding=False,
)


@pytest.fixture(scope="module")
def session():
    return pretraining(GRID)


@pytest.mark.slow
def test_replicas_of_a_sound_run_are_alike_in_all_layouts(session):
    words, labels = batches(GRID)[0]
    sharded = override(GRID, replicated_tensor_sharding=True)
    for each, config in ((session, GRID), (pretraining(sharded), sharded)):
        with each:
            run_steps(each, config, words, labels, [1e-2])
            check_replicas(each, 1)


@pytest.mark.slow
def test_a_flipped_bit_in_any_tensor_is_found_and_tensor_layer_and_replica_are_named(session):
    flipped = []
    with session:
        for number, (name, variable) in enumerate(session.state.to_dict().items()):
            groups = variable.replica_grouping
            if groups.group_size == 1:
                continue
            replica = number % GRID.execution.replication_factor
            flip(session, name, replica)
            with pytest.raises(CorruptedError) as error:
                check_replicas(session, 7)
            told = str(error.value)
            members = groups.groups[groups.assignment[replica]]
            named = f"replica {replica} than" if len(members) > 2 else "replica "
            assert told.startswith(f"step 7: got other bytes of {name}, layer ") and named in told
            if name.split(".")[1:2] == ["decoder"]:
                assert f"layer {'.'.join(name.split('.')[1:3])}," in told
            flip(session, name, replica)
            flipped.append(name.split(".")[0])
        check_replicas(session, 7)
    assert {"weights", "optimizer", "skipped"} <= set(flipped)


FLAGS = """
    --config tiny --name run --hidden_size 24 --heads 3 --steps 4 --warmup_steps 0 --samples 0
    --global_batch_size 4 --micro_batch_size 2 --sequence_length 8 --data_parallel 2
    --tensor_parallel_1 1 --tensor_parallel_2 1 --replicated_tensor_sharding false
    --check_replicas 2 --checkpoint.every 1
""".split()


def damaging(step: int) -> str:
    """A program that trains as the job does, where a bit of replica 1 flips in a step."""
    return textwrap.dedent(f"""
        import sys
        from popxl_gpt.utils.errors import exit_on_user_error
        from popxl_gpt.demo import pretraining
        from popxl_gpt.demo.job import run as training_run
        from tests.integration.bit_flips import NAME, flip
        run_steps, steps = training_run.run_steps, []

        def run(session, *rest):
            steps.append(run_steps(session, *rest))
            holds = any(r.index == 1 for r in session._engine.machine.replicas)
            if len(steps) == {step} and holds:
                flip(session, NAME, 1)
            return steps[-1]

        training_run.run_steps = run
        with exit_on_user_error():
            sys.exit(pretraining.main(sys.argv[1:]))
    """)


@pytest.mark.multi
def test_a_run_whose_replicas_differ_ends_with_its_own_exit_code_and_saves_nothing_of_it(tmp_path):
    program = tmp_path / "damaging.py"
    program.write_text(damaging(step=3))
    words = [warm.python(), str(program), *FLAGS, "--run_folder", str(tmp_path)]
    launcher = "-m poprun --num-replicas 2 --num-instances 2".split()
    words = [warm.launcher(), *launcher, *words]
    paths = ":".join(str(ROOT / part) for part in ("", "runtime", "runtime/tests"))
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment(), "PYTHONPATH": paths},
    )
    assert done.returncode == 4, done.stderr
    assert f"corrupted: step 3: got other bytes of {NAME}, layer decoder.0, in" in done.stderr
    assert "Traceback" not in done.stderr
    saved = [path.name for path in checkpoints_in(tmp_path / "run" / "checkpoints")]
    assert saved == ["step_00000001", "step_00000002"]


@pytest.mark.slow
def test_checks_change_no_number(tmp_path):
    texts = []
    for check in ("0", "1"):
        folder = tmp_path / check
        assert main([*FLAGS, "--check_replicas", check, "--run_folder", str(folder)]) == 0
        files = sorted((folder / "run/checkpoints/step_00000004").glob("*.safetensors"))
        texts.append([path.read_bytes() for path in files])
    assert texts[0] and texts[0] == texts[1]
