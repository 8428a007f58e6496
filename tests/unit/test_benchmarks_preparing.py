"""The benchmark of preparation compares what it says: the same tokens, whoever made them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATASETS = '''
import json


class Data(list):
    """The few names of `datasets` that the benchmark uses, by a plain loop."""

    def map(self, function, *, batched, remove_columns, num_proc):
        assert batched and remove_columns == ["text"] and num_proc == 1
        return Data([{"ids": ids} for ids in function({"text": [row["text"] for row in self]})["ids"][EXTRA:]])

    def with_format(self, name):
        return {"ids": [row["ids"] for row in self]}


def load_dataset(kind, *, data_files, split, cache_dir):
    assert (kind, split) == ("json", "train")
    return Data([json.loads(line) for line in open(data_files, encoding="utf-8")])


def disable_progress_bars():
    pass
'''


def benchmark(folder: Path, extra: int, *words: str) -> subprocess.CompletedProcess:
    (folder / "datasets.py").write_text(DATASETS.replace("EXTRA", str(extra)))
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    command = [
        sys.executable,
        str(ROOT / "benchmarks/preparing.py"),
        "--rounds",
        "1",
        "--workers",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run([*command, *words], capture_output=True, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [0, 1], ids=["as it is", "with a document left out"])
def test_all_make_the_same_tokens_or_the_benchmark_says_no(tmp_path, extra):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"text {number}: the cat sat on the mat\n" * 200)
    done = benchmark(tmp_path, extra, "--vocabulary_size", "300", "--text", str(tmp_path / "*.txt"))
    if extra:
        assert done.returncode == 1 and "tokens; expected the same of all" in done.stderr, (
            done.stderr
        )
        return
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["bytes"] == sum(p.stat().st_size for p in tmp_path.glob("*.txt"))
    assert figures["speed"] == figures["seconds"]["datasets"][0] / figures["seconds"]["prepare"][0]
    library = figures["seconds"]["tokenizers"][0]
    assert figures["library_speed"] == library / figures["seconds"]["prepare"][0]


@pytest.mark.slow
def test_a_python_without_datasets_is_told():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/preparing.py"), "--datasets_python", "/bin/false"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "/bin/false: got no package datasets; expected" in done.stderr
