"""A custom module: a layer with variables of its own, built once, called with two sets of weights,
differentiated.
"""

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.layers import Linear

BATCH, WIDTH = 2, 4


class Gated(addons.Module):
    """y = sigmoid(x @ gate) * (x @ value) * scale, features [..., WIDTH] -> [..., WIDTH]."""

    def __init__(self):
        super().__init__()
        # modules in attributes: their variables get the attribute's name
        self.gate = Linear(WIDTH, bias=False)
        self.value = Linear(WIDTH)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """Add the layer to the current graph."""
        scale = self.add_variable_input("scale", lambda: np.ones(WIDTH), x.dtype)
        opening = 1 / (1 + ops.exp(-self.gate(x)))
        return opening * self.value(x) * scale


np.random.seed(0)  # fresh weights are drawn from numpy
ir = popxl.Ir()
with ir.main_graph, popxl.in_sequence():
    x_stream = popxl.h2d_stream((BATCH, WIDTH), popxl.float32, name="x")
    x = ops.host_load(x_stream)

    # `facts` knows how to make the variables; `graph` has them as inputs, under the same names.
    facts, graph = Gated().create_graph(x)
    print("variables:", ", ".join(facts.keys_flat()))
    first, second = facts.init(), facts.init()

    # One graph, two layers: binding says whose weights a call uses.
    call = graph.bind(first).call_with_info(x)
    (y,) = graph.bind(second).call(call.outputs[0])

    # The gradient of the first call, for its input and for every variable.
    grad = addons.autodiff(graph, grads_required=[graph.graph.inputs[0], *graph.args.values_flat()])
    dy = popxl.constant(np.ones((BATCH, WIDTH)), popxl.float32)
    dx, *dws = grad.call(dy, args=grad.grad_graph_info.inputs_dict(call))

    names = ["y", "dx", *(f"d {name}" for name in graph.args.keys_flat())]
    streams = {name: addons.host_store(t) for name, t in zip(names, (y, dx, *dws))}

with popxl.Session(ir) as session:
    results = session.run({x_stream: np.linspace(-1, 1, BATCH * WIDTH).reshape(BATCH, WIDTH)})
for name, stream in streams.items():
    array = results[stream]
    print(f"{name:15} {str(array.shape):8} norm {np.linalg.norm(array):.4f}")
