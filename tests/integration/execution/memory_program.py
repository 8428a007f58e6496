"""A process of a run: how much its resident memory grows by the state of layers.
``memory_program.py FOLDER``.

The first program warms up, the second has one layer too, the third has more of the same size. What
the third adds beyond the second is the state of those layers, for a program's objects are the same
size whatever its depth.
"""

import gc
import json
import re
import sys
from pathlib import Path

import numpy as np
import popdist
import popxl_addons as addons

from popxl_gpt.config.presets import preset
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.host import own_samples, run_steps
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.utils.runtime import release_freed_memory

LAYERS = (1, 1, 8)


def configuration(layers: int, replicas: int) -> Config:
    """Data-parallel replicas, over which everything is sharded."""
    return preset(
        "tiny",
        layers=layers,
        hidden_size=512,
        heads=8,
        data_parallel=replicas,
        tensor_parallel_1=1,
        tensor_parallel_2=1,
    )


def stepped(config: Config) -> addons.TaskSession:
    """A session that has made a step, so that all of its memory is in use."""
    session = pretraining(config)
    shape = (config.training.global_batch_size, config.model.sequence_length)
    words = own_samples(
        np.random.default_rng(0).integers(0, config.model.vocabulary_size, shape), config
    )
    with session:
        run_steps(session, config, words, words, [1e-3])
    return session


def resident_bytes() -> int:
    """Anonymous memory of this process that the kernel holds, without what the allocator keeps for
    later.
    """
    gc.collect()
    release_freed_memory()
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def main(folder: Path) -> None:
    replicas = popdist.getNumTotalReplicas()
    sessions, found = [], []
    for layers in LAYERS:
        sessions.append(stepped(configuration(layers, replicas)))
        found.append(resident_bytes())
    first, second, third = found
    grown = (third - second) - (second - first)
    (folder / f"{popdist.getInstanceIndex()}.json").write_text(json.dumps(grown))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
