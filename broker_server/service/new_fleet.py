"""What `shoal init` makes a fleet of: its name, its broker, and the configuration that follows."""

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
# What `shoal run` trains; `shoal export` writes the artifacts. `shoal up` does not need it.
[model]
artifacts = "artifacts"
arch = "conv"
"""
_LISTENER = """\
port = {port}  # boards take theirs from the file `address` beside this one: change it, too, \
and enrol them anew
listen = "{listen}"
"""


@dataclass(frozen=True)
class NewFleet:
    """What a fleet is to be.

    Attributes:
        fleet: its name.
        host: name or address under which boards reach the broker.
        port: of the broker.
        url: ``mosquitto`` for one that the server starts, ``emqx`` for one on ``host``, or the
            address of a Mosquitto that the operator runs.
        listen: address that a broker started here listens on.
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
    def own_broker(self) -> str | None:
        """Of which kind the broker is that the operator runs; None if the server starts it."""
        if "://" in self.url:
            return MOSQUITTO
        return EMQX if self.url == EMQX else None

    def configuration(self) -> str:
        """Return the text of its fleet.toml."""
        if self.own_broker is not None:
            return _FLEET_TOML.format(fleet=self.fleet, url=self.broker, listener="")
        listener = _LISTENER.format(port=self.port, listen=self.listen)
        return _FLEET_TOML.format(fleet=self.fleet, url=self.url, listener=listener)
