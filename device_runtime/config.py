"""The device's configuration: one TOML file, frozen once read. Relative paths are relative to that file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from device_runtime.data.config import DataConfig
from device_runtime.personal_files import KEPT_RUNS
from fleet_protocol.config import load_config
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.link import BrokerAddress
from fleet_protocol.topics import NAME_PATTERN

__all__ = ["DeviceConfig", "PersonalConfig", "TlsConfig", "load_device_config"]

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Seconds = Annotated[float, Field(gt=0)]


class TlsConfig(FrozenModel):
    """Files for a ``mqtts://`` broker.

    Attributes:
        ca_file: certificates to trust instead of the system's.
        cert_file: client certificate.
        key_file: its key.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


class PersonalConfig(FrozenModel):
    """The model that stays on this board in mutual learning.

    Attributes:
        set: folder of a mutual set, exported for the fleet's model and this board's own.
        keep_runs: of so many runs the model is kept, the current one among them; older ones are removed.
    """

    set: Path
    keep_runs: int = Field(default=KEPT_RUNS, ge=1)


class DeviceConfig(FrozenModel):
    """Everything an operator may set on a board.

    Attributes:
        fleet: name of the fleet.
        device: id of the device, unique in the fleet.
        broker: ``mqtt[s]://[user:password@]host[:port]``.
        state_dir: folder for the task record and the blobs; it is made.
        data: where the training data is.
        max_width: widest sub-model this board may be given, in (0, 1].
        max_depth: deepest, in blocks, or None for no limit.
        backend: ``onnx`` (portable step), ``ort-training``, or ``auto`` (the latter where it is installed).
        threads: threads of one training step; 0 takes every core.
        holdout: share of the samples kept for evaluation instead of training.
        connect_timeout_seconds: how long to try the broker at start before giving up.
        retry_seconds: time between two announcements of a finished update that nobody acknowledges.
        repair_seconds: silence after which missing chunks are asked for again.
        max_cache_bytes: bound of the blobs kept between tasks.
        tls: certificate files.
        personal: the board's own model, for mutual learning.
    """

    fleet: Name
    device: Name
    broker: str
    state_dir: Path
    data: DataConfig
    max_width: float = Field(default=1.0, gt=0, le=1)
    max_depth: int | None = Field(default=None, ge=1)
    backend: Literal["auto", "onnx", "ort-training"] = "auto"
    threads: int = Field(default=1, ge=0)
    holdout: float = Field(default=0.1, ge=0, lt=1)
    connect_timeout_seconds: Seconds = 30.0
    retry_seconds: Seconds = 5.0
    repair_seconds: Seconds = 2.0
    max_cache_bytes: int = Field(default=512 * 1024 * 1024, ge=0)
    tls: TlsConfig | None = None
    personal: PersonalConfig | None = None

    def address(self) -> BrokerAddress:
        """The broker with its certificate files.

        Raises:
            ConfigError: the address has a wrong form, or certificate files go with a plain connection.
        """
        tls = self.tls or TlsConfig()
        address = BrokerAddress.parse(self.broker, ca_file=tls.ca_file, cert_file=tls.cert_file, key_file=tls.key_file)
        if self.tls is not None and not address.tls:
            raise ConfigError(f"[tls] is set but broker {self.broker!r} is not encrypted; write mqtts://")
        return address

    def resolved(self, base: Path) -> DeviceConfig:
        """The same configuration with relative paths taken from ``base``.

        Args:
            base: usually the folder of the configuration file.
        """
        tls = self.tls
        if tls is not None:
            files = {name: base / path for name, path in tls if path is not None}
            tls = tls.model_copy(update=files)
        personal = self.personal
        if personal is not None:
            personal = personal.model_copy(update={"set": base / personal.set})
        return self.model_copy(
            update={
                "state_dir": base / self.state_dir,
                "data": self.data.resolved(base),
                "tls": tls,
                "personal": personal,
            }
        )


def load_device_config(path: Path) -> DeviceConfig:
    """Read a device's configuration file.

    Args:
        path: the TOML file.

    Raises:
        ConfigError: the file cannot be read or its content is wrong.
    """
    config = load_config(path, DeviceConfig).resolved(path.resolve().parent)
    config.address()
    return config
