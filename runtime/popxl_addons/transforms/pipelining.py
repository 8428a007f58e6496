"""Run a part of a graph once per micro-batch, written as the stages of a pipeline.

On several devices a pipeline overlaps stage s of one micro-batch with stage s - 1 of the next. The
numbers are those of the whole part run once per micro-batch, and that is how it runs here: a
replica has one device, on which stages in turn take the same time and hold the activations of one
micro-batch instead of one per stage.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import popxl
from popxl import Tensor
from popxl.context import get_current_context
from popxl.op_records import place_of
from popxl.opdef import Op
from popxl.ops.call import CallSiteInfo
from popxl.placement import DEFAULT_IPU, NO_IPU
from popxl.transforms.autodiff import GradGraphInfo

from popxl_addons.transforms.repeat_graph import repeat_ops, runs_with_the_program


class StageContext:
    """Which stage each op of a pipeline belongs to. `pipelined_execution` makes one."""

    def __init__(self) -> None:
        self._current: int | None = None
        self._stages: dict[Op, int] = {}

    @contextmanager
    def stage(self, i: int) -> Iterator[None]:
        """Ops made inside belong to stage ``i``, counted from 0. ValueError for a negative one."""
        if i < 0:
            raise ValueError(f"stage: got {i}; expected 0 or more.")
        outer, self._current = self._current, i
        try:
            yield
        finally:
            self._current = outer

    def stash_and_restore_tensor(self, t: Tensor, from_stage: int | None = None) -> Tensor:
        """An earlier stage's tensor, for use in the current stage of the same micro-batch.

        Here it is the tensor itself, or its copy to the virtual device that is current where that
        is another one.

        Args:
            from_stage: the stage whose value is meant; default: the one that made ``t``.
        Raises:
            RuntimeError: outside a stage, no stage made ``t`` and none is given, or the stage comes
                later.
        """
        where = "stash_and_restore_tensor"
        if self._current is None:
            raise RuntimeError(
                f"{where}: got a call outside a stage; expected one inside `with "
                "pipeline.stage(i):`."
            )
        source = self._producers().get(t) if from_stage is None else from_stage
        if source is None:
            raise RuntimeError(
                f"{where}: got %{t.name}, which no stage made; expected a result of an "
                "earlier stage. Pass from_stage=."
            )
        if source > self._current:
            raise RuntimeError(
                f"{where}: got %{t.name} of stage {source} in stage {self._current}; expected "
                "an earlier stage's."
            )
        here, there = get_current_context().ipu_of_ops or DEFAULT_IPU, place_of(t).ipu
        is_placed = here != NO_IPU and there is not None
        return t.copy_to_ipu(here, there) if is_placed and here != there else t

    def stash_and_restore_activations(
        self, call_info: CallSiteInfo, grad_info: GradGraphInfo
    ) -> dict[Tensor, Tensor]:
        """What a gradient graph needs of an earlier stage's call, as the ``inputs_dict`` of its own
        call.

        Results of stages are stashed; variables and whatever else was made outside the pipeline are
        given as they are.
        """
        made = self._producers()
        return {
            inner: self.stash_and_restore_tensor(t) if t in made else t
            for inner, t in grad_info.inputs_dict(call_info).items()
        }

    def _record(self, op: Op) -> None:
        if not runs_with_the_program(op):
            return
        if self._current is None:
            raise RuntimeError(
                f"pipelined_execution: got {op!r}, made at {op.where} outside a stage; expected "
                "every op of the pipeline inside `with pipeline.stage(i):`."
            )
        self._stages[op] = self._current

    def _producers(self) -> dict[Tensor, int]:
        """The stage of every result; calls may have gained some since they were made."""
        return {t: stage for op, stage in self._stages.items() for t in op.outputs}

    def _check(self, steps: int) -> None:
        stages = max(self._stages.values(), default=-1) + 1
        if steps < 2 * stages:
            raise ValueError(
                f"pipelined_execution: got {steps} steps for {stages} stages; expected at least "
                f"{2 * stages}: two per stage."
            )
        made = self._producers()
        for op, stage in self._stages.items():
            for t in op.inputs:
                if made.get(t, 0) > stage:
                    raise ValueError(
                        f"pipelined_execution: got {op!r}, made at {op.where} in stage {stage}, "
                        f"which uses %{t.name} of stage {made[t]}; expected results of its own "
                        "and of earlier stages."
                    )


@contextmanager
def pipelined_execution(steps: int) -> Iterator[StageContext]:
    """Changes the current graph: what is built inside the block runs ``steps`` times, once per
    micro-batch.

        with addons.pipelined_execution(steps) as pipeline:
            with pipeline.stage(0), popxl.ipu(0):
                ...
            with pipeline.stage(1), popxl.ipu(1):
                ...

    Each time the stages run in order, streams advance, and what earlier times wrote to variables
    and other tensors from outside is seen. The block's tensors cannot be used after it: store them,
    or write them to a variable.

    Raises:
        RuntimeError: an op outside a stage.
        ValueError: fewer than two steps per stage, or an op that uses a later stage's result.
        GraphError: a tensor of the block is an output of the graph.
    """
    graph, pipeline = popxl.gcg(), StageContext()
    handle = graph.register_op_created_hook(pipeline._record)
    try:
        yield pipeline
    finally:
        graph.remove_op_created_hook(handle)
    pipeline._check(steps)
    body = [op for op in graph.ops if op in pipeline._stages]
    repeat_ops(graph, sorted(body, key=pipeline._stages.__getitem__), steps, "pipeline")


class _Scheduled:
    """PopXL's record of a pipeline on several devices at once, which does not exist here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}: got a pipeline to schedule by hand; expected "
            "popxl_addons.pipelined_execution, which runs the stages of each micro-batch in order. "
            "Stash with its stash_and_restore_tensor."
        )


class Pipelining(_Scheduled):
    """Schedules stages over devices in PopXL. Refused here, see `pipelined_execution`."""


class Stash(_Scheduled):
    """Keeps a tensor for a later stage in PopXL. Refused here, see `StageContext`."""


class Restore(_Scheduled):
    """Gives a stashed tensor back in PopXL. Refused here, see `StageContext`."""
