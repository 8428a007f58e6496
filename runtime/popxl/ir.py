"""The program: a main graph, any number of callable graphs, and how many replicas run it."""

import inspect
import itertools
import numbers
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

import popdist
import popdist.popart
from popart import DataFlow, DeviceInfo

from popxl.collection import without_collection
from popxl.context import get_current_context
from popxl.dtypes import dtype
from popxl.graph import Graph
from popxl.module import Module
from popxl.options import LAUNCHED, SessionOptions
from popxl.remote_buffer import RemoteBuffer
from popxl.replica_grouping import ReplicaGrouping, assignment_from_stride
from popxl.streams import DeviceToHostStream, HostToDeviceStream
from popxl.tensor import TensorByRef
from popxl.values import Tensor, TensorSpec

_ids = itertools.count()


class Ir:
    """A program for ``replication`` replicas (SPMD), or "popdist": as many as the launcher says.

    It grows until a `Session` is made of it, which freezes it.
    """

    def __init__(self, replication: int | Literal["popdist"] = 1) -> None:
        self._id = next(_ids)
        self._graphs: dict[str, Graph] = {}
        self._numbers: dict[str, int] = {}
        """Of the last graph with a name, whose graphs are told apart by their numbers."""
        self._buffers: list[RemoteBuffer] = []
        self._frozen = False
        self._holder: Any = None
        """The `SessionState` whose values of the variables are the host's, from the first Session
        on.
        """
        self.state_once = False
        """Whether the host's values are the device's, see `keep_state_once`."""
        self.remote_files: Any = None
        """`RemoteFiles` of a program whose remote memory is larger than the host's."""
        self.device_memory: None | int | float = None
        """What a program may take of a device's memory, see `limit_device_memory`."""
        self._num_host_transfers = 1
        self._pb_ir = IrInternals(self)
        self._launched: dict[str, Any] | None = None
        """The session options that say which replicas a launcher has started, None without one."""
        self._fixed_replicas: tuple[int, int] | None = None
        """Replicas over all processes and in this one, where no session option changes them any
        more.
        """
        options = self._pb_ir.getSessionOptions()
        if replication == "popdist":
            popdist.popart.configureSessionOptions(options)
            self._launched = {name: getattr(options, name) for name in LAUNCHED}
            self._fixed_replicas = popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()
        elif (
            isinstance(replication, numbers.Integral)
            and not isinstance(replication, bool)
            and replication >= 1
        ):
            options.enableReplicatedGraphs, options.replicatedGraphCount = (
                replication > 1,
                int(replication),
            )
        else:
            raise ValueError(
                f"Ir: got replication {replication!r}; expected a positive int or 'popdist'."
            )
        if cache := os.environ.get("POPXL_CACHE_DIR"):
            options.enableEngineCaching, options.cachePath = True, cache
        self._main_graph = self._new_graph("", unique=False)

    @property
    def id(self) -> int:
        """Unique number."""
        return self._id

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

    @property
    def num_host_transfers(self) -> int:
        """Transfers of each stream in one run: device iterations times accumulation where loads sit
        in repeats.
        """
        return self._num_host_transfers

    @num_host_transfers.setter
    def num_host_transfers(self, value: int) -> None:
        if value < 1:
            raise ValueError(f"num_host_transfers: got {value}; expected at least 1.")
        self._check_open("num_host_transfers")
        self._num_host_transfers = int(value)

    @property
    def replication_factor(self) -> int:
        """Replicas over all processes. Without a launcher the session options say how many, until a
        Session is made.
        """
        return (
            self._fixed_replicas[0]
            if self._fixed_replicas
            else self._pb_ir.getSessionOptions().replicas()
        )

    @replication_factor.setter
    def replication_factor(self, value: int) -> None:
        self._check_open("replication_factor")
        options = self._pb_ir.getSessionOptions()
        options.enableReplicatedGraphs, options.replicatedGraphCount = int(value) > 1, int(value)
        self._launched = self._fixed_replicas = None

    @property
    def instance_replication_factor(self) -> int:
        """Replicas in this process."""
        return (
            self._fixed_replicas[1]
            if self._fixed_replicas
            else self._pb_ir.getSessionOptions().replicas()
        )

    def __eq__(self, value: Any) -> bool:
        if not isinstance(value, Ir):
            raise TypeError(f"Ir: got {type(value).__name__} to compare with; expected an Ir.")
        return self._id == value._id

    def __hash__(self) -> int:
        return hash(self._id)

    # Groupings

    def replica_grouping(self, stride: int = 1, group_size: int | None = None) -> ReplicaGrouping:
        """Groups of ``group_size`` replicas ``stride`` apart; the default size is
        replication_factor // stride.

        Raises:
            ValueError: stride or size outside 1..replicas, or not dividing the replicas.
        """
        n = self.replication_factor
        if not 1 <= stride <= n or n % stride:
            raise ValueError(
                f"replica_grouping: got stride {stride}; expected a divisor of the {n} replicas."
            )
        size = n // stride if group_size is None else group_size
        if not 1 <= size <= n:
            raise ValueError(
                f"replica_grouping: got group_size {size}; expected 1 <= group_size <= {n} "
                "replicas."
            )
        return ReplicaGrouping._from_assignment(
            self, assignment_from_stride(n, 1 if size == 1 else stride, size)
        )

    def replica_grouping_from_assignments(self, assignment: list[int]) -> ReplicaGrouping:
        """The grouping with the given group number per replica. ValueError if the groups are not
        equal and in order.
        """
        return ReplicaGrouping._from_assignment(self, list(assignment))

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
        if not callable(fn):
            raise TypeError(
                f"create_graph: got {type(fn).__name__}; expected a function or a popxl.Module. "
                "Pass the function first, then its arguments."
            )
        build = fn.build if isinstance(fn, Module) else fn
        signature = inspect.signature(build)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            given = [type(a).__name__ for a in args] + [
                f"{n}={type(a).__name__}" for n, a in kwargs.items()
            ]
            raise ValueError(
                f"create_graph: got arguments ({', '.join(given)}); expected those of "
                f"{_name_of(fn)}{signature}: {error}. Pass a tensor, a spec or another value for "
                "each parameter without a default."
            ) from None
        bound.apply_defaults()
        graph = self._new_graph(_name_of(fn))
        with graph, without_collection():
            for name, value in bound.arguments.items():
                bound.arguments[name] = _make_inputs(graph, name, value, signature.parameters[name])
            result = build(*bound.args, **bound.kwargs)
            for tensor in _as_outputs(result, _name_of(fn)):
                graph._add_output(tensor)
        return graph

    def create_empty_graph(self, name: str | None = None) -> Graph:
        """A new graph, to be filled with ``with graph:``, graph_input and graph_output."""
        return self._new_graph(name or "graph")

    def _new_graph(self, name: str, unique: bool = True) -> Graph:
        self._check_open("create_graph")
        if unique:
            scopes = get_current_context().name_scopes
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
        (folder / f"{check}.dot").write_text("\n".join([*lines, "}"]) + "\n")

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

    def _new_buffer(self, shape: tuple[int, ...], dtype: dtype, entries: int) -> RemoteBuffer:
        return RemoteBuffer(shape, dtype, entries)

    # Freezing

    def _check_open(self, what: str) -> None:
        if self._frozen:
            raise RuntimeError(
                f"{what}: got a change to Ir {self._id} after a Session was made of it; "
                "expected none. Build a new Ir."
            )

    def _freeze(self) -> None:
        self._pb_ir.getSessionOptions().check()
        self._fixed_replicas = self.replication_factor, self.instance_replication_factor
        self._frozen = True


def _name_of(fn: Any) -> str:
    """What a graph of a function or Module is called: the qualified name, without the mark of local
    definitions.
    """
    named = fn if hasattr(fn, "__qualname__") and not isinstance(fn, Module) else type(fn)
    qualified: str = named.__qualname__
    return qualified.replace(".<locals>", "")


def _is_by_ref(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    return annotation is TensorByRef or TensorByRef in getattr(annotation, "__args__", ())


def _make_inputs(graph: Graph, name: str, value: Any, parameter: inspect.Parameter) -> Any:
    by_ref = _is_by_ref(parameter)
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        if _all_tensors(list(value.values()), name):
            return {k: graph._add_input(_spec(v), k, by_ref) for k, v in value.items()}
        return {k: _make_input(graph, k, v, by_ref) for k, v in value.items()}
    return _make_input(graph, name, value, by_ref)


def _make_input(graph: Graph, name: str, value: Any, by_ref: bool) -> Any:
    if isinstance(value, (Tensor, TensorSpec)):
        return graph._add_input(_spec(value), name, by_ref)
    if isinstance(value, (list, tuple)) and _all_tensors(value, name):
        return type(value)(
            [graph._add_input(_spec(v), f"{name}_{i}", by_ref) for i, v in enumerate(value)]
        )
    return value


def _all_tensors(values: Any, name: str) -> bool:
    found = [isinstance(v, (Tensor, TensorSpec)) for v in values]
    if any(found) and not all(found):
        raise TypeError(
            f"create_graph: got {name} with tensors and other values; expected only tensors or "
            "none. Pass the others as parameters of their own."
        )
    return any(found)


def _spec(value: Tensor | TensorSpec) -> TensorSpec:
    return value.spec if isinstance(value, Tensor) else value


def _as_outputs(result: Any, name: str) -> list[Tensor]:
    if result is None:
        return []
    outputs = [result] if isinstance(result, Tensor) else result
    try:
        outputs = list(outputs)
    except TypeError:
        outputs = [result]
    for item in outputs:
        if not isinstance(item, Tensor):
            raise ValueError(
                f"create_graph: got {type(item).__name__} from {name}; expected None, a tensor or "
                "tensors. Return what ops gave, and keep other values outside the graph."
            )
    return outputs


class IrInternals:
    """What programs find at ``ir._pb_ir``."""

    session_type: ClassVar[Callable[..., Any]]
    """`popxl.Session`; its module fills it in when it is imported."""

    def __init__(self, ir: Ir) -> None:
        self._ir = ir
        self._options = SessionOptions()
        self._flow = DataFlow()

    def getSessionOptions(self) -> SessionOptions:  # noqa: N802 - PopART's name
        """The one mutable options object of the Ir."""
        return self._options

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
