"""Shows a fleet in Home Assistant, by its discovery over MQTT.

See https://www.home-assistant.io/integrations/mqtt/. Its broker receives the figures of a run and
which devices are online, but no weights and no samples.
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
_STATES = "shoal-state"
_STATE_LETTERS = 255
"""Bound of Home Assistant on the text of a state."""
_RUN_COMPONENTS: Mapping[str, Mapping[str, str]] = {
    "status": {"name": "Run"},
    "round": {"name": "Rounds closed", "state_class": "measurement"},
    "accuracy": {
        "name": "Accuracy",
        "state_class": "measurement",
        "suggested_display_precision": "4",
    },
    "loss": {
        "name": "Loss",
        "state_class": "measurement",
        "suggested_display_precision": "4",
    },
    "online": {"name": "Boards online", "state_class": "measurement"},
}
_BOARD_COMPONENTS: Mapping[str, Mapping[str, str]] = {
    "online": {"name": "Online", "platform": "binary_sensor", "device_class": "connectivity"},
    "reason": {"name": "Not training because"},
    "tier": {"name": "Tier"},
    "merged": {"name": "Updates merged", "state_class": "total"},
    "temperature": {
        "name": "Temperature",
        "device_class": "temperature",
        "unit_of_measurement": "°C",
        "state_class": "measurement",
    },
}


class HomeAssistant:
    """A device for the fleet and one for each board.

    Each has a retained state, which is published again when it changes.

    Args:
        address: broker of Home Assistant, ``mqtt://[user:password@]host[:port]``.

    Raises:
        ConfigError: the address has another form.
    """

    def __init__(self, address: str) -> None:
        self._broker = BrokerAddress.parse(address)
        self._published: dict[str, str] = {}

    def update(self, opened: Store, run: RunRecord) -> int:
        """Publish what has changed.

        Returns:
            The number of closed rounds the first time, and then 0.
        """
        status = queries.status(opened, run.id)
        is_first = not self._published
        payloads = dict(_payloads(run, status, queries.devices(opened, run.id)))
        changed = []
        for topic, payload in payloads.items():
            if self._published.get(topic) != payload:
                changed.append((topic, payload, 1, True))
        self._publish(changed)
        self._published = payloads
        return status.closed if is_first else 0

    def end(self, _status: str) -> None:
        """Leave the states, which the broker retains."""

    def _publish(self, messages: list[Any]) -> None:
        """Publish messages (topic, payload, quality of service, whether it is retained)."""
        if not messages:
            return
        broker = self._broker
        login: Any = None
        if broker.username:
            login = {"username": broker.username, "password": broker.password}
        tls: Any = None
        if broker.tls:
            tls = {"ca_certs": None}  # the authorities that the system trusts
        try:
            publish.multiple(messages, broker.host, broker.port, auth=login, tls=tls)
        except (OSError, MQTTException) as error:
            raise TransportError(
                f"the broker of Home Assistant at {broker} has not taken it: {error}"
            ) from error


def _payloads(
    run: RunRecord, status: queries.StatusView, devices: list[queries.DeviceView]
) -> Iterator[tuple[str, str]]:
    """Yield the retained messages of a fleet, by their topics."""
    evaluation = status.evaluation
    run_values = {
        "status": status.run.status if status.run else run.status,
        "round": status.closed,
        "accuracy": evaluation.accuracy if evaluation else None,
        "loss": evaluation.loss if evaluation else None,
        "online": status.online,
    }
    fleet_id = f"shoal_{_safe(run.fleet)}"
    fleet_topic = f"{_STATES}/{run.fleet}/run"
    fleet = _description(fleet_id, f"Shoal {run.fleet}", fleet_topic, _RUN_COMPONENTS)
    yield f"{_DISCOVERY}/{fleet_id}/config", _json(fleet)
    yield fleet_topic, json.dumps(run_values)
    for view in devices:
        profile = view.device.profile
        values = {
            "online": "ON" if view.device.online else "OFF",
            "reason": view.reason[:_STATE_LETTERS] or "it trains",
            "tier": view.tier,
            "merged": view.merged,
            "temperature": profile.temperature_celsius if profile else None,
        }
        board_id = f"{fleet_id}_{_safe(view.device.id)}"
        topic = f"{_STATES}/{run.fleet}/devices/{_safe(view.device.id)}"
        board = _description(board_id, view.device.id, topic, _BOARD_COMPONENTS)
        board["device"]["via_device"] = fleet_id
        yield f"{_DISCOVERY}/{board_id}/config", _json(board)
        yield topic, json.dumps(values)


def _description(
    identity: str, name: str, state_topic: str, components: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Return what Home Assistant needs to show a device whose state has a topic."""
    described = {}
    for key, component in components.items():
        described[key] = {
            "platform": "sensor",
            "unique_id": f"{identity}_{key}",
            "value_template": f"{{{{ value_json.{key} }}}}",
            **component,
        }
    return {
        "device": {"identifiers": [identity], "name": name, "manufacturer": "Shoal"},
        "origin": {"name": "shoal", "sw_version": version("shoal")},
        "state_topic": state_topic,
        "components": described,
    }


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False)


def _safe(name: str) -> str:
    """Return a name in the letters that discovery allows; different names stay different."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    if safe == name:
        return name
    return f"{safe}-{blob_digest(name.encode())[:6]}"
