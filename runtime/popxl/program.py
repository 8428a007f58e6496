"""A program: tensors, ops, graphs, and the Ir that holds them.

A tensor knows its graph, a graph its ops and its Ir, an op its graph and its operands: one
recursive type, and so one module, which is longer than others are. What these classes do that needs
none of the others is in the modules that this one imports. Other modules import them by PopXL's
names: `popxl.tensor`, `popxl.graph`, `popxl.ir`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
from popart import DataFlow, DeviceInfo

from popxl.collection import without_collection
from popxl.dtypes import dtype
from popxl.errors import UndefinedValue
from popxl.graph_arguments import as_outputs, bind, make_inputs, name_of
from popxl.module import Module
from popxl.native_names import op_type
from popxl.op_definition import OpDefinition
from popxl.options import SessionOptions
from popxl.placement import DEFAULT_IPU, NO_IPU, Place, TileSet
from popxl.remote_buffer import RemoteBuffer
from popxl.replica_grouping import ReplicaGrouping
from popxl.replicated_program import ReplicatedProgram
from popxl.session_lock import SessionLock
from popxl.spec import TensorSpec
from popxl.streams import DeviceToHostStream, HostToDeviceStream
from popxl.tensor_methods import TensorMethods
from popxl.tracing import CONTEXT, Hooks
from popxl.typing_ import NewAliasAnnotation
from popxl.unpicklable import Unpicklable


class Tensor(TensorMethods["Tensor"]):
    """A symbolic value in one graph. Compared and hashed by identity; RuntimeError on
    construction.
    """

    _graph: "Graph"
    _op: "Op | None"
    _remote: Any = None

    def __init__(self) -> None:
        raise RuntimeError(
            "Tensor: got a constructor call; expected popxl.variable, popxl.constant, "
            "graph_input or an op."
        )

    @classmethod
    def _make(cls, graph: "Graph", name: str, spec: TensorSpec, op: "Op | None") -> Any:
        self = cls.__new__(cls)
        self._graph, self._name, self._spec, self._op = graph, name, spec, op
        return self

    @property
    def id(self) -> str:
        """Unique id in the Ir: the graph's scope and the name."""
        return f"{self.scope}/{self._name}" if self.scope else self._name

    @property
    def scope(self) -> str:
        """The graph's part of the id."""
        return self._graph._scope

    @property
    def ir(self) -> "Ir":
        """Owning Ir."""
        return self._graph.ir

    @property
    def location_info(self) -> Any:
        """The tensor's place; remote placement for remote variables, None otherwise."""
        return self._remote

    @property
    def ipu(self) -> int:
        """Virtual device: of the op that made it, 0 outside `popxl.ipu`; else of the first op with
        one that uses it.

        UndefinedValue if neither an op made it nor one uses it, and where such ops have none:
        ``popxl.ipu(None)``.
        """
        ipu = self._device()
        if ipu is None:
            how = "which no op made and none uses" if self._op is None else "made without a device"
            raise UndefinedValue(f"Tensor.ipu: got %{self.name}, {how}; expected a known device.")
        return ipu

    def _device(self) -> int | None:
        """The device of the op that makes it, else of the first op that uses it, or None."""
        if self._op is not None:
            return self._op.place_of(self).ipu
        users = (op for op in self._graph._ops if self in op.inputs)
        taken = (
            int(op.arguments["source"]) if op.definition.name == "ipu_copy" else _known(op.ipu)
            for op in users
        )
        return next((ipu for ipu in taken if ipu is not None), None)

    @property
    def tile_set(self) -> TileSet:
        """Tile set of the op that made it. UndefinedValue if unknown."""
        tile_set = None if self._op is None else self._op.place_of(self).tile_set
        if tile_set is None:
            raise UndefinedValue(
                f"Tensor.tile_set: got %{self.name}, which no op made; expected a known tile set."
            )
        return tile_set

    @property
    def in_sync_with_ipu(self) -> bool:
        """Whether a variable's value on the host is current."""
        return True

    def _constant(self, data: np.ndarray, dtype: dtype) -> "Tensor":
        return make_constant(data, dtype, None)


def _known(ipu: int | None) -> int | None:
    """The virtual device of an op that carries this; None if it has none."""
    return None if ipu == NO_IPU else DEFAULT_IPU if ipu is None else ipu


class Constant(Tensor):
    """A tensor with a fixed value in its graph."""

    host_value: np.ndarray

    def copy_to_ipu(self, dst: int, src: int) -> Tensor:  # type: ignore[override]
        """`ops.ipu_copy` with an explicit source."""
        return self._apply("ipu_copy", self, dst, src)


RetrievalMode = Literal["one_per_group", "all_replicas"]


class Variable(Tensor):
    """A tensor of the main graph that keeps its value from run to run.

    Its host array has `shape_on_host`: the groups of its replica grouping in front when there are
    several.
    """

    host_value: np.ndarray | None
    """Initial host value. A Session takes it over and leaves None, so that state exists once."""
    _grouping: ReplicaGrouping | None
    """None: all replicas, however many the program gets."""
    _retrieval: RetrievalMode
    shard: Tensor | None = None
    """The tensor of a `replica_sharded_variable` on the device that holds this replica's piece."""
    shard_over: int = 1

    def copy_to_ipu(self, dst: int, src: int) -> Tensor:  # type: ignore[override]
        """`ops.ipu_copy` with an explicit source."""
        return self._apply("ipu_copy", self, dst, src)

    @property
    def in_sync_with_ipu(self) -> bool:
        """Whether the host has the value that the device has: not after a run that changes it,
        until it is read.
        """
        holder = self.ir._holder
        return holder is None or holder.is_current(self)

    @property
    def replica_grouping(self) -> ReplicaGrouping:
        """Groups of replicas that share one value."""
        return self._grouping or self.ir.replica_grouping()

    @property
    def retrieval_mode(self) -> RetrievalMode:
        """Whether the host reads one value per group or every replica's."""
        return self._retrieval

    @property
    def shape_on_replica(self) -> tuple[int, ...]:
        """Shape that one replica holds."""
        return self.shape

    @property
    def shape_on_host(self) -> tuple[int, ...]:
        """`shape`, with the number of groups in front when there are several."""
        groups = 1 if self._grouping is None else self._grouping.num_groups
        return (groups, *self.shape) if groups > 1 else self.shape


def make_constant(data: np.ndarray, dtype: dtype, name: str | None) -> Constant:
    """A constant of the current graph from an array of the right numpy type."""
    graph = cast("Graph", CONTEXT.graph)
    graph._check_open("constant")
    tensor: Constant = graph._new_tensor(TensorSpec(data.shape, dtype), name or "t", kind=Constant)
    tensor.host_value = data
    graph._constants.append(tensor)
    return tensor


if TYPE_CHECKING:
    TensorByRef = Tensor
else:
    TensorByRef = NewAliasAnnotation("TensorByRef", Tensor)
"""Annotation of a graph function's parameter: writes inside the graph are applied to the caller's
tensor.
"""


class Op(Unpicklable):
    """One op in a graph: a definition applied to arguments."""

    __slots__ = (
        "definition",
        "arguments",
        "graph",
        "name",
        "source",
        "refusal",
        "_inputs",
        "_outputs",
        "ipu",
        "io_tiles",
        "execution",
        "sequence_block",
        "_modified_here",
    )

    def __init__(
        self,
        definition: OpDefinition,
        arguments: dict[str, Any],
        graph: "Graph",
        name: str,
        source: tuple[str, int],
    ):
        self.definition = definition
        self.arguments = arguments
        self.graph = graph
        self.name = name
        self.source = source
        self._inputs = tuple(flatten(arguments.values()))
        self._outputs: list[Tensor] = []
        context = CONTEXT
        self.refusal: Exception | None = context.refusal
        """Why it cannot be executed: `popxl.ops.checks.refuse_to_execute` has said so."""
        self.ipu, self.io_tiles, self.execution = (
            context.ipu_of_ops,
            context.io_tile_set,
            context.execution,
        )
        self.sequence_block = context.sequence_block
        self._modified_here: set[Tensor] = set()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensor operands, flat, in signature order."""
        return self._inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Results. Those of calls grow with the called graph's outputs."""
        return tuple(self._outputs)

    def opType(self) -> str:  # noqa: N802 - PopART's name
        """The native layer's name of the kind of op, such as "MatMul"."""
        return op_type(self.definition.name)

    @property
    def written(self) -> tuple[Tensor, ...]:
        """Operands whose storage this op changes; for calls those that the called graph takes by
        reference.
        """
        if "control" in self.definition.effects:
            return tuple(
                t
                for graph, inputs in self.called()
                for g, t in zip(graph.inputs, inputs)
                if self.is_by_reference(g)
            )
        return tuple(cast(Tensor, self.arguments[p]) for p in self.definition.writes)

    @property
    def viewed(self) -> tuple[Tensor, ...]:
        """Operands that the results may be views of."""
        return tuple(flatten(self.arguments[p] for p in self.definition.views))

    def called(self) -> list[tuple["Graph", tuple[Tensor, ...]]]:
        """(graph, its inputs here) for each graph that this op calls."""
        a = self.arguments
        if "then_branch" in a:
            return [(a["then_branch"], a["then_inputs"]), (a["else_branch"], a["else_inputs"])]
        return (
            [(a["graph"], a["inputs"])]
            if isinstance(a.get("inputs"), tuple) and "graph" in a
            else []
        )

    def place_of(self, t: Tensor, known: dict[Tensor, Place] | None = None) -> Place:
        """The place of one of the results; what a call returns is where the call, or the called
        graph, put it.

        Args:
            known: of results that were asked for on the way here; it gains more.
        """
        if "ipus" not in self.arguments and not self.called():
            return self._own_place(self.ipu)
        known = {} if known is None else known
        if t not in known:
            known[t] = self._place_of(self.outputs.index(t), known)
        return known[t]

    def _place_of(self, index: int, known: dict[Tensor, Place]) -> Place:
        if not self.called():
            return self._own_place(self.arguments["ipus"][index])
        inner = {place_of(graph.outputs[index], known) for graph, _ in self.called()}
        ipu, set_of_all = inner.pop() if len(inner) == 1 else Place(None, None)
        return Place(ipu if self.ipu is None else _known(self.ipu), set_of_all)

    def _own_place(self, ipu: int | None) -> Place:
        return Place(_known(ipu), "io" if self.io_tiles else "compute")

    def is_by_reference(self, inner: Tensor) -> bool:
        """Whether this call takes an input of a called graph by reference: as every call does, or
        for itself.
        """
        return inner in inner._graph._by_ref_inputs or inner in self._modified_here

    def take_by_reference(self, inner: Tensor) -> None:
        """Let this call, and no other, take an input of a called graph by reference."""
        self._modified_here.add(inner)

    def set_argument(self, name: str, value: Any) -> None:
        """Replace one argument (calls gain inputs this way while a program is being built)."""
        self.arguments[name] = value
        self._inputs = tuple(flatten(self.arguments.values()))

    def add_output(self, spec: TensorSpec, name: str) -> Tensor:
        """Append a result."""
        tensor: Tensor = self.graph._new_tensor(spec, name, op=self)
        self._outputs.append(tensor)
        return tensor

    @property
    def where(self) -> str:
        """The line where the user made it: ``file:line``."""
        return f"{self.source[0]}:{self.source[1]}"

    @property
    def described(self) -> str:
        """The op, its graph and where it was made, for messages."""
        return f"{self} in graph '{self.graph.name or 'main'}', built at {self.where}"

    def __repr__(self) -> str:
        results = ", ".join(f"%{t.name}" for t in self._outputs)
        return (
            f"{results} = {self.definition.name}({', '.join(f'%{t.name}' for t in self._inputs)})"
        )


def place_of(t: Tensor, known: dict[Tensor, Place] | None = None) -> Place:
    """The place where the op that made a tensor put it, see `Op.place_of`."""
    return Place(None, None) if t._op is None else t._op.place_of(t, known)


def flatten(values: Any) -> Iterator[Tensor]:
    """The tensors among values and their lists and tuples, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from flatten(value)


class Graph(Unpicklable):
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
    retained: list[Tensor]
    """Main graph only: what ops that run with an upload of the weights have made for others, see
    `fragments`.
    """
    _ops: list["Op"]
    _call_sites: list["Op"]
    """Ops anywhere in the Ir that call this graph; a plain call gains this graph's new outputs."""
    rounding_seed: Tensor | None
    """The input that stochastic rounding draws from, see `popxl.extensions.round_from`."""
    is_split: bool
    """Whether its phases are what it calls, see `popxl.extensions.split_into_phases`."""
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
        self.retained, self.rounding_seed, self._hooks = [], None, Hooks()
        self.is_split = self.needs_own_gradient = False
        return self

    @property
    def name(self) -> str:
        """Unique name in the Ir; "" for the main graph."""
        return self._name

    @property
    def _pb_graph(self) -> "GraphInternals":
        return GraphInternals(self)

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
        CONTEXT.push_graph(self)
        self._times_entered += 1
        return self

    def __exit__(self, *exc: Any) -> None:
        CONTEXT.pop_graph()
        self._times_entered -= 1

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
        context = CONTEXT
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
        CONTEXT._hooks(op)

    _times_entered = 0
    """How often the graph was entered by `with` statements that have not ended: it is being built.
    """
    _is_body = False
    """Whether a repeat or conditional runs this graph; such a graph's outputs cannot be
    extended.
    """


class Ir(ReplicatedProgram):
    """A program for ``replication`` replicas (SPMD), or "popdist": as many as the launcher says.

    It grows until a `Session` is made of it, which freezes it.
    """

    def __init__(self, replication: int | Literal["popdist"] = 1) -> None:
        super().__init__(replication)
        self._graphs: dict[str, Graph] = {}
        self._numbers: dict[str, int] = {}
        """The number of the last graph with a name, whose graphs are told apart by their numbers.
        """
        self._buffers: list[RemoteBuffer] = []
        self._holder: Any = None
        """The `SessionState` whose values of the variables are the host's, from the first Session
        on.
        """
        self._session_lock = SessionLock()
        self.state_once = False
        """Whether the host's values are the device's, see `keep_state_once`."""
        self.remote_files: Any = None
        """`RemoteFiles` of a program whose remote memory is larger than the host's."""
        self.alternating_steps = 1
        """See `popxl.extensions.alternate_steps`."""
        self.device_memory: None | int | float = None
        """What a program may take of a device's memory, see `limit_device_memory`."""
        self._pb_ir = IrInternals(self)
        self._main_graph = self._new_graph("", unique=False)

    @property
    def main_graph(self) -> Graph:
        """The graph that Session.run executes."""
        return self._main_graph

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """Every graph, the main graph first."""
        return tuple(self._graphs.values())

    @property
    def remote_buffers(self) -> tuple[RemoteBuffer, ...]:
        """Every remote buffer, by id."""
        return tuple(self._buffers)

    # Graphs

    def create_graph(
        self,
        fn: Callable[..., None | Tensor | Iterable[Tensor]] | Module,
        *args: Any,
        **kwargs: Any,
    ) -> Graph:
        """Trace a function, or a Module's ``build``, into a new graph.

        Tensors and specs among the arguments, and lists or tuples of them, become inputs in
        signature order; other arguments are passed through, dicts untouched. Parameters annotated
        ``TensorByRef`` (or ``list[TensorByRef]``) are by reference.

        Raises:
            TypeError: fn is not callable, or a list mixes tensors with other values.
            ValueError: the arguments do not match the signature, or a result is not a tensor.
        """
        build, bound = bind(fn, args, kwargs)
        graph = self._new_graph(name_of(fn))
        with graph, without_collection():
            for name, value in bound.arguments.items():
                parameter = bound.signature.parameters[name]
                bound.arguments[name] = make_inputs(
                    graph._add_input, name, value, parameter.kind, _is_by_ref(parameter)
                )
            result = build(*bound.args, **bound.kwargs)
            for tensor in as_outputs(result, name_of(fn)):
                graph._add_output(tensor)
        return graph

    def create_empty_graph(self, name: str | None = None) -> Graph:
        """A new graph, to be filled with ``with graph:``, graph_input and graph_output."""
        return self._new_graph(name or "graph")

    def _new_graph(self, name: str, unique: bool = True) -> Graph:
        self._check_open("create_graph")
        if unique:
            scopes = CONTEXT.name_scopes
            name = "/".join([*scopes, name])
            number = self._numbers[name] = self._numbers.get(name, -1) + 1
            name = f"{name}_subgraph({number})"
        graph = Graph._make(self, name)
        self._graphs[name] = graph
        return graph

    def dot_checkpoint(self, check: str, save_dir: Path | str | None = None) -> None:
        """Write every graph in Graphviz form to ``save_dir/<check>.dot`` (default: the working
        directory).
        """
        folder = Path(save_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["digraph ir {"]
        for graph in self.graphs:
            for number, op in enumerate(graph.ops):
                node = f"{graph.name or 'main'}/{op.name}/{number}"
                lines.append(f'  "{node}" [label="{op.definition.name}"];')
                lines.extend(f'  "{t.id}" -> "{node}";' for t in op.inputs)
                lines.extend(f'  "{node}" -> "{t.id}";' for t in op.outputs)
        path = folder / f"{check}.dot"
        path.unlink(missing_ok=True)
        with open(path, "x") as file:  # never through a link
            file.write("\n".join([*lines, "}"]) + "\n")

    # Streams and buffers

    def _streams(self, op_name: str, argument: str) -> set[Any]:
        return {
            op.arguments[argument]
            for graph in self.graphs
            for op in graph.ops
            if op.definition.name == op_name
        }

    def get_all_h2d_streams(self) -> set[HostToDeviceStream]:
        """Streams that some host_load uses."""
        return self._streams("host_load", "h2d_stream")

    def get_all_d2h_streams(self) -> set[DeviceToHostStream]:
        """Streams that some host_store uses."""
        return self._streams("host_store", "d2h_stream")

    def _register_buffer(self, buffer: RemoteBuffer) -> int:
        self._buffers.append(buffer)
        return len(self._buffers)


def _is_by_ref(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    return annotation is TensorByRef or TensorByRef in getattr(annotation, "__args__", ())


class GraphInternals(Unpicklable):
    """What programs find at ``graph._pb_graph``."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def getOps(self) -> list[Op]:  # noqa: N802 - PopART's name
        """The graph's own ops; those of graphs that they call are not among them."""
        return list(self._graph.ops)

    def getOpSchedule(self, *args: Any, **kwargs: Any) -> list[Op]:  # noqa: N802
        """The same in the order in which they run: that in which they were made."""
        return self.getOps()

    def setCanBeRecursivelyAutodiffed(self, value: bool) -> None:  # noqa: N802
        """Say whether autodiff of a graph that calls this one may derive this one's gradient;
        otherwise it has to be given in called_graphs_grad_info.
        """
        self._graph.needs_own_gradient = not value

    def getCanBeRecursivelyAutodiffed(self) -> bool:  # noqa: N802
        """What `setCanBeRecursivelyAutodiffed` has said; True before."""
        return not self._graph.needs_own_gradient


class IrInternals(Unpicklable):
    """What programs find at ``ir._pb_ir``."""

    session_type: ClassVar[Callable[..., Any]]
    """`popxl.Session`; its module fills it in when it is imported."""

    def __init__(self, ir: Ir) -> None:
        self._ir = ir
        self._flow = DataFlow()

    def getSessionOptions(self) -> SessionOptions:  # noqa: N802 - PopART's name
        """The one mutable options object of the Ir."""
        return self._ir._options

    def getAllGraphs(self) -> list[Graph]:  # noqa: N802
        """Every graph, the main graph included."""
        return list(self._ir.graphs)

    def setPatterns(self, *args: Any, **kwargs: Any) -> None:  # noqa: N802
        """Accepted; graph clean-up happens in the engine."""

    def applyPreAliasPatterns(self, *args: Any, **kwargs: Any) -> tuple[()]:  # noqa: N802
        """Accepted; graph clean-up happens in the engine."""
        return ()

    def setDataFlow(self, flow: DataFlow) -> None:  # noqa: N802
        """Set how often streams are used in one run, and which outputs a native session returns."""
        self._ir.num_host_transfers = flow.batchesPerStep()
        self._flow = flow

    def getDataFlow(self) -> DataFlow:  # noqa: N802
        """What `setDataFlow` and ``ir.num_host_transfers`` say."""
        anchors = {name: self._flow.art(name) for name in self._flow.anchors()}
        return DataFlow(self._ir.num_host_transfers, anchors)

    def updateVertices(self) -> None:  # noqa: N802
        """Accepted; the order of ops is that in which they were made."""

    def setIsPrepared(self) -> None:  # noqa: N802
        """Accepted; a session prepares what it needs."""

    def openSession(self, device: DeviceInfo) -> Any:  # noqa: N802
        """A session of the program that keeps the host's values of variables apart, for
        `popart.InferenceSession`.
        """
        return type(self).session_type(self._ir, device, weights_to_host_on_exit=False)
