"""A callable whose ``build`` defines a graph."""

from typing import Any


class Module:
    """Base of layers: `Ir.create_graph` accepts an instance and traces its ``build``.

    Tensors made in ``build`` may be kept on ``self`` and used later as keys of ``inputs_dict``.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``build`` inline, in the current graph."""
        return self.build(*args, **kwargs)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Define the graph: returns a tensor, several, or nothing. To be overridden."""
        raise NotImplementedError(
            f"{type(self).__name__}.build: got no definition; expected the subclass to define "
            "build()."
        )
