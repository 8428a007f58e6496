"""A custom optimizer: stochastic gradient descent with Nesterov momentum, written as a module with
state of its own.

A perceptron learns whether a point is in a ring. The learning rate comes with every run, gradients
are clipped together, and only matrices decay. Half way the program stops; another session takes the
checkpoint, and goes on.
"""

import tempfile

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import InputStreams, NamedTensors, OutputStreams
from popxl_addons.layers import Linear

BATCH, HIDDEN, STEPS = 128, 32, 200


class Nesterov(addons.Module):
    """velocity = momentum * velocity + g; weight -= rate * (g + momentum * velocity), g = gradient
    + decay * weight.
    """

    # By reference: what is written to it in the graph is written to the variable.
    def build(
        self,
        weight: popxl.TensorByRef,
        gradient: popxl.Tensor,
        rate: popxl.Tensor,
        *,
        momentum: float = 0.9,
        decay: float = 0.0,
    ) -> None:
        """weight and gradient of one shape, rate []."""
        zeros = np.zeros(weight.shape, weight.dtype.as_numpy())
        velocity = self.add_variable_input("velocity", lambda: zeros, weight.dtype, by_ref=True)
        gradient = gradient + weight * decay
        ops.var_updates.copy_var_update_(velocity, velocity * momentum + gradient)
        ops.scaled_add_(weight, gradient + velocity * momentum, b=-rate)


class InRing(addons.Module):
    """Mean loss of points [BATCH, 2] and whether they are in the ring [BATCH], by a perceptron."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = Linear(HIDDEN), Linear(2)

    def build(self, points: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        """points [BATCH, 2], labels [BATCH] -> []."""
        return addons.cross_entropy(self.out(ops.relu(self.hidden(points))), labels)


def clip(gradients: tuple[popxl.Tensor, ...], largest: float) -> tuple[popxl.Tensor, ...]:
    """The gradients, scaled down together where their common norm is larger."""
    squares = ops.concat([ops.sum(t * t).reshape((1,)) for t in gradients])
    norm = ops.sqrt(ops.sum(squares))
    scale = largest / ops.maximum(norm, popxl.constant(largest, norm.dtype))
    return tuple(t * scale for t in gradients)


def training_session() -> addons.TaskSession:
    """A session that does one step with each run, at the rate that the run is given."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        inputs = InputStreams(
            points=((BATCH, 2), popxl.float32),
            labels=((BATCH,), popxl.int32),
            rate=((), popxl.float32),
        )
        outputs = OutputStreams(loss=((), popxl.float32))
        points, labels, rate = (ops.host_load(stream) for stream in inputs)
        facts, forward = InRing().create_graph(points, labels)
        variables = NamedTensors(fwd=facts.init())

        gradient = addons.autodiff(forward, grads_required=forward.args.values_flat())
        call = forward.bind(variables.fwd).call_with_info(points, labels)
        ops.host_store(outputs.loss, call.outputs[0])
        one = popxl.constant(1.0, popxl.float32)
        gradients = clip(gradient.call(one, args=gradient.grad_graph_info.inputs_dict(call)), 0.5)

        nesterov = Nesterov(cache=True)  # weights of one shape and one decay share a graph
        for name, weight_gradient in zip(forward.args.keys_flat(), gradients):
            weight = variables.fwd[name]
            decay = 1e-3 if weight.rank > 1 else 0.0
            optim_facts, update = nesterov.create_graph(weight, weight_gradient, rate, decay=decay)
            state = optim_facts.init()
            variables.insert(f"optim.{name}", state, overwrite=True)
            update.bind(state).call(weight, weight_gradient, rate)
    return addons.TaskSession(inputs, outputs, variables, ir=ir, device_desc="cpu")


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The points of a step, and whether they are in the ring."""
    points = np.random.default_rng(step).uniform(-1, 1, (BATCH, 2)).astype(np.float32)
    radius = np.linalg.norm(points, axis=1)
    return points, ((radius > 0.4) & (radius < 0.9)).astype(np.int32)


def train(session: addons.TaskSession, step: int) -> float:
    """One step of STEPS, at a rate that falls to zero: the loss."""
    points, labels = batch(step)
    fed = {"points": points, "labels": labels, "rate": np.float32(0.5 * (1 - step / STEPS))}
    return float(
        session.run({stream: fed[name] for name, stream in session.inputs.items()})[
            session.outputs.loss
        ]
    )


def main() -> None:
    """Train half way, save, and train on in another session."""
    np.random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        for half in range(2):
            with training_session() as session:
                if half:
                    session.load_checkpoint(folder + "/half", report_missing="error")
                    print(f"another session goes on after {session.session_state['steps']} steps")
                for step in range(half * STEPS // 2, (half + 1) * STEPS // 2):
                    loss = train(session, step)
                    if step % 25 == 24:
                        print(f"step {step + 1:3}: loss {loss:.2f}")
                session.save_checkpoint(folder + "/half")


if __name__ == "__main__":
    main()
