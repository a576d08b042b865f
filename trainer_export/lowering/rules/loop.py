"""Lowerings of recurrent layers and their gradients as ONNX Scan.

So a graph has the size of one step. The body is traced from the step and lowered by the same rules
as other code. It reads the weights of the states from the outer graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer_export.graph import GraphBuilder, Port
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.constants import fill
from trainer_export.lowering.values import Shape, Spec, Value
from trainer_export.recurrence import CELLS, back, forth

_BATCH = "batch"

_Step = Callable[..., list[Tensor]]
"""Maps states, rows and outer values to the new states and the kept values of the step."""


@dataclass(frozen=True)
class _Loop:
    """The inputs of a loop over the first dimension."""

    states: Sequence[Value]  # initial states, [batch, ...]
    rows: Sequence[Value]  # tensors of which each step reads one row, [steps, batch, ...]
    around: Sequence[Value]  # what all steps read
    backwards: bool = False  # whether it starts at the last step


@dataclass(frozen=True)
class _Body:
    """The graph of one step, and the names of its kept values."""

    graph: GraphBuilder
    kept: list[str]

    @property
    def outputs(self) -> list[str]:
        """The values that a Scan stacks, without duplicates: a cell's output is also its state."""
        return list(dict.fromkeys(self.kept))


def _run(emit: Emitter, loop: _Loop, step: _Step, shapes: Sequence[Shape]) -> list[Value]:
    """Run a loop.

    Args:
        emit: writes the nodes.
        loop: the inputs.
        step: the function of each row.
        shapes: shapes of the kept values of all steps.

    Returns:
        The last states, then the kept values.
    """
    body = _lower_step(emit, loop, step)
    stacked = body.outputs
    direction = [int(loop.backwards)]
    inputs = _logical_names(emit, (*loop.states, *loop.rows))
    names = emit.nodes(
        "Scan",
        *inputs,
        outputs=len(loop.states) + len(stacked),
        attributes={
            "body": body.graph,
            "num_scan_inputs": len(loop.rows),
            "scan_input_directions": direction * len(loop.rows),
            # Stacked in reverse as well, so that row t of a gradient belongs to step t.
            "scan_output_directions": direction * len(stacked),
        },
    )
    count = len(loop.states)
    name_of = dict(zip(stacked, names[count:], strict=True))
    results = []
    for name, state in zip(names[:count], loop.states, strict=True):
        results.append(emit.value(name, state.shape))
    for kept, shape in zip(body.kept, shapes, strict=True):
        results.append(emit.value(name_of[kept], shape))
    return results


def _lower_step(emit: Emitter, loop: _Loop, step: _Step) -> _Body:
    """Trace one step, and write it as the body of a Scan."""
    from trainer_export.lowering.program import lower  # noqa: PLC0415 - it finds this module
    from trainer_export.traced_program import trace_program  # noqa: PLC0415 - the same

    prefix = emit.graph.inner_prefix()
    body = GraphBuilder("step", prefix)
    ports = _step_ports(body, loop)
    around_ports = []
    for i, value in enumerate(loop.around):
        around_ports.append(Port(f"around{i}", "float32", tuple(value.shape)))
    around = tuple(around_ports)
    trace = trace_program("step", step, (*ports, *around), ())
    inside = Emitter(body, ports[0].name)
    names = [body.input(port) for port in ports]
    # Not inputs of the body: it reads them from the outer graph, without a copy.
    names += _logical_names(emit, loop.around)
    inputs = []
    for name, spec in zip(names, trace.input_specs, strict=True):
        inputs.append(inside.value(name, spec.shape))
    results = lower(inside, trace, inputs)
    count = len(loop.states)
    kept = results[count:]
    # A cell's output is also its state: values with the same name are one output.
    unique = {value.name: value for value in kept}
    for i, value in enumerate([*results[:count], *unique.values()]):
        port = Port(
            f"{body.prefix}out{i}",
            "float32",
            (_BATCH, *value.shape[1:]),
        )
        body.output(port, inside.in_logical_order(value))
    return _Body(body, [value.name for value in kept])


def _logical_names(emit: Emitter, values: Sequence[Value]) -> list[str]:
    return [emit.in_logical_order(value) for value in values]


def _step_ports(body: GraphBuilder, loop: _Loop) -> tuple[Port, ...]:
    """Return the inputs of a step: its states, and one row of each of the others."""
    sizes = []
    for state in loop.states:
        sizes.append(state.shape[1:])
    for rows in loop.rows:
        sizes.append(rows.shape[2:])
    ports = []
    for i, shape in enumerate(sizes):
        ports.append(
            Port(
                f"{body.prefix}in{i}",
                "float32",
                (_BATCH, *shape),
            )
        )
    return tuple(ports)


def _recurrence(
    emit: Emitter,
    out: Sequence[Spec],
    kind: str,
    z: Value,
    weight: Value,
    bias: Value,
    start: Sequence[Value],
) -> list[Value]:
    # h[t] = cell(z[t], W h[t-1] + b, h[t-1]). The contribution of the inputs, z, is one product
    # over all steps outside the loop, so that a step multiplies only by W.
    cell = CELLS[kind]
    count = len(start)

    def step(*tensors: Tensor) -> list[Tensor]:
        row, weight_now, bias_now = tensors[count:]
        states = forth(cell, row, weight_now, bias_now, tensors[:count])
        return [*states, *states]

    states = []
    for state in start:
        states.append(emit.full(state))
    loop = _Loop(states, [z], [weight, bias])
    results = _run(emit, loop, step, _shapes(out))
    return results[count:]


def _shapes(specs: Sequence[Spec]) -> list[Shape]:
    return [spec.shape for spec in specs]


def _backward(
    emit: Emitter,
    out: Sequence[Spec],
    kind: str,
    slopes: Sequence[Value | None],
    z: Value,
    *weights_and_states: Any,
) -> list[Value]:
    # dL/dh[t-1] = cell'(dL/dh[t] + slope[t]), from the last step to the first. The states before
    # each step are read, not recomputed. The loop keeps only the gradients of the gates; the
    # gradient of W is then one product over all steps outside the loop.
    weight, bias, before = weights_and_states
    cell = CELLS[kind]
    count = len(before)
    sloped = []
    for i, slope in enumerate(slopes):
        if slope is not None:
            sloped.append(i)
    rows: list[Value] = []
    for slope in slopes:
        if slope is not None:
            rows.append(slope)

    def step(*tensors: Tensor) -> list[Tensor]:
        totals = list(tensors[:count])
        first_row = count + len(sloped)
        for i, slope in zip(sloped, tensors[count:first_row], strict=True):
            totals[i] = totals[i] + slope
        row, *states, weight_now, bias_now = tensors[first_row:]
        return back(cell, totals, row, weight_now, bias_now, states)

    zeros = []
    for spec in out[:count]:
        zero = fill(emit, spec, 0)
        zeros.append(emit.full(zero))
    loop = _Loop(
        zeros,
        [*rows, z, *before],
        [weight, bias],
        backwards=True,
    )
    return _run(emit, loop, step, _shapes(out[count:]))


LOWERINGS: dict[Any, Callable[..., Any]] = {
    torch.ops.shoal.recurrence.default: _recurrence,
    torch.ops.shoal.recurrence_backward.default: _backward,
}
