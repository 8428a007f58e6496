"""Graphs: ordered ops with inputs and outputs. The order in which ops were added is always a valid
order.
"""

from typing import TYPE_CHECKING, Any

from popxl.context import Hooks, get_current_context
from popxl.values import Constant, Tensor, TensorSpec

if TYPE_CHECKING:
    from popxl.ir import Ir
    from popxl.op_records import Op
    from popxl.tensor import Variable


class Graph:
    """One graph of an Ir. ``with graph:`` makes it current, any number of times. TypeError on
    construction.
    """

    _ir: "Ir"
    _name: str
    _tensors: dict[str, Tensor]
    _counters: dict[str, int]
    _inputs: list[Tensor]
    _outputs: list[Tensor]
    _by_ref_inputs: set[Tensor]
    _activations: set[Tensor]
    """Outputs that autodiff appended; they are not among the gradients that it expects by
    default.
    """
    _constants: list[Constant]
    _variables: list["Variable"]
    kept: list[Tensor]
    """Main graph only: what ops that run with an upload of the weights have made for others, see
    `fragments`.
    """
    _ops: list["Op"]
    _call_sites: list["Op"]
    """Ops anywhere in the Ir that call this graph; a plain call gains this graph's new outputs."""
    rounding_seed: Tensor | None
    """The input that stochastic rounding draws from, see `popxl.extensions.round_from`."""
    needs_own_gradient: bool
    """Whether autodiff of a graph that calls this one has to be given its gradient, as that is not
    the derived one.
    """
    _hooks: Hooks

    def __init__(self) -> None:
        raise TypeError(
            "Graph: got a constructor call; expected ir.create_graph(...) or "
            "ir.create_empty_graph()."
        )

    @classmethod
    def _make(cls, ir: "Ir", name: str) -> "Graph":
        self = cls.__new__(cls)
        self._ir, self._name = ir, name
        self._tensors, self._counters = {}, {}
        self._inputs, self._outputs, self._by_ref_inputs, self._activations = [], [], set(), set()
        self._constants, self._variables, self._ops, self._call_sites = [], [], [], []
        self.kept, self.rounding_seed, self._hooks = [], None, Hooks()
        self.needs_own_gradient = False
        return self

    @property
    def name(self) -> str:
        """Unique name in the Ir; "" for the main graph."""
        return self._name

    @property
    def _scope(self) -> str:
        return self._name

    @property
    def id(self) -> str:
        """Unique id in the Ir."""
        return self._name

    @property
    def ir(self) -> "Ir":
        """Owning Ir."""
        return self._ir

    @property
    def main_graph(self) -> "Graph":
        """Main graph of the Ir."""
        return self._ir.main_graph

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Inputs: the function's arguments first, then those of graph_input."""
        return tuple(self._inputs)

    @property
    def inputs_by_name(self) -> dict[str, Tensor]:
        """Inputs by name."""
        return {t.name: t for t in self._inputs}

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Outputs; autodiff may append to them."""
        return tuple(self._outputs)

    @property
    def ops(self) -> tuple["Op", ...]:
        """Ops in the order they were added."""
        return tuple(self._ops)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the graph."""
        return tuple(self._tensors.values())

    @property
    def variables(self) -> tuple["Variable", ...]:
        """Variables; only the main graph has any."""
        return tuple(self._variables)

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Constants of this graph."""
        return tuple(self._constants)

    @property
    def called_graphs(self) -> tuple["Graph", ...]:
        """Graphs that ops here call directly, each once."""
        return tuple(dict.fromkeys(graph for op in self._ops for graph, _ in op.called()))

    def get_tensor(self, tensor_id: str) -> Tensor:
        """The tensor with this id. ValueError if there is none."""
        for tensor in self._tensors.values():
            if tensor.id == tensor_id:
                return tensor
        raise ValueError(
            f"get_tensor: got id {tensor_id!r}; expected the id of a tensor of graph "
            f"'{self._name or 'main'}'."
        )

    def __contains__(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            raise TypeError(f"in graph: got {type(value).__name__}; expected a Tensor.")
        return value._graph is self

    def __eq__(self, value: Any) -> bool:
        if not isinstance(value, Graph):
            raise TypeError(f"Graph: got {type(value).__name__} to compare with; expected a Graph.")
        return value is self

    __hash__ = object.__hash__

    def __enter__(self) -> "Graph":
        get_current_context().push_graph(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        get_current_context().pop_graph()

    def register_op_created_hook(self, fn: Any) -> int:
        """Call ``fn(op)`` after each op made in this graph; returns a handle."""
        return self._hooks.register(fn)

    def remove_op_created_hook(self, handle: int) -> None:
        """Undo a registration. ValueError for an unknown handle."""
        self._hooks.remove(handle)

    def __repr__(self) -> str:
        counts = f"{len(self._inputs)} inputs, {len(self._ops)} ops, {len(self._outputs)} outputs"
        return f"Graph[{self._name or 'main'}: {counts}]"

    # Building

    def _check_open(self, what: str) -> None:
        self._ir._check_open(what)

    def _unique(self, name: str, table: dict[str, Any]) -> str:
        if name not in table:
            return name
        while True:
            self._counters[name] = self._counters.get(name, 0) + 1
            candidate = f"{name}__{self._counters[name]}"
            if candidate not in table:
                return candidate

    def _new_tensor(
        self,
        spec: TensorSpec,
        name: str,
        op: "Op | None" = None,
        kind: type[Tensor] = Tensor,
        scoped: bool = True,
    ) -> Any:
        context = get_current_context()
        if scoped and context._graphs and context.graph is self:
            name = "".join(f"{s}/" for s in context.name_scopes) + name
        name = self._unique(name, self._tensors)
        tensor = kind._make(self, name, spec, op)
        self._tensors[name] = tensor
        return tensor

    def _rename(self, tensor: Tensor, name: str) -> None:
        del self._tensors[tensor.name]
        tensor._name = self._unique(name, self._tensors)
        self._tensors[tensor.name] = tensor

    def _add_input(self, spec: TensorSpec, name: str, by_ref: bool = False) -> Tensor:
        self._check_open("graph_input")
        tensor: Tensor = self._new_tensor(spec, name)
        self._inputs.append(tensor)
        if by_ref:
            self._by_ref_inputs.add(tensor)
        return tensor

    def _add_output(self, t: Tensor) -> None:
        if not isinstance(t, Tensor) or t._graph is not self:
            raise ValueError(
                f"graph_output: got {t!r}; expected a tensor of graph '{self._name or 'main'}'. "
                "Return tensors made inside the graph."
            )
        self._check_open("graph_output")
        self._outputs.append(t)
        for call in self._call_sites:
            call.add_output(t.spec, t.name)

    def _add_op(self, op: "Op") -> None:
        self._ops.append(op)
        for graph, _ in op.called():
            if op.definition.name == "call":
                graph._call_sites.append(op)
            else:
                graph._is_body = True
        self._hooks(op)
        get_current_context()._hooks(op)

    _is_body = False
    """Whether a repeat or conditional runs this graph; such a graph's outputs cannot be
    extended.
    """


def called_first(*graphs: Graph) -> list[Graph]:
    """The graphs and all graphs that they call, at any depth; each once, after every graph that it
    calls.
    """
    order: dict[Graph, None] = {}
    visited: set[Graph] = set()

    def visit(g: Graph) -> None:
        if g in visited:
            return
        visited.add(g)
        for called in g.called_graphs:
            visit(called)
        order[g] = None

    for graph in graphs:
        visit(graph)
    return list(order)
