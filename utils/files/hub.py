"""Models and tokenizers as Hugging Face's hub and its libraries leave them: what a path is that was
meant as one of ours, and what to do with it.
"""

import re
from pathlib import Path

from popxl_gpt.utils.errors import DataError
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.plain import names_in

TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
ADAPTER = "adapter_config.json"
"""What peft leaves in the folder of an adapter."""
SNAPSHOTS, MAIN = "snapshots", "refs/main"
"""The parts of a model in the hub's cache: a folder for each version, and the file that names the
newest.
"""
OTHER_TOKENIZERS = (SENTENCEPIECE, "vocab.json", "merges.txt", "tokenizer_config.json")
"""Files of a tokenizer that transformers makes a tokenizer.json of."""
CACHED = re.compile(r"(models|datasets|spaces)--.+")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
HUB_MODEL = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(@(?P<revision>[\w.-]+))?")
"""A model's name, with its owner's; a version may follow."""
FOREIGN_TOKENIZERS = {
    re.compile(rb"\n.{1,3}?\n.", re.DOTALL): "a SentencePiece model",
    re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n"): "tiktoken's ranks",
}
"""How tokenizers of other kinds begin, in files named tokenizer.model. Source:
github.com/google/sentencepiece, src/sentencepiece_model.proto: messages in field 1, of which field
1 is a text; github.com/openai/tiktoken, tiktoken/load.py.
"""
MAKE_TOKENIZER = (
    "Make one in a folder OUT with transformers, beside which sentencepiece or tiktoken is "
    'installed, and give OUT: python -c "from transformers import AutoTokenizer; '
    "AutoTokenizer.from_pretrained('FOLDER').save_pretrained('OUT')\"."
)


def foreign_model(path: Path) -> str | None:
    """What a path is that was meant as a model's folder, as `got ..; expected ..`, without the
    path; None for what is not known here.
    """
    if path.is_file():
        return f"a file; expected the folder that it lies in. Give {path.parent}."
    cache = path.parent if path.name == SNAPSHOTS else path
    if CACHED.fullmatch(cache.name) and (cache / SNAPSHOTS).is_dir():
        return f"the hub's cache of a model; expected one version of it. Give {_snapshot(cache)}."
    if (path / ADAPTER).is_file():
        return (
            'an adapter of peft; expected a whole model. Merge it: python -c "from peft import '
            "AutoPeftModelForCausalLM as A; A.from_pretrained('FOLDER').merge_and_unload()"
            ".save_pretrained('OUT')\", and give OUT."
        )
    return None


def hub_hint(path: Path) -> str:
    """A sentence for a path that is not there and may be meant as a name at the hub, such as
    openai-community/gpt2; empty for others.
    """
    is_name = HUB_NAME.fullmatch(str(path)) is not None and path.suffix != ".json"
    if not is_name or path.exists() or (path.parent != Path() and path.parent.exists()):
        return ""
    return (
        " If it is a name at Hugging Face's hub, run `hf "
        f"download {path} --local-dir FOLDER` and give FOLDER."
    )


def _snapshot(cache: Path) -> Path:
    """The newest version of a model in the hub's cache."""
    try:
        name = read_bounded(cache / MAIN, 100).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    names = names_in(cache / SNAPSHOTS)
    return cache / SNAPSHOTS / (name if name in names else (names or ["VERSION"])[-1])


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json that a path means: a folder's own, or the file.

    Raises:
        DataError: the folder has none.
    """
    if not path.is_dir():
        return path
    # of a model, of a prepared folder, of a run
    for file in (path / TOKENIZER, path / "checkpoints" / TOKENIZER):
        if file.is_file():
            return file
    how = "Check the path."
    if CACHED.fullmatch(path.name) and (path / SNAPSHOTS).is_dir():
        how = f"Give {_snapshot(path)}."
    elif any((path / name).is_file() for name in OTHER_TOKENIZERS):
        how = MAKE_TOKENIZER
    raise DataError(f"--tokenizer: got {path}, a folder without {TOKENIZER}; expected one. {how}")


def foreign_tokenizer(content: bytes) -> str | None:
    """What the content of a file is that is no tokenizer.json, as `got ..; expected ..`, without
    the path; None for what is not known here.
    """
    kinds = (kind for begin, kind in FOREIGN_TOKENIZERS.items() if begin.match(content))
    kind = next(kinds, None)
    return None if kind is None else f"{kind}; expected a {TOKENIZER}. {MAKE_TOKENIZER}"
