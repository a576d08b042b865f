"""flash.toml: the description of one board."""

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

# Keys of device.toml that an enrolment contains.
_ENROLLED_KEYS = {"fleet", "device", "broker", "identity", "tls", "insecure"}
# Prefixes of public keys of OpenSSH.
_KEY_KINDS = ("ssh-", "ecdsa-", "sk-")

BoardName = Literal["generic-arm64", "generic-x86-64", "jetson", "rpi3", "rpi4", "rpi5", "zero2w"]
Python = Literal["3.10", "3.11", "3.12", "3.13"]


@dataclass(frozen=True)
class Board:
    """A kind of computer.

    Attributes:
        machine: its processor, as ``uname -m`` prints it.
        python: the Python version of its usual system.
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
    """``[network]``: Wi-Fi; a cable needs no settings.

    Attributes:
        ssid: name of the Wi-Fi network.
        password: password of the network, 8 to 63 characters for WPA2 or WPA3; empty for an open
            network.
        country: two-letter country code, such as ``DE``; without one, the radio stays off.
        hidden: whether the network hides its name.
        wpa3: whether the network supports only WPA3; not needed for a network with both WPA2 and
            WPA3.
    """

    ssid: str = Field(min_length=1, max_length=32)
    password: SecretStr | None = None
    country: Annotated[str, Field(pattern="^[A-Z]{2}$")] | None = None
    hidden: bool = False
    wpa3: bool = False

    @model_validator(mode="after")
    def _whole(self) -> Self:
        # Not ValueError, because pydantic's message would show the whole table with the password.
        if self.country is None:
            raise ConfigError(
                "[network] country is missing: by law the radio stays off without it; "
                'set it to the two-letter code of the board\'s country, such as "DE"'
            )
        # The limit counts bytes, which pydantic's length does not.
        if len(self.ssid.encode()) > 32 or not self.ssid.isprintable():
            raise ConfigError(
                "[network] ssid must have 1 to 32 bytes (an umlaut has two) and only printable"
                " characters"
            )
        # An open network has no password to check, so a valid one stands in.
        word = "8 letters" if self.password is None else self.password.get_secret_value()
        if not 8 <= len(word.encode()) <= 63 or not word.isprintable():
            raise ConfigError(
                "[network] password must have 8 to 63 characters; omit it for an open network"
            )
        return self


class Ssh(FrozenModel):
    """``[ssh]``: the account that may log in; without it nobody can.

    Attributes:
        user: name of the account on the board; the account can use sudo.
        keys: public SSH keys, or files with one key each.
    """

    user: Annotated[str, Field(pattern="^[a-z][a-z0-9-]{0,30}$")] = "shoal-admin"
    keys: tuple[str, ...] = Field(min_length=1)


class FlashConfig(FrozenModel):
    """The configuration of ``shoal flash``.

    Attributes:
        board: kind of computer on which the agent runs.
        hostname: host name of the board; by default the device's id.
        python: Python version of the board's system, if it differs from the usual version.
        enrolment: the enrolment file that `shoal enroll` wrote; it sets the fleet, the device and
            the broker.
        fleet: name of the fleet, if there is no enrolment.
        device: id of the device, if there is no enrolment.
        server: address of the broker, ``mqtt[s]://host:port``; with an enrolment, needed only if
            the address differs from the enrolment's.
        insecure: whether to run without identities, on a network that you trust.
        files: files to copy to the board; they are placed in the folder to which paths in
            ``[data]`` are relative.
        data: the training data, as in device.toml.
        settings: additional keys of device.toml, such as ``max_width``.
        network: Wi-Fi.
        ssh: the account that may log in.
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
        """Return processor and Python version of the board."""
        usual = BOARDS[self.board]
        return Board(usual.machine, self.python or usual.python)

    @property
    def host(self) -> str:
        """Return the name of the board in its network."""
        if self.hostname:
            return self.hostname
        name = (self.device or self.board).lower()
        # A host name allows neither underscores nor dots.
        return name.replace("_", "-").replace(".", "-")

    def resolved(self, base: Path) -> "FlashConfig":
        """Return these settings with paths from ``base`` and the values of the enrolment.

        Raises:
            ConfigError: the enrolment contradicts these settings, or a key cannot be read.
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
        # None: the key was not given, so the enrolment's value holds.
        if value not in {None, enrolled}:
            raise ConfigError(
                f"{key} is {value!r}, but the enrolment {self.enrolment} has {enrolled!r}"
            )

    def device_toml(self) -> str:
        """Return the board's configuration, with the same checks as on the board.

        If neither an enrolment nor a fleet is named, the configuration expects that an enrolment is
        copied to the board later.

        Raises:
            ConfigError: a key is unknown in device.toml, or a key is missing.
        """
        document = self._device_document()
        if self.fleet is None or self.enrolment is not None:
            self._refuse_idle_settings()
            # Only for the check: the file for the board must not contain them.
            # The values that the enrolment will have on the board.
            enrolled = {"fleet": "fleet", "device": "device", "broker": "mqtts://broker"}
            text = tomli_w.dumps({**enrolled, **document})
            parse_config(text, DeviceConfig, source="flash.toml")
            return tomli_w.dumps({**document, "identity": {"file": ENROLMENT}})
        own = {"fleet": self.fleet, "device": self.device, "insecure": self.insecure}
        named = {key: value for key, value in own.items() if value}
        text = tomli_w.dumps({**named, **document})
        # `address` raises if the board could not connect without an identity.
        parse_config(text, DeviceConfig, source="flash.toml").address()
        return text

    def _device_document(self) -> dict[str, Any]:
        """Return device.toml without the board's identity."""
        data = self.data.resolved(Path(DATA))
        document: dict[str, Any] = {"state_dir": STATE, **self.settings}
        if self.server is not None:
            document["broker"] = self.server
        # The user's functions are copied beside the data.
        if data.functions() and "code" not in self.settings:
            document["code"] = [DATA]
        document["data"] = {
            # `exclude_defaults` would drop the kind, which chooses the table's form.
            "kind": data.kind,
            **data.model_dump(mode="json", exclude_defaults=True),
        }
        return document

    def _refuse_idle_settings(self) -> None:
        """Refuse settings that contradict an enrolment, because the agent would not start."""
        idle = _ENROLLED_KEYS & self.settings.keys()
        subject = ""
        if idle:
            subject = f"[settings] {min(idle)}"
        elif self.server is not None and BrokerAddress.parse(self.server).username is not None:
            subject = "the login in server"
        if subject:
            raise ConfigError(
                f"{subject} is not allowed beside an enrolment, and the agent would not"
                " start; remove it"
            )


def load_flash_config(path: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> FlashConfig:
    """Read flash.toml; `changes` are top-level keys with other values for this board.

    Raises:
        ConfigError: the file is invalid, or names something that does not exist.
    """
    # Values of a card in the table of cards replace those of flash.toml.
    document = {**read_toml(path), **changes}
    config = validate_config(document, FlashConfig, source=str(path))
    config = config.resolved(path.resolve().parent)
    config.device_toml()  # raises if it is invalid, before anything is packed
    return config


def _public_key(key: str, base: Path) -> str:
    """Return a public key, read from its file if a file was named."""
    if key.startswith(_KEY_KINDS):
        return key
    try:
        text = (base / Path(key).expanduser()).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"[ssh] keys: {key} is neither a public key nor a file that contains one: {error}"
        ) from error
    # A private key must not leave this computer.
    if not text.startswith(_KEY_KINDS):
        raise ConfigError(
            "[ssh] keys: this file does not contain a public key; name OpenSSH's file that"
            " ends in .pub"
        )
    return text
