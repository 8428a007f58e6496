"""What a thread that writes gets of one that reads, and files of tensors."""

import hashlib
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from popxl_gpt.data.records import checksum
from popxl_gpt.execution.checkpoints.saving import _shares
from popxl_gpt.execution.checkpoints.tensor_files import read_tensors, write_tensors
from popxl_gpt.execution.part_queue import PartQueue, bytes_of, copied


def part(name: str, floats: int) -> "tuple[str, dict[str, np.ndarray]]":
    return name, {"weights": np.full(floats, 1.5, np.float32)}


def test_parts_wait_for_room_and_one_that_is_larger_than_all_of_it_goes_alone():
    queue, most = PartQueue(1000), []
    names = [(f"layer {n}", floats) for n, floats in enumerate([100, 100, 50, 500, 100, 200])]

    def put() -> None:
        for name, floats in names:
            queue.put(part(name, floats))
            most.append(queue._bytes)
        queue.end()

    thread = threading.Thread(target=put)
    thread.start()
    time.sleep(0.05)
    assert most == [400, 800, 1000]  # and nothing more, until one is written
    assert [name for name, _ in queue.taken()] == [name for name, _ in names]
    thread.join()
    assert max(most) == 2000 and most.count(2000) == 1
    assert queue._bytes == 0


def test_what_keeps_the_reader_from_going_on_is_raised_where_parts_are_taken():
    queue = PartQueue(10**6)
    queue.put(part("a", 1))
    queue.end(ValueError("a row is gone"))
    with pytest.raises(ValueError, match="a row is gone"):
        list(queue.taken())


def test_a_reader_does_not_wait_for_one_who_takes_no_more():
    queue = PartQueue(0)
    queue.put(part("a", 1))
    thread = threading.Thread(target=queue.put, args=(part("b", 1),))
    thread.start()
    queue.close()
    thread.join(10)
    assert not thread.is_alive()
    queue.put(part("c", 1))  # dropped


def own_bytes() -> int:
    """Of memory that is the process's own."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


@pytest.mark.slow
def test_a_copy_is_apart_from_what_is_copied_and_its_memory_is_given_back():
    arrays = {
        "matrix": np.arange(2**22, dtype=np.float32).reshape(2**11, 2**11).T,
        "half": np.linspace(0, 1, 7, dtype=np.float16),
        "step": np.float32(3.0)[()] * np.ones((), np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }
    name, copies = copied(("head", arrays))
    assert name == "head" and bytes_of((name, copies)) == 2**24 + 14 + 4
    for key, array in arrays.items():
        assert (copies[key].dtype, copies[key].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(copies[key], array)
        assert not np.shares_memory(copies[key], array)
    held = own_bytes()
    del copies
    assert held - own_bytes() >= 2**24


def test_every_process_writes_about_as_many_bytes_as_any_other():
    sizes = {"embedding": 50, **{f"decoder.{n}": 12 for n in range(9)}, "head": 1}
    for instances in (1, 2, 3, 4):
        shares = _shares(sizes, instances)
        assert sorted(name for share in shares for name in share) == sorted(sizes)
        loads = [sum(sizes[name] for name in share) for share in shares]
        assert max(loads) <= max(50, sum(sizes.values()) / instances + 12)
    assert len(_shares({"embedding": 1, "head": 1}, 8)) == 8


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_of_tensors_is_what_the_formats_own_library_writes(metadata, tmp_path):
    generator = np.random.default_rng(0)
    tensors = {
        "weights.b": generator.standard_normal((3, 5)).astype(np.float32),
        "weights.a": generator.standard_normal((4, 2)).astype(np.float32).T,
        "half": generator.standard_normal(3).astype(np.float16),
        "step": np.ones((), np.float32),
        "none": np.zeros((0, 4), np.float32),
    }
    written = write_tensors(tensors, tmp_path / "ours", metadata)
    save_file(
        {name: np.array(array, order="C") for name, array in tensors.items()},
        tmp_path / "theirs",
        metadata,
    )
    content = (tmp_path / "ours").read_bytes()
    assert content == (tmp_path / "theirs").read_bytes()
    assert written["bytes"] == len(content)
    assert written["sha256"] == hashlib.sha256(content).hexdigest()
    assert written["tensors"] == {name: checksum()(a.tobytes()) for name, a in tensors.items()}
    for name, array in read_tensors(tmp_path / "ours").items():
        np.testing.assert_array_equal(array, tensors[name])
