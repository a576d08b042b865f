"""The settings of rounds and of encodings: ``[round]``, ``[upload]``, ``[download]``."""

from typing import Literal

from pydantic import Field, ValidationInfo, model_validator

from broker_server.settings.evaluation import Share
from fleet_protocol.encodings import KEEP
from fleet_protocol.frozen import FrozenModel


class RoundKeys(FrozenModel):
    """The number of rounds, and the selection of devices.

    Attributes:
        rounds: number of rounds to close.
        fraction: share of the eligible online devices that is selected, rounded up.
        min_devices: number of devices that must be online and eligible before a round starts; at
            least this many are selected.
        quorum: share of the wanted devices, rounded up, whose updates suffice to close a round. A
            device whose update is refused no longer counts as wanted.
        grace: seconds for which a round that has its quorum waits for each offline device to
            return; by default, a quarter of the time that the slowest answer took.
        over_selection: number of extra devices to select, as a share of the wanted devices. The
            round closes when the wanted number of devices has answered, without waiting for
            stragglers.
        buffer: number of updates after which the server makes a new version. A device that has not
            answered continues, and its update becomes part of a later version. With None, the
            server waits for all devices. With a buffer, ``fraction`` is the share of devices that
            are working at any time.
        staleness: exponent a in an update's weight, (1 + s) ** -a, where s is the number of new
            versions since the device began its task.
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
    """How the rounds of a fleet are run.

    Attributes:
        deadline_seconds: seconds from the offers until the round closes.
        wait_seconds: seconds for which the server waits until ``min_devices`` are online.
        nudge_seconds: seconds of silence after which the server resends a device its offer.
        retries: number of consecutive abandoned rounds after which the run fails.
        chunk_bytes: payload bytes of a chunk; chunks are smaller if the broker does not accept
            packets of this size.
    """

    deadline_seconds: float = Field(default=120.0, gt=0)
    wait_seconds: float = Field(default=60.0, gt=0)
    nudge_seconds: float = Field(default=10.0, gt=0)
    retries: int = Field(default=3, ge=1)
    chunk_bytes: int = Field(default=96 * 1024, ge=1024, le=15 * 1024 * 1024)


class UploadConfig(FrozenModel):
    """How updates are encoded.

    Attributes:
        encoding: encoding of the updates. ``fp32`` sends the weights. Every other encoding sends
            their difference from the weights that the device received, in fewer bytes: 50% for
            ``fp16`` and for ``bf16``, which has the range of float32; 26% for ``int8``; 13% for
            ``int4``; and 5% for ``topk``, which sends only the largest entries.
        keep: share of the entries of every tensor that ``topk`` sends.
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
    """How weights are encoded for the devices that train them.

    Attributes:
        encoding: encoding of the weights that the server sends: ``fp32`` or, for methods that
            average the changes of devices, weights rounded to ``fp16`` or ``bf16`` (50% of the
            bytes) or to ``int8`` (26% of the bytes). The global model stays float32.
    """

    encoding: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
