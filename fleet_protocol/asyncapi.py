"""The AsyncAPI 3 document of the protocol, generated from the message types.

python -m fleet_protocol.asyncapi > docs/asyncapi.json
"""

import json
import sys
from typing import Any

from pydantic import BaseModel

from fleet_protocol import control, messages, requests
from fleet_protocol.blobs import DEFAULT_CHUNK_BYTES, FRAME_OVERHEAD
from fleet_protocol.topics import NAME_PATTERN, Topics

_SERVER_TO_DEVICE = (
    messages.Offer,
    messages.Cancel,
    messages.UploadAck,
    messages.UploadMissing,
    messages.UploadRefused,
)
_DEVICE_TO_SERVER = (messages.Accept, messages.Progress, messages.NeedChunks, messages.Done, messages.Refuse)
_RUN_EVENTS = (
    control.RunStarted,
    control.RunRejected,
    control.FleetChanged,
    control.RoundStarted,
    control.DeviceAccepted,
    control.DeviceProgressed,
    control.UpdateReceived,
    control.UpdateRefused,
    control.StatisticsStarted,
    control.RoundClosed,
    control.RoundAbandoned,
    control.RunFinished,
)
_PARAMETERS = {
    "fleet": "name of the fleet",
    "device": "id of the device",
    "digest": "of the blob: 1e20 and the 64 hexadecimal digits of its BLAKE3, or those of its sha256 alone",
    "task": "id of the task",
    "index": "number of the chunk, from 0",
}


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def _message(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    schema.pop("description", None)
    return {
        "name": model.__name__,
        "title": model.__name__,
        "summary": _summary(model),
        "contentType": "application/json",
        "payload": schema,
    }


def _chunk(summary: str) -> dict[str, Any]:
    return {
        "name": "Chunk",
        "title": "Chunk",
        "summary": summary,
        "description": (
            "Binary, big-endian: magic SHC2, index (4 bytes), size of the blob (8), bytes per chunk (4), BLAKE3 of "
            f"the payload (32), payload; {FRAME_OVERHEAD} bytes before the payload. The default chunk is "
            f"{DEFAULT_CHUNK_BYTES} bytes."
        ),
        "contentType": "application/octet-stream",
        "payload": {"type": "string", "format": "binary"},
    }


def _channel(address: str, names: tuple[str, ...], *, description: str) -> dict[str, Any]:
    used = {name: text for name, text in _PARAMETERS.items() if f"{{{name}}}" in address}
    return {
        "address": address,
        "description": description,
        "parameters": {name: {"description": text} for name, text in used.items()},
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
    }


def _channels() -> dict[str, Any]:
    topics = Topics("FLEET")

    def address(topic: str) -> str:
        return topic.replace("FLEET", "{fleet}")

    return {
        "deviceStatus": _channel(
            address(topics.status("{device}")), ("DeviceStatus",), description="Retained presence, with a will."
        ),
        "deviceProfile": _channel(
            address(topics.profile("{device}")), ("DeviceProfile",), description="What a device is, retained."
        ),
        "deviceTask": _channel(
            address(topics.task("{device}")),
            tuple(model.__name__ for model in _SERVER_TO_DEVICE),
            description="Server to one device, QoS 1.",
        ),
        "deviceReply": _channel(
            address(topics.reply("{device}")),
            tuple(model.__name__ for model in _DEVICE_TO_SERVER),
            description="One device to the server, QoS 1.",
        ),
        "blob": _channel(
            address(topics.root) + "/blobs/{digest}/{index}",
            ("BlobChunk",),
            description="Chunks of a blob, published once for all the devices that wait for it.",
        ),
        "upload": _channel(
            address(topics.root) + "/uploads/{task}/{index}",
            ("UploadChunk",),
            description="Chunks of an update.",
        ),
        "serverStatus": _channel(
            address(topics.server_status), ("ServerStatus",), description="Retained presence of the server."
        ),
        "serverControl": _channel(
            address(topics.server_control),
            ("RunRequest", "SteerRequest"),
            description="The command line asks a running server.",
        ),
        "serverEvents": _channel(
            address(topics.server_events),
            tuple(model.__name__ for model in _RUN_EVENTS),
            description="What a running server tells about its runs.",
        ),
    }


def document() -> dict[str, Any]:
    """The whole document.

    Returns:
        An AsyncAPI 3.0 document as plain JSON values, seen from the server.
    """
    models = (
        messages.DeviceStatus,
        messages.DeviceProfile,
        messages.ServerStatus,
        *_SERVER_TO_DEVICE,
        *_DEVICE_TO_SERVER,
        requests.RunRequest,
        requests.SteerRequest,
        *_RUN_EVENTS,
    )
    schemas: dict[str, Any] = {}
    for model in models:
        schemas.update(model.model_json_schema(ref_template="#/components/schemas/{model}").get("$defs", {}))
    sent = {"deviceTask", "blob", "serverStatus", "serverEvents"}
    channels = _channels()
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Shoal fleet protocol",
            "version": str(messages.SCHEMA_VERSION),
            "description": (
                "What a Shoal server and its devices say to each other over MQTT 5. Names match "
                f"{NAME_PATTERN}. Anything unknown, oversized, for another round or with a bad digest is refused "
                "and counted."
            ),
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": {
            f"{'send' if name in sent else 'receive'}{name[0].upper()}{name[1:]}": {
                "action": "send" if name in sent else "receive",
                "channel": {"$ref": f"#/channels/{name}"},
            }
            for name in channels
        },
        "components": {
            "messages": {
                **{model.__name__: _message(model) for model in models},
                "BlobChunk": _chunk("One chunk of a blob on its way to the devices."),
                "UploadChunk": _chunk("One chunk of an update on its way to the server."),
            },
            "schemas": dict(sorted(schemas.items())),
        },
    }


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=1, sort_keys=False)
    sys.stdout.write("\n")
