"""The generated parts of README.md: `python -m utils.readme` writes them anew from the code.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; a new one is an entry of `PARTS`.
"""

import re
from collections.abc import Callable
from pathlib import Path

from config import UserError, exit_on_user_error, preset, preset_names, reference
from utils.units import si

README = Path(__file__).parent.parent / "README.md"
_PART = re.compile(r"(<!-- generated: (?P<name>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def presets_table() -> str:
    """The presets as a Markdown table."""
    lines = [
        "| preset | parameters | layers | hidden | heads | sequence | batch | precision | dp × tp1 × tp2 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in preset_names():
        config = preset(name)
        model, execution = config.model, config.execution
        cells = [
            f"`{name}`",
            si(model.parameters),
            model.layers,
            model.hidden_size,
            model.heads,
            model.sequence_length,
            config.training.global_batch_size,
            model.precision,
            f"{execution.data_parallel} × {execution.tensor_parallel_1} × {execution.tensor_parallel_2}",
        ]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


PARTS: dict[str, Callable[[], str]] = {"presets": presets_table, "settings": reference}


def with_generated_parts(text: str) -> str:
    """The text with every generated part written anew.

    Raises:
        UserError: if a part has an unknown name or is missing.
    """
    found = [match["name"] for match in _PART.finditer(text)]
    if sorted(found) != sorted(PARTS):
        raise UserError(
            f"README.md: got generated parts {found}; expected {list(PARTS)}, each once. Restore the marks."
        )
    return _PART.sub(lambda match: f"{match[1]}\n{PARTS[match['name']]()}\n{match[3]}", text)


def main() -> None:
    """Rewrite README.md if it is out of date."""
    before = README.read_text(encoding="utf-8")
    after = with_generated_parts(before)
    if after != before:
        README.write_text(after, encoding="utf-8")
    print(f"{README.name}: {'written' if after != before else 'up to date'}")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
