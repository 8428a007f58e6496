"""Task sessions: streams and state by name, checkpoints that are whole or absent."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import popxl
import popxl_addons as addons
import pytest
from helpers.addons_programs import normal
from popxl import ops
from popxl_addons import durable
from popxl_addons.durable import replace_folder
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.task_session import initialise_memmap_dir_from_checkpoint, write_variables_pb


def make_session(names=("a.w", "b"), shape=(3,), scale=1.0, memmap=None, **options):
    """y = x * each variable, summed; every run adds one to the variables."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        inputs = addons.InputStreams(x=(shape, popxl.float32))
        outputs = addons.OutputStreams(y=(shape, popxl.float32))
        x = ops.host_load(inputs.x)
        state = {}
        for i, name in enumerate(names):
            data = (
                np.memmap(memmap, np.float32, "w+", shape=shape)
                if memmap and i == 0
                else np.empty(shape, np.float32)
            )
            data[...] = normal(*shape, seed=i) * scale
            state[name] = popxl.variable(data, popxl.float32, name)
        y = x * state[names[0]]
        for name in names[1:]:
            y = y + x * state[name]
        ops.host_store(outputs.y, y)
        for t in state.values():
            t += 1
    return addons.TaskSession(inputs, outputs, NamedTensors.from_dict(state), ir=ir, **options)


def values_of(session):
    return {
        name: value.copy() for name, value in session.get_named_tensors_data().to_dict().items()
    }


class Loader:
    def __init__(self, position=0):
        self.position = position

    def save(self, path):
        with open(path, "w") as file:
            file.write(str(self.position))

    def resume(self, filename):
        with open(filename) as file:
            self.position = int(file.read())


def test_streams_are_read_by_name_attribute_position_and_slice():
    session = make_session()
    assert session.inputs["x"] is session.inputs.x is session.inputs[0] is session.inputs[:1][0]
    assert (
        list(session.outputs) == [session.outputs.y]
        and "y" in session.outputs
        and len(session.outputs) == 1
    )
    assert session.inputs.keys() == ["x"] and session.outputs.items()[0][0] == "y"
    with pytest.raises(KeyError, match="expected one of x"):
        session.inputs["z"]
    with pytest.raises(AttributeError, match="got 'z'"):
        session.outputs.z  # noqa: B018
    with session:
        results = session.run({session.inputs.x: np.ones(3, np.float32)})
    np.testing.assert_allclose(results[session.outputs.y], normal(3) + normal(3, seed=1), rtol=1e-6)
    assert session.session_state == {"steps": 1}


def test_a_checkpoint_brings_back_state_steps_and_data_position(tmp_path):
    session = make_session()
    session.dataloader = Loader(17)
    session.add_session_state_info({"epoch": 2})
    with session:
        session.run({session.inputs.x: np.ones(3, np.float32)})
        session.save_checkpoint(str(tmp_path / "one"))
    saved = values_of(session)
    files = sorted(
        os.path.relpath(os.path.join(d, f), tmp_path) for d, _, fs in os.walk(tmp_path) for f in fs
    )
    assert files == [
        "one/dataloader.bin",
        "one/model/a.w.npz",
        "one/model/b.npz",
        "one/session_info.json",
    ]
    with np.load(tmp_path / "one/model/a.w.npz", allow_pickle=False) as arrays:
        assert arrays.files == ["a.w"]
        np.testing.assert_array_equal(arrays["a.w"], saved["a.w"])
    assert json.loads((tmp_path / "one/session_info.json").read_text()) == {"steps": 1, "epoch": 2}

    other = make_session(scale=5.0)
    other.dataloader = Loader()
    with other:
        other.load_checkpoint(str(tmp_path / "one"))
        for name, value in values_of(other).items():
            np.testing.assert_array_equal(value, saved[name])
        results = other.run({other.inputs.x: np.ones(3, np.float32)})
    np.testing.assert_allclose(results[other.outputs.y], saved["a.w"] + saved["b"], rtol=1e-6)
    assert other.session_state == {"steps": 2, "epoch": 2} and other.dataloader.position == 17


def test_a_checkpoint_has_values_and_steps_of_one_moment_while_threads_run(tmp_path):
    session = make_session(("w",), shape=(5,), scale=0.0, max_checkpoints=9)
    x = {session.inputs.x: np.ones(5, np.float32)}

    def run(_):
        for _ in range(60):
            session.run(x)

    with session, ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(run, number) for number in range(3)]
        for number in range(6):
            session.save_checkpoint(str(tmp_path / f"{number}"))
        for thread in threads:
            thread.result()
    assert session.session_state == {"steps": 180}
    for number in range(6):
        steps = json.loads((tmp_path / f"{number}" / "session_info.json").read_text())["steps"]
        with np.load(tmp_path / f"{number}" / "model" / "w.npz") as arrays:
            np.testing.assert_array_equal(arrays["w"], np.full(5, steps))


def test_only_the_newest_checkpoints_stay(tmp_path):
    session = make_session(max_checkpoints=2)
    for name in ("1", "2", "2", "3"):
        session.save_checkpoint(str(tmp_path / name))
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]


def test_a_checkpoint_under_another_name_of_its_folder_stays(tmp_path, monkeypatch):
    session = make_session()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("ckpt", tmp_path / "ckpt", "link/ckpt", "link/../" + tmp_path.name + "/ckpt"):
        session.save_checkpoint(str(name))
        session.load_checkpoint(str(tmp_path / "ckpt"))
    monkeypatch.chdir("/")
    session.save_checkpoint(
        str(tmp_path / "other")
    )  # the one that was saved by a relative path goes
    assert sorted(os.listdir(tmp_path)) == ["link", "other"]


def test_a_link_in_the_place_of_a_checkpoint_is_replaced_and_what_it_leads_to_is_another(tmp_path):
    session = make_session(max_checkpoints=2)
    session.save_checkpoint(str(tmp_path / "ckpt"))
    (tmp_path / "latest").symlink_to("ckpt")
    session.save_checkpoint(str(tmp_path / "latest"))
    assert not (tmp_path / "latest").is_symlink()
    for name in ("ckpt", "latest"):
        session.load_checkpoint(str(tmp_path / name))
    session.save_checkpoint(str(tmp_path / "next"))
    assert sorted(os.listdir(tmp_path)) == ["latest", "next"]


def test_a_checkpoint_with_another_inside_stays_until_that_may_go(tmp_path):
    session = make_session()
    session.save_checkpoint(str(tmp_path / "ckpt"))
    session.save_checkpoint(str(tmp_path / "ckpt/best"))
    for name in ("ckpt", "ckpt/best"):
        session.load_checkpoint(str(tmp_path / name))
    session.save_checkpoint(str(tmp_path / "other"))
    assert os.listdir(tmp_path) == ["other"]


def test_a_checkpoint_replaces_none_that_is_to_be_kept(tmp_path):
    for kept in (1, 2):
        session = make_session(max_checkpoints=kept)
        session.save_checkpoint(str(tmp_path / "ckpt/best"))
        if kept == 1:
            session.save_checkpoint(str(tmp_path / "ckpt"))
            assert not (tmp_path / "ckpt/best").exists()
        else:
            with pytest.raises(ValueError, match="has the checkpoint .*ckpt/best inside"):
                session.save_checkpoint(str(tmp_path / "ckpt"))
            session.load_checkpoint(str(tmp_path / "ckpt/best"))


@pytest.mark.parametrize("count", [0, -1])
def test_a_session_that_would_keep_no_checkpoint_is_refused(count):
    with pytest.raises(ValueError, match=f"got max_checkpoints {count}; expected 1 or more"):
        make_session(max_checkpoints=count)


def test_names_of_one_side_only_are_left_and_reported(tmp_path, caplog):
    source = make_session(names=("a.w", "other"))
    source.save_checkpoint(str(tmp_path / "c"))
    session = make_session(scale=5.0)
    before = values_of(session)
    session.load_checkpoint(str(tmp_path / "c"))
    assert "got no values for b" in caplog.text
    np.testing.assert_array_equal(values_of(session)["b"], before["b"])
    np.testing.assert_array_equal(values_of(session)["a.w"], values_of(source)["a.w"])
    with pytest.raises(ValueError, match="got no values for b"):
        session.load_checkpoint(str(tmp_path / "c"), report_missing="error")
    with pytest.raises(ValueError, match="'none', 'warn' or 'error'"):
        session.load_checkpoint(str(tmp_path / "c"), report_missing="maybe")
    os.remove(tmp_path / "c" / "session_info.json")
    session.load_checkpoint(str(tmp_path / "c"), report_missing="none")
    assert session.session_state == {"steps": 0}


def test_state_is_copied_from_another_session_by_name():
    source, target = make_session(), make_session(scale=5.0)
    target.load_from_session(source, report_missing="error")
    for name, value in values_of(target).items():
        np.testing.assert_array_equal(value, values_of(source)[name])
    write_variables_pb(target, {target.state.b: np.full(3, 9, np.float32)})
    assert (values_of(target)["b"] == 9).all()


def test_memory_mapped_variables_are_saved_as_raw_files(tmp_path):
    session = make_session(memmap=tmp_path / "w.npy")
    session.save_checkpoint(str(tmp_path / "c"))
    assert sorted(os.listdir(tmp_path / "c" / "model")) == ["a.w.npy", "b.npz"]
    saved = values_of(session)
    target = make_session(scale=5.0)
    before = values_of(target)
    target.load_checkpoint(str(tmp_path / "c"), report_missing="error", skip_memmap=True)
    np.testing.assert_array_equal(values_of(target)["a.w"], before["a.w"])
    target.load_checkpoint(str(tmp_path / "c"), report_missing="error")
    np.testing.assert_array_equal(values_of(target)["a.w"], saved["a.w"])
    initialise_memmap_dir_from_checkpoint(str(tmp_path / "c"), str(tmp_path / "maps"))
    np.testing.assert_array_equal(
        np.fromfile(tmp_path / "maps" / "a.w.npy", np.float32), saved["a.w"]
    )


class Sharded(addons.Module):
    def build(self, x):
        self.add_replica_sharded_variable_input("w", lambda: np.arange(4.0), popxl.float32)
        return x


def test_the_shard_of_a_variable_stands_for_it_in_the_state_and_other_tensors_are_refused(tmp_path):
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        facts, _ = Sharded().create_graph(popxl.TensorSpec((), popxl.float32))
        state = facts.init()
        doubled = state.w + state.w
        state.w += 1
    with addons.TaskSession([], [], state, ir=ir) as session:
        session.run()
    assert session.state.w is ir.main_graph.variables[0]
    session.save_checkpoint(str(tmp_path / "c"))
    with session:
        session.run()
    session.load_checkpoint(str(tmp_path / "c"), report_missing="error")
    np.testing.assert_array_equal(values_of(session)["w"], np.arange(4) + 1)
    with pytest.raises(TypeError, match=r"got %add\S* as state 'w'; expected a variable"):
        addons.TaskSession([], [], NamedTensors(w=doubled), ir=ir)


def mapped_session(folder):
    """A session whose one variable lies in a file: every run adds one to it."""
    ir = popxl.Ir()
    with ir.main_graph:
        facts = addons.NamedVariableFactories(
            w=addons.VariableFactory(lambda: np.zeros(3), popxl.float32, "w")
        )
        state = facts.init(memmap_dir=str(folder))
        state.w += 1
    return addons.TaskSession([], [], state, ir=ir)


def test_a_program_starts_from_a_memmap_directory_that_was_made_from_a_checkpoint(tmp_path):
    session = mapped_session(tmp_path / "first")
    with session:
        session.run(), session.run()
    session.save_checkpoint(str(tmp_path / "c"))
    with session:
        session.run()
    initialise_memmap_dir_from_checkpoint(str(tmp_path / "c"), str(tmp_path / "second"))
    again = mapped_session(tmp_path / "second")
    np.testing.assert_array_equal(values_of(again)["w"], np.full(3, 2.0))
    again.load_checkpoint(str(tmp_path / "c"), skip_memmap=True)
    with again:
        again.run()
    np.testing.assert_array_equal(values_of(again)["w"], np.full(3, 3.0))
    np.testing.assert_array_equal(values_of(session)["w"], np.full(3, 3.0))


def npz_with_pickle(path):
    np.savez(path, **{"a.w": np.array([{"x": 1}], dtype=object)})


def npz_of_wrong_shape(path):
    np.savez(path, **{"a.w": np.zeros(7, np.float32)})


def npz_of_wrong_type(path):
    np.savez(path, **{"a.w": np.zeros(3, np.float64)})


def npz_of_another_name(path):
    np.savez(path, other=np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:40]), "which cannot be read"),
        (lambda path: path.write_bytes(b""), "which cannot be read"),
        (npz_with_pickle, "which cannot be read"),
        (npz_of_another_name, "which cannot be read"),
        (npz_of_wrong_shape, r"got float32\[7\] for 'a.w'; expected float32\[3\]"),
        (npz_of_wrong_type, r"got float64\[3\] for 'a.w'"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_changes(tmp_path, damage, says):
    session = make_session()
    session.save_checkpoint(str(tmp_path / "c"))
    damage(tmp_path / "c" / "model" / "a.w.npz")
    target = make_session(scale=5.0)
    before = values_of(target)
    with pytest.raises(ValueError, match=says):
        target.load_checkpoint(str(tmp_path / "c"))
    for name, value in values_of(target).items():
        np.testing.assert_array_equal(value, before[name])


def test_a_data_position_that_is_damaged_is_refused_before_anything_changes(tmp_path):
    session = make_session()
    session.dataloader = Loader(17)
    session.save_checkpoint(str(tmp_path / "c"))
    target = make_session(scale=5.0)
    target.dataloader = Loader(3)
    position = tmp_path / "c" / "dataloader.bin"
    position.write_text("damaged")
    with target:
        target.run({target.inputs.x: np.ones(3, np.float32)})
        before = values_of(target)
    with pytest.raises(ValueError, match="damaged"):
        target.load_checkpoint(str(tmp_path / "c"))
    position.write_text("17")
    npz_of_wrong_shape(tmp_path / "c" / "model" / "a.w.npz")
    with pytest.raises(ValueError, match="for 'a.w'"):
        target.load_checkpoint(str(tmp_path / "c"))
    for name, value in values_of(target).items():
        np.testing.assert_array_equal(value, before[name])
    assert target.session_state == {"steps": 1} and target.dataloader.position == 3


def test_a_data_position_that_is_missing_is_reported_as_a_variable_is(tmp_path, caplog):
    make_session().save_checkpoint(str(tmp_path / "c"))
    session = make_session(scale=5.0)
    session.dataloader = Loader(3)
    before = values_of(session)
    with pytest.raises(ValueError, match="got no values for dataloader.bin; expected the dataload"):
        session.load_checkpoint(str(tmp_path / "c"), report_missing="error")
    for name, value in values_of(session).items():
        np.testing.assert_array_equal(value, before[name])
    session.load_checkpoint(str(tmp_path / "c"), report_missing="none")
    assert not caplog.text
    session.load_checkpoint(str(tmp_path / "c"))
    assert "got no values for dataloader.bin" in caplog.text and session.dataloader.position == 3


def test_a_flipped_byte_in_a_value_is_noticed(tmp_path):
    session = make_session(shape=(500,))
    session.save_checkpoint(str(tmp_path / "c"))
    path = tmp_path / "c" / "model" / "b.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert zipfile.is_zipfile(io.BytesIO(bytes(data)))
    with pytest.raises(ValueError, match="b.npz, which cannot be read"):
        session.load_checkpoint(str(tmp_path / "c"))


def test_missing_and_unreadable_checkpoints_are_named(tmp_path):
    session = make_session()
    with pytest.raises(FileNotFoundError, match="expected a checkpoint written by save_checkpoint"):
        session.load_checkpoint(str(tmp_path / "nothing"))
    session.save_checkpoint(str(tmp_path / "c"))
    (tmp_path / "c" / "session_info.json").write_text("{broken")
    with pytest.raises(ValueError, match="session_info.json, which cannot be read"):
        session.load_checkpoint(str(tmp_path / "c"))
    with pytest.raises(ValueError, match="an object with save and resume"):
        session.dataloader = 3
    with pytest.raises(TypeError):
        session.add_session_state_info({"x": object()})


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path):
    session = make_session()
    session.dataloader = Loader(1)
    session.save_checkpoint(str(tmp_path / "c"))
    old = (tmp_path / "c" / "model" / "b.npz").read_bytes()

    def fail(path):
        raise OSError("disk full")

    session.dataloader.save = fail
    with pytest.raises(OSError, match="disk full"):
        session.save_checkpoint(str(tmp_path / "c"))
    assert os.listdir(tmp_path) == ["c"]
    assert (tmp_path / "c" / "model" / "b.npz").read_bytes() == old
    session.load_checkpoint(str(tmp_path / "c"), report_missing="error")


def test_where_names_cannot_be_swapped_a_rename_that_fails_puts_the_old_folder_back(
    tmp_path, monkeypatch
):
    target = tmp_path / "t"
    replace_folder(target, lambda folder: folder.mkdir())
    (target / "old").write_text("old")
    rename = os.rename

    def refuse(source, destination):
        if os.path.basename(source) == "new":
            raise OSError("refused")
        rename(source, destination)

    monkeypatch.setattr(durable, "exchange", lambda first, second: False)
    replace_folder(tmp_path / "u", lambda folder: folder.mkdir())
    replace_folder(tmp_path / "u", lambda folder: folder.mkdir())
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="refused"):
        replace_folder(target, lambda folder: folder.mkdir())
    assert (target / "old").read_text() == "old" and sorted(os.listdir(tmp_path)) == ["t", "u"]


def test_an_existing_folder_is_swapped_in_one_step_where_the_file_system_can(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
    swaps = durable.exchange(tmp_path / "a", tmp_path / "b")
    renames, rename = [], os.rename
    monkeypatch.setattr(
        os,
        "rename",
        lambda source, destination: renames.append(source) or rename(source, destination),
    )
    replace_folder(
        tmp_path / "a", lambda folder: (folder.mkdir(), (folder / "x").write_text("new"))
    )
    assert len(renames) == (0 if swaps else 2) and (tmp_path / "a" / "x").read_text() == "new"
    assert not durable.exchange(tmp_path / "a", tmp_path / "missing")


SAVER = """
import importlib.util, itertools, pathlib, sys
spec = importlib.util.spec_from_file_location("durable", sys.argv[1])
durable = importlib.util.module_from_spec(spec)
spec.loader.exec_module(durable)

def write(folder):
    folder.mkdir()
    for name in "abc":
        (folder / name).write_text(str(number))

for number in itertools.count():
    durable.replace_folder(pathlib.Path(sys.argv[2]), write)
    if number == 0:
        print("started", flush=True)
"""


@pytest.mark.slow
def test_a_process_killed_while_it_saves_leaves_one_whole_folder_under_the_name(tmp_path):
    target, rng = tmp_path / "c", np.random.default_rng(0)
    for _ in range(6):
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, durable.__file__, str(target)], stdout=subprocess.PIPE
        )
        saver.stdout.readline()
        time.sleep(float(rng.uniform(0.0, 0.05)))
        saver.kill()
        saver.communicate()
        contents = {(target / name).read_text() for name in "abc"}
        assert len(contents) == 1 and sorted(os.listdir(target)) == ["a", "b", "c"]
    replace_folder(target, lambda folder: folder.mkdir())
    assert os.listdir(tmp_path) == ["c"]


class FakeWandb:
    """The few calls of wandb that task sessions make, on a folder."""

    def __init__(self, root):
        self.root, self.logged = root, []
        self.Artifact = lambda name, type: SimpleNamespace(
            name=name, add_dir=lambda path: shutil.copytree(path, root / name), wait=lambda: None
        )
        self.Histogram = lambda np_histogram: np_histogram

    def log_artifact(self, artifact):
        self.logged.append(artifact.name)

    def use_artifact(self, name):
        return SimpleNamespace(download=lambda: str(self.root / name))

    def log(self, values, step):
        self.logged.append((step, *values))


def test_artifacts_and_histograms_go_through_wandb(tmp_path, monkeypatch):
    wandb = FakeWandb(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    session, target = make_session(), make_session(scale=5.0)
    session.save_checkpoint("wandb://mine")
    target.load_checkpoint("wandb://mine", report_missing="error")
    for name, value in values_of(target).items():
        np.testing.assert_array_equal(value, values_of(session)[name])
    session.wandb_variable_histograms(step=3)
    assert wandb.logged == ["mine", (3, "a.w"), (3, "b")]
