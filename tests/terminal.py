"""What a terminal takes for a command, by Unicode's own tables."""

import unicodedata

BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def commands_in(text: str) -> "list[str]":
    """What a terminal would not show as a character."""
    return [
        c
        for c in text
        if c not in "\n\t"
        and (unicodedata.category(c) in ("Cc", "Zl", "Zp") or unicodedata.bidirectional(c) in BIDI)
    ]
