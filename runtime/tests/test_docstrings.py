"""Docstrings begin with what they describe: a noun, or the verb of what a function does."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("popart", "popdist", "poprun", "popxl", "popxl_addons", "popxl_engine")
APPLICATION = ("config", "data", "demo", "execution", "modelling", "utils")
TREES = (
    *(f"runtime/{package}" for package in PACKAGES),
    *("runtime/examples", "runtime/tests"),
    *APPLICATION,
)
"""The folders whose docstrings begin so."""
WITHOUT_NOUN = frozenset(
    # prepositions and adverbs of time and place
    "about above across after against along among around as at before behind below beside between "
    "beyond by during for from in inside into of off on once over per since through to under until "
    "up where while with within without "
    # pronouns that stand for a noun
    "he it those that they who whose "
    # participles
    "called done given held kept made meant sent taken told used".split()
)
"""First words of what lacks its noun, as in "Of the members." and "Those that wait"."""


def is_documented(node: ast.AST, before: "ast.stmt | None") -> bool:
    """Whether a string that follows a statement of a body is a docstring, or one under a field."""
    if before is None:
        return isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    return isinstance(before, (ast.Assign, ast.AnnAssign))


def docstrings(text: str) -> "Iterator[tuple[int, str]]":
    """The line and the words of each docstring of a module, those under fields among them."""
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for before, statement in zip([None, *body], body) if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(words))):
                    if is_documented(node, before):
                        yield statement.lineno, words


def lacks_noun(words: str) -> bool:
    """Whether a docstring begins with a word that asks for a noun before it."""
    first = words.split(maxsplit=1)[:1]
    return bool(first) and first[0].rstrip(",").lower() in WITHOUT_NOUN


def found_in(tree: str) -> "list[str]":
    """The docstrings of a tree that lack their noun: file, line and beginning of each."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {' '.join(words.split())[:60]}"
        for path in sorted((ROOT / tree).rglob("*.py"))
        for line, words in docstrings(path.read_text(encoding="utf-8"))
        if lacks_noun(words)
    ]


@pytest.mark.parametrize("tree", TREES)
def test_a_docstring_begins_with_its_noun(tree):
    lacking = found_in(tree)
    assert not lacking, "\n".join(["Name the thing first:", *lacking])


@pytest.mark.parametrize(
    "words, lacks",
    [
        ("Of the members in this process.", True),
        ("That of an instance, which is this one.", True),
        ("As `gather`, patiently.", True),
        ("Inside, kernels add in one order.", True),
        ("Held while a library is looked for.", True),
        ("The members of this process.", False),
        ("Whether a row waits.", False),
        ("Add up what has come.", False),
        ("Offsets of the rows.", False),
        ("", False),
    ],
)
def test_a_noun_is_missed_where_it_lacks(words, lacks):
    assert lacks_noun(words) is lacks


def test_strings_under_fields_are_docstrings_too():
    text = '"""Of a module."""\nA = 1\n"""To a field."""\nif A:\n    "no docstring"\n'
    assert [words for _, words in docstrings(text)] == ["Of a module.", "To a field."]
