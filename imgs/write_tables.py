"""The generated parts of pages in docs/: they are written anew from the code.

    python imgs/write_tables.py

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; a new one is an entry of
`PAGES`.
"""

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from popxl_gpt.config.leaves import leaves, sections, shown  # noqa: E402
from popxl_gpt.config.presets import preset, preset_names  # noqa: E402
from popxl_gpt.execution.planning.model_size import parameter_count  # noqa: E402
from popxl_gpt.utils.errors import UserError, exit_on_user_error  # noqa: E402
from popxl_gpt.utils.units import si  # noqa: E402

SETTINGS = ROOT / "docs" / "settings.md"
API = ROOT / "runtime" / "tests" / "helpers" / "public_names.json"
"""The names of the original API, by module."""
_PART = re.compile(r"(<!-- generated: (?P<name>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def presets_table() -> str:
    """The presets as a Markdown table."""
    lines = [
        "| preset | parameters | layers | hidden | heads | sequence | batch | precision | dp "
        "× tp1 × tp2 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in preset_names():
        config = preset(name)
        model, execution = config.model, config.execution
        cells = [
            f"`{name}`",
            si(parameter_count(model)),
            model.layers,
            model.hidden_size,
            model.heads,
            model.sequence_length,
            config.training.global_batch_size,
            model.precision,
            f"{execution.data_parallel} × {execution.tensor_parallel_1} × "
            f"{execution.tensor_parallel_2}",
        ]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def reference() -> str:
    """Every setting as Markdown tables, one per section."""
    blocks = []
    for section, doc in sections().items():
        lines = [
            f"### {section}\n\n{doc}" if section else doc,
            "",
            "| flag | default | values | meaning |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| `--{leaf.name}` | {shown(leaf.default)} | {leaf.expected} | "
            f"{' '.join(leaf.doc.split())} |"
            for leaf in leaves()
            if leaf.section == section
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def missing_names() -> dict[str, list[str]]:
    """Names of the original API that the runtime does not have yet, by module; an empty list is a
    whole module.
    """
    modules: dict[str, dict[str, object]] = json.loads(API.read_text(encoding="utf-8"))["modules"]
    missing: dict[str, list[str]] = {}
    for module, names in modules.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            missing[module] = []
            continue
        lost = [name for name in names if not hasattr(found, name)]
        if lost:
            missing[module] = lost
    return missing


def missing_table() -> str:
    """The missing names as a Markdown table, with how many of all there are."""
    modules: dict[str, dict[str, object]] = json.loads(API.read_text(encoding="utf-8"))["modules"]
    missing = missing_names()
    lost = sum(len(names or modules[module]) for module, names in missing.items())
    everything = sum(map(len, modules.values()))
    if not missing:
        return f"All {everything} names are there, with their signatures.\n"
    lines = [
        f"{everything - lost} of {everything} names are there. Missing:",
        "",
        "| module | names |",
        "|---|---|",
    ]
    lines += [
        f"| `{module}` | {', '.join(f'`{name}`' for name in sorted(names)) or 'the whole module'} |"
        for module, names in missing.items()
    ]
    return "\n".join(lines) + "\n"


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    SETTINGS: {"presets": presets_table, "settings": reference},
    ROOT / "docs" / "popxl.md": {"missing names": missing_table},
}


def with_generated_parts(text: str, page: Path) -> str:
    """The text of a page with every generated part written anew.

    Raises:
        UserError: if a part has an unknown name or is missing.
    """
    parts, found = PAGES[page], [match["name"] for match in _PART.finditer(text)]
    if sorted(found) != sorted(parts):
        where = page.relative_to(ROOT)
        raise UserError(
            f"{where}: got generated parts {found}; expected {list(parts)}, each once. "
            "Restore the marks."
        )
    return _PART.sub(lambda match: f"{match[1]}\n{parts[match['name']]()}\n{match[3]}", text)


def main() -> None:
    """Rewrite the pages that are out of date."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = with_generated_parts(before, page)
        if after != before:
            page.write_text(after, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'written' if after != before else 'up to date'}")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
