"""Devices in the store: what each last said about itself."""

import time

from sqlalchemy import func, select
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from broker_server.store import schema
from broker_server.store.database import Database
from broker_server.store.records import DeviceRecord
from fleet_protocol.messages import DeviceStatus

_GIVEN = sqlite_insert(schema.devices)
_SEE = _GIVEN.on_conflict_do_update(
    index_elements=["fleet", "id"],
    set_={
        "online": _GIVEN.excluded.online,
        "state": _GIVEN.excluded.state,
        "last_seen_at": _GIVEN.excluded.last_seen_at,
        "profile": func.coalesce(_GIVEN.excluded.profile, schema.devices.c.profile),
    },
)


class DeviceTable(Database):
    """The devices that a store has seen."""

    def see_device(self, status: DeviceStatus) -> None:
        """Remember what a device said about itself, with the next commit; its profile stays when it says none."""
        now = time.time()
        row = {
            "fleet": status.fleet,
            "id": status.device,
            "online": status.online,
            "state": status.state,
            "profile": None if status.profile is None else status.profile.model_dump_json(),
            "first_seen_at": now,
            "last_seen_at": now,
        }
        # One row waits for each device and kind of word: the last with a profile, and the last without.
        self._later(_SEE, row, (status.fleet, status.device, status.profile is None))

    def devices(self, fleet: str | None = None) -> list[DeviceRecord]:
        """Every device that was ever seen, by id."""
        self.flush()
        query = select(schema.devices).order_by(schema.devices.c.id)
        return self._all(DeviceRecord, query if fleet is None else query.where(schema.devices.c.fleet == fleet))
