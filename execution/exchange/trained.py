"""Models that programs take: checkpoints of ours, and folders of Hugging Face's as they are, by
their place or by their name at the hub.
"""

from pathlib import Path

from popxl_gpt.data.chat_template import KEPT
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import MANIFEST
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.exchange.hub import model_folder
from popxl_gpt.execution.exchange.hugging_face import HuggingFaceFolder, is_hugging_face
from popxl_gpt.utils.files.plain import real_path

INIT_FROM = "--init_from"
TrainedModel = SavedRun | HuggingFaceFolder


def find_model(named: Path, flag: str = "--checkpoint") -> TrainedModel:
    """What a path names, or a name at the hub.

    Raises:
        UserError: there is none, or none can be used.
    """
    path = model_folder(named, flag)
    return HuggingFaceFolder(path) if is_hugging_face(path) else find_trained(path, flag)


def came_with(named: Path) -> Path | None:
    """The folder with what lies, or lay, beside the weights of a model of Hugging Face's that a run
    begins with; none where it is another's.
    """
    path = model_folder(named, INIT_FROM)
    if is_hugging_face(path):
        return path
    real = real_path(path)
    is_checkpoint = (real / MANIFEST).exists()
    folders = (real.parent,) if is_checkpoint else (real / "checkpoints", real)
    return next((folder / KEPT for folder in folders if (folder / KEPT).is_dir()), None)
