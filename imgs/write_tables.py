"""The generated parts of pages in docs/, and the types of the commands' settings: they are written
anew from the code.

    python imgs/write_tables.py

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; a new one is an entry of
`PAGES`.
"""

import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from popxl.extensions import Machine, phase_time, plan  # noqa: E402

from popxl_gpt.config.bounds import Bytes  # noqa: E402
from popxl_gpt.config.ipu_config import (  # noqa: E402
    DEPRECATED,
    NOT_HERE,
    IpuConfig,
    setting_of,
)
from popxl_gpt.config.leaves import Leaf, leaves, sections, shown  # noqa: E402
from popxl_gpt.config.preparing import COMMANDS  # noqa: E402
from popxl_gpt.config.presets import override, preset, preset_names  # noqa: E402
from popxl_gpt.demo.commands import CONVERSIONS, EVALUATE, GENERATE  # noqa: E402
from popxl_gpt.demo.job.options import TrainOptions  # noqa: E402
from popxl_gpt.execution.exchange.hugging_face_config import model_in  # noqa: E402
from popxl_gpt.execution.planning.model_size import parameter_count  # noqa: E402
from popxl_gpt.execution.planning.options import PlanOptions  # noqa: E402
from popxl_gpt.execution.planning.run_plan import StepPlan  # noqa: E402
from popxl_gpt.execution.planning.text import layout_name  # noqa: E402
from popxl_gpt.execution.pretraining import training_program  # noqa: E402
from popxl_gpt.utils.errors import UserError, exit_on_user_error  # noqa: E402
from popxl_gpt.utils.units import duration, si  # noqa: E402
from tests.rows import rows_tables  # noqa: E402

SETTINGS = ROOT / "docs" / "settings.md"
MODELS = ROOT / "docs" / "models.md"
FIVE_MINUTES = ROOT / "benchmarks" / "five_minutes.jsonl"
KEYWORDS = ROOT / "demo" / "keywords.pyi"
"""The settings that Python gives by keyword, for editors and type checkers."""
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


def ipu_table() -> str:
    """The keys of optimum-graphcore's `ipu_config.json` as a Markdown table."""
    lines = ["| key | default there | here | meaning |", "|---|---|---|---|"]
    for key in leaves(IpuConfig):
        setting = setting_of(key)
        here = "–" if setting is None else f"`--{setting.name}`"
        cells = [f"`{key.name}`", shown(key.default), here, " ".join(key.doc.split())]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"| `{name}` | – | deprecated | {told} |" for name, told in DEPRECATED.items()]
    lines += [f"| `{name}` | none | refused | {told}. |" for name, told in NOT_HERE.items()]
    return "\n".join(lines) + "\n"


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


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
PUBLISHED: "dict[str, tuple[str, tuple[int, ...], dict[str, object]]]" = {
    "Qwen3 0.6B": (
        "qwen3",
        (151936, 1024, 3072, 28, 16, 8),
        {"tie_word_embeddings": True, "head_dim": 128},
    ),
    "Llama 3.2 1B": (
        "llama",
        (128256, 2048, 8192, 16, 32, 8),
        {"tie_word_embeddings": True, "head_dim": 64, "rope_scaling": LLAMA3},
    ),
    "Qwen2.5 7B": ("qwen2", (152064, 3584, 18944, 28, 28, 4), {}),
    "Llama 3.1 8B": ("llama", (128256, 4096, 14336, 32, 32, 8), {"rope_scaling": LLAMA3}),
    "Mistral Nemo 12B": (
        "mistral",
        (131072, 5120, 14336, 40, 32, 8),
        {"sliding_window": None, "head_dim": 128},
    ),
    "Qwen3 14B": ("qwen3", (151936, 5120, 17408, 40, 40, 8), {"head_dim": 128}),
    "Qwen3 32B": ("qwen3", (151936, 5120, 25600, 64, 64, 8), {"head_dim": 128}),
    "Llama 3.3 70B": ("llama", (128256, 8192, 28672, 80, 64, 8), {"rope_scaling": LLAMA3}),
}
"""Models as their `config.json` has them: type, `SIZES`, and what else matters."""
TRAINED = {
    "sequence_length": 2048, "global_batch_size": 64, "precision": "bfloat16",
    "stochastic_rounding": True, "moment_precision": "8bit", "head_serialisation": 16,
}  # fmt: skip
"""How the models of `sizes_table` are trained."""
DEVICES = (8, 24, 80)
"""Gigabytes of the devices of `sizes_table`."""


def sizes_table() -> str:
    """What training published models takes of a device and of the host, by their plans."""
    lines = [
        "| model | parameters | device memory | fits on | state on the host | activations there |",
        "|---|---|---|---|---|---|",
    ]
    for name, (kind, sizes, others) in PUBLISHED.items():
        values = {"model_type": kind, **dict(zip(SIZES, sizes, strict=True)), **others}
        model = model_in(Path("config.json"), values)
        training = {**TRAINED, "data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1}
        config = override(replace(preset("tiny"), model=model), dropout=0.0, **training)
        found = plan(training_program(config)[0], device="cuda")  # the same on every CPU
        tokens = config.tokens_per_step
        between = (model.layers + 2) * tokens * model.hidden_size * 2  # x and dx, bfloat16
        device = found.peak_bytes / 1e9
        cells = [
            name,
            si(parameter_count(model)),
            f"{device:.1f} GB",
            f"{next(size for size in DEVICES if device < 0.9 * size)} GB",
            f"{(found.remote_memory_bytes - between) / 1e9:.0f} GB",
            f"{between / 1e9:.0f} GB",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


LINKS = {"100 Gb/s Ethernet": 12.5e9, "those of the plan above": 40e9, "NVLink 4": 450e9}
"""What a device sends at most, in bytes/s, by the links of `links_table`."""
DEVICE_FLOPS, REMOTE = 62e12, 20e9
"""The other speeds of its plans: FLOP/s, and bytes/s of remote memory."""


def links_table() -> str:
    """What presets of many devices take with several kinds of links, by their plans."""
    lines = [
        "| preset | dp × tp1 × tp2 | links | step | of that exposed links | throughput | of the "
        "limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("gpt3_2.7B_pod64", "gpt3_175B_pod256"):
        config = preset(name)
        program = plan(training_program(config)[0], with_peaks=False)
        for links, speed in LINKS.items():
            machine = Machine(flops=DEVICE_FLOPS, link=speed, remote=REMOTE)
            times = tuple(phase_time(phase, machine) for phase in program.phases)
            found = StepPlan(config, program, machine, (), times, 0)
            cells = [
                f"`{name}`",
                layout_name(config.execution).replace("x", "×"),
                f"{links}, {speed / 1e9:g} GB/s",
                duration(found.seconds),
                duration(found.exposed),
                si(found.tokens_per_second, "tokens/s"),
                f"{found.limit / found.seconds:.0%}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def five_minutes_table() -> str:
    """The results of the five-minute benchmark, the fewest bits first."""
    lines = [
        "| entry | bits per byte | runs | longest | processor | load after it | size, batch, "
        "vocabulary, commit |",
        "|---|---|---|---|---|---|---|",
    ]
    results = [json.loads(line) for line in FIVE_MINUTES.read_text().splitlines()]
    for result in sorted(results, key=lambda result: float(result["bits_per_byte"])):
        runs, machine = result["all_bits_per_byte"], result["machine"]
        cells = [
            f"`{result['entry']}`",
            f"{result['bits_per_byte']:.4f}",
            str(len(runs)) if len(runs) < 2 else f"{len(runs)}: {min(runs):.4f} to {max(runs):.4f}",
            f"{result['seconds']:.1f} s",
            f"{machine['processor']}, {machine['vector']}",
            f"{machine['load']:.1f}",
            settings_cell(result),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def settings_cell(result: "dict[str, Any]") -> str:
    """Sizes, batches and vocabularies of a result's runs, and the commit; older results have none,
    and a vocabulary of 4,096.
    """
    if "commit" not in result:
        return "–"
    used = [
        f"{s['size']}, {s['batch']}, {s.get('vocabulary', 4096)}"
        for s in result["all_settings"]
        if "size" in s
    ]
    return ", ".join([*dict.fromkeys(used), f"`{result['commit']}`"])


def keywords() -> str:
    """The settings that each function of `popxl_gpt.api` takes by keyword, as types."""
    plans, config = {leaf.name for leaf in leaves(PlanOptions)}, leaves()
    training = [leaf for leaf in leaves(TrainOptions) if leaf.name not in plans]
    kinds = {
        "TrainSettings": {"config": "str | Path", **_types(*config, *training)},
        "EvaluateSettings": _types(
            *(leaf for leaf in config if leaf.name in {*EVALUATE.used} - {"input_files"})
        ),
        "GenerateSettings": _types(*(leaf for leaf in config if leaf.name in GENERATE.used)),
        "PrepareSettings": _types(
            *(
                leaf
                for command in COMMANDS.values()
                for leaf in leaves(command.options)
                if leaf.name != command.words
            )
        ),
        "ConvertSettings": _types(
            *(
                leaf
                for _, options in CONVERSIONS.values()
                for leaf in leaves(options)
                if leaf.name != "paths"
            )
        ),
    }
    lines = [
        "# Written by imgs/write_tables.py: the settings of the commands, by keyword.",
        "from collections.abc import Sequence",
        "from pathlib import Path",
        "from typing import Literal, TypedDict",
        "",
        "from typing_extensions import Unpack as Unpack",
    ]
    for name, types in kinds.items():
        lines += ["", f"class {name}(TypedDict, total=False):"]
        lines += [f"    {setting}: {kind}" for setting, kind in types.items()]
    return "\n".join(lines) + "\n"


def _types(*settings: Leaf) -> "dict[str, str]":
    """The types of settings by name; all of one that several commands have."""
    found: dict[str, dict[str, None]] = {}
    for leaf in settings:
        found.setdefault(leaf.name, {}).update(dict.fromkeys(_parts(leaf)))
    return {name: " | ".join(sorted(parts, key="None".__eq__)) for name, parts in found.items()}


def _parts(leaf: Leaf) -> "list[str]":
    """What a setting may be."""
    texts = ", ".join(f'"{text}"' for text in leaf.choices or leaf.words)
    parts = [] if leaf.choices else [leaf.kind.__name__]
    parts += ["Path"] if leaf.is_path else []
    if isinstance(leaf.bound, Bytes):
        parts += ["float", "str"] if leaf.bound.or_share else ["str"]
    parts += [f"Literal[{texts}]"] if texts else []
    if leaf.is_list:
        parts.append(f"Sequence[{' | '.join(parts)}]")
    return [*dict.fromkeys(parts), *(["None"] if leaf.optional else [])]


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    SETTINGS: {"presets": presets_table, "settings": reference, "ipu config": ipu_table},
    ROOT / "docs" / "popxl.md": {"missing names": missing_table},
    MODELS: {"sizes": sizes_table},
    ROOT / "docs" / "plan.md": {"links": links_table},
    ROOT / "docs" / "rows.md": {"rows": rows_tables},
    ROOT / "docs" / "five-minutes.md": {"five minutes": five_minutes_table},
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


def main(names: "list[str]") -> None:
    """Rewrite what is out of date, of the files that are named, or of all.

    Raises:
        UserError: if a file has no generated parts.
    """
    files = {str(file.relative_to(ROOT)): file for file in (*PAGES, KEYWORDS)}
    if unknown := [name for name in names if name not in files]:
        raise UserError(f"got {unknown}; expected names of {sorted(files)}")
    for page in [files[name] for name in names or files]:
        before = page.read_text(encoding="utf-8")
        after = keywords() if page == KEYWORDS else with_generated_parts(before, page)
        if after != before:
            page.write_text(after, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'written' if after != before else 'up to date'}")


if __name__ == "__main__":
    with exit_on_user_error():
        main(sys.argv[1:])
