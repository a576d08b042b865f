"""Shows a fleet in Home Assistant through MQTT discovery.

See https://www.home-assistant.io/integrations/mqtt/. Home Assistant's broker receives the figures
of a run and the online devices, but neither weights nor samples.
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
"""Home Assistant's limit on the length of a state."""
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
    """One Home Assistant device for the fleet and one for each board.

    Each has a retained state, which is published when it changes.

    Args:
        address: broker of Home Assistant, ``mqtt://[user:password@]host[:port]``.

    Raises:
        ConfigError: the address is malformed.
    """

    def __init__(self, address: str) -> None:
        self._broker = BrokerAddress.parse(address)
        self._published: dict[str, str] = {}

    def update(self, opened: Store, run: RunRecord) -> int:
        """Publish the changed states.

        Returns:
            The number of closed rounds at the first call, then 0.
        """
        status = queries.status(opened, run.id)
        is_first = not self._published
        payloads = dict(_payloads(run, status, queries.devices(opened, run.id)))
        changed = []
        for topic, payload in payloads.items():
            if self._published.get(topic) != payload:
                # Quality of service 1, retained: Home Assistant may start later.
                changed.append((topic, payload, 1, True))
        self._publish(changed)
        # Only now, so that states that the broker did not accept are sent again.
        self._published = payloads
        return status.closed if is_first else 0

    def end(self, _status: str) -> None:
        """Do nothing: the broker retains the states."""

    def _publish(self, messages: list[Any]) -> None:
        """Publish messages (topic, payload, quality of service, retain flag)."""
        if not messages:
            return
        broker = self._broker
        login: Any = None
        if broker.username:
            login = {"username": broker.username, "password": broker.password}
        tls: Any = None
        if broker.tls:
            tls = {"ca_certs": None}  # use the system's trusted authorities
        try:
            publish.multiple(messages, broker.host, broker.port, auth=login, tls=tls)
        except (OSError, MQTTException) as error:
            raise TransportError(
                f"the broker of Home Assistant at {broker} did not accept the messages: {error}"
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
        "online": sum(view.is_online for view in devices),
    }
    fleet_id = f"shoal_{_safe(run.fleet)}"
    fleet_topic = f"{_STATES}/{run.fleet}/run"
    fleet = _description(fleet_id, f"Shoal {run.fleet}", fleet_topic, _RUN_COMPONENTS)
    yield f"{_DISCOVERY}/{fleet_id}/config", _json(fleet)
    yield fleet_topic, json.dumps(run_values)
    for view in devices:
        profile = view.device.profile
        values = {
            "online": "ON" if view.is_online else "OFF",
            # Home Assistant refuses longer states.
            "reason": view.reason[:_STATE_LETTERS] or "it trains",
            "tier": view.tier,
            "merged": view.merged,
            "temperature": profile.temperature_celsius if profile else None,
        }
        board_id = f"{fleet_id}_{_safe(view.device.id)}"
        topic = f"{_STATES}/{run.fleet}/devices/{_safe(view.device.id)}"
        board = _description(board_id, view.device.id, topic, _BOARD_COMPONENTS)
        # Home Assistant shows the boards below their fleet.
        board["device"]["via_device"] = fleet_id
        yield f"{_DISCOVERY}/{board_id}/config", _json(board)
        yield topic, json.dumps(values)


def _description(
    identity: str, name: str, state_topic: str, components: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Return the discovery message of a device whose state is published to a topic."""
    described = {}
    for key, component in components.items():
        described[key] = {
            # A component may state another platform.
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
    """Return a name in the characters that discovery allows; different names stay different."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    if safe == name:
        return name
    # Two names may become the same text, so the digest keeps them apart.
    return f"{safe}-{blob_digest(name.encode())[:6]}"
