"""The tokenizer of a GGUF file: tokens, merges, and the name by which llama.cpp knows how text is
cut before. It has its own code for each name, so what it does not know is refused.

Source: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from popxl_gpt.data.chat_template import TEMPLATE, TOKENIZER_CONFIG
from popxl_gpt.data.encoding import byte_names
from popxl_gpt.data.limited_tokenizer import EACH_CHARACTER, is_plain_bpe
from popxl_gpt.data.special_tokens import BEGIN, END, as_list
from popxl_gpt.data.text_tokenizer import NO_OBJECT, TextTokenizer
from popxl_gpt.execution.exchange.gguf_pieces import BYTES, is_of_pieces, pieces
from popxl_gpt.utils.errors import UserError, unreadable
from popxl_gpt.utils.files.bounded import read_bounded, read_object, shown

Values = dict[str, Any]
TEMPLATE_BYTES = 2**24
OTHER = "Train with another tokenizer, or use to_hugging_face."
NORMAL, UNKNOWN, CONTROL, OF_USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Tokens that end a text: GGUF has a name for each, and no list."""

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = "as ByteLevel does"
DIGITS = r"\p{N}"
LLAMA3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
QWEN2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
TEKKEN = rf"{'|'.join(_CASED)}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
GPT4O = (
    rf"{_CASED[0]}{_ENDINGS}?|{_CASED[1]}{_ENDINGS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
)
CUTS = {
    ((GPT2,), False): "gpt-2",
    ((DIGITS, GPT2), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "dbrx",
    ((QWEN2,), False): "qwen2",
    ((TEKKEN,), True): "tekken",
    ((GPT4O,), False): "gpt-4o",
}
"""Names of llama.cpp by the patterns that cut text, one after the other, and whether a piece that
is a token is not merged.
"""


def tokenizer_values(
    tokenizer: TextTokenizer, size: int, special_tokens: "Mapping[str, int | list[int]]"
) -> "tuple[Values, list[str]]":
    """What a GGUF file has of a tokenizer, by the names of gguf's writer, and what llama.cpp does
    otherwise.

    Args:
        size: tokens that the model has.
        special_tokens: that texts begin and end with, as the model names them; the tokenizer may
            name more that end them.
    Raises:
        UserError: llama.cpp has no tokenizer that does the same.
    """
    content: Values = json.loads(tokenizer.library.to_str())
    if tokenizer.classes > size:
        raise UserError(
            f"{tokenizer.name}: got tokens up to {tokenizer.classes - 1}; expected those of the "
            f"model, which has {size}. Use the tokenizer.json that made its training data."
        )
    names, found, notes = _pieces(tokenizer.name, content)
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [UNUSED] * size
    for name, number in names.items():
        tokens[number], types[number] = name, BYTE if name in BYTES else NORMAL
    for token in content["added_tokens"]:
        if any(token[side] for side in ("lstrip", "rstrip", "single_word")):
            _refuse(
                tokenizer.name,
                f"the token {shown(token['content'])} that takes spaces beside it or stands "
                "between words",
                "tokens that are cut from text as they are",
            )
        tokens[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else OF_USER
    unknown = content["model"].get("unk_token")
    if "token_scores" in found:
        found["token_scores"] = [found["token_scores"].get(name, 0.0) for name in tokens]
        if unknown in tokens:
            types[tokens.index(unknown)] = UNKNOWN
            found["unk_token_id"] = tokens.index(unknown)
    found |= {"token_list": tokens, "token_types": types}
    ends = [*dict.fromkeys([*as_list(special_tokens.get(END, tokenizer.end)), *tokenizer.ends])]
    if len(ends) > len(ENDS):
        notes = [*notes, f"GGUF has names for {len(ENDS)} tokens that end a text, of {len(ends)}."]
    return {**found, **_around(tokenizer, special_tokens, ends)}, notes


def chat_template(folder: Path) -> "str | list[Values] | None":
    """The chat template beside a tokenizer, or several with their names; None where there is none.

    Raises:
        UserError: a file cannot be read.
    """
    path = folder / TEMPLATE
    try:
        if path.is_file():
            return read_bounded(path, TEMPLATE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error
    found = (read_object(folder / TOKENIZER_CONFIG, TEMPLATE_BYTES, NO_OBJECT) or {}).get(
        "chat_template"
    )
    is_named = isinstance(found, list) and all(
        isinstance(each, dict) and {str} >= {type(each.get(name)) for name in ("name", "template")}
        for each in found
    )
    return found if is_named or isinstance(found, str) else None


def _pieces(name: str, content: Values) -> "tuple[dict[str, int], Values, list[str]]":
    """Tokens by their names there, how they are made of text, and what llama.cpp does otherwise."""
    model, vocabulary, notes = content["model"], content["model"]["vocab"], []
    if is_of_pieces(content):
        found = pieces(content)
        if isinstance(found, str):
            raise UserError(f"{name}: {found}. {OTHER}")
        return vocabulary, *found
    normalizer = (content["normalizer"] or {}).get("type")
    if normalizer not in (None, "NFC"):
        _refuse(name, f"a normalizer {normalizer}", "text that is taken as it is, or in form NFC")
    if normalizer == "NFC":
        notes = ["llama.cpp does not bring text into Unicode's form NFC, as the tokenizer does."]
    cuts = _cuts(content["pre_tokenizer"])
    if model["type"] == "WordLevel" and cuts == (EACH_CHARACTER,):
        names, merges = _of_characters(vocabulary)
        return names, _of_bytes(CUTS[((GPT2,), False)], merges), notes
    is_plain = is_plain_bpe({**model, "ignore_merges": False})
    if not is_plain or not _is_of_bytes(content["pre_tokenizer"]):
        _refuse(name, f"a tokenizer {model['type']} that is not byte-level BPE", "byte-level BPE")
    cut = CUTS.get((cuts, model["ignore_merges"]))
    if cut is None:
        told = ", then ".join(cuts) + (", with ignore_merges" if model["ignore_merges"] else "")
        known = ", ".join(CUTS.values())
        _refuse(name, f"text cut by {shown(told)}", f"a pattern of {known}, which llama.cpp knows")
    return vocabulary, _of_bytes(cut, [" ".join(pair) for pair in model["merges"]]), notes


def _of_bytes(cut: str, merges: "list[str]") -> Values:
    return {"tokenizer_model": "gpt2", "tokenizer_pre": cut, "token_merges": merges}


def _cuts(step: "Values | None") -> "tuple[str, ...]":
    """The patterns that cut text, in order; of a step that is not known, its type."""
    if step is None:
        return ()
    kind = step["type"]
    if kind == "Sequence":
        return tuple(cut for part in step["pretokenizers"] for cut in _cuts(part))
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return (GPT2,) if step["use_regex"] else ()
    if kind == "Digits" and step["individual_digits"]:
        return (DIGITS,)
    how = (step.get("behavior"), step.get("invert"))  # the patterns leave nothing between
    if kind == "Split" and how in (("Isolated", False), ("Removed", True)):
        pattern: str = step["pattern"].get("Regex", kind)
        return (pattern,)
    return (kind,)


def _is_of_bytes(step: "Values | None") -> bool:
    """Whether the last thing that is done to a text is to name its bytes."""
    last = step if step is None or step["type"] != "Sequence" else step["pretokenizers"][-1]
    return last is not None and last["type"] == "ByteLevel"


def _of_characters(vocabulary: "dict[str, int]") -> "tuple[dict[str, int], list[str]]":
    """A tokenizer of characters as one of bytes, whose merges make characters."""
    of_byte = byte_names()
    names: dict[str, int] = {}
    merges: dict[str, None] = {}
    for text, number in vocabulary.items():
        names["".join(parts := [of_byte[byte] for byte in text.encode()])] = number
        if len(text) == 1:
            for end in range(1, len(parts)):
                merges[f"{''.join(parts[:end])} {parts[end]}"] = None
    return names, list(merges)


def _around(
    tokenizer: TextTokenizer, special_tokens: "Mapping[str, int | list[int]]", ends: "list[int]"
) -> Values:
    """The tokens that texts begin and end with, and whether they stand around a prompt."""
    first, last = tokenizer.first.tolist(), tokenizer.last.tolist()
    begin = first or as_list(special_tokens.get(BEGIN, tokenizer.begin))
    if len(first) > 1 or last not in ([], ends[:1]):
        _refuse(
            tokenizer.name,
            f"the tokens {first} before a text and {last} after it",
            "at most one before it, and the end of text after it",
        )
    found: Values = {"add_bos_token": bool(first), "add_eos_token": bool(last)}
    return {**found, **dict(zip(("bos_token_id",), begin)), **dict(zip(ENDS, ends))}


def _refuse(name: str, got: str, expected: str) -> NoReturn:
    raise UserError(f"{name}: got {got}; expected {expected}. {OTHER}")
