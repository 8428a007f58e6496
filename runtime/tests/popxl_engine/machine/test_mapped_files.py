"""A file under memory that is cut off ends the process in words, whichever thread touches it."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading
import numpy as np, popxl, torch
from popxl import ops

def main(path, way):
    np.arange(2**20, dtype=np.float32).tofile(path)
    mapped = np.memmap(path, np.float32, "r+", shape=(2**20,))
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((2**20,), popxl.float32, 1)
        variable = popxl.remote_variable(mapped, buffer, 0, name="w")
        with popxl.in_sequence():
            loaded = ops.remote_load(buffer, 0)
            loaded += popxl.constant(1.0, popxl.float32)
            ops.remote_store(buffer, 0, loaded)
            out = popxl.d2h_stream((), popxl.float32, name="out")
            ops.host_store(out, ops.sum(loaded, axis=(0,), keepdims=False))
    session = popxl.Session(ir, "cpu")
    with session:
        session.run()
        print("ran", flush=True)
        if way != "whole":
            os.truncate(path, 4096)
        if way == "numpy":
            print(mapped[2**19])
        elif way == "torch":
            print(torch.from_numpy(mapped).sum())
        elif way == "threads":
            together = threading.Barrier(8)
            def touch(i):
                together.wait()
                print(mapped[2**19 + i * 1024])
            for i in range(8):
                threading.Thread(target=touch, args=(i,)).start()
        elif way == "thread":
            thread = threading.Thread(target=lambda: print(mapped.sum()))
            thread.start()
            thread.join()
        else:
            session.run()
    print("done")

# a process for each way, which has the modules already
for way in sys.argv[1:]:
    if not os.fork():
        for number, kind in enumerate(("out", "err"), 1):
            os.dup2(os.open(f"{way}.{kind}", os.O_CREAT | os.O_WRONLY), number)
        main(f"{way}.npy", way)
        sys.exit()
    _, status = os.wait()
    print(way, os.waitstatus_to_exitcode(status))
"""
WAYS = ("session", "numpy", "torch", "thread", "threads", "whole")


@pytest.mark.slow
def test_a_mapped_file_that_is_cut_off_ends_the_process_in_words(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *WAYS],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        cwd=tmp_path,
    )
    ended = dict(line.split() for line in done.stdout.splitlines())
    assert tuple(ended) == WAYS, done.stderr
    for way, code in ended.items():
        out, err = ((tmp_path / f"{way}.{kind}").read_text() for kind in ("out", "err"))
        if way == "whole":
            assert (code, out) == ("0", "ran\ndone\n"), err
            continue
        assert (code, out) == ("74", "ran\n"), (way, err)
        assert err == (
            f"error: {tmp_path / way}.npy: got 4096 bytes; expected the 4194304 that are mapped "
            "into memory. Another program cut the file off while it was used: keep others out of "
            "the folder, and start again from a checkpoint.\n"
        ), way
