"""Graphs that run one after the other like one graph."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from trainer_export.check import open_session, run_session


class Chained:
    """A session of several graphs, each of which may take what those before it return.

    Args:
        graphs: the graphs in order.
    """

    def __init__(self, graphs: Sequence[bytes]) -> None:
        self._sessions = [open_session(graph) for graph in graphs]

    def get_inputs(self) -> Sequence[Any]:
        """Return the inputs that no graph returns."""
        returned = {port.name for port in self.get_outputs()}
        inputs: dict[str, Any] = {}
        for session in self._sessions:
            for port in session.get_inputs():
                if port.name not in returned:
                    inputs[port.name] = port
        return tuple(inputs.values())

    def get_outputs(self) -> Sequence[Any]:
        """Return the outputs of all graphs."""
        outputs: list[Any] = []
        for session in self._sessions:
            outputs.extend(session.get_outputs())
        return outputs

    def run(self, names: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs with these names."""
        values = dict(feed)
        for session in self._sessions:
            values.update(run_session(session, values))
        return [values[name] for name in names]
