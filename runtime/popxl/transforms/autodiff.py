"""Reverse-mode differentiation, graph to graph. The forward graph gains the intermediates it needs
as outputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from popxl import ops
from popxl.collection import without_collection
from popxl.dtypes import float32
from popxl.errors import GraphError
from popxl.fp8_utils import FLOAT8
from popxl.graph import Graph, called_first
from popxl.opdef import Op
from popxl.ops.casting import WIDE
from popxl.tensor import Constant, Tensor
from popxl.transforms.clone import clone_constant, clone_op, placed_like, prune, remove_ops
from popxl.transforms.control_rules import CONTROL_RULES
from popxl.transforms.grad_info import ExpectedConnection, ExpectedConnectionType, GradGraphInfo
from popxl.transforms.gradient_rules import added, rule_for
from popxl.transforms.storage import TRANSFERS, Summaries

__all__ = ["ExpectedConnection", "ExpectedConnectionType", "GradGraphInfo", "autodiff"]

PREFIX = "Gradient___"
INDEX = (
    "expected a floating-point tensor, or one that values are computed of: an index, a label or "
    "a seed has no gradient. Name the tensors you want in grads_required."
)


@without_collection()
def autodiff(
    graph: Graph,
    grads_provided: Iterable[Tensor] | None = None,
    grads_required: Iterable[Tensor] | None = None,
    called_graphs_grad_info: Mapping[Graph, GradGraphInfo] | None = None,
    return_all_grad_graphs: bool = False,
) -> GradGraphInfo | dict[Graph, GradGraphInfo]:
    """Make a graph's gradient graph. Appends intermediates it needs to the forward graph's outputs
    and to its calls.

    The gradient graph takes the gradients of ``grads_provided``, in order, then forward values; it
    returns those of ``grads_required``, in order. The body of a repeat or conditional cannot get
    more outputs; its intermediates are recomputed.

    Args:
        grads_provided: tensors whose gradients come in; default: the floating-point outputs but
            those appended earlier, and integer outputs that are made of integers in grads_required.
            Gradients of a tensor that is in it twice add up.
        grads_required: tensors whose gradients are wanted; default: all inputs. Where no gradient
            arrives, it is zeros. Gradients of integers are integers; ops whose gradients they do
            not have cannot be executed.
        called_graphs_grad_info: gradients of called graphs to use instead of differentiating them.
        return_all_grad_graphs: return ``{graph: GradGraphInfo}`` for this graph and those it calls.
    Raises:
        GraphError: a required gradient that does not exist (of an index, or of an op without a
            gradient on the way), an op that writes in place, a tensor of another graph, or a called
            graph whose gradient is written by hand and not given.
    """
    if graph is graph.main_graph:
        raise GraphError(
            "autodiff: got the main graph; expected a graph that it calls. Move the computation to "
            "ir.create_graph(...)."
        )
    required = list(graph.inputs if grads_required is None else grads_required)
    _check("grads_required", required, graph)
    if grads_provided is None:
        active = influenced(graph, required)
        provided = [t for t in results_of(graph) if t.dtype.is_floating_point or t in active]
    else:
        provided = list(grads_provided)
        _check("grads_provided", provided, graph)
    run = Differentiation(graph, provided, required, called_graphs_grad_info or {})
    info = run.differentiate(graph, provided, required)
    return run.infos if return_all_grad_graphs else info


def _check(what: str, tensors: Iterable[Tensor], graph: Graph) -> None:
    for t in tensors:
        if not isinstance(t, Tensor) or t._graph is not graph:
            raise GraphError(
                f"autodiff: got {t!r} in {what}; expected a tensor of graph '{graph.name}'."
            )


def influenced(graph: Graph, tensors: Iterable[Tensor]) -> set[Tensor]:
    """These, and what a graph computes of them: floating point, and of integers among them
    integers.
    """
    found = set(tensors)
    for op in graph.ops:
        operands = found.intersection(op.inputs)
        if operands:
            with_integers = any(not t.dtype.is_floating_point for t in operands)
            found.update(t for t in op.outputs if with_integers or t.dtype.is_floating_point)
    return found


def results_of(graph: Graph) -> list[Tensor]:
    """The outputs but those that were appended because a gradient needs them."""
    return [t for t in graph.outputs if t not in graph._activations]


def add_activation(graph: Graph, t: Tensor, expected: str) -> None:
    """Append a tensor that a gradient needs to a graph's outputs.

    The body of a repeat or conditional can give its inputs alone: GraphError for others, saying
    what is ``expected``.
    """
    if graph._is_body and t in graph.inputs:
        return
    if graph._is_body:
        raise GraphError(
            f"autodiff: got {t._op!r} in graph '{graph.name}', the body of a repeat or "
            f"conditional; expected {expected}. Load it outside and pass it in as an input."
        )
    graph._add_output(t)
    graph._activations.add(t)


class Differentiation:
    """One run of autodiff: the gradient graphs of a graph and of those it calls, each made once."""

    def __init__(
        self,
        graph: Graph,
        provided: Sequence[Tensor],
        required: Sequence[Tensor],
        supplied: Mapping[Graph, GradGraphInfo],
    ) -> None:
        self.infos: dict[Graph, GradGraphInfo] = dict(supplied)
        self.missing: dict[Tensor, str] = {}
        """Forward tensors whose gradients cannot be produced, and why."""
        self.summaries = Summaries()
        """Summaries of forward graphs, which gain outputs but no ops here, and of gradient graphs
        that are ready.
        """
        self._with_integers = any(not t.dtype.is_floating_point for t in required)
        self._reached = reached_outputs(graph, provided, self.has_gradient)

    def has_gradient(self, t: Tensor) -> bool:
        """Whether a tensor's type has gradients: integers' are made where a user asks for some."""
        return self._with_integers or t.dtype.is_floating_point

    def info(self, graph: Graph) -> GradGraphInfo:
        """The gradient of a called graph: from all outputs that one may reach, to all inputs that
        can have one.
        """
        if graph not in self.infos:
            if graph.needs_own_gradient:
                raise GraphError(
                    f"autodiff: got a call of graph '{graph.name}', whose gradient is written by "
                    "hand; expected it in called_graphs_grad_info. Pass {graph: its gradient}, "
                    "or call the module by call_module."
                )
            provided = [t for t in dict.fromkeys(graph.outputs) if t in self._reached[graph]]
            self.differentiate(graph, provided, None)
        return self.infos[graph]

    def differentiate(
        self, graph: Graph, provided: Sequence[Tensor], required: Sequence[Tensor] | None
    ) -> GradGraphInfo:
        """Make and remember a gradient graph. ``required=None``: all inputs whose gradients can be
        produced.
        """
        write = self.summaries.first_write(graph)
        if write is not None:
            raise GraphError(
                f"autodiff: got {write!r} in graph '{graph.name}', built at {write.where}; "
                "expected no op that writes in place, because gradients need the values from "
                "before. Use the out-of-place form."
            )
        self.infos[graph] = info = GradientBuilder(self, graph, provided, required).build()
        return info


def reached_outputs(
    graph: Graph, provided: Iterable[Tensor], has_gradient: Callable[[Tensor], bool]
) -> dict[Graph, set[Tensor]]:
    """The outputs of every graph called at any depth that a gradient of ``provided`` may reach."""
    result: dict[Graph, set[Tensor]] = {g: set() for g in reversed(called_first(graph))}
    result[graph].update(provided)
    for g in result:
        reached = set(result[g])
        for op in reversed(g.ops):
            if reached.isdisjoint(op.outputs):
                continue
            reached.update(filter(has_gradient, op.inputs))
            # What reaches one carried value of a loop may reach all of them, an iteration earlier.
            everything = op.definition.name == "repeat"
            for called, _ in op.called():
                pairs = zip(called.outputs, op.outputs)
                result[called].update(
                    i for i, o in pairs if has_gradient(i) and (everything or o in reached)
                )
    return result


class GradientBuilder:
    """Builds the gradient graph of one graph: walks its ops backwards, applies their rules, keeps
    what is needed.
    """

    def __init__(
        self,
        run: Differentiation,
        forward: Graph,
        provided: Sequence[Tensor],
        required: Sequence[Tensor] | None,
    ) -> None:
        self.run, self.forward, self.provided = run, forward, provided
        self.everything = required is None
        self.required = (
            list(filter(run.has_gradient, forward.inputs)) if required is None else required
        )
        self.active = influenced(forward, self.required)
        self.available = (
            set(forward.inputs) if forward._is_body else {*forward.inputs, *forward.outputs}
        )
        """Forward values that the gradient graph can be given without extending the forward
        graph.
        """
        self.used = {t for op in forward.ops for t in op.inputs}
        self.gradients: dict[Tensor, Tensor] = {}
        """Forward tensor -> the sum of its gradients so far."""
        self.values: dict[Tensor, Tensor] = {}
        """Forward tensor -> its value in the gradient graph."""
        self.clones: dict[Op, Op] = {}
        """Forward op -> the same op in the gradient graph, where values are made again."""
        self.stand_ins: dict[Tensor, Tensor] = {}
        """Value in the gradient graph -> the forward tensor it stands for: an input if any op uses
        it in the end.
        """
        self.named: dict[Tensor, Tensor] = {}
        """Gradient -> the forward tensor after which it is named."""
        self._derivable: dict[Tensor, bool] = {}

    def build(self) -> GradGraphInfo:
        """Make the graph; extend the forward graph's outputs with the values that it needs."""
        main = self.forward.main_graph
        # the graph's name starts with the forward graph's, not with the scopes open here
        with main:
            self.graph = main.ir.create_empty_graph(
                f"{self.forward.name.rpartition('_subgraph(')[0]}_grad"
            )
        with self.graph:
            for t in self.provided:
                gradient = self.graph._add_input(t.spec, PREFIX + t.name)
                self.named[gradient] = t
                if not t.dtype.is_floating_point and t not in self.active:
                    continue  # such as an argmax: it is given a gradient, which goes nowhere
                self.gradients[t] = (
                    added(self.gradients[t], gradient) if t in self.gradients else gradient
                )
            if self.forward._is_body:
                self._recompute()
            for op in reversed(self.forward.ops):
                if not self.active.isdisjoint(op.inputs):
                    self._step_back(op)
            required = self._producible()
            for t in required:
                self.graph._add_output(self._result(t))
            prune(self.graph, self.run.summaries)
        self._start_after_reshapes()
        activations = self._connect()
        return GradGraphInfo.make(
            self.graph,
            self.forward,
            [
                *map(ExpectedConnection.of_gradient, self.provided),
                *map(ExpectedConnection.of_value, activations),
            ],
            map(ExpectedConnection.of_gradient, required),
        )

    # Going back through the ops

    def _step_back(self, op: Op) -> None:
        blocked = next((self.run.missing[t] for t in op.outputs if t in self.run.missing), None)
        if blocked is None and self.gradients.keys().isdisjoint(op.outputs):
            return
        rule = CONTROL_RULES.get(op.definition.name) or rule_for(op)
        if isinstance(rule, str):
            self.block(op.inputs, rule)
            return
        with placed_like(op):
            for t, gradient in rule(self, op):
                if blocked is not None and gradient is not None:
                    # prune removes what the rule made; it told us where gradients stop
                    self.block([t], blocked)
                else:
                    self._accumulate(op, t, gradient)

    def block(self, tensors: Iterable[Tensor], reason: str) -> None:
        """Note that the gradients of these forward tensors cannot be produced."""
        for t in tensors:
            if t in self.active:
                self.run.missing.setdefault(t, reason)

    def _accumulate(self, op: Op, t: Tensor, gradient: Tensor | None) -> None:
        if gradient is None or t not in self.active:
            return
        # 8 bits have gradients of whatever type their rule gives: no op adds in 8 bits
        is_typed = gradient.dtype is t.dtype or (t.dtype in FLOAT8 and gradient.dtype in WIDE)
        if gradient.shape != t.shape or not is_typed:
            raise GraphError(
                f"autodiff: got {gradient.spec} from the gradient rule of {op.definition.name} "
                f"({op.definition.file}) for %{t.name}; expected {t.spec}, the operand's own "
                "shape and dtype."
            )
        known = self.gradients.get(t)
        self.gradients[t] = gradient if known is None else added(known, gradient)

    def gradient(self, t: Tensor) -> Tensor | None:
        """The whole gradient of a result of the op at hand, named after it; None if none reaches
        it.
        """
        gradient = self.gradients.get(t)
        if gradient is not None and gradient._op is not None and gradient not in self.named:
            self.graph._rename(gradient, PREFIX + t.name)
            self.named[gradient] = t
        return gradient

    def gradient_or_zeros(self, t: Tensor) -> Tensor:
        """The same as `gradient`, zeros where none reaches the tensor."""
        gradient = self.gradient(t)
        return self.zeros(t) if gradient is None else gradient

    def zeros(self, t: Tensor) -> Tensor:
        """Zeros of a forward tensor's spec in the current graph, named as its gradient."""
        dtype = float32 if t.dtype in FLOAT8 else t.dtype
        zeros: Tensor = ops.init(t.shape, dtype, PREFIX + t.name, "zero", t.meta_shape)
        return zeros

    def has_transfers(self, graph: Graph) -> bool:
        """Whether a forward graph, or one that it calls, loads or stores."""
        return bool(self.run.summaries.effects(graph) & TRANSFERS)

    def called_info(self, graph: Graph) -> GradGraphInfo:
        """The gradient of a called graph."""
        return self.run.info(graph)

    def why_missing(self, t: Tensor) -> str:
        """Why a called graph's gradient graph lacks the gradient of its tensor ``t``."""
        return self.run.missing.get(t) or (
            f"expected the gradient graph given for '{t._graph.name}' in called_graphs_grad_info "
            f"to return the gradient of %{t.name}."
        )

    def _producible(self) -> Sequence[Tensor]:
        missing = self.run.missing
        for t in self.required:
            if not t.dtype.is_floating_point and t not in self.gradients:
                missing.setdefault(t, INDEX)
        if self.everything:
            return [t for t in self.required if t not in missing]
        for t in self.required:
            if t in missing:
                raise GraphError(
                    f"autodiff: got %{t.name}: {t.spec} of graph '{self.forward.name}' in "
                    f"grads_required; {missing[t]}"
                )
        return self.required

    def _result(self, t: Tensor) -> Tensor:
        gradient = self.gradient(t)
        if gradient is None:
            return self.zeros(t)
        if self.named.get(gradient) is t:
            return gradient
        copy: Tensor = ops.identity(gradient)
        self.graph._rename(copy, PREFIX + t.name)
        return copy

    # Forward values

    def value(self, t: Tensor) -> Tensor:
        """A forward tensor's value in the gradient graph: given as an input, or made again where
        that costs nothing.
        """
        views = [t]
        while views[-1] not in self.values and self._is_new_view(views[-1]):
            assert views[-1]._op is not None
            views.append(views[-1]._op.inputs[0])
        for view in reversed(views):  # an operand before its view: chains may be long
            if view not in self.values:
                self.values[view] = self._new_value(view)
        return self.values[t]

    def _new_value(self, t: Tensor) -> Tensor:
        op = t._op
        if isinstance(t, Constant):
            return clone_constant(t)
        if op is not None and (op in self.clones or self._is_new_view(t)):
            if op not in self.clones:
                self.clones[op] = clone_op(op, self.value)
            return self.clones[op].outputs[op.outputs.index(t)]
        stand_in: Tensor = self.graph._new_tensor(t.spec, t.name, scoped=False)
        self.stand_ins[stand_in] = t
        return stand_in

    def _is_new_view(self, t: Tensor) -> bool:
        """Whether a value is made again that was not yet."""
        op = t._op
        return (
            op is not None
            and op not in self.clones
            and t not in self.available
            and self._is_cheap_view(op)
        )

    def _is_cheap_view(self, op: Op) -> bool:
        """Whether it only rearranges a tensor that is available anyway, or one no larger than its
        results in use.
        """
        if not is_view(op):
            return False
        used = sum(t.nelms for t in op.outputs if t in self.used)
        return self._is_derivable(op.inputs[0]) or op.inputs[0].nelms <= max(
            used, op.outputs[0].nelms
        )

    def _is_derivable(self, t: Tensor) -> bool:
        views = []
        while (
            t not in self._derivable
            and t not in self.available
            and t._op is not None
            and is_view(t._op)
        ):
            views.append(t)
            t = t._op.inputs[0]
        found = self._derivable.get(t, t in self.available or isinstance(t, Constant))
        self._derivable.update(dict.fromkeys(views, found))
        return found

    def _recompute(self) -> None:
        for op in self.forward.ops:
            if not self.run.summaries.has_effect(op, TRANSFERS):
                self.clones[op] = clone_op(op, self.value)

    def _start_after_reshapes(self) -> None:
        """Take a value that is only rearranged, and reshaped in the end, as it is then: nobody does
        that twice.
        """
        originals, outputs = (
            {clone: op for op, clone in self.clones.items()},
            set(self.graph.outputs),
        )
        users: dict[Tensor, list[Op]] = {}
        for op in self.graph.ops:
            for t in dict.fromkeys(op.inputs):
                users.setdefault(t, []).append(op)
        starts: list[tuple[Sequence[Op], Tensor]] = []
        """Views that go, and the forward tensor whose value the last one made."""
        for value, t in self.stand_ins.items():
            views: list[Op] = []
            count = 0
            while (
                t not in self.available and len(users.get(value, ())) == 1 and value not in outputs
            ):
                op = users[value][0]
                if op not in originals or not is_view(op) or len(op.outputs) > 1:
                    break
                value = op.outputs[0]
                views.append(op)
                count = (
                    len(views)
                    if op.definition.name == "reshape" and value.nelms <= t.nelms
                    else count
                )
            if count:
                starts.append((views[:count], originals[views[count - 1]].outputs[0]))
        remove_ops(self.graph, [op for views, _ in starts for op in views])
        for gone, t in starts:
            end = gone[-1].outputs[0]
            self.graph._tensors[end.name] = end
            end._op = None
            self.stand_ins[end] = t

    def _connect(self) -> list[Tensor]:
        """Turn used stand-ins into inputs, in the forward graph's order; returns their forward
        tensors.
        """
        used = {t for op in self.graph.ops for t in op.inputs}.union(self.graph.outputs)
        activations = []
        for t in dict.fromkeys((*self.forward.inputs, *self.forward.tensors)):
            stand_in = self.values.get(t)
            if stand_in is None or stand_in not in self.stand_ins:
                continue
            if stand_in not in used:
                del self.graph._tensors[stand_in.name]
                continue
            self._make_available(t)
            self.graph._inputs.append(stand_in)
            activations.append(t)
        return activations

    def _make_available(self, t: Tensor) -> None:
        if t not in self.available:
            add_activation(
                self.forward,
                t,
                "values that can be computed again, because the gradient recomputes them",
            )


def is_view(op: Op) -> bool:
    """Whether the op's only operand is one whose elements it rearranges, and nothing else happens:
    no collective.
    """
    return len(op.inputs) == 1 and op.viewed == op.inputs and not op.definition.effects
