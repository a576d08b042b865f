"""Shows a fleet in Home Assistant, by its discovery over MQTT: https://www.home-assistant.io/integrations/mqtt/.

The broker is the home's, where nobody needs to know the fleet's keys; what is told there are a run's figures and who is
online, no weights and no samples.
"""

import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from paho.mqtt import MQTTException, publish

from broker_server.store import RunRecord, Store, queries
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import TransportError
from fleet_protocol.transport import BrokerAddress

_DISCOVERY = "homeassistant/device"
_RUN: Mapping[str, Mapping[str, str]] = {
    "status": {"name": "Run"},
    "round": {"name": "Rounds closed", "state_class": "measurement"},
    "accuracy": {"name": "Accuracy", "state_class": "measurement", "suggested_display_precision": "4"},
    "loss": {"name": "Loss", "state_class": "measurement", "suggested_display_precision": "4"},
    "online": {"name": "Boards online", "state_class": "measurement"},
}
_BOARD: Mapping[str, Mapping[str, str]] = {
    "online": {"name": "Online", "platform": "binary_sensor", "device_class": "connectivity"},
    "reason": {"name": "Not training because"},
    "tier": {"name": "Tier"},
    "merged": {"name": "Updates merged", "state_class": "total"},
    "temperature": {
        "name": "Temperature", "device_class": "temperature", "unit_of_measurement": "°C", "state_class": "measurement",
    },
}  # fmt: skip


class HomeAssistant:
    """A device for the fleet and one for each board, each with a retained state that is told again when it changes.

    Its broker is at ``mqtt://[user:password@]host[:port]``; another form is a ConfigError.
    """

    def __init__(self, address: str) -> None:
        self._broker = BrokerAddress.parse(address)
        self._told: dict[str, str] = {}

    def look(self, opened: Store, run: RunRecord) -> int:
        """Tell what has changed; the number of rounds told is that of the run's closed ones, the first time."""
        view = queries.status(opened, run.id)
        first = not self._told
        said = dict(self._messages(run, view, queries.devices(opened, run.id)))
        self._publish([(topic, text, 1, True) for topic, text in said.items() if self._told.get(topic) != text])
        self._told = said
        return view.closed if first else 0

    def end(self, _status: str) -> None:
        """The states stay, retained."""

    @staticmethod
    def _messages(
        run: RunRecord, view: queries.StatusView, devices: list[queries.DeviceView]
    ) -> Iterator[tuple[str, str]]:
        judged = view.evaluation
        figures = {
            "status": view.run.status if view.run else run.status,
            "round": view.closed,
            "accuracy": judged.accuracy if judged else None,
            "loss": judged.loss if judged else None,
            "online": view.online,
        }
        fleet = f"shoal_{_safe(run.fleet)}"
        yield from _device(fleet, f"Shoal {run.fleet}", f"shoal-state/{run.fleet}/run", _RUN, figures)
        for item in devices:
            known = item.device.profile
            states = {
                "online": "ON" if item.device.online else "OFF",
                "reason": item.reason[:255] or "it trains",
                "tier": item.tier,
                "merged": item.merged,
                "temperature": known.temperature_celsius if known else None,
            }
            place = f"shoal-state/{run.fleet}/devices/{_safe(item.device.id)}"
            yield from _device(f"{fleet}_{_safe(item.device.id)}", item.device.id, place, _BOARD, states, fleet)

    def _publish(self, retained: list[Any]) -> None:
        broker = self._broker
        login: Any = {"username": broker.username, "password": broker.password} if broker.username else None
        tls: Any = {"ca_certs": None} if broker.tls else None  # those that the system trusts
        try:
            if retained:
                publish.multiple(retained, broker.host, broker.port, auth=login, tls=tls)
        except (OSError, MQTTException) as error:
            raise TransportError(f"the broker of Home Assistant at {broker} has not taken it: {error}") from error


def _device(
    identity: str,
    name: str,
    place: str,
    parts: Mapping[str, Mapping[str, str]],
    states: Mapping[str, Any],
    through: str | None = None,
) -> Iterator[tuple[str, str]]:
    device = {"identifiers": [identity], "name": name, "manufacturer": "Shoal"}
    found = {
        "device": device if through is None else {**device, "via_device": through},
        "origin": {"name": "shoal", "sw_version": version("shoal")},
        "state_topic": place,
        "components": {
            key: {
                "platform": "sensor",
                "unique_id": f"{identity}_{key}",
                "value_template": f"{{{{ value_json.{key} }}}}",
                **part,
            }
            for key, part in parts.items()
        },
    }
    yield f"{_DISCOVERY}/{identity}/config", json.dumps(found, ensure_ascii=False)
    yield place, json.dumps(states)


def _safe(name: str) -> str:
    """A name in the letters that discovery allows; different names stay different."""
    made = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    return made if made == name else f"{made}-{blob_digest(name.encode())[:6]}"
