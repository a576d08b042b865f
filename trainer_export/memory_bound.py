"""Fits the training steps of a tier into a bound of memory, by recomputing activations.

A step that is above the bound keeps fewer values from the forward to the backward pass. It runs the
same operators, some of them twice, so its results have the same bits. The bound counts what
`trainer_export.footprint.peak_memory` counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import onnx

from fleet_protocol.errors import ChoiceError
from fleet_protocol.graph_parts import ABOVE
from trainer_export.footprint import peak_memory
from trainer_export.formats.files import GraphFile
from trainer_export.formats.model_bytes import model_bytes
from trainer_export.in_place import prefixes_in_place
from trainer_export.recomputing import EFFORTS, PeakWithin, lower_peak, schedule_of
from trainer_export.sized_graph import SizedGraph

_STEPS = frozenset({"onnx/train", ABOVE})
_GROWTH = 2  # a step with more than this multiple of its nodes would take too long
_MB = 1_000_000


def within_memory(graphs: Sequence[GraphFile], nbytes: float, tier: str) -> tuple[GraphFile, ...]:
    """Return the graphs of a tier with training steps whose peak memory is within a bound.

    Args:
        graphs: the portable graphs; those within the bound, and all except training steps, stay as
            they are.
        nbytes: largest peak memory of a step in bytes, for batches of 32.
        tier: id of the tier, for the error.

    Raises:
        ExportError: a step needs more, even if it recomputes all it can.
    """
    bounded: list[GraphFile] = []
    for graph in graphs:
        if graph.key in _STEPS and peak_of_step(graph.model) > nbytes:
            model = bounded_step(graph.model, nbytes, tier)
            bounded.append(replace(graph, data=model_bytes(model), model=model))
        else:
            bounded.append(graph)
    return tuple(bounded)


def bounded_step(model: onnx.ModelProto, nbytes: float, tier: str) -> onnx.ModelProto:
    """Return a copy of a step whose peak memory is within a bound.

    Arguments and errors as for :func:`within_memory`.
    """
    least = peak_of_step(model)
    for result in _lowered_steps(model, int(nbytes)):
        peak = peak_of_step(result)
        if peak <= nbytes:
            return result
        least = min(least, peak)
    raise ChoiceError(
        f"a training step of {tier} needs {least / _MB:.1f} MB even if it recomputes its"
        f" activations, and the bound is {nbytes / _MB:.1f} MB; raise --memory, or export"
        " smaller tiers"
    )


def smallest_step(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the step of lowest peak memory: a copy that recomputes activations, or itself."""
    return min([model, *_lowered_steps(model, 0)], key=peak_of_step)


def _lowered_steps(model: onnx.ModelProto, nbytes: int) -> Iterator[onnx.ModelProto]:
    """Yield copies of a step whose peak is lowered to a bound, or as far as possible.

    A recomputation may read a parameter that the step would otherwise have overwritten, and may
    then raise the peak. The second copy reserves memory for both.
    """
    allowed = prefixes_in_place((model,))
    for in_place in dict.fromkeys((allowed, ())):
        yield _lowered(model, nbytes, in_place)


def peak_of_step(model: onnx.ModelProto) -> int:
    """Return the peak memory of a step that overwrites what it may, in bytes."""
    return peak_memory(model, in_place=prefixes_in_place((model,)))


def _lowered(model: onnx.ModelProto, nbytes: int, in_place: tuple[str, ...]) -> onnx.ModelProto:
    """Return a copy of a step with its peak lowered to a bound, or as far as possible.

    Args:
        model: the step.
        nbytes: the bound.
        in_place: prefixes of the inputs that are overwritten.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = SizedGraph(result)
    # Parameters, states and constants, which no recomputing makes smaller.
    kept = peak_memory(model, in_place=in_place) - schedule_of(graph).peak.nbytes
    goal = PeakWithin(nbytes - kept, _GROWTH * len(model.graph.node))
    lower_peak(graph, goal, EFFORTS)
    return result
