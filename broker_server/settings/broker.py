"""The settings of the broker that carries a fleet's messages."""

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
    """The broker that carries the fleet's messages.

    Attributes:
        url: the broker: ``embedded`` for a fleet on this computer, ``mosquitto`` for an installed
            Mosquitto that the server starts, or ``mqtt[s]://[user:password@]host[:port]``.
        port: port of the broker that the server starts.
        listen: address on which the server's own Mosquitto listens; ``0.0.0.0`` accepts boards from
            the network.
        ca_file: file with the certificates to trust instead of the system's.
        cert_file: file with the client certificate of the server.
        key_file: file with the private key of the client certificate.
        identity: file with the server's enrolment in a fleet that ``shoal init`` created. All
            messages are then signed, and a Mosquitto that the server starts requires the fleet's
            certificates.
        insecure: allow a broker that carries the fleet's messages over a network on which others
            can read and change them.
        connect_timeout_seconds: seconds for which the server tries to connect at startup before it
            gives up.
        receivers: number of processes that receive updates, each over its own connection; with 0,
            the server itself receives the updates.
        receiver_hosts: names of the hosts that run the receivers; receivers are assigned to the
            hosts in turn. ``ssh`` must reach each host without a password prompt, and Python, the
            store and the certificates must have the same paths there. If empty, the receivers run
            on the server's own computer.
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
        # Brackets of an IPv6 address belong to URLs only.
        return "127.0.0.1" if listen == "localhost" else listen.strip("[]")

    @model_validator(mode="after")
    def _hosts_have_receivers(self) -> "BrokerConfig":
        if len(self.receiver_hosts) > self.receivers:
            raise ValueError(
                f"receiver_hosts names {len(self.receiver_hosts)} hosts for {self.receivers}"
                " receivers"
            )
        # A broker on this computer is reached over loopback, which another host does not share.
        if self.receiver_hosts and self.hosted:
            raise ValueError(
                "receivers on other hosts need the url of a broker that they can reach, not"
                f" {self.url!r}"
            )
        return self

    @model_validator(mode="after")
    def _embedded_is_for_one_computer(self, info: ValidationInfo) -> "BrokerConfig":
        # A stored configuration is only displayed.
        if self.url != EMBEDDED or info.context == STORED:
            return self
        if self.identity is not None:
            raise ValueError(
                "the embedded broker admits anyone, and a fleet with identities needs a "
                'Mosquitto: set url = "mosquitto" (`sudo apt install mosquitto`), or give '
                "the url of one that you run"
            )
        if not is_loopback(self.listen):
            raise ValueError(
                "the embedded broker is only for this computer, and cannot listen on "
                f"{self.listen or 'every address'}: for boards elsewhere create a fleet with "
                "identities (`shoal init FLEET --host ADDRESS`), or, for a network that you "
                'trust, set url = "mosquitto" and insecure = true'
            )
        return self

    @property
    def hosted(self) -> bool:
        """Return whether the server starts the broker."""
        return self.url in {EMBEDDED, MOSQUITTO}
