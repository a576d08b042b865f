"""The manifest of a mutual set: one graph that trains a personal model and a meme on the same batch (METHODS 5).

Each of the two models has a manifest of its own inside, with its parameters, states, noise and forward graphs, so
whatever evaluates a model of an ordinary set evaluates these too. The inputs and outputs of the mutual graph are those
of a train graph with the model's name before them: ``personal.param.<name>``, ``next.meme.state.<name>``,
``noise.personal.<layer>``, ``personal.loss``; the batch ``x``, ``y``, the rate ``lr`` and the weights of the labels
``alpha`` (in the personal loss) and ``beta`` (in the meme's) are shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, ValidationError

from fleet_protocol.errors import BlobError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.manifest import FORMAT_VERSION, CheckSpec, FileSpec, GraphSpec, Manifest, NoiseSpec

__all__ = ["SIDES", "AdaptorSpec", "MutualManifest", "Side", "loss_name", "parse_mutual_manifest", "side_name"]

Side = Literal["personal", "meme"]
SIDES: tuple[Side, ...] = ("personal", "meme")


class AdaptorSpec(FileSpec):
    """Weights blob that the part of a meme starts from which its device keeps.

    Attributes:
        parameters: their names, in the order of the meme.
    """

    parameters: tuple[str, ...] = Field(min_length=1)


class MutualManifest(FrozenModel):
    """Everything about one mutual set; its digest is the digest of its JSON bytes.

    Attributes:
        format_version: version of this schema.
        kind: tells it from an ordinary manifest.
        personal: the model that stays on the device; its graphs are ``onnx/eval``, ``onnx/infer`` and, with static
            batch norm, ``onnx/stats``.
        meme: the copy of the global model, likewise.
        graph: the mutual step.
        personal_init: weights blob the personal model starts from.
        adaptor: what the meme adds to the parameters that it shares with the fleet's model, in a shape of its own; None
            where the meme is the fleet's model and starts wholly from what the device is sent.
        peak_memory_bytes: estimated peak of one training process beyond the runtime itself, batch 32.
        checks: the comparison of the mutual graph with PyTorch.
        versions: exporter packages and their versions.
    """

    format_version: Literal[1] = 1
    kind: Literal["mutual"] = "mutual"
    personal: Manifest
    meme: Manifest
    graph: GraphSpec
    personal_init: FileSpec
    adaptor: AdaptorSpec | None = None
    peak_memory_bytes: int = Field(ge=0)
    checks: tuple[CheckSpec, ...] = ()
    versions: Mapping[str, str] = Field(default_factory=dict)

    def side(self, side: Side) -> Manifest:
        """The manifest of one of the two models."""
        return self.personal if side == "personal" else self.meme

    @property
    def noise(self) -> tuple[NoiseSpec, ...]:
        """What both models draw in a step, in the order it is drawn in; named ``<side>.<layer>``."""
        return tuple(
            NoiseSpec(name=side_name(side, spec.name), shape=spec.shape)
            for side in SIDES
            for spec in self.side(side).noise
        )

    def to_bytes(self) -> bytes:
        """The canonical JSON of this manifest, whose sha256 names the mutual set."""
        return self.model_dump_json(indent=1).encode()


def parse_mutual_manifest(data: bytes) -> MutualManifest:
    """Read a mutual manifest.

    Args:
        data: the bytes of its ``manifest.json``.

    Raises:
        BlobError: the bytes are no mutual manifest of a version this software reads; the message names the fields.
    """
    try:
        return MutualManifest.model_validate_json(data)
    except ValidationError as error:
        fields = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'document'}: {e['msg']}" for e in error.errors()[:3])
        raise BlobError(
            f"not a manifest of a mutual set of format {FORMAT_VERSION} ({fields}); export the pair again with this "
            "version of Shoal"
        ) from error


def side_name(side: Side, name: str) -> str:
    """The name that a model's tensor or layer has in the mutual graph."""
    return f"{side}.{name}"


def loss_name(side: Side) -> str:
    """Graph output with the mutual loss of a model."""
    return side_name(side, "loss")
