"""What lies beside the weights in a folder of Hugging Face's: configuration, generation settings,
chat template, tokenizer. A run keeps it as it came, and it goes out again so.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer

from popxl_gpt.config.model import ARCHITECTURE, BY_DEFAULT, Model
from popxl_gpt.data.chat_template import TEMPLATE, TOKENIZER_CONFIG
from popxl_gpt.data.special_tokens import BEGIN, END
from popxl_gpt.data.text_tokenizer import GENERATION
from popxl_gpt.data.tokenisation import TOKENIZER_BYTES
from popxl_gpt.execution.checkpoints.checkpoint_folder import TOKENIZER
from popxl_gpt.execution.exchange.families.family import Family, Values
from popxl_gpt.execution.exchange.hugging_face_config import model_in, special_tokens_in
from popxl_gpt.execution.exchange.hugging_face_files import read_json
from popxl_gpt.utils.errors import UserError, unreadable
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.plain import is_file, write_plain

CONFIG = "config.json"
BESIDE = (
    GENERATION, TEMPLATE, "chat_template.json", TOKENIZER, TOKENIZER_CONFIG,
    "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model",
)  # fmt: skip
"""Files that are kept, beside `CONFIG`; all but the first are the tokenizer's."""
OF_WEIGHTS = {**{name: name for name in (*ARCHITECTURE, "layer_norm_eps")}, **BY_DEFAULT}
"""Settings that weights are for, and what of a model tells them."""
DTYPES = ("torch_dtype", "dtype")
"""Names of the type of weights: the older one, and today's."""


def keep(source: Path, target: Path) -> None:
    """Copy the files of a folder, as they are, into a new one. OSError where it takes none.

    Raises:
        UserError: one cannot be read.
    """
    for name in (CONFIG, *BESIDE):
        if is_file(source / name):
            target.mkdir(exist_ok=True)
            write_plain(target / name, _content(source / name))


def copy_beside(kept: Path, folder: Path) -> None:
    """Put what was kept into a folder, but for the configuration."""
    for name in BESIDE:
        if is_file(kept / name):
            write_plain(folder / name, _content(kept / name))


def has_tokenizer(kept: Path, tokenizer: Path | None) -> bool:
    """Whether a tokenizer is the one that was kept, however it is written; so is none."""
    if tokenizer is None:
        return True
    if not is_file(kept / TOKENIZER):
        return False
    ours, theirs = _content(tokenizer), _content(kept / TOKENIZER)
    if ours == theirs:
        return True
    try:
        texts = [Tokenizer.from_str(found.decode()).to_str() for found in (ours, theirs)]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # the tokenizers package raises nothing narrower, and panics
        return False
    return texts[0] == texts[1]


def config_text(kept: Path | None, model: Model, family: Family, values: Values) -> bytes:
    """The configuration of an export: what was kept, changed where the model is another.

    Args:
        values: all that is known of the model.
    """
    file = None if kept is None else kept / CONFIG
    theirs = {} if file is None or not is_file(file) else read_json(file)
    if file is None or not _is_of(file, theirs, model, family):
        return _text(values)
    positions = family.sizes["sequence_length"][0]
    changed = {positions: values[positions]} if _positions(file, theirs) != model.positions else {}
    changed |= {name: values["torch_dtype"] for name in DTYPES if theirs.get(name) is not None}
    known = special_tokens_in(theirs, model.vocabulary_size)
    told = {name: values[name] for name in (BEGIN, END) if name not in known}
    changed |= {name: value for name, value in told.items() if value is not None}
    found = {**theirs, **changed}
    if not _is_of(file, found, model, family):  # other entries follow from its positions
        found |= family.write(model)
    found.pop("auto_map", None)  # names code, which is not taken along
    return _content(file) if found == theirs else _text(found)


def _is_of(file: Path, theirs: Values, model: Model, family: Family) -> bool:
    """Whether a configuration is of a model's family and architecture."""
    if theirs.get("model_type") != family.model_type or family.code is not None:
        return False
    try:
        found = model_in(file, theirs)
    except UserError:
        return False
    return all(getattr(found, name) == getattr(model, name) for name in OF_WEIGHTS.values())


def _positions(file: Path, theirs: Values) -> int:
    return model_in(file, theirs).positions


def _text(values: Values) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _content(path: Path) -> bytes:
    try:
        return read_bounded(path, TOKENIZER_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
