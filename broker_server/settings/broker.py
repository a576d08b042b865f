"""Which broker carries a fleet, and what the server must know of it."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator, model_validator

from fleet_protocol.frozen import STORED, FrozenModel
from fleet_protocol.hosts import is_loopback

EMBEDDED = "embedded"
MOSQUITTO = "mosquitto"
"""Values of ``url`` for a broker that the server starts."""

ANYWHERE = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  (compared, not bound)
"""Values of ``listen`` for all addresses of the computer."""


class BrokerConfig(FrozenModel):
    """Which broker carries the fleet.

    Attributes:
        url: ``embedded`` for a fleet on this computer, ``mosquitto`` for an installed one that the
            server starts, or ``mqtt[s]://[user:password@]host[:port]``.
        port: of the broker that the server starts.
        listen: address on which a Mosquitto that the server starts listens; ``0.0.0.0`` lets
            boards on the network in.
        ca_file: certificates to trust instead of the system's.
        cert_file: client certificate of the server.
        key_file: its key.
        identity: the server's enrolment in a fleet made by `shoal init`; then everything is signed,
            and a Mosquitto that the server starts asks for certificates of the fleet.
        insecure: let a broker carry the fleet over a network although anybody on it may read and
            write.
        connect_timeout_seconds: how long to try the first connection.
        receivers: processes that take updates from it, each over a connection of its own; 0 for the
            server alone.
        receiver_hosts: where they run, in turn, by names that ``ssh`` reaches without a question;
            Python, store and certificates have the same paths there. None for the server's own
            computer.
    """

    url: str = EMBEDDED
    port: int = Field(default=1883, ge=1, le=65535)
    listen: str = "127.0.0.1"
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    identity: Path | None = None
    insecure: bool = False
    connect_timeout_seconds: float = Field(default=30.0, gt=0)
    receivers: int = Field(default=0, ge=0, le=64)
    receiver_hosts: tuple[Annotated[str, Field(pattern=r"^[^-\s]\S*$")], ...] = ()

    @field_validator("listen")
    @classmethod
    def _address(cls, listen: str) -> str:
        return "127.0.0.1" if listen == "localhost" else listen.strip("[]")

    @model_validator(mode="after")
    def _hosts_have_receivers(self) -> "BrokerConfig":
        if len(self.receiver_hosts) > self.receivers:
            raise ValueError(
                f"receiver_hosts names {len(self.receiver_hosts)} hosts for {self.receivers}"
                " receivers"
            )
        if self.receiver_hosts and self.hosted:
            raise ValueError(
                "receivers on other hosts need the url of a broker that they reach, not"
                f" {self.url!r}"
            )
        return self

    @model_validator(mode="after")
    def _embedded_is_for_one_computer(self, info: ValidationInfo) -> "BrokerConfig":
        if self.url != EMBEDDED or info.context == STORED:
            return self
        if self.identity is not None:
            raise ValueError(
                "the embedded broker lets in anybody, and a fleet with identities needs a "
                'Mosquitto: say url = "mosquitto" (`sudo apt install mosquitto`), or give the '
                "url of one that you run"
            )
        if not is_loopback(self.listen):
            raise ValueError(
                "the embedded broker is for this computer only, and cannot listen on "
                f"{self.listen or 'every address'}: for boards elsewhere make a fleet with "
                "identities (`shoal init FLEET --host ADDRESS`), or, for a network that you "
                'trust, say url = "mosquitto" and insecure = true'
            )
        return self

    @property
    def hosted(self) -> bool:
        """Return whether the server starts the broker."""
        return self.url in {EMBEDDED, MOSQUITTO}
