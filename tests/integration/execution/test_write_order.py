"""A session accepts the programs of every preset: their writes in place have an order."""

import popart
import popxl
import pytest
from popxl import ops
from popxl.transforms.ambiguity import check_ambiguity
from popxl.transforms.op_order import Steps

from popxl_gpt.config.presets import preset, preset_names
from popxl_gpt.execution.pretraining import training_program


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", preset_names())
def test_the_writes_of_every_preset_are_ordered_and_found_so_in_linear_time(name):
    ir = training_program(preset(name))[0]
    steps = Steps()
    check_ambiguity(ir, steps)
    assert steps.count <= 8 * sum(
        1 + len(op.inputs) + len(op.outputs) for graph in ir.graphs for op in graph.ops
    )


def test_a_write_that_is_added_to_a_preset_outside_its_sequence_is_refused():
    ir, _, state = training_program(preset(preset_names()[0]))
    with ir.main_graph:
        seed = state.seed
        ops.add_(seed, popxl.constant([1] * seed.shape[0], seed.dtype))
    with pytest.raises(popart.popart_exception, match="^Inplacing ambiguity detected"):
        check_ambiguity(ir)
