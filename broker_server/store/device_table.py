"""The devices of a store, with the last report of each."""

import time
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from broker_server.store import schema
from broker_server.store.database import Database
from broker_server.store.records import DeviceRecord
from fleet_protocol.messages import DeviceProfile, DeviceStatus

_DEVICES = schema.devices
_INSERT = sqlite_insert(_DEVICES)


def _insert_or_update(*columns: str) -> Any:
    """Return the statement that adds a device, or sets some columns of a known one."""
    new_values = {name: _INSERT.excluded[name] for name in columns}
    return _INSERT.on_conflict_do_update(index_elements=["fleet", "id"], set_=new_values)


_RECORD_STATUS = _insert_or_update("online", "state", "last_seen_at")
_RECORD_PROFILE = _insert_or_update("profile", "last_seen_at")


class DeviceTable(Database):
    """The devices of a store."""

    def record_device(self, message: DeviceStatus | DeviceProfile) -> None:
        """Record a device's report, with the next commit."""
        now = time.time()
        row: dict[str, object] = {
            "fleet": message.fleet,
            "id": message.device,
            "online": False,
            "state": "announced",
            "profile": None,
            "first_seen_at": now,
            "last_seen_at": now,
        }
        # Only the last row waits for each device and kind of message.
        device = (message.fleet, message.device)
        if isinstance(message, DeviceProfile):
            row["profile"] = message.profile.model_dump_json()
            self._later(_RECORD_PROFILE, row, (*device, "profile"))
        else:
            row["online"] = message.online
            row["state"] = message.state
            self._later(_RECORD_STATUS, row, (*device, "status"))

    def set_presence(
        self,
        device: str,
        state: str,
        *,
        online: bool = False,
    ) -> None:
        """Record that a device went offline or came back, which it does not report itself."""
        # The device's earlier report comes first, because it would overwrite this if it was written
        # later.
        self.flush()
        change = update(_DEVICES).where(_DEVICES.c.id == device)
        self._write(change.values(online=online, state=state))

    def known_devices(self, fleet: str) -> list[DeviceRecord]:
        """Return the devices of a fleet whose server begins, by id.

        Each is stored as offline until its next report. A device whose row cannot be read is left
        out, with a warning: it describes itself again when it connects.
        """
        in_fleet = _DEVICES.c.fleet == fleet
        self._write(update(_DEVICES).where(in_fleet).values(online=False))
        return self._readable(
            DeviceRecord, select(_DEVICES).where(in_fleet).order_by(_DEVICES.c.id)
        )

    def devices(self, fleet: str | None = None) -> list[DeviceRecord]:
        """Return every device that ever connected, by id; of one fleet or of all."""
        self.flush()
        query = select(_DEVICES).order_by(_DEVICES.c.id)
        if fleet is not None:
            query = query.where(_DEVICES.c.fleet == fleet)
        return self._all(DeviceRecord, query)
