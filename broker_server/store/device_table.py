"""Devices in the store: what each last said about itself."""

import time

from sqlalchemy import select, update
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from broker_server.store import schema
from broker_server.store.database import Database
from broker_server.store.records import DeviceRecord
from fleet_protocol.messages import DeviceProfile, DeviceStatus

_GIVEN = sqlite_insert(schema.devices)
_SEE = _GIVEN.on_conflict_do_update(
    index_elements=["fleet", "id"],
    set_={
        "online": _GIVEN.excluded.online,
        "state": _GIVEN.excluded.state,
        "last_seen_at": _GIVEN.excluded.last_seen_at,
    },
)
_LEARN = _GIVEN.on_conflict_do_update(
    index_elements=["fleet", "id"],
    set_={"profile": _GIVEN.excluded.profile, "last_seen_at": _GIVEN.excluded.last_seen_at},
)


class DeviceTable(Database):
    """The devices that a store has seen."""

    def see_device(self, said: DeviceStatus | DeviceProfile) -> None:
        """Remember what a device said about itself, with the next commit."""
        now = time.time()
        row = {"fleet": said.fleet, "id": said.device, "online": False, "state": "announced", "profile": None}
        row |= {"first_seen_at": now, "last_seen_at": now}
        # One row waits for each device and kind of word: the last one.
        key = said.fleet, said.device
        if isinstance(said, DeviceProfile):
            self._later(_LEARN, {**row, "profile": said.profile.model_dump_json()}, (*key, "profile"))
        else:
            self._later(_SEE, {**row, "online": said.online, "state": said.state}, (*key, "status"))

    def lose_device(self, device: str, state: str) -> None:
        """Remember that a device is away, which it does not say itself."""
        self.flush()
        self._write(update(schema.devices).where(schema.devices.c.id == device).values(online=False, state=state))

    def known_devices(self, fleet: str) -> list[DeviceRecord]:
        """Those of a fleet whose server begins: each is offline until it says something else."""
        self._write(update(schema.devices).where(schema.devices.c.fleet == fleet).values(online=False))
        return self.devices(fleet)

    def devices(self, fleet: str | None = None) -> list[DeviceRecord]:
        """Every device that was ever seen, by id."""
        self.flush()
        query = select(schema.devices).order_by(schema.devices.c.id)
        return self._all(DeviceRecord, query if fleet is None else query.where(schema.devices.c.fleet == fleet))
