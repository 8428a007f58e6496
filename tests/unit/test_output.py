"""Outputs of a run that take nothing, or wait."""

import fcntl
import io
import os

import pytest

from popxl_gpt.demo.job import output
from popxl_gpt.demo.job.output import PIECE, Output

ROOM = 2 * PIECE


@pytest.fixture
def pipe(monkeypatch):
    """Reading and writing end of a pipe with little room, and an output to it."""
    monkeypatch.setattr(output, "PATIENCE_SECONDS", 0.0)
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, ROOM)
    with open(reading, "rb", buffering=0) as reader, open(writing, "w", encoding="ascii") as stream:
        yield reader, Output(stream, is_told=True)


def test_lines_that_nobody_reads_are_left_out_and_told_of_once(pipe, caplog):
    reader, written = pipe
    for number in range(100):
        written.write(f"{number:>1023}\n")
    assert caplog.text.count("stdout: got 'nobody reads it'; expected an output that takes") == 1
    first = reader.read(100 * 1024)
    assert [int(line) for line in first.splitlines()] == list(range(len(first) // 1024))
    written.write("somebody reads again\n")
    assert reader.read(ROOM) == b"somebody reads again\n"


def test_a_line_is_written_when_it_ends_or_when_it_is_flushed(pipe):
    reader, written = pipe
    os.set_blocking(reader.fileno(), False)
    print("half a", end="", file=written)
    assert reader.read() is None
    print(" line\nand", "more", file=written, end="", flush=True)
    assert reader.read() == b"half a line\nand more"


def test_a_text_longer_than_a_piece_arrives_whole(tmp_path):
    with open(tmp_path / "text", "w", encoding="utf-8") as stream:
        Output(stream, is_told=True).write("ä" * 10 * PIECE + "\n")
    assert (tmp_path / "text").read_text("utf-8") == "ä" * 10 * PIECE + "\n"


def test_a_stream_that_was_closed_is_told_of_as_one_that_fails(tmp_path, caplog):
    with open(tmp_path / "text", "w") as stream:
        written = Output(stream, is_told=True)
    written.write("nobody hears\n")
    assert caplog.text.count("stdout: got ") == 1


def test_a_stream_that_is_gone_when_python_flushes_at_its_exit_is_no_news(tmp_path, caplog):
    with open(tmp_path / "text", "w") as stream:
        written = Output(stream, is_told=True)
        written.write("all of it\n")
    written.close()
    assert not caplog.records


def test_streams_in_memory_stay_as_they_are(monkeypatch):
    memory = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr("sys.stdout", memory)
    with output.lasting_output():
        print("here")
        assert output.sys.stdout is memory
    memory.seek(0)
    assert memory.read() == "here\n"
