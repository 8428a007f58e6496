"""FLOPs of programs against counts by hand."""

from collections import Counter

import numpy as np
import popxl
import popxl_addons as addons
import pytest
from helpers.addons_programs import normal
from popxl import ops
from popxl.extensions import attention, plan
from popxl_addons.performance_utils import (
    elementwise_binary_flops,
    evaluate_FLOPs,
    evaluate_ir_FLOPs,
    format_flops_scientific,
    print_FLOPs,
    total_FLOPs,
)

B, S, H, A = 2, 6, 8, 2
"""Sequences, tokens of each, hidden size, heads."""
T = B * S
TANH = EXP = 8
"""Operations that the cost rules count for one of them."""


class Block(addons.Module):
    """A decoder block of GPT-2: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = addons.layers.LayerNorm(), addons.layers.LayerNorm()
        self.qkv, self.out = addons.layers.Linear(3 * H), addons.layers.Linear(H)
        self.up, self.down = addons.layers.Linear(4 * H), addons.layers.Linear(H)

    def build(self, x):
        q, k, v = (
            t.reshape((B, S, A, H // A)).transpose((0, 2, 1, 3))
            for t in ops.split(self.qkv(self.norm1(x)), 3, 1)
        )
        scores = (q @ k.transpose((0, 1, 3, 2))) * (H // A) ** -0.5 + np.triu(
            np.full((S, S), -1e4, np.float32), 1
        )
        attended = ops.softmax(scores, -1) @ v
        x = x + self.out(attended.transpose((0, 2, 1, 3)).reshape((T, H)))
        return x + self.down(ops.gelu(self.up(self.norm2(x))))


FORWARD = {
    "matmul": 24 * T * H**2 + 4 * T * S * H,
    "layer_norm": 2 * 8 * T * H,
    "softmax": (EXP + 2) * T * S * A,
    "gelu": 2 * TANH * 4 * T * H,
    "mul": T * S * A,
    "add": T * S * A + T * (3 * H + H + 4 * H + H) + 2 * T * H,
}
"""Products: 2 m k n each. Masking, four biases and two residuals: one addition per element."""


def block_graphs():
    """A block's graph and its gradient's."""
    with popxl.Ir().main_graph:
        _, forward = Block().create_graph(popxl.TensorSpec((T, H), popxl.float32))
        return forward, addons.autodiff(forward)


def by_kind(breakdown):
    """{kind: operations} of a breakdown whose total is that of its parts."""
    kinds = {name: sum(ops.values()) for name, ops in breakdown.items() if name != "TOT"}
    assert breakdown["TOT"] == sum(kinds.values())
    return kinds


def test_a_gpt_block_counts_as_by_hand():
    forward, _ = block_graphs()
    assert by_kind(evaluate_FLOPs(forward.graph)) == FORWARD


def test_operations_are_listed_by_kind_and_op_with_their_total():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(normal(2, 3))
        graph = ir.create_graph(lambda t: t + 1, x)
        a, b = x @ popxl.variable(normal(3, 4)), x @ popxl.variable(normal(3, 5))
        ops.call(graph, x), ops.repeat(graph, 3, x)
    assert evaluate_FLOPs(ir.main_graph) == {
        "matmul": {a.id: 2 * 6 * 4, b.id: 2 * 6 * 5},
        "add": {graph.outputs[0].id: 4 * 6},
        "TOT": 108 + 24,
    }
    assert evaluate_FLOPs(ir.create_empty_graph()) == {"TOT": 0}


def test_the_gradient_of_a_gpt_block_has_twice_its_products():
    _, gradient = block_graphs()
    flops = by_kind(evaluate_FLOPs(gradient.graph))
    assert flops["matmul"] == 2 * FORWARD["matmul"]
    assert flops["softmax_grad"] == 4 * T * S * A and flops["group_norm_grad"] == 2 * 16 * T * H
    assert flops["gelu_grad"] == 2 * TANH * 4 * T * H and "softmax" not in flops


def test_a_program_counts_calls_repeats_and_replicas_as_its_plan_does():
    ir = popxl.Ir(replication=3)
    with ir.main_graph:
        stream = popxl.h2d_stream((T, H), popxl.float32)
        out = popxl.d2h_stream((T, H), popxl.float32)
        facts, block = Block().create_graph(popxl.TensorSpec((T, H), popxl.float32))
        bound = block.bind(facts.init())
        x = ops.host_load(stream)
        (x,) = bound.call(*bound.call(x))
        (x,) = ops.repeat(block.graph, 5, x, inputs_dict=bound.args)
        ops.host_store(out, x)
    assert by_kind(evaluate_FLOPs(ir.main_graph)) == {
        name: 7 * flops for name, flops in FORWARD.items()
    }
    assert evaluate_ir_FLOPs(ir) == evaluate_ir_FLOPs(block.graph)
    assert by_kind(evaluate_ir_FLOPs(ir)) == {name: 21 * flops for name, flops in FORWARD.items()}
    assert total_FLOPs(ir) == 21 * sum(FORWARD.values())
    assert total_FLOPs(ir) == 3 * sum(phase.flops for phase in plan(ir).phases)


def test_a_conditional_counts_its_dearer_branch_and_moving_data_counts_nothing():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(normal(2, 3))
        cheap = ir.create_graph(lambda t: t + 1, x)
        dear = ir.create_graph(lambda t: ops.exp(t), x)
        ops.conditional(popxl.variable(np.array(True)), cheap, dear, [x], [x])
        assert by_kind(evaluate_FLOPs(ir.main_graph)) == {"exp": 6 * EXP}
        y = ops.transpose(x).reshape((6,))
        assert by_kind(evaluate_FLOPs(ir.main_graph)) == {"exp": 6 * EXP}
        ops.conditional(popxl.variable(np.array(True)), dear, cheap, [x], [x])
        y * 2.0
    assert by_kind(evaluate_FLOPs(ir.main_graph)) == {"exp": 12 * EXP, "mul": 6}
    assert elementwise_binary_flops(ir.main_graph.ops[-1]) == 6


@pytest.mark.parametrize(
    "value, form, text",
    [
        (1234567, "K", "1234.567e3"),
        (1234567, "M", "1.235e6"),
        (1234567, "G", "0.001e9"),
        (10**12, "T", "1.000e12"),
        (0, "nearest3", "0.000e0"),
        (999, "nearest3", "999.000e0"),
        (1000, "nearest3", "1.000e3"),
        (999_999_999, "nearest3", "1.000e9"),
        (123 * 10**15, "nearest3", "123.000e15"),
    ],
)
def test_operations_are_written_with_exponents(value, form, text):
    assert format_flops_scientific(value, form) == text
    assert float(text) == pytest.approx(value, rel=0.3)


def test_tables_list_kinds_of_ops_or_ops(capsys):
    counts = {"add": {"x": 500, "y": 1500}, "matmul": {"z": 6000}, "mul": {"w": 2000}, "TOT": 10000}
    print_FLOPs(counts, "flat")
    flat = [
        [cell.strip() for cell in line.split(" | ")]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert [line[0] for line in flat[2:]] == ["matmul z", "mul w", "add y", "add x", "total"]
    assert flat[2][1:] == ["6.000e3", "60.0%"] and flat[-1][1:] == ["10.000e3", "100.0%"]
    print_FLOPs(counts, numerical_format="K")
    typed = [
        [cell.strip() for cell in line.split(" | ")]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert [line[0] for line in typed[2:]] == ["matmul", "add", "mul", "total"]
    assert typed[3][1] == "2.000e3"
    print_FLOPs({})
    assert "total" in capsys.readouterr().out


def test_unknown_modes_and_formats_are_refused_in_words():
    with pytest.raises(ValueError, match="got mode 'tree'; expected 'type' or 'flat'"):
        print_FLOPs({}, "tree")
    with pytest.raises(ValueError, match="got 'P'; expected 'K', 'M', 'G', 'T' or 'nearest3'"):
        format_flops_scientific(1, "P")


def test_what_does_the_work_of_several_ops_counts_as_those_as_in_a_plan():
    ir = popxl.Ir()
    with ir.main_graph:
        query, key, value = (popxl.variable(normal(B, A, S, H)) for _ in range(3))
        result = attention(query, key, value, popxl.constant(np.zeros((S, S), np.float32)))
        ops.host_store(popxl.d2h_stream(result.shape, result.dtype), result)
    found = by_kind(evaluate_FLOPs(ir.main_graph))
    assert found["matmul"] == 2 * 2 * B * A * S * S * H and "attention" not in found
    assert found == sum((Counter(phase.flops_by_op) for phase in plan(ir).phases), Counter())
