"""The benchmark of precisions: what it writes."""

import numpy as np
import pytest

from benchmarks import precision
from benchmarks.shakespeare import Characters


@pytest.mark.parametrize("flags, drawn", [([], []), (["--picture", "curves.png"], ["curves.png"])])
def test_the_picture_is_drawn_where_it_is_asked_for(flags, drawn, tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.touch()
    run = {"losses": [1.0], "validation_loss": 1.0, "step_seconds": 1.0, "ceiling_share": None}
    pictures = []
    monkeypatch.setattr(precision, "trained", lambda *_: run)
    monkeypatch.setattr(precision, "draw", lambda _, path: pictures.append(str(path)))
    monkeypatch.setattr(Characters, "read", lambda _: Characters(np.arange(9), np.arange(9), 9))
    words = ["precision.py", "--text", str(text), "--seeds", "1", "--modes", "float32", *flags]
    monkeypatch.setattr("sys.argv", words)
    assert precision.main() == 0
    assert pictures == drawn
