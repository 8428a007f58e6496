"""Write docs/passes.md: each pass of the compiler with a place of a training step before and after
it.

    python imgs/draw_passes.py
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import popxl  # noqa: E402
import torch  # noqa: E402
from popxl import ops  # noqa: E402
from popxl_engine.ir import Block, to_text  # noqa: E402
from popxl_engine.lowering import lower  # noqa: E402
from popxl_engine.passes import (  # noqa: E402
    PASSES,
    PASSES_APART,
    Pass,
    PassManager,
    enabled_passes,
)

from popxl_gpt.config.presets import override, preset  # noqa: E402
from popxl_gpt.execution.pretraining import training_program  # noqa: E402

PAGE = ROOT / "docs/passes.md"
HEAD = """\
# Passes

<!-- Written by imgs/draw_passes.py -->

The compiler runs these passes in this order. Each takes a program, as blocks of instructions, and
gives another one that does the same. Those of a graph work on the block of a single graph, before
calls are inlined: they do the same wherever it is called. `POPXL_PASSES=-name,-name` turns passes
off, `POPXL_PRINT_AFTER=name` prints the program after one, `POPXL_VERIFY=1` checks it after each.
A few run on some devices alone, and say so.
The lines below are from training steps of the `mini` preset, from attention that a program
composes of products and a softmax, and from a sum and a loop over replicas: what was there, and
what a pass puts there.
"""
STEPS = (
    ({}, "cpu", ()),
    ({"precision": "bfloat16", "micro_batch_size": 8, "dropout": 0.1}, "cpu", ()),
    ({"recomputation": False, "dropout": 0.1}, "cpu", ("recompute_probs",)),
    ({"logit_softcap": 15.0}, "cpu", ()),
    ({}, "cuda", ()),
)
"""Changes to the preset, the device, and passes that are left out."""


class Watching(PassManager):
    """Keeps the smallest change of each pass. ``changes``: by its name."""

    changes: "dict[str, tuple[list[str], list[str]]]" = {}

    def _run(self, each: Pass, block: Block) -> Block:
        result = super()._run(each, block)
        if result is not block and each.is_optional and each.name != "lower":
            found = one_change(list(lines(block)), list(lines(result)))
            known = self.changes.get(each.name)
            if found[1] and (known is None or len(sum(found, [])) < len(sum(known, []))):
                self.changes[each.name] = found
        return result


def lines(block: Block) -> "Iterator[str]":
    """The instructions of a program, without what is not given to them."""
    for line in to_text(block).splitlines():
        if line.startswith("  "):
            text = line.split("  #")[0].strip()
            text = re.sub(r"(, )?\b\w+=(None|False|\(\))(?=[,)])", "", text)
            yield text.replace("(, ", "(")


def one_change(before: "list[str]", after: "list[str]") -> "tuple[list[str], list[str]]":
    """The first instruction that is new, and those that are gone for it, through their operands."""
    kept, was = set(after), set(before)
    gone, new = [x for x in before if x not in kept], [x for x in after if x not in was]
    if not new:
        return gone, new
    first = new[-1]
    wanted = set(re.findall(r"%[^\s:,()]+", first.split(" = ")[0]))
    found: list[str] = []
    for line in reversed(gone):
        results, _, operands = line.partition(" = ")
        if wanted & set(re.findall(r"%[^\s:,()]+", results)):
            found.insert(0, line)
            wanted |= set(re.findall(r"%[^\s:,()]+", operands))
    made = set(re.findall(r"%[^\s:,()]+", first.partition(" = ")[2]))
    return found, [x for x in new if made & set(re.findall(r"%[^\s:,()]+", x.split(" = ")[0]))] + [
        first
    ]


def composed_attention() -> popxl.Ir:
    """A program that composes attention of products and a softmax."""
    ir = popxl.Ir()
    with ir.main_graph:
        query, key, value = (
            popxl.variable(np.zeros((8, 6, 256, 32), np.float32), name=name)
            for name in ("query", "key", "value")
        )
        later = np.triu(np.full((256, 256), -np.inf, np.float32), 1)
        mask = popxl.constant(later, popxl.float32, "mask")
        scores = query @ key.transpose((0, 1, 3, 2)) * (1 / math.sqrt(32)) + mask
        y = ops.softmax(scores, axis=-1) @ value
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype), y)
    return ir


def sum_over_replicas() -> popxl.Ir:
    """A program on two replicas that has something to do beside their sum."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = popxl.variable(np.zeros((8, 8), np.float32), name="x")
        total = ops.collectives.replicated_all_reduce(x)
        for y in (ops.gelu(total), ops.exp(x)):
            ops.host_store(popxl.d2h_stream(y.shape, y.dtype), y)
    return ir


def layer_of_a_loop(n: popxl.Tensor, x: popxl.Tensor, shards: popxl.RemoteBuffer):
    """What an iteration does: it gathers a layer's weights, and uses them."""
    weight = ops.collectives.replicated_all_gather(ops.remote_load(shards, n))
    return n + 1, ops.tanh(x @ weight)


def loop_over_replicas() -> popxl.Ir:
    """A program on two replicas that repeats a layer whose weights are in shards."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        shards = popxl.remote_buffer((4, 8), popxl.float32, 6)
        x = popxl.variable(np.zeros((8, 8), np.float32), name="x")
        n = popxl.constant(0, popxl.int32)
        graph = ir.create_graph(layer_of_a_loop, n, x, shards)
        _, y = ops.repeat(graph, 6, n, x)
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype), y)
    return ir


def watch_all() -> "dict[str, tuple[list[str], list[str]]]":
    """Compile all steps, and attention as programs compose it."""
    steps = [
        (training_program(override(preset("mini"), **changes))[0], device, left_out)
        for changes, device, left_out in STEPS
    ]
    others = composed_attention(), sum_over_replicas(), loop_over_replicas()
    programs = [*steps, *((ir, "cpu", ()) for ir in others)]
    for ir, device, left_out in programs:
        where = torch.device(device)
        enabled = enabled_passes(where, PASSES_APART)
        manager = Watching([p for p in enabled if p.name not in left_out])
        manager.run_on_program(lower(ir.main_graph, manager.run_on_graph))
    return Watching.changes


def described(fn: "Callable[[Block], Block]") -> str:
    """What a pass's function says of itself, a line a paragraph."""
    inner = getattr(fn, "keywords", {}).get("rewrite", fn)
    inner = getattr(inner, "func", inner)
    words = (inspect.getdoc(inner) or "").split("Args:")[0].split("Raises:")[0].strip()
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in words.split("\n\n"))


def page() -> str:
    """The whole page."""
    changes = watch_all()
    parts = [HEAD]
    for each in PASSES:
        scope = "of a graph" if each.per_graph else "of a program"
        needed = "" if each.is_optional else ", always on"
        parts.append(f"## {each.name}\n\n*{scope}{needed}*. {described(each.fn)}\n")
        if each.name in changes:
            before, after = changes[each.name]
            shown = [f"- {line}" for line in before] + [f"+ {line}" for line in after]
            text = re.sub(r"(%[\w./]+?)_\d{3,}\b", r"\1", "\n".join(shown))
            parts.append(f"```diff\n{text}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
