"""The progress line, as a terminal and as a log show it."""

import fcntl
import json
import logging
import os
import re
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from popxl_gpt.config.presets import preset
from popxl_gpt.demo.job.progress import Progress
from popxl_gpt.demo.job.progress_line import Piece, ProgressLine, fitting, tell, whole
from popxl_gpt.demo.job.warnings_file import warnings_kept

COLUMNS = 60


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = COLUMNS) -> "Iterator[list[str]]":
    """A block whose stdout and stderr are a terminal; afterwards the list has its screen."""
    outside, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    screen: list[str] = []
    with open(inside, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        yield screen
    content = b""
    with suppress(OSError):  # the other side is closed, and all of it read
        while part := os.read(outside, 2**16):
            content += part
    os.close(outside)
    screen += shown(content.decode())


def shown(content: str) -> "list[str]":
    """What a terminal shows after some characters."""
    lines, column = [""], 0
    for character in content:
        if character == "\n":
            lines.append("")
        elif character == "\r":
            column = 0
        else:
            assert character.isprintable(), repr(character)
            assert column < COLUMNS, "longer than the terminal is wide"
            lines[-1] = lines[-1][:column] + character + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def pieces(progress: Progress, step: int) -> "list[Piece]":
    progress.ran(1, 0.5)
    values = {"step": step, "tokens": 256 * step, "loss": 4.0 / step, "learning_rate": 1e-3}
    found = {"validation_loss": 4.5, "validation_standard_error": 0.1}
    return progress.pieces({**values, "gradient_norm": 1.0, "skipped": 0, **found})


def test_a_terminal_keeps_one_line_and_what_is_told_stays_above(monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    progress = Progress(preset("tiny", steps=300), 0)
    with terminal(monkeypatch) as screen, warnings_kept():
        line = ProgressLine()
        for step in range(1, 301):
            line.show(pieces(progress, step))
            if step == 100:
                tell("step 0 was told")
            if step == 200:
                logging.getLogger("demo").warning("the disk is full")
        line.close()
    assert screen[:2] == ["step 0 was told", "the disk is full"]
    assert screen[2].startswith("step 300/300  ") and screen[3:] == [""]
    assert "smoothed" in screen[2] and "validation 4.5000 ±0.1000" in screen[2]


def test_warnings_from_before_a_run_are_kept_where_it_keeps_its_own(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    path, logger = tmp_path / "warnings.jsonl", logging.getLogger("demo")
    with warnings_kept() as kept:
        logger.warning("other settings")
        assert not path.exists()  # the folder may go again
        kept.begin(SimpleNamespace(step=7), path)
        logger.info("no warning")
        logger.warning("a full disk")
        kept.keep("diverged")
    logger.warning("after it")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    told = [(line["step"], line["text"]) for line in found]
    assert told == [(None, "other settings"), (7, "a full disk"), (7, "diverged")]
    shown = capsys.readouterr().err
    assert "other settings" in shown and "a full disk" in shown and "diverged" not in shown


def test_a_log_has_every_piece(capsys):
    progress = Progress(preset("tiny", steps=300), 0, limit_seconds=0.1)
    ProgressLine().show(pieces(progress, 300))
    assert capsys.readouterr().out.startswith(
        "step 300/300  loss 0.0133  smoothed 0.0133  validation 4.5000 ±0.1000  lr 1.00e-03  "
        "norm 1.000  76.8 ktokens  "
    )
    assert "  20% of the limit  " in whole(pieces(progress, 300))


def test_utilisation_is_the_models_operations_over_what_the_machine_multiplies(capsys):
    sizes = {"layers": 2, "hidden_size": 32, "heads": 2, "vocabulary_size": 96}
    config = preset("tiny", **sizes, sequence_length=16)
    forward = 2 * (12 * 32 * 32 + 2 * 16 * 32) * 2 + 2 * 32 * 96  # of a token, as papers count it
    progress = Progress(config, 0)
    assert "MFU" not in whole(pieces(progress, 1)) and "mfu" not in progress.fields()
    progress.ceiling = 1e8
    progress.ran(4, 6.0)  # the last run, by itself; pieces() adds one of half a second a step
    rate = 3 * forward * config.tokens_per_step / 1.5
    assert progress.fields()["mfu"] == pytest.approx(rate / 1e8, abs=1e-4)
    shown = re.search(r"FLOP/s  (\S+)% MFU  ", whole(pieces(progress, 2)))
    mean = progress.flops_per_second / 1e8
    assert shown is not None and float(shown[1]) == pytest.approx(100 * mean, abs=0.051)


def test_utilisation_is_of_the_fastest_step_where_the_ceiling_was_measured_too_low():
    progress = Progress(preset("tiny"), 0)
    progress.ran(1, 0.5)
    progress.ceiling = progress.flops_per_second / 2  # beside other work
    assert progress.fields()["mfu"] == 1.0
    progress.ran(1, 2.0)
    assert progress.fields()["mfu"] == 0.25


def test_the_least_important_pieces_give_way():
    line = [Piece("first"), Piece("least", 9), Piece("second", 1), Piece("less", 5)]
    texts = [fitting(line, width) for width in (50, 20, 14, 6, 3)]
    assert texts == [whole(line), "first  second  less", "first  second", "first", "fir"]
