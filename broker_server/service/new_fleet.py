"""Defines a new fleet for `shoal init`: its name, its broker, and the resulting configuration."""

from dataclasses import dataclass

from broker_server.service.own_brokers import EMQX, MOSQUITTO
from fleet_protocol.transport import bracket_host

_FLEET_TOML = """\
# A fleet with identities: devices need the file that `shoal enroll NAME` writes.
fleet = "{fleet}"
store = "store"

[broker]
url = "{url}"
identity = "server.enrolment"
{listener}
# The model that `shoal run` trains; `shoal export` writes the artifacts. `shoal up` needs none.
[model]
artifacts = "artifacts"
arch = "conv"
"""
_LISTENER = """\
port = {port}  # boards that are enrolled already keep theirs: enrol them again after a change
listen = "{listen}"
"""


@dataclass(frozen=True)
class NewFleet:
    """The definition of a new fleet.

    Attributes:
        fleet: its name.
        host: name or address at which boards reach the broker.
        port: port of the broker.
        url: ``mosquitto`` for a broker that the server starts, ``emqx`` for one on ``host``, or the
            address of a Mosquitto that the operator runs.
        listen: address on which a broker started here listens.
    """

    fleet: str
    host: str
    port: int = 8883
    url: str = MOSQUITTO
    listen: str = "0.0.0.0"  # noqa: S104  (boards must get in, and nobody without a certificate)

    @property
    def broker(self) -> str:
        """The broker's address for boards."""
        return self.url if "://" in self.url else f"mqtts://{bracket_host(self.host)}:{self.port}"

    @property
    def address_file(self) -> str:
        """The content of the file ``address``; the port of a hosted broker is in fleet.toml."""
        # Its port is part of the address, because no fleet.toml configures it.
        if self.own_broker is not None:
            return self.broker
        return f"mqtts://{bracket_host(self.host)}"

    @property
    def own_broker(self) -> str | None:
        """The kind of broker that the operator runs; None if the server starts it."""
        if "://" in self.url:
            # An address stands for a Mosquitto of the operator.
            return MOSQUITTO
        return EMQX if self.url == EMQX else None

    def configuration(self) -> str:
        """Return the text of the fleet's fleet.toml."""
        if self.own_broker is not None:
            return _FLEET_TOML.format(fleet=self.fleet, url=self.broker, listener="")
        listener = _LISTENER.format(port=self.port, listen=self.listen)
        return _FLEET_TOML.format(fleet=self.fleet, url=self.url, listener=listener)
