"""Lowerings of recurrent layers and their gradients as ONNX Scan: the size of a graph is that of
one step.

The body is traced from the step and lowered by the same rules as everything else. It reads the
weights of the states from the graph around it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer_export.graph import GraphBuilder, Port
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import fill
from trainer_export.lowering.values import Shape, Spec, Value
from trainer_export.recurrence import CELLS, back, forth

_BATCH = "batch"


@dataclass(frozen=True)
class _Loop:
    """A loop over the first dimension."""

    states: Sequence[Value]  # what it starts with, [batch, ...]
    rows: Sequence[Value]  # what a step reads, [steps, batch, ...]
    around: Sequence[Value]  # what all steps read
    backwards: bool = False  # whether it starts at the last step


def _run(
    e: Emitter, loop: _Loop, step: Callable[..., list[Tensor]], shapes: Sequence[Shape]
) -> list[Value]:
    """Run a loop.

    Args:
        e: where to.
        loop: what it reads.
        step: a function of states, rows and what is around to the new states and what is kept of
            the step.
        shapes: of what is kept of all steps.

    Returns:
        The last states, then what is kept.
    """
    from trainer_export.lowering.program import lower  # noqa: PLC0415 - it finds this module
    from trainer_export.traced_program import trace_program  # noqa: PLC0415 - the same

    body = GraphBuilder("step", e.graph.inner_prefix())
    moving = [(v, v.shape[1:]) for v in loop.states] + [(v, v.shape[2:]) for v in loop.rows]
    ports = tuple(
        Port(f"{body.prefix}in{i}", "float32", (_BATCH, *shape))
        for i, (_, shape) in enumerate(moving)
    )
    fixed = tuple(Port(f"around{i}", "float32", tuple(v.shape)) for i, v in enumerate(loop.around))
    trace = trace_program("step", step, (*ports, *fixed), ())
    inside = Emitter(body, ports[0].name)
    sizes = [spec.shape for spec in trace.input_specs]
    names = [
        *(body.input(port) for port in ports),
        *(e.plain(value) for value in loop.around),
    ]
    made = lower(
        inside,
        trace,
        [inside.value(name, size) for name, size in zip(names, sizes, strict=True)],
    )
    kept = made[len(loop.states) :]
    unique = list({value.name: value for value in kept}.values())
    for i, value in enumerate([*made[: len(loop.states)], *unique]):
        body.output(
            Port(f"{body.prefix}out{i}", "float32", (_BATCH, *value.shape[1:])),
            inside.plain(value),
        )
    way = [int(loop.backwards)]
    names = list(
        e.graph.nodes(
            "Scan",
            *(e.plain(value) for value in (*loop.states, *loop.rows)),
            outputs=len(loop.states) + len(unique),
            attributes={
                "body": body,
                "num_scan_inputs": len(loop.rows),
                "scan_input_directions": way * len(loop.rows),
                "scan_output_directions": way * len(unique),
            },
        )
    )
    ends = [e.value(name, state.shape) for name, state in zip(names, loop.states, strict=False)]
    found = dict(zip((value.name for value in unique), names[len(ends) :], strict=True))
    return [
        *ends,
        *(e.value(found[value.name], shape) for value, shape in zip(kept, shapes, strict=True)),
    ]


def _recurrence(
    e: Emitter,
    out: Sequence[Spec],
    kind: str,
    z: Value,
    weight: Value,
    bias: Value,
    start: Sequence[Value],
) -> list[Value]:
    cell = CELLS[kind]
    count = len(start)

    def step(*tensors: Tensor) -> list[Tensor]:
        row, hold, shift = tensors[count:]
        states = forth(cell, row, hold, shift, tensors[:count])
        return [*states, *states]

    loop = _Loop([e.full(state) for state in start], [z], [weight, bias])
    return _run(e, loop, step, [spec.shape for spec in out])[count:]


def _backward(
    e: Emitter,
    out: Sequence[Spec],
    kind: str,
    slopes: Sequence[Value | None],
    z: Value,
    *rest: Any,
) -> list[Value]:
    weight, bias, before = rest
    cell = CELLS[kind]
    count = len(before)
    told = [i for i, slope in enumerate(slopes) if slope is not None]

    def step(*tensors: Tensor) -> list[Tensor]:
        total = list(tensors[:count])
        given = list(tensors[count:])
        for i in told:
            total[i] = total[i] + given.pop(0)
        row, *states, hold, shift = given
        return back(cell, total, row, hold, shift, states)

    zeros = [e.full(fill(e, spec, 0)) for spec in out[:count]]
    rows = [slope for slope in slopes if slope is not None]
    loop = _Loop(zeros, [*rows, z, *before], [weight, bias], backwards=True)
    return _run(e, loop, step, [spec.shape for spec in out[count:]])


LOWERINGS: dict[Any, Callable[..., Any]] = {
    torch.ops.shoal.recurrence.default: _recurrence,
    torch.ops.shoal.recurrence_backward.default: _backward,
}
