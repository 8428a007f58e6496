"""The compiled library's binary interface: what its sources declare is what Python calls it with.

`ctypes` believes any signature, and a wrong one reads other memory. The sources are read as text,
so that this needs no compiler; where there is one, the library has the same functions.
"""

import ctypes
import re
from typing import Any, NamedTuple

import pytest
from helpers.products import sets_in_use
from popxl_engine.native import build, instruction_sets, library

CTYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "void": None,
}
"""Signed and unsigned numbers of one size travel alike."""
MACRO = re.compile(r"^[ \t]*#define[ \t]+(\w+)\(([^)]*)\)(.*)$", re.M)


class Signature(NamedTuple):
    """The signature of a function, as ctypes says it."""

    parameters: tuple[Any, ...]
    result: Any


def exported(text: str) -> dict[str, Signature]:
    """The functions that a source defines with C linkage, macros expanded, on any CPU."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text.replace("\\\n", " "), flags=re.S)
    found = {}
    for begin in re.finditer(r'extern "C" \{', text):
        block = text[begin.end() : closing(text, begin.end() - 1, "{}")]
        macros = {name: (words(names), body) for name, names, body in MACRO.findall(block)}
        macros["FOR_ELEMENT_TYPE"] = ["NAME"], "NAME(float, f32) NAME(bfloat16, bf16)"
        block = re.sub(r"^[ \t]*#.*$", "", block, flags=re.M)
        for result, name, parameters in functions(expanded(block, macros)):
            found[name] = Signature(
                tuple(ctype(parameter) for parameter in words(parameters)), ctype(result)
            )
    return found


def closing(text: str, opening: int, pair: str) -> int:
    """The place where the bracket that opens at a place closes."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == pair[0]) - (text[place] == pair[1])
        if not depth:
            return place
    raise AssertionError(f"{text[opening : opening + 40]!r} does not close")


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def expanded(text: str, macros: dict[str, tuple[list[str], str]]) -> str:
    """Text with the calls of macros replaced, and those in what replaces them."""
    call = re.compile(rf"\b({'|'.join(macros)})\(") if macros else None
    while call is not None and (found := call.search(text)):
        end = closing(text, found.end() - 1, "()")
        names, body = macros[found[1]]
        for name, value in zip(names, words(text[found.end() : end])):
            body = re.sub(rf"\b{re.escape(name)}\b|##{name}\b", value, body.replace("##", " ## "))
            body = body.replace(" ## ", "##")
        text = text[: found.start()] + body.replace("##", "") + text[end + 1 :]
    return text


def functions(text: str) -> list[tuple[str, str, str]]:
    """(result, name, parameters) of each function that a text defines."""
    found = []
    while body := re.search(r"([\w\s*]+?)\b(\w+)\(([^()]*)\)\s*\{", text):
        found.append((body[1].strip(), body[2], body[3]))
        text = text[closing(text, body.end() - 1, "{}") + 1 :]
    return found


def ctype(declared: str) -> Any:
    """The type of a parameter with its name, or of a result."""
    return ctypes.c_void_p if "*" in declared else CTYPES[declared.split()[0]]


def in_sources() -> dict[str, Signature]:
    found: dict[str, Signature] = {}
    for path in sorted(build.FOLDER.glob("*.[ch]*")):
        found.update(exported(path.read_text(encoding="utf-8")))
    return found


def in_python() -> dict[str, Signature]:
    return {
        symbol: Signature(tuple(parameters), result)
        for symbol, (parameters, result) in library.symbols().items()
    }


def differences(sources: dict[str, Signature], python: dict[str, Signature]) -> list[str]:
    """What does not agree, a line for each function."""
    return [
        f"{name}: the sources declare {sources.get(name)}, Python calls {python.get(name)}"
        for name in sorted({*sources, *python})
        if sources.get(name) != python.get(name)
    ]


def test_python_calls_every_function_as_the_sources_declare_it():
    wrong = differences(in_sources(), in_python())
    assert not wrong, "\n".join(wrong)


SAMPLE = """
extern "C" {
#define PAIR(T, NAME) T *NAME, int64_t NAME##_row
#define FOR(T, NAME)                      \\
  void f_##NAME(PAIR(T, x), float scale) { \\
    if (scale) { call(x); }               \\
  }
#ifdef BFLOAT16_LIBRARY
FOR_ELEMENT_TYPE(FOR)
#endif
int64_t size(uint64_t n, int threads) { return n; }  // a comment (with, commas)
}
void inner(int hidden) {}
"""


def test_a_source_is_read_with_its_macros_expanded():
    assert exported(SAMPLE) == {
        f"f_{name}": Signature((ctypes.c_void_p, ctypes.c_int64, ctypes.c_float), None)
        for name in ("f32", "bf16")
    } | {
        "size": Signature((ctypes.c_int64, ctypes.c_int), ctypes.c_int64),
    }


def changed(name: str, **fields: Any) -> dict[str, Signature]:
    sources = in_sources()
    return {**sources, name: sources[name]._replace(**fields)}


@pytest.mark.parametrize(
    "sources",
    [
        pytest.param(
            changed("adamw", parameters=in_sources()["adamw"].parameters[:-1]), id="count"
        ),
        pytest.param(changed("attend_grad_scratch", result=None), id="result"),
        pytest.param(
            changed("gelu_f32", parameters=(ctypes.c_void_p,) * 2 + (ctypes.c_float, ctypes.c_int)),
            id="type",
        ),
        pytest.param({n: s for n, s in in_sources().items() if n != "squares_bf16"}, id="missing"),
        pytest.param({**in_sources(), "more": Signature((), None)}, id="uncalled"),
    ],
)
def test_a_difference_is_seen(sources):
    assert len(differences(sources, in_python())) == 1


@pytest.mark.skipif(library.library() is None, reason="no C++ compiler: there is no library")
def test_libraries_have_each_function_of_their_sources_and_instruction_sets_once():
    here = sets_in_use()
    both = [library.library(dtype) for dtype in library.SOURCES]
    count = {name: sum(hasattr(each, name) for each in both) for name in in_sources()}
    assert set(count.values()) <= {0, 1}
    missing = {name for name in count if not count[name]}
    assert missing == set().union(
        *(each.functions for each in instruction_sets.SETS if each not in here)
    )
