"""Tokenizers of SentencePiece's BPE, as Llama 2, Mistral and Gemma have them, in GGUF: pieces with
scores in place of merges.

tokenizer.json lists the merges of each piece one after the other, the best piece first. llama.cpp
joins what makes the piece with the best score, whatever the two parts. These are one algorithm
where all merges of a piece stand together, and all that make it are listed.
"""

from collections.abc import Iterator
from typing import Any

Values = dict[str, Any]
SPACE = "\u2581"
"""Stands for a space."""
BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
"""Pieces of what has no other."""
BEGINNING = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}
"""Normalizer of text that gets a space before."""
AS_IT_IS = BEGINNING["normalizers"][1]
AT_SPACES = {"String": " "}
METASPACE_NOTE = (
    "llama.cpp puts a space before all text, and after each special token; the tokenizer puts none "
    "before text that begins with one, or that is not the first."
)


def is_of_pieces(content: Values) -> bool:
    """Whether a tokenizer.json is SentencePiece's BPE."""
    model = content["model"]
    return model["type"] == "BPE" and bool(model["byte_fallback"])


def pieces(content: Values) -> "tuple[Values, list[str]] | str":
    """What a GGUF file has of it, by the names of gguf's writer, with a score for each token by its
    name, and what is to be known of it; or what is wrong, as `got ..; expected ..`.
    """
    model, normalizer, cut = content["model"], content["normalizer"], content["pre_tokenizer"]
    vocabulary: dict[str, int] = model["vocab"]
    notes: list[str] = []
    if normalizer == BEGINNING and cut is None:
        has_space = True
    elif normalizer == AS_IT_IS and (cut or {"pattern": AT_SPACES}).get("pattern") == AT_SPACES:
        has_space = False  # after the normalizer no spaces are left to cut at
    elif normalizer is None and cut is not None and cut["type"] == "Metaspace" and not cut["split"]:
        has_space = cut["prepend_scheme"] != "never"
        notes = [METASPACE_NOTE] if has_space else []
    else:
        return (
            "got pieces of text that is cut or changed before; expected spaces that become "
            f"{SPACE}, and no more"
        )
    if not vocabulary.keys() >= BYTES:
        return "got pieces without one for each byte; expected all 256"
    if model["dropout"] or model["ignore_merges"] or model["continuing_subword_prefix"]:
        return "got pieces with dropout, ignore_merges or a prefix; expected plain merges"
    ranks: dict[str, int] = {}
    merges = {tuple(pair): "".join(pair) for pair in model["merges"]}
    last = None
    for piece in merges.values():
        if piece != last and piece in ranks:
            return f"got merges of {piece!r} that stand apart; expected them together"
        last = piece
        ranks.setdefault(piece, len(ranks))
    added = {token["content"] for token in content["added_tokens"]}
    for piece in vocabulary.keys() - BYTES - added:
        for parts in _splits(piece):
            if parts not in merges and all(len(part) == 1 or part in ranks for part in parts):
                return f"got no merge of {parts[0]!r} and {parts[1]!r}; expected all of a piece"
    scores = {piece: -float(ranks.get(piece, len(ranks))) for piece in vocabulary}
    found = {"tokenizer_model": "llama", "tokenizer_pre": "default", "add_space_prefix": has_space}
    return {**found, "token_scores": scores}, notes


def _splits(piece: str) -> "Iterator[tuple[str, str]]":
    return ((piece[:end], piece[end:]) for end in range(1, len(piece)))
