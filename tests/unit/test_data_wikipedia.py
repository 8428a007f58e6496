"""A Wikipedia dump, made here, to plain text and to token files."""

import bz2
import tracemalloc
from xml.sax.saxutils import escape

import pytest
from helpers.quick import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.data.wikipedia import strip_markup, wikipedia_source
from popxl_gpt.utils.errors import DataError

PAGE = (
    "<page><title>{title}</title><ns>{ns}</ns><id>1</id>{redirect}"
    "<revision><id>2</id><text>{text}</text></revision></page>"
)
MARKS = ["{{", "}}", "[[", "]]", "|", "{|\n", "\n|}", "<ref>", "</ref>", "''", "word", "\n"]


def page(title, text, ns=0, redirect=""):
    return PAGE.format(title=escape(title), text=escape(text), ns=ns, redirect=redirect)


def dump(path, pages, compress=True):
    head = (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" '
        'version="0.11">\n<siteinfo></siteinfo>\n'
    )
    content = (head + "\n".join(pages) + "\n</mediawiki>\n").encode()
    path.write_bytes(bz2.compress(content) if compress else content)
    return path


@pytest.mark.parametrize("compress", [True, False])
def test_articles_come_in_order_with_their_titles_and_nothing_else_does(tmp_path, compress):
    pages = [
        page("A & B", "First <b>text</b>."),
        page("Talk:A", "Talk", ns=1),
        page("Old name", "#REDIRECT [[A & B]]", redirect='<redirect title="A &amp; B" />'),
        page("Empty", ""),
        page("Zürich", "Second."),
    ]
    source = wikipedia_source(dump(tmp_path / "wiki.xml", pages, compress))
    for _ in range(2):
        assert list(source.documents()) == ["A & B\n\nFirst <b>text</b>.", "Zürich\n\nSecond."]


def test_a_dump_of_several_bz2_streams_is_read_to_its_end(tmp_path):
    path = dump(
        tmp_path / "wiki.xml",
        [page(f"T{number}", "x" * 50) for number in range(20)],
        compress=False,
    )
    content = path.read_bytes()
    path.write_bytes(
        b"".join(
            bz2.compress(content[start : start + 500]) for start in range(0, len(content), 500)
        )
    )
    assert len(list(wikipedia_source(path).documents())) == 20


@pytest.mark.slow
def test_reading_takes_no_more_memory_for_a_longer_dump(tmp_path):
    peaks = []
    for pages in (200, 2000):
        path = dump(
            tmp_path / f"{pages}.xml.bz2",
            (page(f"T{number}", "words " * 300) for number in range(pages)),
        )
        tracemalloc.start()
        count = sum(1 for _ in wikipedia_source(path).documents())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count == pages
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("'''Bold''' and ''italic'' and '''''both'''''", "Bold and italic and both"),
        (
            "a [[link]], a [[target|named]] one, a [[Alien: Covenant]] film",
            "a link, a named one, a Alien: Covenant film",
        ),
        ("[[File:x.jpg|thumb|A [[cat]] in a [[hat|tall hat]]]]After", "After"),
        (
            "Text[[Category:Cats]][[de:Katze]] [[:Category:Cats|see]] [[:Category:Dogs]]",
            "Text see Category:Dogs",
        ),
        ("before{{Infobox|a={{nested|{{deep}}}}\n|b=[[x]]}}after", "beforeafter"),
        ("stray }} and {{open stay", "stray }} and {{open stay"),
        ("one {{open {{closed}} two", "one {{open two"),
        ("top\n{| class=x\n|-\n| cell\n{| \n| inner\n|}\n|}\nend", "top\n\nend"),
        (
            "fact<ref name='a'>[http://x.org Source]</ref> more<ref name='a' /> text",
            "fact more text",
        ),
        ("x<!-- hidden\n -->y<br/>z<math>a^2</math>", "xyz"),
        ("[https://example.org Example site] and [http://bare.org]", "Example site and"),
        (
            "== Title ==\nText\n=== Sub ===\n* one\n** two\n# three\n: four",
            "Title\nText\nSub\none\ntwo\nthree\nfour",
        ),
        ("a&nbsp;b &amp;lt; &ndash; __NOTOC__", "a b &lt; –"),
        ("a\n\n\n\n  \n b", "a\n\n b"),
        (
            "plain text: with - signs, 1 < 2 and it's fine",
            "plain text: with - signs, 1 < 2 and it's fine",
        ),
    ],
)
def test_markup_becomes_text(markup, text):
    assert strip_markup(markup) == text


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.sampled_from(MARKS), max_size=30))
def test_stripping_ends_and_keeps_words_outside_of_markup(parts):
    stripped = strip_markup("first \n" + " ".join(parts) + "\n last")
    assert stripped.startswith("first") and stripped.count("word") <= parts.count("word")


@pytest.mark.slow
def test_a_dump_becomes_token_files_with_clean_text(tmp_path):
    pages = [
        page(f"Title {number}", f"'''Bold''' [[a|word]] {{{{box}}}} number {number}.")
        for number in range(50)
    ]
    source = wikipedia_source(dump(tmp_path / "wiki.xml.bz2", pages))
    infos = [
        prepare(
            source,
            tmp_path / str(workers),
            Settings(sequence_length=8, vocabulary_size=300),
            workers=workers,
            report=lambda line: None,
        )
        for workers in (1, 2)
    ]
    assert infos[0] == infos[1]
    assert (
        len(TokenDataset(tmp_path / "1/train-*.tfrecord", 8, 300))
        == infos[0]["splits"]["train"]["records"]
    )
    assert "box" not in (tmp_path / "1/tokenizer.json").read_text()


@pytest.mark.parametrize("compress", cases([True, False], lambda compress: not compress))
def test_a_dump_that_is_cut_off_or_damaged_is_named(tmp_path, compress):
    texts = [
        " ".join(str(number * 7919 % 10007) for number in range(start, start + 400))
        for start in range(400)
    ]
    path = dump(
        tmp_path / "wiki.xml",
        [page(f"T{number}", text) for number, text in enumerate(texts)],
        compress,
    )
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        DataError, match=r"wiki.xml: got damaged data after article \d+ .*Download it again"
    ):
        list(wikipedia_source(path).documents())
    damaged = bytearray(content)
    damaged[len(content) // 2 : len(content) // 2 + 9] = b"\x00" * 9
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"wiki.xml: got damaged data after article \d+ "):
        list(wikipedia_source(path).documents())


def test_xml_without_articles_is_named(tmp_path):
    path = dump(tmp_path / "wiki.xml", [page("Talk:A", "Talk", ns=1)])
    with pytest.raises(DataError, match="wiki.xml: got no articles"):
        list(wikipedia_source(path).documents())
