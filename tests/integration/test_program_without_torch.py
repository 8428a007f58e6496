"""The whole GPT program is built by the API alone: neither torch nor the engine is needed before a
session runs it.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.quick import cases

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "popxl_engine"}:
            raise ImportError(f"{name} may not be imported while a program is built")

sys.meta_path.insert(0, Forbid())
from popxl_gpt.config.presets import preset
from popxl_gpt.execution.pretraining import training_program

data_parallel, tensor_parallel_1, tensor_parallel_2 = (int(size) for size in sys.argv[1:])
config = preset("tiny", data_parallel=data_parallel, tensor_parallel_1=tensor_parallel_1,
                tensor_parallel_2=tensor_parallel_2, dropout=0.1)
ir, _, _ = training_program(config)
assert not {"torch", "popxl_engine"} & set(sys.modules)
print(len(ir.main_graph.called_graphs))
"""


@pytest.mark.slow
@pytest.mark.parametrize("grid", cases([(1, 1, 1), (2, 2, 2)], lambda grid: grid == (2, 2, 2)))
def test_the_gpt_program_is_built_where_torch_and_the_engine_are_forbidden(grid):
    command = [sys.executable, "-c", PROGRAM, *map(str, grid)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 7, "the seven phases are graphs that the main graph calls"
