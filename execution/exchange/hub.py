"""Models by their names at Hugging Face's hub: from the cache of its library, or through it from
the hub. No code is taken, and pickled weights only where there are no others.
"""

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from popxl_gpt.execution.exchange.hugging_face import INDEX, KINDS, is_hugging_face
from popxl_gpt.execution.exchange.hugging_face_files import named_files
from popxl_gpt.execution.exchange.kept_files import BESIDE, CONFIG
from popxl_gpt.utils.errors import UserError, first_line
from popxl_gpt.utils.files.hub import HUB_MODEL, TOKENIZER
from popxl_gpt.utils.files.plain import is_file, names_in

FILES = (CONFIG, *BESIDE, "model.safetensors", "model-*.safetensors", INDEX)
PICKLED = ("pytorch_model.bin", "pytorch_model-*.bin", KINDS[1][1])
PACKAGE = "huggingface_hub"


def hub_name(path: Path) -> "re.Match[str] | None":
    """The parts of a name at the hub, see `HUB_MODEL`; None for a path."""
    is_path = os.path.exists(path) or os.path.exists(path.parent)
    return None if is_path else HUB_MODEL.fullmatch(str(path))


@lru_cache
def model_folder(path: Path, flag: str) -> Path:
    """The folder of a model that a path names: its own, or that of a name at the hub, such as
    Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@main. A copy in the cache without a tokenizer is taken only
    where the hub gives no other.

    Raises:
        UserError: it is such a name, and there is neither a copy in the cache nor a way to the hub.
    """
    named = hub_name(path)
    if named is None:
        return path
    name, revision = named["name"], named["revision"]
    if find_spec(PACKAGE) is None:
        raise UserError(
            f"{flag}: got {path}, no folder here; expected one, or a name at Hugging Face's hub "
            f"and the package {PACKAGE}, which finds it. Install it: pip install {PACKAGE}."
        )
    from huggingface_hub.constants import HF_HUB_CACHE

    cached, _ = _snapshot(name, revision, FILES + PICKLED, is_local=True)
    cached = cached if cached is not None and _is_whole(cached) else None
    if cached is not None and is_file(cached / TOKENIZER):
        return cached
    found, problem = _snapshot(name, revision, FILES)
    if found is not None and not _weights(found):
        found, problem = _snapshot(name, revision, FILES + PICKLED)
    if found is None or not _is_whole(found):
        if cached is not None:  # without a tokenizer
            return cached
        told = "config.json or weights are missing" if problem is None else first_line(problem)
        raise UserError(
            f"{flag}: got {path}, which is no folder here, is not whole in the hub's cache "
            f"{HF_HUB_CACHE}, and does not come from the hub ({told}); expected a run, a "
            "checkpoint, a folder of a model, or its name. Check the name, or run `hf download "
            f"{name}` where there is a network and copy the cache, or give a folder."
        )
    return found


def _snapshot(
    name: str, revision: str | None, files: Sequence[str], is_local: bool = False
) -> "tuple[Path | None, Exception | None]":
    """The folder of a model in the cache, filled from the hub unless that is all there may be; or
    why there is none.
    """
    from huggingface_hub import snapshot_download

    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": list(files)}
    try:
        return Path(snapshot_download(name, local_files_only=is_local, **wanted)), None
    except Exception as error:  # of the library, of that for requests, of the system
        return None, error


def _weights(folder: Path) -> "list[str]":
    """The files of weights in a folder, of the first kind that there is."""
    names = names_in(folder)
    found = ([name for name in names if shard.fullmatch(name)] for _, _, shard in KINDS)
    return next(filter(None, found), [])


def _is_whole(folder: Path) -> bool:
    """Whether a folder of the cache has configuration and weights."""
    there = set(_weights(folder))
    if not there or not is_hugging_face(folder):
        return False
    for whole, index, _ in KINDS:
        if (folder / index).is_file():
            return set(named_files(folder / index)) <= there
        if whole in there:
            return True
    return False
