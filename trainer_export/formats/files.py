"""What a format hands over to be written: bytes with a place and, for a graph, a signature."""

from dataclasses import dataclass, field

import onnx

from trainer_export.graph import Port


@dataclass(frozen=True)
class SetFile:
    """One file of an artifact set.

    Attributes:
        key: in the manifest, such as ``onnx/train``.
        path: relative to the tier's folder.
        data: the content.
        inputs: inputs of a graph in order.
        outputs: outputs of a graph in order; empty for what is no graph.
    """

    key: str
    path: str
    data: bytes
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()

    @property
    def is_graph(self) -> bool:
        """Whether this is a graph and not another file."""
        return bool(self.outputs)


@dataclass(frozen=True)
class GraphFile(SetFile):
    """A graph that is still at hand as a parsed model, whose serialization is ``data``."""

    model: onnx.ModelProto = field(default_factory=onnx.ModelProto)
