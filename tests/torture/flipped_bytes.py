"""Each byte of a checkpoint changed: loading refuses in words, or gives the same bits."""

import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import popxl_addons as addons

from popxl_gpt.config.command_line import parse_command_line
from popxl_gpt.config.schema import Config
from popxl_gpt.demo.pretraining import Options
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.utils.errors import UserError
from tests.torture.application import Mode, Workshop
from tests.torture.judge import Broken, checkpoints_of
from tests.torture.torture import Torture

SMALL = Mode(
    "small", {"layers": 1, "hidden_size": 6, "checkpoint.every": 1, "steps": 2, "warmup_steps": 0}
)


@dataclass
class Loaded:
    """A small run's two checkpoints, and a session that they are loaded into."""

    config: Config
    session: addons.TaskSession
    first: Path
    second: Path
    files: "list[tuple[Path, bytes]]"
    """Files of the second."""
    expected: "dict[str, Any]"

    def load(self, checkpoint: Path) -> "dict[str, Any]":
        """Load a checkpoint. Returns the whole state then: step, data, and the bytes of every
        variable.
        """
        saved = SavedRun(checkpoint, self.config)
        saved.restore(self.session)
        state = {
            name: self.session.get_tensor_data(v)
            for name, v in self.session.state.to_dict().items()
        }
        return {
            "position": saved.position,
            **{name: np.asarray(array).tobytes() for name, array in state.items()},
        }


def prepare(shop: Workshop) -> Loaded:
    folder = shop.fresh()
    shop.finish(SMALL, folder)
    first, second = checkpoints_of(folder / "runs/run")
    config = parse_command_line(
        ["--config", str(folder / "runs/run/config.yml")],
        program="torture",
        default="tiny",
        options=Options,
    ).config
    files = [(path, path.read_bytes()) for path in sorted(second.iterdir())]
    loaded = Loaded(config, pretraining(config), first, second, files, {})
    loaded.expected = loaded.load(second)
    if loaded.load(first) == loaded.expected:
        raise Broken("two checkpoints hold the same state")
    return loaded


def prepared(shop: Workshop) -> Loaded:
    return shop.shared("loaded", lambda: prepare(shop))


def trial(case: int, shop: Workshop) -> str:
    loaded, place, choice = prepared(shop), case, random.Random(case)
    for path, content in loaded.files:
        if place < len(content):
            break
        place -= len(content)
    byte = content[place] ^ (
        1 << choice.randrange(8) if choice.random() < 0.5 else choice.randrange(1, 256)
    )
    told = f"{path.name} byte {place} {content[place]:#04x} -> {byte:#04x}"
    logging.disable()
    try:
        # so that what the damaged one does not give is not what it should give
        loaded.load(loaded.first)
        path.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
        found = loaded.load(loaded.second)
    except UserError as error:
        if path.parent.name not in str(error):
            raise Broken(f"{told}: refused without naming the checkpoint: {error}") from error
        return f"{told}: refused"
    except Exception as error:
        raise Broken(f"{told}: {error!r}") from error
    finally:
        path.write_bytes(content)
        logging.disable(logging.NOTSET)
    changed = [name for name, value in loaded.expected.items() if found.get(name) != value]
    if changed:
        raise Broken(f"{told}: accepted, with another {', '.join(changed[:3])}")
    return f"{told}: the same bits"


FLIPPED_BYTES = Torture(
    "flipped_bytes",
    "A changed byte of a checkpoint is refused in words, or changes nothing.",
    trial,
    lambda shop: sum(len(content) for _, content in prepared(shop).files),
)
