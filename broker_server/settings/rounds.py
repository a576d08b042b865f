"""The tables of rounds and of how weights travel: ``[round]``, ``[upload]``, ``[download]``."""

from typing import Literal

from pydantic import Field, ValidationInfo, model_validator

from broker_server.settings.evaluation import Share
from fleet_protocol.encodings import KEEP
from fleet_protocol.frozen import FrozenModel


class RoundKeys(FrozenModel):
    """How many rounds there are, and who is asked.

    Attributes:
        rounds: rounds to close.
        fraction: share of the eligible online devices that is asked, rounded up.
        min_devices: devices that must be online and eligible before a round starts, and are asked
            at least.
        quorum: share of the wanted devices, rounded up, whose updates make a round. Those whose
            update is refused are not counted among them.
        grace: seconds that a round with a quorum waits for devices that have left, from the moment
            each was gone; by default a quarter of the time that the slowest of those that answered
            took.
        over_selection: share of the wanted devices that is asked beyond them; the round closes when
            as many as are wanted have answered, and the slowest are not waited for.
        buffer: updates that make a version; whoever has not answered goes on and counts in a later
            one. None waits for everybody. With it ``fraction`` is the share of the devices that is
            at work at any time.
        staleness: an update that was made s versions ago counts (1 + s) to the power of minus this.
    """

    rounds: int = Field(default=20, ge=1)
    fraction: Share = 1.0
    min_devices: int = Field(default=1, ge=1)
    quorum: Share = 0.5
    grace: float | None = Field(default=None, ge=0)
    over_selection: float = Field(default=0.0, ge=0, le=10)
    buffer: int | None = Field(default=None, ge=1)
    staleness: float = Field(default=0.5, ge=0)

    @model_validator(mode="after")
    def _has_effect(self, info: ValidationInfo) -> "RoundKeys":
        late = self.buffer is not None
        self.refuse_idle(info, "staleness", late, where="where no update is late", instead="buffer")
        return self


class RoundConfig(RoundKeys):
    """How the rounds of a fleet go.

    Attributes:
        deadline_seconds: time from the offers to the close.
        wait_seconds: how long to wait for ``min_devices``.
        nudge_seconds: a device silent for this long is sent its offer again.
        retries: abandoned rounds in a row before the run fails.
        chunk_bytes: payload bytes of a chunk; less where the broker takes no such packets.
    """

    deadline_seconds: float = Field(default=120.0, gt=0)
    wait_seconds: float = Field(default=60.0, gt=0)
    nudge_seconds: float = Field(default=10.0, gt=0)
    retries: int = Field(default=3, ge=1)
    chunk_bytes: int = Field(default=96 * 1024, ge=1024, le=15 * 1024 * 1024)


class UploadConfig(FrozenModel):
    """How updates travel.

    Attributes:
        encoding: ``fp32``, the weights; or their difference to those that were sent, in ``fp16``
            (half of the bytes), ``bf16`` (half, too: the range of float32), ``int8`` (0.26) or
            ``int4`` (0.13), or in ``topk``, the largest entries alone (0.05).
        keep: with ``topk``, the share of the entries of every tensor that is sent.
    """

    encoding: Literal["fp32", "fp16", "bf16", "int8", "int4", "topk"] = "fp32"
    keep: Share = KEEP

    @model_validator(mode="after")
    def _has_effect(self, info: ValidationInfo) -> "UploadConfig":
        where = f'on encoding = "{self.encoding}"'
        largest = self.encoding == "topk"
        self.refuse_idle(info, "keep", largest, where=where, instead='encoding = "topk"')
        return self


class DownloadConfig(FrozenModel):
    """How weights travel to the devices that train them.

    Attributes:
        encoding: ``fp32``; or, for methods that average what devices have changed, rounded to
            ``fp16`` or ``bf16`` (half of the bytes) or ``int8`` (0.26). The global model stays
            float32.
    """

    encoding: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
