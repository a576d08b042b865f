"""Opens the transport of whoever speaks: signed for a member of an enrolled fleet, plain for anybody else."""

import queue

from fleet_protocol.identity.member import Member
from fleet_protocol.transport import BrokerAddress, Event, Farewell, Transport, module_for, open_transport


def open_for(
    member: Member | None,
    address: BrokerAddress,
    client_id: str,
    inbox: queue.SimpleQueue[Event],
    *,
    will: Farewell | None = None,
    session_expiry_seconds: int = 3600,
) -> Transport:
    """Make a transport, as `open_transport` does, for a member or for anybody.

    A member signs what it says and takes nothing that is not signed; None is for a fleet without identities. A member's
    folder that cannot be written is a StorageError.
    """
    if member is None:
        return open_transport(address, client_id, inbox, will=will, session_expiry_seconds=session_expiry_seconds)
    module = module_for("an enrolled fleet", "fleet_protocol.identity.signed_transport")  # cryptography, that is
    opened: Transport = module.open_signed(
        address, client_id, inbox, member, will=will, session_expiry_seconds=session_expiry_seconds
    )
    return opened
