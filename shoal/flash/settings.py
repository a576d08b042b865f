"""flash.toml: everything that one board is to be."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, SecretStr, model_validator
from typing_extensions import Self

from device_runtime.settings import DeviceConfig
from fleet_protocol.configuration import parse_config, read_toml, validate_config
from fleet_protocol.data.sources import DataConfig
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FiniteJson, FrozenModel
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.messages.values import Name
from fleet_protocol.transport import BrokerAddress

CONFIG = "/etc/shoal/device.toml"
ENROLMENT = "/etc/shoal/enrolment"
STATE = "/var/lib/shoal"
DATA = "/var/lib/shoal/data"

# Keys of device.toml that an enrolment brings.
_ENROLLED_KEYS = {"fleet", "device", "broker", "identity", "tls", "insecure"}
# In front of public keys of OpenSSH.
_KEY_KINDS = ("ssh-", "ecdsa-", "sk-")

BoardName = Literal["generic-arm64", "generic-x86-64", "jetson", "rpi3", "rpi4", "rpi5", "zero2w"]
Python = Literal["3.10", "3.11", "3.12", "3.13"]


@dataclass(frozen=True)
class Board:
    """A kind of computer.

    Attributes:
        machine: its processor, as ``uname -m`` has it.
        python: that of its usual system.
    """

    machine: Literal["aarch64", "x86_64"]
    python: Python


BOARDS: Mapping[BoardName, Board] = MappingProxyType(
    {
        "generic-arm64": Board("aarch64", "3.13"),  # Debian 13
        "generic-x86-64": Board("x86_64", "3.13"),
        "jetson": Board("aarch64", "3.10"),  # JetPack 6
        "rpi3": Board("aarch64", "3.13"),  # Raspberry Pi OS of Debian 13
        "rpi4": Board("aarch64", "3.13"),
        "rpi5": Board("aarch64", "3.13"),
        "zero2w": Board("aarch64", "3.13"),
    }
)


class Network(FrozenModel):
    """``[network]``: Wi-Fi; a cable needs nothing.

    Attributes:
        ssid: name of the Wi-Fi.
        password: 8 to 63 characters of WPA2 or WPA3; none for an open network.
        country: two letters, as in ``DE``; without them the radio stays off.
        hidden: whether the network does not say its name.
        wpa3: whether it has WPA3 alone; one that has WPA2 as well needs nothing.
    """

    ssid: str = Field(min_length=1, max_length=32)
    password: SecretStr | None = None
    country: Annotated[str, Field(pattern="^[A-Z]{2}$")] | None = None
    hidden: bool = False
    wpa3: bool = False

    @model_validator(mode="after")
    def _whole(self) -> Self:
        # Not ValueError: what pydantic makes of one shows the whole table, the password included.
        if self.country is None:
            raise ConfigError(
                "[network] country is missing: by law the radio stays off without it; "
                'write the two letters of where the board is, such as country = "DE"'
            )
        if len(self.ssid.encode()) > 32 or not self.ssid.isprintable():
            raise ConfigError(
                "[network] ssid has to have 1 to 32 bytes (an umlaut has two), "
                "and none that is not printed"
            )
        word = "8 letters" if self.password is None else self.password.get_secret_value()
        if not 8 <= len(word.encode()) <= 63 or not word.isprintable():
            raise ConfigError(
                "[network] password has to have 8 to 63 characters; "
                "leave it out for an open network"
            )
        return self


class Ssh(FrozenModel):
    """``[ssh]``: who may log in; without it nobody can.

    Attributes:
        user: name of the account, which may use sudo.
        keys: public keys, or files that hold one each.
    """

    user: Annotated[str, Field(pattern="^[a-z][a-z0-9-]{0,30}$")] = "shoal-admin"
    keys: tuple[str, ...] = Field(min_length=1)


class FlashConfig(FrozenModel):
    """What ``shoal flash`` reads.

    Attributes:
        board: kind of computer.
        hostname: of the board; by default the device's name.
        python: of its system, where that is not the usual one of the board.
        enrolment: the file that ``shoal enroll`` wrote; it has fleet, device and server in it.
        fleet: without an enrolment: name of the fleet.
        device: without an enrolment: id of the device.
        server: address of the broker, ``mqtt[s]://host:port``; with an enrolment only where that
            one's is another.
        insecure: a network that you trust, without identities.
        files: carried to the board, into the folder that relative paths of ``[data]`` start from.
        data: where the training data is, as in device.toml.
        settings: further keys of device.toml, such as ``max_width``.
        network: Wi-Fi.
        ssh: who may log in.
    """

    board: BoardName
    hostname: Annotated[str, Field(pattern="^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] | None = None
    python: Python | None = None
    enrolment: Path | None = None
    fleet: Name | None = None
    device: Name | None = None
    server: str | None = None
    insecure: bool = False
    files: tuple[Path, ...] = ()
    data: DataConfig
    settings: Mapping[str, FiniteJson] = Field(default_factory=dict)
    network: Network | None = None
    ssh: Ssh | None = None

    @property
    def target(self) -> Board:
        """Processor and Python of the board."""
        usual = BOARDS[self.board]
        return Board(usual.machine, self.python or usual.python)

    @property
    def host(self) -> str:
        """Name of the board in its network."""
        if self.hostname:
            return self.hostname
        name = (self.device or self.board).lower()
        return name.replace("_", "-").replace(".", "-")

    def resolved(self, base: Path) -> "FlashConfig":
        """Return the same with paths from ``base``, and what the enrolment says.

        Raises:
            ConfigError: the enrolment says otherwise than this, or a key cannot be read.
        """
        changes: dict[str, object] = {"files": tuple(base / path for path in self.files)}
        if self.enrolment is not None:
            member = read_enrolment(base / self.enrolment, "device")
            self._require_equal("fleet", self.fleet, member.fleet)
            self._require_equal("device", self.device, member.name)
            changes["enrolment"] = base / self.enrolment
            changes["fleet"] = member.fleet
            changes["device"] = member.name
        if self.ssh is not None:
            keys = tuple(_public_key(key, base) for key in self.ssh.keys)
            changes["ssh"] = self.ssh.model_copy(update={"keys": keys})
        return self.model_copy(update=changes)

    def _require_equal(
        self,
        key: str,
        value: str | None,
        enrolled: str,
    ) -> None:
        if value not in {None, enrolled}:
            raise ConfigError(
                f"{key} is {value!r}, and in the enrolment {self.enrolment} {enrolled!r}"
            )

    def device_toml(self) -> str:
        """Return the board's configuration, checked as the board will read it.

        Where neither an enrolment nor a fleet is named, it expects an enrolment that is copied to
        the board later.

        Raises:
            ConfigError: a key that device.toml does not have, or one that is missing.
        """
        document = self._device_document()
        if self.fleet is None or self.enrolment is not None:
            self._refuse_idle_settings()
            # What the enrolment will say on the board.
            enrolled = {"fleet": "fleet", "device": "device", "broker": "mqtts://broker"}
            text = tomli_w.dumps({**enrolled, **document})
            parse_config(text, DeviceConfig, source="flash.toml")
            return tomli_w.dumps({**document, "identity": {"file": ENROLMENT}})
        own = {"fleet": self.fleet, "device": self.device, "insecure": self.insecure}
        named = {key: value for key, value in own.items() if value}
        text = tomli_w.dumps({**named, **document})
        parse_config(text, DeviceConfig, source="flash.toml").address()
        return text

    def _device_document(self) -> dict[str, Any]:
        """Return device.toml but for who the board is."""
        data = self.data.resolved(Path(DATA))
        document: dict[str, Any] = {"state_dir": STATE, **self.settings}
        if self.server is not None:
            document["broker"] = self.server
        # The user's functions are carried beside the data.
        if data.functions() and "code" not in self.settings:
            document["code"] = [DATA]
        document["data"] = {
            "kind": data.kind,
            **data.model_dump(mode="json", exclude_defaults=True),
        }
        return document

    def _refuse_idle_settings(self) -> None:
        """Refuse settings that an enrolment makes needless, and with which no agent starts."""
        idle = _ENROLLED_KEYS & self.settings.keys()
        subject = ""
        if idle:
            subject = f"[settings] {min(idle)}"
        elif self.server is not None and BrokerAddress.parse(self.server).username is not None:
            subject = "the login in server"
        if subject:
            raise ConfigError(
                f"{subject} has no effect beside an enrolment, and would end the agent; remove it"
            )


def load_flash_config(path: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> FlashConfig:
    """Read flash.toml; `changes` are keys at its top that are others for this board.

    Raises:
        ConfigError: it is wrong, or names something that is not there.
    """
    document = {**read_toml(path), **changes}
    config = validate_config(document, FlashConfig, source=str(path))
    config = config.resolved(path.resolve().parent)
    config.device_toml()  # raises where it is wrong, before anything is packed
    return config


def _public_key(key: str, base: Path) -> str:
    """Return a public key itself, where a file that holds it was named."""
    if key.startswith(_KEY_KINDS):
        return key
    try:
        text = (base / Path(key).expanduser()).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"[ssh] keys: {key} is no public key and no file that holds one: {error}"
        ) from error
    # A private one must not leave this computer.
    if not text.startswith(_KEY_KINDS):
        raise ConfigError(
            "[ssh] keys: this file holds no public key; name the one of OpenSSH that ends in .pub"
        )
    return text
