"""A `Modelfile`, from which Ollama makes a model of a GGUF file. It takes the chat template from
that.

Source: github.com/ollama/ollama, docs/modelfile.mdx.
"""

from collections.abc import Iterable
from pathlib import Path

from popxl_gpt.data.text_tokenizer import GENERATION, NO_OBJECT
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.files.bounded import read_object

NAME = "Modelfile"
MARK = "# Made by to_gguf: ollama create NAME -f Modelfile\n"
"""The first line of those that are made here."""
GENERATION_BYTES = 2**20
PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""Names of Ollama by those of Hugging Face."""


def modelfile(file: str, positions: int, stops: Iterable[str], beside: Iterable[Path]) -> str:
    """The content of a Modelfile.

    Args:
        file: the GGUF file's name in the same folder.
        stops: texts that end an answer.
        beside: folders that may hold how the model is sampled from; the first that does counts.
    Raises:
        UserError: the file's name does not stand on one line.
    """
    if not file.isprintable():
        raise UserError(
            f"{file}: got a name that is no line of text; expected one. Choose another."
        )
    told = (read_object(place / GENERATION, GENERATION_BYTES, NO_OBJECT) for place in beside)
    found = next(filter(None, told), {})
    if found.get("do_sample") is False:
        found = {**found, "temperature": 0}
    lines = [f"FROM ./{file}", f"PARAMETER num_ctx {positions}"]
    lines += [
        f"PARAMETER {theirs} {found[name]:g}"
        for name, theirs in PARAMETERS.items()
        if type(found.get(name)) in (int, float)
    ]
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in stops]
    return MARK + "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    mark = '"""' if '"' in text else '"'
    return f"{mark}{text}{mark}"
