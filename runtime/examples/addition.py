"""Addition: the smallest whole program. Every run adds an array from the host to a variable on the
device.
"""

import numpy as np
import popxl
from popxl import ops

# Build. Nothing is computed here: a tensor has a name, a shape and a type, but no value.
ir = popxl.Ir()
with ir.main_graph, popxl.in_sequence():
    numbers = popxl.h2d_stream((3,), popxl.float32, name="numbers")
    doubled = popxl.d2h_stream((3,), popxl.float32, name="doubled")
    total = popxl.variable(np.zeros(3), popxl.float32, name="total")

    x = ops.host_load(numbers)
    ops.add_(total, x)  # a trailing underscore: the first operand itself changes
    ops.host_store(doubled, total + total)  # `+` makes a tensor of its own

# Run. A session compiles the finished graph; a variable keeps its value from run to run.
with popxl.Session(ir, "cpu") as session:
    for step in range(3):
        outputs = session.run({numbers: np.array([1, 2, 3], np.float32) * step})
        print(f"run {step}: twice the total is {outputs[doubled].tolist()}")

# Leaving the session brought the variables back to the host.
print(f"{total.name}: {session.get_tensor_data(total).tolist()}")
