"""Opens the transport of whoever speaks: signed for a member of an enrolled fleet, plain for anybody else."""

from __future__ import annotations

import queue
from importlib import import_module

from fleet_protocol.errors import ConfigError
from fleet_protocol.identity.member import Member
from fleet_protocol.transport import BrokerAddress, Event, Farewell, Transport, open_transport

__all__ = ["open_for"]


def open_for(
    member: Member | None,
    address: BrokerAddress,
    client_id: str,
    inbox: queue.SimpleQueue[Event],
    *,
    will: Farewell | None = None,
    session_expiry_seconds: int = 3600,
) -> Transport:
    """Make a transport; it is not connected yet.

    Args:
        member: signs what it says and takes nothing that is not signed; None for a fleet without identities.
        address: the broker.
        client_id: identity of the session; two transports must not share one.
        inbox: where events go.
        will: what the broker publishes, retained, when we vanish.
        session_expiry_seconds: how long the broker keeps our session after we vanish.

    Raises:
        ConfigError: a certificate file of the address cannot be read, or what the transport needs is not installed.
        StorageError: the member's folder cannot be written.
    """
    if member is None:
        return open_transport(address, client_id, inbox, will=will, session_expiry_seconds=session_expiry_seconds)
    try:
        module = import_module("fleet_protocol.identity.signed_transport")  # needs cryptography
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed here, which an enrolled fleet needs: "
            "pip install 'shoal[device]' on a board, 'shoal[server]' for a server"
        ) from error
    opened: Transport = module.open_signed(
        address, client_id, inbox, member, will=will, session_expiry_seconds=session_expiry_seconds
    )
    return opened
