"""What one instance writes, as the machine's stderr has it."""

import os

import pytest
from poprun import log_mux
from poprun.log_mux import CHUNK, LogStream


@pytest.fixture
def shown(monkeypatch):
    """What was passed on, in parts."""
    parts: list[bytes] = []
    monkeypatch.setattr(log_mux, "say", parts.append)
    return parts


@pytest.fixture
def stream():
    made = LogStream(1)
    yield made
    made.close()


def write(stream, *texts):
    """Write texts, each of which is read by itself."""
    for text in texts:
        os.write(stream._writing, text)
        stream.read()


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\n\nc"], [b"ab", b"", b"c"]),
        ([b"a\r\nb\r", b"\nc\r\r\nd\n"], [b"a", b"b", b"c", b"d"]),
        ([b"\r 1%", b"\r 2%\r", b" 3%\nend\n"], [b" 3%", b"end"]),
        ([b"\r 1%\r    \r", b"said\n", b"\r 2%"], [b"said", b" 2%"]),
        ([b"\r", b"\r\r"], []),
    ],
)
def test_lines_have_their_instance_and_are_overwritten_as_on_a_terminal(
    stream, shown, texts, lines
):
    write(stream, *texts)
    stream.finish()
    assert b"".join(shown) == b"".join(b"[1] %s\n" % line for line in lines)


def test_progress_is_shown_while_it_goes_on(stream, shown, monkeypatch):
    now = 0.0
    monkeypatch.setattr(log_mux.time, "monotonic", lambda: now)
    for count in range(1, 100):
        now = count / 10
        write(stream, b"\r%d%%" % count)
        stream.forward(held=5.0)
    # each 5 seconds the last line that has ended
    assert shown == [b"[1] 51%\n"]


def test_a_line_without_an_end_is_passed_on_in_pieces_and_not_kept(stream, shown):
    texts = [b"%06d " % number * 100 for number in range(1000)]
    for text in texts:
        write(stream, text)
        stream.forward()
        assert len(stream._partial_line) < CHUNK
    assert len(shown) == sum(map(len, texts)) // CHUNK
    stream.finish()
    assert b"".join(part[len(b"[1] ") : -1] for part in shown) == b"".join(texts)
