"""The manifest of a pair: one graph trains a device's own model and the received one.

It contains a manifest for each of the two models, with its parameters, states, noise and forward
graphs, so that code that evaluates a model of an ordinary set can evaluate these too. The inputs
and outputs of the step are those of a train graph prefixed with the model's side:
``own.param.<name>``, ``next.sent.state.<name>``, ``noise.own.<layer>``, ``own.loss``. The batch
``x``, ``y`` and the rate ``lr`` are shared; a routine may have further inputs of one number each.
Specification section 5 defines such a routine.
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
    """Weights blob with which the parameters of the sent model start that stay on its device."""

    parameters: tuple[str, ...] = Field(min_length=1)  # their names, in the order of the model


class PairManifest(FrozenModel):
    """Everything about one pair; its digest is the digest of its JSON bytes.

    Attributes:
        format_version: version of this schema.
        kind: distinguishes it from an ordinary manifest.
        routine: the routine that trains with the step.
        own: the model that stays on the device; its graphs are ``onnx/eval``, ``onnx/infer`` and,
            with static batch norm, ``onnx/stats``.
        sent: the same for the copy of the global model.
        graph: the step of both.
        own_init: initial weights blob of the device's own model.
        adaptor: parameters that the sent model adds to those that it shares with the fleet's model,
            with their own shape; None if it is the fleet's model and starts only from the sent
            weights.
        peak_memory_bytes: estimated peak memory of one training process, for batches of 32,
            excluding the runtime itself.
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
        """The random draws of both models in a step, in order.

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

    A BlobError names the fields if this software does not support its version.
    """
    return parse_document(PairManifest, data, "a manifest of a pair")


def side_name(side: Side, name: str) -> str:
    """The name of a model's tensor or layer in the step of a pair."""
    return f"{side}.{name}"


def loss_name(side: Side) -> str:
    """Output of the step with the loss of a model."""
    return side_name(side, "loss")
