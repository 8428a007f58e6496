"""The five-minute benchmark: its text, its clock, and what counts as a result."""

import gzip
import hashlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks import five_minutes
from benchmarks.five_minutes import OURS, Baseline, Entry, chosen, result_of, split
from benchmarks.harness import BenchmarkError
from imgs import write_tables
from popxl_gpt.config.preparing import parse_preparation
from popxl_gpt.config.presets import preset
from popxl_gpt.config.saving import to_yaml
from popxl_gpt.demo.commands import EVALUATE, parse_training

LINE = b"Benefit, n. An act of kindness; a favor conferred. --Bacon.\n"
TEXT = LINE * (90 * five_minutes.PIECE // len(LINE))
"""Two documents of it are held out."""
COPY = "import json, pathlib, sys; folder = pathlib.Path(sys.argv[1])\n"


def program(path: Path, words: str) -> str:
    """A program of an entry, which is given the folder."""
    path.write_text(COPY + words)
    return f"{{python}} {path} {{folder}}"


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Flags of the benchmark, with a text of ours in place of the dictionary."""
    text = tmp_path / "text.dz"
    text.write_bytes(gzip.compress(TEXT))
    monkeypatch.setattr(five_minutes, "SHA256", hashlib.sha256(text.read_bytes()).hexdigest())
    monkeypatch.setattr(five_minutes, "RECORDS", tmp_path / "records.jsonl")
    return ["--text", str(text), "--folder", str(tmp_path / "made")]


def run(monkeypatch, entry: Entry, words: "list[str]") -> int:
    """The exit code of the benchmark of one entry, which is called mine."""
    monkeypatch.setitem(five_minutes.ENTRIES, "mine", entry)
    monkeypatch.setattr(sys, "argv", ["five_minutes.py", "mine", *words])
    return five_minutes.main()


def entry(folder: Path, score: str, **more) -> Entry:
    """An entry that learns nothing, and its score by a line of Python of `size`."""
    read = "size = sum(len(f.read_bytes()) for f in folder.glob('held_out/*'))\n"
    nothing = program(folder / "nothing.py", "")
    return Entry(
        prepare=nothing,
        train=nothing,
        score=program(
            folder / "score.py",
            read + f"(folder / 'score.json').write_text(json.dumps({score}))",
        ),
        **more,
    )


def test_pieces_are_whole_lines_and_every_fortieth_is_held_out():
    trained, held_out = split(TEXT)
    documents = [*trained[:39], held_out[0], *trained[39:78], held_out[1], *trained[78:]]
    assert b"".join(documents) == TEXT
    assert len(held_out) == 2
    assert all(document.endswith(b"\n") for document in documents)
    sizes = [len(document) for document in documents[:-1]]
    assert all(five_minutes.PIECE <= size < five_minutes.PIECE + len(LINE) for size in sizes)


def test_bytes_that_are_no_utf8_are_left_out_before_cutting():
    assert split(b"caf\x92\xc3\xa9\n") == (["caf\u00e9\n".encode()], [])


def test_another_text_is_refused(tmp_path):
    other = tmp_path / "other.dz"
    other.write_bytes(gzip.compress(TEXT))
    with pytest.raises(BenchmarkError, match="got SHA-256 .*expected 3e6b2cdc.*apt-get download"):
        five_minutes.write_text(other, tmp_path / "made")


def test_an_entry_is_prepared_trained_and_scored_and_its_record_kept(given, tmp_path, monkeypatch):
    settings = {"size": "2x128x2", "batch": 32, "vocabulary": 2048}
    score = "{'bits_per_byte': 8.0, 'bytes': size}"
    uniform = entry(tmp_path, score, settings=lambda folder: settings)
    assert run(monkeypatch, uniform, [*given, "--record", "--runs", "2"]) == 0
    (record,) = map(json.loads, five_minutes.RECORDS.read_text().splitlines())
    assert record["entry"] == "mine"
    assert record["all_bits_per_byte"] == [8.0, 8.0] and 0 < record["seconds"] < 300
    assert record["machine"]["cores"] <= five_minutes.CORES
    assert record["all_settings"] == [settings, settings]
    assert write_tables.settings_cell(record) == f"2x128x2, 32, 2048, `{record['commit']}`"


def test_a_score_of_part_of_the_text_is_refused(given, tmp_path, monkeypatch):
    part = entry(tmp_path, "{'bits_per_byte': 8.0, 'bytes': size // 2}")
    with pytest.raises(BenchmarkError, match=r"mine: got a score of fewer bytes; expected all \d+"):
        run(monkeypatch, part, given)


def test_a_baselines_score_of_part_of_the_text_is_refused(given, monkeypatch):
    found = {"bits_per_byte": 8.0, "seconds": 1.0, "bytes": 5}

    class Bench:
        common = {"vocabulary_size": 2048}

        def __init__(self, arguments):
            assert arguments.recipes == ["modern"]

        def tuned(self, kind):
            return {"size": "2x128x2", "batch": 32}

        def with_mode(self, kind, settings, minutes):
            return {**settings, "mode": "eager-float32"}

        def run(self, kind, settings, minutes):
            return found

    monkeypatch.setattr(five_minutes.time_to_loss, "Bench", Bench)
    monkeypatch.setattr(Entry, "call", lambda *_: 1.0)
    baseline = Baseline(kind="modern", start="size=2x128x2 batch=32")
    with pytest.raises(BenchmarkError, match="mine: got a score of fewer bytes"):
        run(monkeypatch, baseline, given)
    found["bytes"] = 2 * len(TEXT)
    assert run(monkeypatch, baseline, [*given, "--record"]) == 0
    (record,) = map(json.loads, five_minutes.RECORDS.read_text().splitlines())
    how = {"size": "2x128x2", "batch": 32, "mode": "eager-float32", "vocabulary": 2048}
    assert record["all_settings"] == [how]


def test_the_load_is_read_after_each_entry(given, tmp_path, monkeypatch, capsys):
    trained = []
    monkeypatch.setattr(five_minutes, "machine", lambda: {"load": len(trained)})
    uniform = entry(tmp_path, "{'bits_per_byte': 8.0, 'bytes': size}")
    scored = {"bits_per_byte": 8.0, "bytes": len(TEXT), "seconds": 1.0, "settings": {}}
    monkeypatch.setattr(Entry, "run", lambda *_: trained.append(1) or {**scored})
    monkeypatch.setitem(five_minutes.ENTRIES, "other", uniform)
    run(monkeypatch, uniform, ["other", *given])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [result["machine"]["load"] for result in results] == [1, 2]


def test_the_settings_of_ours_are_those_of_its_run(tmp_path):
    (tmp_path / "run").mkdir()
    config = preset("tiny", layers=3, hidden_size=32, heads=4, global_batch_size=8)
    (tmp_path / "run" / "config.yml").write_text(to_yaml(config))
    assert chosen(tmp_path) == {"size": "3x32x4", "batch": 8, "vocabulary": 128}


def test_results_without_settings_stay_valid():
    assert write_tables.settings_cell({"entry": "ours"}) == "–"
    assert write_tables.five_minutes_table()


@pytest.mark.parametrize("margin, verdict", [(1e-6, "late: no entry"), (1.01, "in time")])
def test_a_run_that_takes_longer_is_no_result(
    margin, verdict, given, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(five_minutes, "MARGIN", margin)
    uniform = entry(tmp_path, "{'bits_per_byte': 8.0, 'bytes': size}")
    run(monkeypatch, uniform, [*given, "--record"])
    assert verdict in capsys.readouterr().out
    records = five_minutes.RECORDS.read_text().splitlines()
    assert len(records) == (verdict == "in time")


def test_a_result_is_the_median_of_the_runs_and_the_longest_time():
    runs = [
        {"bits_per_byte": bits, "seconds": seconds, "settings": {}, "machine": {"load": seconds}}
        for bits, seconds in ((1, 9), (4, 7), (2, 8))
    ]
    assert result_of(runs) == {
        "bits_per_byte": 2,
        "all_bits_per_byte": [1, 4, 2],
        "seconds": 9,
        "all_settings": [{}] * 3,
        "machine": {"load": 8},
    }


def test_runs_that_have_ended_are_recorded_though_a_later_one_fails(given, tmp_path, monkeypatch):
    done = f"pathlib.Path('{tmp_path}') / 'done'"
    first = f"(size, ({done}).touch())[0] if not ({done}).exists() else 1"
    script = f"{{'bits_per_byte': 8.0, 'bytes': {first}}}"
    with pytest.raises(BenchmarkError, match="fewer bytes"):
        run(monkeypatch, entry(tmp_path, script), [*given, "--record", "--runs", "2"])
    (record,) = map(json.loads, five_minutes.RECORDS.read_text().splitlines())
    assert record["all_bits_per_byte"] == [8.0]


def test_a_program_that_fails_is_named_with_its_last_words(given, tmp_path, monkeypatch):
    broken = entry(tmp_path, "{'bits_per_byte': 8.0, 'bytes': undefined}")
    with pytest.raises(BenchmarkError, match="(?s)score.py .*exit code 1:.*NameError") as error:
        run(monkeypatch, broken, given)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "words, told",
    [
        (["theirs"], "got .'theirs'.; expected some of ours, modern, nanogpt"),
        (["ours", "--record", "--minutes", "1"], "got --minutes 1; expected 5"),
    ],
)
def test_words_that_are_wrong_are_told(words, told, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["five_minutes.py", *words])
    with pytest.raises(BenchmarkError, match=told):
        five_minutes.main()


def test_the_commands_of_ours_are_taken_by_their_programs():
    words = {
        name: getattr(OURS, name).format(python="", folder="made", minutes="5").split()[1:]
        for name in ("prepare", "train", "score")
    }
    parse_preparation(words["prepare"])
    assert parse_training(words["train"]).config.training.minutes == 5
    EVALUATE.read(words["score"])


def test_a_missing_dictionary_is_told_with_the_way_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["five_minutes.py", "--text", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="2"):
        five_minutes.main()
    assert "apt-get download dict-gcide" in capsys.readouterr().err
