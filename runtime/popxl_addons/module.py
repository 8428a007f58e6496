"""Layers: classes whose ``build`` defines a graph and declares the variables that the graph
needs.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import popxl
from popxl import ReplicaGrouping, Tensor
from popxl.transforms.autodiff import results_of

from popxl_addons.custom_grad import (
    build_custom_grad_graph,
    create_grad_graph_info,
)
from popxl_addons.grad_tensors import _Aux, _VarGrads
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.graph_cache import argument_hash, tensors_of_call
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import overrides
from popxl_addons.variable_factory import (
    DataSource,
    NamedVariableFactories,
    VariableFactory,
    add_replica_sharded_variable_input,
    add_variable_input,
)

__all__ = ["Module", "NameScopeMeta", "create_grad_graph_info", "_Aux", "_VarGrads"]

Key = str | int
INLINING = ("error", "warning", "none")


def _scoped(build: Callable[..., Any]) -> Callable[..., Any]:
    """``build``, run in the module's name scope unless it already is (a subclass that calls its
    base's build).
    """

    @functools.wraps(build)
    def in_scope(self: "Module", *args: Any, **kwargs: Any) -> Any:
        if self._building or self._name_scope is None:
            return build(self, *args, **kwargs)
        self._building = True
        try:
            with popxl.name_scope(self._name_scope):
                return build(self, *args, **kwargs)
        finally:
            self._building = False

    return in_scope


class NameScopeMeta(type):
    """Runs the ``build`` of every class in its module's name scope."""

    def __init__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any], **kwargs: Any):
        super().__init__(name, bases, members, **kwargs)
        if "build" in members:
            cls.build = _scoped(members["build"])


class Module(popxl.Module, metaclass=NameScopeMeta):
    """Base of layers. ``build`` runs inline when the module is called, or in a graph of its own by
    `create_graph`.

    Modules that are attributes are submodules: their variables appear under the attribute's name,
    and their ``build`` runs in a name scope of that name. ``aux`` and ``var_grad`` carry tensors
    from ``build`` to a hand-written ``build_grad`` and gradients out of it. A subclass need not
    call ``__init__``.

    Args:
        cache: `create_graph` gives the same graph again for equal arguments.
        grad_inlining_error: what to do when a module with a ``build_grad`` is called inline, where
            the surrounding graph's autodiff cannot see it: "error", "warning" (a UserWarning) or
            "none".
    Raises:
        ValueError: ``cache`` together with ``build_grad``, or another ``grad_inlining_error``.
    """

    # What __init__ would set is set where it is first used: subclasses may set attributes before
    # it, or never call it.
    _name_scope: str | None = None
    _building = False
    _graphs: dict[Any, tuple[NamedVariableFactories, GraphWithNamedArgs, Any]] | None = None
    _grad_inlining_error = "error"

    @functools.cached_property
    def _children(self) -> dict[str, "Module"]:
        return {}

    @functools.cached_property
    def _factories(self) -> NamedVariableFactories:
        return NamedVariableFactories()

    @functools.cached_property
    def _inputs(self) -> NamedTensors:
        return NamedTensors()

    @functools.cached_property
    def _called_grads(self) -> dict[Any, Any]:
        return {}

    @functools.cached_property
    def aux(self) -> _Aux:
        """Tensors that ``build`` keeps for ``build_grad``."""
        return _Aux()

    @functools.cached_property
    def var_grad(self) -> _VarGrads:
        """Gradients of variables that ``build_grad`` sets."""
        return _VarGrads()

    def _begin_gradient(self, aux: _Aux, var_grad: _VarGrads) -> None:
        self.aux, self.var_grad = aux, var_grad

    def __init__(
        self,
        cache: bool = False,
        grad_inlining_error: Literal["error", "warning", "none"] = "error",
    ) -> None:
        super().__init__()
        if grad_inlining_error not in INLINING:
            raise ValueError(
                f"{type(self).__name__}: got grad_inlining_error {grad_inlining_error!r}; "
                "expected 'error', 'warning' or 'none'."
            )
        self._graphs = {} if cache else None
        self._grad_inlining_error = grad_inlining_error
        if cache and self.implements_grad_graph:
            raise ValueError(
                f"{type(self).__name__}: got cache=True and a build_grad; expected one of them."
            )

    def _reset(self) -> None:
        for name in ("_factories", "_inputs", "_called_grads", "aux", "var_grad"):
            self.__dict__.pop(name, None)
        for child in self._children.values():
            child._reset()

    # building

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``build`` inline, in the current graph."""
        if self.implements_grad_graph and self._grad_inlining_error != "none":
            message = (
                f"{type(self).__name__}: got an inline call of a module with build_grad, which "
                "autodiff would not use; expected call_module or create_graph. Pass "
                "grad_inlining_error='none' if no gradient is needed."
            )
            if self._grad_inlining_error == "error":
                raise ValueError(message)
            warnings.warn(message, UserWarning, stacklevel=2)
        return self.build(*args, **kwargs)

    def build_grad(self, *args: Tensor, **kwargs: Any) -> None | Tensor | Iterable[Tensor]:
        """Optional gradient by hand: from the outputs' gradients to those of the inputs that are no
        variables.

        It takes a positional parameter for each output's gradient. What ``build`` kept is
        ``self.aux[name]``; gradients of variables are put on ``self.var_grad[name]``.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.build_grad: got no definition; expected autodiff to be used."
        )

    @property
    def implements_grad_graph(self) -> bool:
        """Whether build_grad is overridden."""
        return overrides(type(self), Module, "build_grad")

    def create_graph(
        self, *args: Any, **kwargs: Any
    ) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        """Trace ``build`` on tensors or specs: (factories of its variables, its graph with the same
        names).

        The graph's inputs are the tensors of the call, then the variables in the order they were
        declared. The module is reset afterwards and can be used again.
        """
        ir = popxl.gir()
        key: Any = None
        if self._graphs is not None:
            key = (ir.id, argument_hash(args), argument_hash(kwargs))
        if self._graphs is not None and key in self._graphs:
            factories, graph, _ = self._graphs[key]
            return factories.copy(), graph.copy()
        self._reset()
        try:
            traced = ir.create_graph(self, *args, **kwargs)
            traced.needs_own_gradient = self.implements_grad_graph
            factories, inputs, gradients = self._collect(set())
            result = GraphWithNamedArgs(
                traced,
                inputs,
                from_module=self,
                aux=self.aux.copy(),
                called_graphs_grad_info=gradients,
            )
        finally:
            self._reset()
        if self._graphs is not None:
            # The arguments stay alive with the graph: objects in the key go by identity.
            self._graphs[key] = factories.copy(), result.copy(), (args, kwargs)
        return factories, result

    def create_grad_graph(
        self,
        fwd_graph: GraphWithNamedArgs,
        grads_provided: Iterable[Tensor] | None = None,
        grads_required: Iterable[Tensor] | None = None,
    ) -> GraphWithNamedArgs:
        """Gradient graph of ``build_grad``, of
        `popxl_addons.custom_grad.build_custom_grad_graph`.
        """
        try:
            return build_custom_grad_graph(self, fwd_graph, grads_provided, grads_required)
        finally:
            self._reset()

    def call_module(
        self,
        module: "Module",
        name: str | None = None,
        autodiff: Literal["auto", "build_grad", "autodiff", "none"] = "auto",
        grads_provided: Callable[[GraphWithNamedArgs], Iterable[Tensor]] | None = None,
        grads_required: Callable[[GraphWithNamedArgs], Iterable[Tensor]] | None = None,
    ) -> Callable[..., tuple[Tensor, ...]]:
        """A function that traces a submodule into a graph of its own and calls it; returns the
        outputs.

        Args:
            name: where its variables appear; default: the name of the submodule's class.
            autodiff: how its gradient is made ("auto": only where it has a build_grad); kept for
                this module's own autodiff, which then uses it. So are those that the submodule has
                of what it calls itself.
            grads_provided, grads_required: from the submodule's graph to those arguments of
            `GraphWithNamedArgs.autodiff`.
        Raises:
            ValueError: another ``autodiff`` than these.
        """
        if autodiff not in ("auto", "build_grad", "autodiff", "none"):
            raise ValueError(
                f"call_module: got autodiff {autodiff!r}; expected 'auto', 'build_grad', "
                "'autodiff' or 'none'."
            )
        scope = name if name is not None else type(module).__name__

        def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            factories, graph = module.create_graph(*args, **kwargs)
            results = len(results_of(graph.graph))
            self._called_grads.update(graph.called_graphs_grad_info)
            if autodiff in ("build_grad", "autodiff") or (
                autodiff == "auto" and module.implements_grad_graph
            ):
                self._called_grads[graph.graph] = graph.autodiff(
                    grads_provided(graph) if grads_provided else None,
                    grads_required(graph) if grads_required else None,
                    method=autodiff,
                )
            variables = self.add_variable_inputs(scope, factories)
            return graph.bind(variables).call(*tensors_of_call(module, *args, **kwargs))[:results]

        return call

    # variables

    def add_variable_factory(self, variable_f: VariableFactory, name: str | None = None) -> Tensor:
        """Declare a variable by an existing factory; returns the graph's input."""
        name = name or str(variable_f.name)
        self._check_name(name)
        return self._declare(name, variable_f.create_input(), variable_f)

    def add_variable_input(
        self,
        name: str,
        data_iter: DataSource,
        dtype: popxl.dtype | None = None,
        by_ref: bool = False,
        replica_grouping: ReplicaGrouping | None = None,
        overwrite: bool = False,
    ) -> Tensor:
        """Declare a variable: a new input of the current graph, and a factory under the (dotted)
        name.

        Args:
            data_iter: as for `VariableFactory`.
            overwrite: replace an earlier declaration of the name, which otherwise is a ValueError.
        """
        self._check_name(name, overwrite)
        return self._declare(
            name, *add_variable_input(name, data_iter, dtype, by_ref, replica_grouping), overwrite
        )

    def add_replica_sharded_variable_input(
        self,
        name: str,
        data_iter: DataSource,
        dtype: popxl.dtype | None = None,
        by_ref: bool = False,
        replica_grouping: ReplicaGrouping | None = None,
        shard_over: int | None = None,
    ) -> Tensor:
        """The same for one replica's 1-D shard; ``shard_over`` defaults to the size of the
        group.
        """
        self._check_name(name)
        declared = add_replica_sharded_variable_input(
            name, data_iter, dtype, by_ref, replica_grouping, shard_over
        )
        return self._declare(name, *declared)

    def add_variable_inputs(
        self, name: Key, variable_f: NamedVariableFactories, overwrite: bool = False
    ) -> NamedTensors:
        """Declare the variables of a graph that is called here, under a name; returns the inputs,
        to be bound.
        """
        prefix = str(name)
        self._factories._put(prefix, variable_f.copy(), overwrite)
        inputs = {
            key: factory.create_input(prefix) for key, factory in variable_f.to_dict().items()
        }
        tensors = NamedTensors.from_dict(inputs)
        self._inputs._put(prefix, tensors.copy(), overwrite)
        return tensors

    def _check_name(self, name: str, overwrite: bool = False) -> None:
        """ValueError for a name that cannot be declared, before the graph has an input for it."""
        self._factories._check(name, overwrite)

    def _declare(
        self, name: str, tensor: Tensor, factory: VariableFactory, overwrite: bool = False
    ) -> Tensor:
        self._factories._put(name, factory, overwrite)
        self._inputs._put(name, tensor, overwrite)
        return tensor

    def _collect(
        self, seen: set[int]
    ) -> tuple[NamedVariableFactories, NamedTensors, dict[Any, Any]]:
        """Own variables, then those of each submodule under its attribute's name; a shared
        submodule counts once.

        With them the gradients of graphs that build called.
        """
        factories, inputs, gradients = (
            self._factories.copy(),
            self._inputs.copy(),
            dict(self._called_grads),
        )
        own_factories: set[int] = set()
        own_inputs: set[int] = set()
        for name, child in self._children.items():
            if id(child) in seen:
                continue
            seen.add(id(child))
            child_factories, child_inputs, child_gradients = child._collect(seen)
            gradients.update(child_gradients)
            for key, factory in child_factories.to_dict().items():
                factories._put(f"{name}.{key}", factory, own=own_factories)
                inputs._put(f"{name}.{key}", child_inputs[key], own=own_inputs)
        return factories, inputs, gradients

    # submodules

    def __setattr__(self, name: str, value: Any) -> None:
        self._children.pop(name, None)
        if isinstance(value, Module):
            self._children[name] = value
            value.set_name_scope(name)
        super().__setattr__(name, value)

    def set_name_scope(self, name: str) -> None:
        """Name scope for ``build``; set when the module becomes an attribute of another."""
        self._name_scope = name

    @classmethod
    def from_list(cls, sub_modules: list["Module"]) -> "Module":
        """A container of submodules, named 0, 1, ..; iterable and indexable."""
        container = Module()
        for index, module in enumerate(sub_modules):
            setattr(container, str(index), module)
        return container

    @classmethod
    def from_variable_factories(cls, inputs: list[VariableFactory]) -> "Module":
        """A container of variables, named 0, 1, ..; declares their inputs in the current graph."""
        container = Module()
        for index, factory in enumerate(inputs):
            setattr(container, str(index), container.add_variable_factory(factory, str(index)))
        return container

    def get(self, key: Key) -> Any:
        """Attribute by (dotted) name or index."""
        return functools.reduce(getattr, str(key).split("."), self)

    def __getitem__(self, key: Key) -> Any:
        if isinstance(key, int) and key < 0:
            key += len(self)
        try:
            return self.get(key)
        except AttributeError:
            kind = IndexError if isinstance(key, int) else KeyError
            raise kind(
                f"{type(self).__name__}: got {key!r}; expected one of {', '.join(self._children)}."
            ) from None

    def __len__(self) -> int:
        return sum(name.isdecimal() for name in self._children)

    def __iter__(self) -> Iterator["Module"]:
        return iter([module for name, module in self._children.items() if name.isdecimal()])

    def __bool__(self) -> bool:
        return True
