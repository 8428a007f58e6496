"""Replicas over several processes: the same numbers as in one. How such runs end is in
`test_poprun.py`.
"""

from pathlib import Path

import numpy as np
import pytest
from helpers import process_programs as programs
from helpers.process_programs import ASSIGNMENTS, GRADIENT_GROUPS, REPLICAS, results, values
from helpers.processes import launch

from tests import warm

pytestmark = pytest.mark.multi

SCRIPT = Path(programs.__file__)


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    return results(str(tmp_path_factory.mktemp("one")))


def in_processes(folder, options, module="poprun", **environment):
    program = [SCRIPT, folder / "results.npz"]
    ended = launch(options, program, module, python=warm.python(), **environment)
    assert ended.code == 0, ended.said
    with np.load(folder / "results.npz") as found:
        return dict(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options, module, environment",
    [
        (["--num-replicas", REPLICAS, "--num-instances", 2], "poprun", {}),
        (["--num-replicas", REPLICAS, "--num-instances", 4], "poprun", {}),
        (
            ["--standalone", "--nproc-per-node", 2],
            "torch.distributed.run",
            {"POPXL_INTERPRET": "1", "POPDIST_NUM_TOTAL_REPLICAS": str(REPLICAS)},
        ),
    ],
    ids=["poprun-2", "poprun-4", "torchrun-2-interpreted"],
)
def test_numbers_do_not_depend_on_how_replicas_are_split_over_processes(
    in_one_process, tmp_path, options, module, environment
):
    found = in_processes(tmp_path, options, module, **environment)
    assert found.keys() == in_one_process.keys()
    different = [
        name for name, array in found.items() if array.tobytes() != in_one_process[name].tobytes()
    ]
    assert not different
    check_against_numpy(found)
    file = np.fromfile(tmp_path / "files" / "file.npy", np.float32)
    np.testing.assert_array_equal(file.reshape(programs.SHAPE), values(*programs.SHAPE)[0])


SHARED_FILE = """
import sys, time
import numpy as np
import popdist, popxl
from popxl import ops
from popxl.extensions import keep_state_once
path, way = sys.argv[1:]
mapped = np.memmap(path, np.float32, "r+", shape=(2, 4))
ir = popxl.Ir(replication="popdist")
keep_state_once(ir)
with ir.main_graph, popxl.in_sequence():
    buffer, own = popxl.remote_buffer((4,), popxl.float32, 1), ir.replica_grouping(1, 1)
    w = popxl.remote_variable(mapped, buffer, 0, name="w", replica_grouping=own)
    ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) + 1.0)
with popxl.Session(ir, "cpu") as session:
    assert session._engine.is_file(w)
    time.sleep(2 * popdist.getInstanceIndex())
    if way == "run":
        session.run()
    else:
        session.write_variable_data(w, np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(session.get_tensor_data(w), 1)
"""


@pytest.mark.parametrize("way", ["run", "write"])
def test_a_file_that_all_processes_change_is_read_when_all_have_changed_it(way, tmp_path):
    np.zeros((2, 4), np.float32).tofile(tmp_path / "w.npy")
    ended = launch(
        ["--num-instances", 2], ["-c", SHARED_FILE, tmp_path / "w.npy", way], python=warm.python()
    )
    assert ended.code == 0, ended.said


SAVED_NOWHERE = """
import sys
import numpy as np
import popxl
import popxl_addons as addons
from popxl_addons.named_tensors import NamedTensors
ir = popxl.Ir(replication="popdist")
with ir.main_graph:
    w = popxl.variable(np.zeros(3, np.float32), name="w")
    w += 1
with addons.TaskSession([], [], NamedTensors(w=w), ir=ir) as session:
    session.run()
    try:
        session.save_checkpoint(sys.argv[1] + "/below/c")
    except NotADirectoryError as error:
        sys.stderr.write(f"instance 0: {error}\\n")
    except RuntimeError as error:
        sys.stderr.write(f"another: {error}\\n")
    session.save_checkpoint(sys.argv[1] + "er/c")
"""


def test_a_checkpoint_that_fails_does_so_in_all_processes(tmp_path):
    (tmp_path / "fold").touch()
    ended = launch(
        ["--num-instances", 2], ["-c", SAVED_NOWHERE, tmp_path / "fold"], python=warm.python()
    )
    assert ended.code == 0, ended.said
    assert "instance 0: [Errno" in ended.said
    assert "another: save_checkpoint: got no checkpoint" in ended.said
    assert "of instance 0 (NotADirectoryError: [Errno" in ended.said
    assert (tmp_path / "folder" / "c" / "model" / "w.npz").exists()


def shards(array, size):
    flat = array[:7].reshape(-1)
    length = -(-flat.size // size)
    return np.pad(flat, (0, length * size - flat.size)).reshape(size, length)


ORACLES = {
    "sum": lambda x, i: x.sum(0),
    "mean": lambda x, i: x.mean(0),
    "max": lambda x, i: x.max(0),
    "square_add": lambda x, i: (x**2).sum(0),
    "in_place": lambda x, i: 2 * x.sum(0),
    "scatter": lambda x, i: shards(x.sum(0), len(x))[i],
    "gather": lambda x, i: np.concatenate(list(x), 1),
    "shard": lambda x, i: shards(x[i], len(x))[i],
    "slice": lambda x, i: (
        np.split(x[i], len(x))[i].squeeze(0) if len(x) == 8 else np.split(x[i], len(x))[i]
    ),
}
"""The way from the operands of a group and a position in it to that member's result."""
GRADIENTS = {
    "identical_inputs": lambda x, i: 2 * x.sum(0),
    "identical_grad_inputs": lambda x, i: 2 * x.sum(0),
    "gather": lambda x, i: 2 * x[i],
    "shard": lambda x, i: np.concatenate(
        [
            2 * np.concatenate([shards(x[m], len(x))[m] for m in range(len(x))])[:21].reshape(7, 3),
            np.zeros((1, 3)),
        ]
    ),
    "slice": lambda x, i: 2 * np.concatenate([np.split(x[m], len(x))[m] for m in range(len(x))]),
}
"""The same for the gradient of the sum of the result's squares, by the operand."""


def check_against_numpy(found):
    x = values(*programs.SHAPE)
    for group_name, assignment in ASSIGNMENTS.items():
        for replica, group in enumerate(assignment):
            members = [r for r in range(REPLICAS) if assignment[r] == group]
            for name, oracle in ORACLES.items():
                expected = oracle(x[members], members.index(replica))
                np.testing.assert_allclose(
                    found[f"{name}/{group_name}"][replica], expected, rtol=1e-5, atol=1e-6
                )
            for name, oracle in GRADIENTS.items() if group_name in GRADIENT_GROUPS else ():
                expected = oracle(x[members], members.index(replica))
                np.testing.assert_allclose(
                    found[f"gradient/{name}/{group_name}"][replica], expected, rtol=1e-5
                )
    line, firsts = np.linspace(-1, 1, 9001, dtype=np.float32), x[:, 0, 0]
    np.testing.assert_allclose(
        found["large/mean/all"][5], line * firsts.mean(), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        found["large/square_add/strided"][1], line**2 * (firsts[1::2] ** 2).sum(), rtol=1e-4
    )
    for replica in range(REPLICAS):
        pair = x[[replica % 4, replica % 4 + 4]]
        expected = pair.mean(0) if replica % 2 else (pair.max(0) + pair).sum(0)
        np.testing.assert_allclose(found["branches"][replica], expected, rtol=1e-5, atol=1e-6)
    expected = {
        "own": 2 * x,
        "one": x[0],
        "every": x,
        "mirrored": x[[0, 1, 4, 5]],
        "paired": x[::2],
        "sharded": x[0]
        + np.concatenate([np.split(x[r].reshape(-1), 8)[r] for r in range(8)]).reshape(x[0].shape),
        "file": x[0],
    }
    halves = x.reshape(2, 4, 2, 12)  # member m of group g is replica 4 * m + g
    change = np.stack([np.concatenate([halves[m, g, m] for m in range(2)]) for g in range(4)])
    expected["remote"] = x[:4] + change.reshape(4, *programs.SHAPE)
    for name, array in expected.items():
        np.testing.assert_allclose(
            found[f"variable/{name}"], array, rtol=1e-5, atol=1e-6, err_msg=name
        )
