"""The tokens that texts begin and end with: one or several, under Hugging Face's names."""

BEGIN, END = "bos_token_id", "eos_token_id"


def as_list(tokens: "int | list[int] | None") -> "list[int]":
    """The tokens under one name; none where it has none."""
    if tokens is None:
        return []
    return tokens if isinstance(tokens, list) else [tokens]
