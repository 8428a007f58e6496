"""Rows as people have them, of JSON, CSV, Parquet and Arrow: each is a document, or refused in
words; and what a preparation leaves out, and says.
"""

import bz2
import csv
import gzip
import io
import json
import random
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

import popxl_gpt.data.sources
from popxl_gpt.data.conversations import conversation_source
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.data.prepare import main
from popxl_gpt.data.sources import Source, text_source
from popxl_gpt.utils.errors import DataError, exit_on_user_error

TEXTS = [
    "one\n\ntwo",
    'quoted "three", and',
    "日本\n",
    "five\tsix; seven | x",
    "[8]",
    '{"a": 1}',
    "l",
]
ROWS = [{"id": n, "text": text, "more": {"text": "[x], y"}} for n, text in enumerate(TEXTS)]


def texts_in(*patterns: object, **options) -> "list[str]":
    return list(text_source([*map(str, patterns)], **options).documents())


def lines(rows) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def delimited(delimiter: str) -> str:
    made = io.StringIO()
    writer = csv.writer(made, delimiter=delimiter)
    writer.writerows([("id", "text"), *((row["id"], row["text"]) for row in ROWS)])
    return made.getvalue()


def of_pyarrow(delimiter: str) -> str:
    table = pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS})
    made = io.BytesIO()
    pyarrow.csv.write_csv(table, made, pyarrow.csv.WriteOptions(delimiter=delimiter))
    return made.getvalue().decode()


def read_json(content: str) -> "list[str]":
    return [row["text"] for row in json.loads(content)]


def read_lines(content: str) -> "list[str]":
    return [json.loads(line)["text"] for line in content.splitlines() if line.strip()]


def read_csv(delimiter: str):
    return lambda content: [
        row["text"] for row in csv.DictReader(io.StringIO(content, ""), delimiter=delimiter)
    ]


def read_pyarrow(delimiter: str):
    def read(content: str) -> "list[str]":
        parsing = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        table = pyarrow.csv.read_csv(io.BytesIO(content.encode()), parse_options=parsing)
        return table["text"].to_pylist()

    return read


FILES = {
    "lines.json": (lines(ROWS), read_lines),
    "lines": (lines(ROWS), read_lines),
    "lines.txt.gz": (lines(ROWS), read_lines),
    "a line.txt": (lines(ROWS[:1]), read_lines),
    "empty lines.md": (f"\n \n{lines(ROWS[:2])}\n\n{lines(ROWS[2:])}", read_lines),
    "array.json": (json.dumps(ROWS), read_json),
    "array.jsonl": (json.dumps(ROWS), read_json),
    "array.json.bz2": (json.dumps(ROWS, indent=2), read_json),
    "array.txt": (f"\ufeff {json.dumps(ROWS, indent='	')}\n", lambda text: read_json(text[1:])),
    "none.json": ("[]", read_json),
    "object.json": (json.dumps(ROWS[0], indent=1), lambda text: [json.loads(text)["text"]]),
    "objects": ("\n".join(json.dumps(row, indent=1) for row in ROWS), lambda text: TEXTS),
    "on a line": (" ".join(map(json.dumps, ROWS)), lambda text: TEXTS),
    "two on a line.jsonl": (json.dumps(ROWS[0]) + lines(ROWS[1:]), lambda text: TEXTS),
    "a.csv": (delimited(","), read_csv(",")),
    "a.TSV": (delimited("\t"), read_csv("\t")),
    "semicolons.csv": (delimited(";"), read_csv(";")),
    "a.csv.zst": (of_pyarrow(","), read_pyarrow(",")),
    "b.tsv": (of_pyarrow("\t"), read_pyarrow("\t")),
    "marked.csv": (f"\ufeff{of_pyarrow(',')}", read_pyarrow(",")),
}
PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("name", FILES)
def test_json_and_csv_give_the_texts_that_python_and_pyarrow_read(tmp_path, name):
    content, read = FILES[name]
    pack = PACKED.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(content.encode()))
    expected = read(content)
    assert expected == TEXTS[: len(expected)] and (expected or name == "none.json")
    assert texts_in(tmp_path / name) == expected
    assert texts_in(tmp_path / name, plain_text=True) == [
        content.removeprefix("\ufeff").replace("\r\n", "\n")
    ]


PROSE = {
    "note.txt": "[1] Smith shows that [2] is wrong.\n",
    "footnotes.txt": "[1]\nSmith\n[2]\nJones\n",
    "draft.md": "[draft] {of a text}\n",
    "list.txt": '["a", "b"] are letters',
    "object.txt": '{"a": 1} is an object\n',
    "front.md": '{"title": "a"}\n\n# A post\n',
    "brace.txt": "{\\rtf1 text}",
    "open.txt": '[{"a": 1}, and so on',
    "deep.txt": "[" * 100_000,
    "program.py": '{"a": 1}\n',
    "another.py": '[{"text": "a"}]\n',
    "string.txt": '"a text"\n',
    "number.txt": "12\n",
    "table.txt": "text,label\na,1\n",
}


@pytest.mark.parametrize("name", PROSE)
def test_prose_and_programs_stay_text(tmp_path, name):
    (tmp_path / name).write_text(PROSE[name])
    assert texts_in(tmp_path) == [PROSE[name]]


def any_value(draw: random.Random, depth: int):
    kind = draw.randrange(7 if depth else 4)
    if kind < 4:
        return [None, draw.choice([True, -1.5e300, 10**30]), draw.choice(TEXTS), "text"][kind]
    if kind == 4:
        return [any_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    names = draw.sample(["text", "a", "[", '"'], draw.randrange(4))
    return {name: any_value(draw, depth - 1) for name in names}


def test_no_file_that_is_json_becomes_one_document_of_its_syntax(tmp_path):
    draw, path, kinds = random.Random(0), tmp_path / "a.txt", set()
    for number in range(150):
        value = any_value(draw, 3)
        content = json.dumps(value, indent=draw.choice([None, 1]), ensure_ascii=draw.random() < 0.5)
        if not isinstance(value, (list, dict)):
            continue
        path.write_text(content)
        found = value if isinstance(value, list) else [value]
        is_good = all(
            isinstance(each, dict) and isinstance(each.get("text", 0), (str, type(None)))
            for each in found
        )
        kinds.add(is_good)
        if is_good:
            assert texts_in(path) == [each["text"] for each in found if each["text"]], number
        else:
            with pytest.raises(DataError, match=r"object|line 1 at byte 0: got .*--plain_text"):
                texts_in(path)
    assert kinds == {True, False}


@pytest.mark.slow
def test_an_array_takes_the_memory_of_an_element(tmp_path):
    row = json.dumps({"text": "a text " * 100})
    (tmp_path / "a.json").write_text(f"[{','.join([row] * 10_000)}]")
    tracemalloc.start()
    assert sum(1 for _ in text_source([str(tmp_path)]).documents()) == 10_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20 < (tmp_path / "a.json").stat().st_size / 6


REFUSED = {
    "config.json": ('{\n "name": "a"\n}', "object 1 at byte 0: got no text in 'text' (fields: 'name')", 1),
    "numbers.txt": ("[1, 2]", "object 1 at byte 1: got '1'; expected a JSON object with text in 'text'", 2),
    "cut.json": ('[{"text": "a"}, {"te', "object 2 at byte 16: got what is no JSON (Unterminated", 1),
    "two.json": ('[{"text": "a"}] [', "object 1 at byte 16: got what is no JSON ('[' in place of the end)", 1),
    "prose.json": ("prose\n", "line 1 at byte 0: got 'prose", 1),
    "odd.json": ('{"text": "a"}\n{"text": b}\n', "line 2 at byte 14: got '{\"text\": b}", 1),
    "torn.json": ('{"text": "a"}{"te\n{"text": "c"}\n', "line 1 at byte 0: got '{", 1),
    "doubled.json": ('{"text": "a", "text": "b"}', "line 1 at byte 0: got two fields 'text'", 1),
    "array.jsonl": ('[{"text": "a", "text": "b"}]', "object 1 at byte 1: got two fields 'text'", 1),
    "bytes.json": (b'[{"text": "\xff"}]', "object 1 at byte 1: got text with half of a surrogate pair", 1),
    "short.csv": ("text,n\na,1\nb\nc,2\n", "line 3: got 1 field where the header has 2; expected a row", 1),
    "quotes.csv": ('text,n\n"a"b,1\nc,2\n', "line 2: got what is no CSV (',' expected after", 1),
    "open.csv": ('text,n\na,1\n"b,2\n', "line 3: got what is no CSV (unexpected end of data)", 1),
    "other.csv": ("body,n\na,1\n", "got no text in 'text' (columns: 'body', 'n'); expected a column", 0),
    "same.csv": ("text,text\na,1\n", "got 2 columns named 'text'; expected one", 0),
    "prose.csv": ("Once, upon\na time\n", "got no text in 'text' (columns: 'Once', ' upon')", 0),
    "bytes.csv": (b"text\n\xff\n", "got bytes that are not UTF-8", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_json_and_csv_without_text_are_refused_in_words_or_left_out_and_counted(
    tmp_path, capsys, name
):
    content, words, records = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as stop, exit_on_user_error():
        main(["text", str(tmp_path), "--output", str(tmp_path / "out"), "--workers", "1"])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and words in told, told
    source = text_source([str(path)], skip_damaged=True)
    assert set(source.documents()) <= {"a", "c"}
    assert len(source.left_out.records) == records and len(source.left_out.files) == (not records)


def test_json_and_plain_text_are_not_asked_for_together(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match="plain_text: got true and --documents json"):
        main(["text", str(tmp_path), "--plain_text", "--documents", "json"])


def column(kind: str):
    """A column of texts, of which the last is null, and the texts."""
    texts = ["one", "日本", "", "one", None]
    if kind == "nulls":
        return pyarrow.nulls(5), [None] * 5
    if kind == "dictionary":
        return pyarrow.array(texts).dictionary_encode(), texts
    if kind == "dictionary of bytes":
        return pyarrow.array([t and t.encode() for t in texts]).dictionary_encode(), texts
    if kind == "run-end encoded":
        encoded = pyarrow.compute.run_end_encode(pyarrow.array(texts))
        return encoded, texts
    if kind in ("binary", "large_binary", "binary_view"):
        values = [None if text is None else text.encode() for text in texts]
        return pyarrow.array(values, getattr(pyarrow, kind)()), texts
    return pyarrow.array(texts, getattr(pyarrow, kind)()), texts


KINDS = (
    "string", "large_string", "string_view", "binary", "large_binary", "binary_view", "dictionary",
    "dictionary of bytes", "run-end encoded", "nulls",
)  # fmt: skip


def write_table(path: Path, table: pyarrow.Table) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_columns_of_every_type_of_text_give_their_texts_and_nulls_are_counted(
    tmp_path, kind, suffix
):
    if (suffix, kind) == (".parquet", "run-end encoded"):
        return  # Parquet has no such type
    values, texts = column(kind)
    write_table(tmp_path / f"a{suffix}", pyarrow.table({"n": range(5), "text": values}))
    write_table(tmp_path / f"b{suffix}", pyarrow.table({"text": ["last"]}))
    source = text_source([str(tmp_path)])
    assert list(source.documents()) == [text for text in texts if text] + ["last"]
    assert sum(source.left_out.nulls.values()) == texts.count(None)


def test_tables_with_two_columns_of_one_name_are_refused_in_words_if_they_are_needed(tmp_path):
    arrays = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array(["c"])]
    for suffix in (".parquet", ".arrow"):
        path = tmp_path / f"a{suffix}"
        write_table(path, pyarrow.Table.from_arrays(arrays, ["text", "n", "text"]))
        with pytest.raises(DataError, match="got 2 columns named 'text'; expected one"):
            texts_in(path)
        write_table(path, pyarrow.Table.from_arrays(arrays, ["n", "text", "n"]))
        assert texts_in(path) == ["b"]
        write_table(path, pyarrow.Table.from_arrays(arrays[:2], ["a.text", "a"]))
        assert texts_in(path, text_field="a.text") == ["a"]


NULLS = {
    "a.jsonl": lines([{"text": "a"}, {"text": None}, {"text": "b"}, {"text": None}]),
    "a.json": json.dumps([{"text": None}, {"text": "a"}, {"text": "b"}, {"text": None}]),
    "a.parquet": ["a", None, None, "b"],
}


@pytest.mark.parametrize("name", NULLS)
def test_rows_of_null_are_left_out_of_every_kind_of_file_and_told_once(tmp_path, capsys, name):
    content = NULLS[name]
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    else:
        write_table(tmp_path / name, pyarrow.table({"text": content}))
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing/a.json").write_text('{"text": null}')
    asked = ["text", str(tmp_path / "nothing"), "--output", str(tmp_path / "none")]
    with pytest.raises(DataError, match="got 0 documents"):
        main([*asked, "--workers", "1", "--tokenizer", "characters"])
    assert "1 row left out that had null in place of text" in capsys.readouterr().out
    source, told = text_source([str(tmp_path / name)]), []
    made = Settings(sequence_length=1, characters=True, validation=0.0)
    info = prepare(source, tmp_path / "out", made, report=told.append)
    assert list(source.documents()) == ["a", "b"] and info["null_rows"] == 2
    line = f"2 rows left out that had null in place of text, the first in {tmp_path / name}."
    assert told.count(line) == 1


MESSAGES = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
    None,
    [{"role": "assistant", "content": "日本"}],
]
CHATS = [(("hi\n", False), ("ho\n", True)), (("日本\n", True),)]
PAIRS = [(("a?", False), ("b", True)), (("", False), ("c", True))]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".json", ".jsonl", ".csv"])
def test_conversations_are_read_of_every_kind_of_file(tmp_path, suffix):
    pairs = {"prompt": ["a?", "", None], "answer": ["b", "c", "d"], "n": [1, 2, 3]}
    tables = {"messages": {"messages": MESSAGES}, "pairs": pairs}
    for name, columns in tables.items():
        path, table = tmp_path / f"{name}{suffix}", pyarrow.table(columns)
        if suffix == ".csv":
            pyarrow.csv.write_csv(pyarrow.table(pairs).slice(0, 2), path)
        elif suffix == ".json":
            path.write_text(json.dumps(table.to_pylist(), indent=1))
        elif suffix == ".jsonl":
            path.write_text(lines(table.to_pylist()))
        else:
            write_table(path, table)
        source = conversation_source([str(path)])
        expected = PAIRS if suffix == ".csv" or name == "pairs" else CHATS
        assert list(source.documents()) == expected
        assert sum(source.left_out.nulls.values()) == (suffix != ".csv")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"text": ["a"]}, "got no texts 'prompt' and 'answer', nor 'messages' (columns: 'text' (string))"),
        ({"prompt": ["a"], "answer": [1]}, "nor 'messages' (columns: 'prompt' (string), 'answer' (int64))"),
        ({"messages": [[{"role": b"user", "content": 5}]]}, "row 1: got message"),
        ({"messages": [1]}, "row 1: got messages '1'"),
        ({"prompt": [b"\xff"], "answer": ["a"]}, "got text in 'prompt' that is not UTF-8"),
    ],
)  # fmt: skip
def test_tables_that_hold_no_conversation_are_refused_in_words(tmp_path, columns, words):
    write_table(tmp_path / "a.parquet", pyarrow.table(columns))
    with pytest.raises(DataError) as found:
        list(conversation_source([str(tmp_path)]).documents())
    assert words in str(found.value)


def test_messages_are_taken_of_rows_with_a_prompt_too_and_that_is_told(tmp_path, capsys):
    row = {"messages": MESSAGES[0], "prompt": "hi", "answer": None}
    rows = [row, {"prompt": "a?", "answer": "b"}, row | {"answer": "x"}]
    (tmp_path / "a.jsonl").write_text(lines(rows))
    asked = ["conversations", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out")]
    asked += ["--tokenizer", "characters", "--sequence_length", "8", "--workers", "1"]
    assert main([*asked, "--validation", "0"]) == 0
    told = capsys.readouterr().out
    assert told.count("'messages' taken of 2 conversations that had prompt or answer beside") == 1
    source = conversation_source([str(tmp_path / "a.jsonl")])
    assert list(source.documents()) == [CHATS[0], PAIRS[0], CHATS[0]]


BINARY = {
    "a.png": b"\x89PNG\r\n", "b.txt": b"text\n" * 300_000 + b"\xff", "c.txt.gz": gzip.compress(b"x" * 99)[:-9],
    "d.zip": b"PK", "e.tar": b"a.txt\0\0\0\0text", "f.parquet": b"PAR1", "g.txt": "UTF-16".encode("utf-16-le"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A folder of files that are no text, and of two that are."""
    (tmp_path / "in").mkdir()
    for name, content in BINARY.items():
        (tmp_path / "in" / name).write_bytes(content)
    (tmp_path / "in/0.txt").write_text("first text\n")
    (tmp_path / "in/z.txt").write_text("last text\n")
    return tmp_path / "in"


def test_files_that_are_no_text_are_counted_named_and_left_out_if_asked(folder, capsys):
    asked = ["text", str(folder), "--output", str(folder.parent / "out"), "--workers", "1"]
    asked += ["--tokenizer", "characters", "--sequence_length", "4", "--validation", "0"]
    with pytest.raises(SystemExit) as stop, exit_on_user_error():
        main(asked)
    told = capsys.readouterr().err
    first = ", ".join(str(folder / name) for name in list(BINARY)[:3])
    says = f"It is the first of 7 files without text: {first} and others. --skip_damaged leaves"
    assert stop.value.code == 2 and says in told and f"{folder / 'a.png'}: got bytes" in told
    assert main([*asked, "--skip_damaged"]) == 0
    assert f"7 files left out, the first: {folder / 'a.png'}: got" in capsys.readouterr().out
    assert texts_in(folder, skip_damaged=True) == ["first text\n", "last text\n"]
    (folder / "0.json").write_text(lines([{"prompt": "a?", "answer": "b"}]))
    (folder / "1.json").write_bytes(b"\x89PNG\r\n\0\0\n")
    chats = conversation_source([str(folder / "*.json")], skip_damaged=True)
    assert list(chats.documents()) == PAIRS[:1] and len(chats.left_out.files) == 1


def test_a_count_of_files_that_takes_long_says_what_was_not_looked_at(folder, monkeypatch):
    monkeypatch.setattr(popxl_gpt.data.sources, "LOOK_SECONDS", -1.0)
    with pytest.raises(DataError, match=r"first of at least 1 file without.* \(7 more were not"):
        texts_in(folder)


@pytest.mark.parametrize("limit", [1, 5, 12, 13, 14, 27, 28, 29, 100])
@pytest.mark.parametrize("documents", ["file", "line", "json"])
def test_no_more_bytes_are_read_than_are_asked_for(tmp_path, limit, documents):
    texts = ["ä" * 5 + "\n", "日本" * 3 + "\n", "end\n"]
    content = lines([{"text": text} for text in texts]) if documents == "json" else "".join(texts)
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    if documents == "line":
        texts = [text.rstrip("\n") for text in texts]
    whole = "".join(texts).encode()
    told = []
    source = text_source([str(tmp_path / "a.txt")], documents=documents)
    made = Settings(
        sequence_length=1, tokenizer=None, characters=True, validation=0.0, max_bytes=limit
    )
    try:
        prepare(source, tmp_path / "out", made, report=told.append)
    except DataError as error:
        assert "expected at least 2, one record" in str(error) and limit == 1
        return
    expected = whole[:limit].decode(errors="ignore")
    (counts,) = [line for line in told if "tokens in" in line]
    assert f", {len(expected.encode())} B, " in counts
    characters = json.loads((tmp_path / "out/tokenizer.json").read_text())["model"]["vocab"]
    assert set(expected) == set(characters) - {"<|endoftext|>", "\ufffd"}


def test_conversations_and_articles_that_do_not_fit_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines([{"prompt": "ab", "answer": "c"}] * 9))
    made = Settings(sequence_length=8, characters=True, validation=0.0, max_bytes=10)
    chats = conversation_source([str(tmp_path / "a.jsonl")])
    info = prepare(chats, tmp_path / "out", made, report=lambda line: None)
    assert info["splits"]["train"]["documents"] == 3
    articles = Source(
        name="articles",
        documents=lambda: iter(["abc"] * 9),
        bytes=27,
        identity={},
        clean=str.upper,
    )
    info = prepare(articles, tmp_path / "other", made, report=lambda line: None)
    assert info["splits"]["train"]["tokens"] == 3 * 4


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_that_are_changed_are_told_once(tmp_path, capsys, end):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(f"one{end}two{end}".encode())
    asked = ["text", str(tmp_path / "*.txt"), "--output", str(tmp_path / "out"), "--workers", "1"]
    asked += ["--tokenizer", "characters", "--sequence_length", "4", "--validation", "0"]
    assert main(asked) == 0
    line = f"Line ends are LF now in 2 files that had CR LF or CR, the first in {tmp_path}/a.txt."
    assert capsys.readouterr().out.count(line) == (end != "\n")
