"""The manifest of a pair: one graph trains a device's own model and the one that it was sent.

Each of the two models has a manifest of its own inside, with its parameters, states, noise and
forward graphs, so whatever evaluates a model of an ordinary set evaluates these too. The inputs and
outputs of the step are those of a train graph with the model's side before them:
``own.param.<name>``, ``next.sent.state.<name>``, ``noise.own.<layer>``, ``own.loss``. The batch
``x``, ``y`` and the rate ``lr`` are shared; a routine may have further inputs of one number each.
Specification section 5 has such a routine.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.manifest import (
    CheckSpec,
    FileSpec,
    GraphSpec,
    Manifest,
    NoiseSpec,
    parse_document,
)

Side = Literal["own", "sent"]
SIDES: tuple[Side, ...] = ("own", "sent")


class AdaptorSpec(FileSpec):
    """Weights blob that the part of the sent model starts from which its device keeps."""

    parameters: tuple[str, ...] = Field(min_length=1)  # their names, in the order of the model


class PairManifest(FrozenModel):
    """Everything about one pair; its digest is the digest of its JSON bytes.

    Attributes:
        format_version: version of this schema.
        kind: tells it from an ordinary manifest.
        routine: what the step is for: the routine that trains with it.
        own: the model that stays on the device; its graphs are ``onnx/eval``, ``onnx/infer`` and,
            with static batch norm, ``onnx/stats``.
        sent: the copy of the global model, likewise.
        graph: the step of both.
        own_init: weights blob that the device's own model starts from.
        adaptor: what the sent model adds to the parameters that it shares with the fleet's model,
            in a shape of its own; None where it is the fleet's model and starts wholly from what
            the device is sent.
        peak_memory_bytes: estimated peak of one training process beyond the runtime itself, batch
            32.
        checks: the comparison of the step with PyTorch.
        versions: exporter packages and their versions.
    """

    format_version: Literal[2] = 2
    kind: Literal["pair"] = "pair"
    routine: str
    own: Manifest
    sent: Manifest
    graph: GraphSpec
    own_init: FileSpec
    adaptor: AdaptorSpec | None = None
    peak_memory_bytes: int = Field(ge=0)
    checks: tuple[CheckSpec, ...] = ()
    versions: Mapping[str, str] = Field(default_factory=dict)

    def side(self, side: Side) -> Manifest:
        """The manifest of one of the two models."""
        return self.own if side == "own" else self.sent

    @property
    def noise(self) -> tuple[NoiseSpec, ...]:
        """What both models draw in a step, in the order it is drawn in.

        Named ``<side>.<layer>``.
        """
        return tuple(
            NoiseSpec(name=side_name(side, spec.name), shape=spec.shape)
            for side in SIDES
            for spec in self.side(side).noise
        )

    def to_bytes(self) -> bytes:
        """The canonical JSON of this manifest, whose sha256 names the pair."""
        return self.model_dump_json(indent=1).encode()


def parse_pair_manifest(data: bytes) -> PairManifest:
    """Read the ``manifest.json`` of a pair.

    A BlobError names the fields where this software reads no such version.
    """
    return parse_document(PairManifest, data, "a manifest of a pair")


def side_name(side: Side, name: str) -> str:
    """The name that a model's tensor or layer has in the step of a pair."""
    return f"{side}.{name}"


def loss_name(side: Side) -> str:
    """Output of the step with the loss of a model."""
    return side_name(side, "loss")
