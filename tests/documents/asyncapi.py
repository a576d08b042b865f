"""The AsyncAPI 3 document of the protocol, generated from the message types.

python -m tests.documents.asyncapi > docs/asyncapi.json
"""

import json
import sys
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel

from fleet_protocol import control, messages, requests
from fleet_protocol.blobs import DEFAULT_CHUNK_BYTES, FRAME_OVERHEAD
from fleet_protocol.identity.enrolment import Papers
from fleet_protocol.topics import NAME_PATTERN, Topics


def _members(union: Any) -> tuple[type[BaseModel], ...]:
    """The messages of a union with a discriminator."""
    members: tuple[type[BaseModel], ...] = get_args(get_args(union)[0])
    return members


_SERVER_TO_DEVICE = _members(messages.ServerMessage)
_DEVICE_TO_SERVER = _members(messages.DeviceMessage)
_RUN_EVENTS = _members(control.RunEvent)
MESSAGES: tuple[type[BaseModel], ...] = (
    messages.DeviceStatus,
    messages.DeviceProfile,
    messages.ServerStatus,
    Papers,
    *_SERVER_TO_DEVICE,
    *_DEVICE_TO_SERVER,
    requests.RunRequest,
    requests.SteerRequest,
    *_RUN_EVENTS,
)
"""Every message that is JSON; the others are three kinds of bytes."""
_PARAMETERS = {
    "fleet": "name of the fleet",
    "device": "id of the device",
    "digest": "digest of the blob: 1e20 and the 64 hexadecimal digits of its BLAKE3, or only the "
    "digits of its SHA-256",
    "task": "id of the task",
    "index": "number of the chunk, counted from 0",
}


def _message(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    schema.pop("description", None)
    return {
        "name": model.__name__,
        "title": model.__name__,
        "summary": (model.__doc__ or "").strip().splitlines()[0],
        "contentType": "application/json",
        "payload": schema,
    }


def _binary(name: str, summary: str, description: str) -> dict[str, Any]:
    return {
        "name": name,
        "title": name,
        "summary": summary,
        "description": f"Binary, big-endian: {description}",
        "contentType": "application/octet-stream",
        "payload": {"type": "string", "format": "binary"},
    }


def _chunk(summary: str) -> dict[str, Any]:
    text = (
        "magic SHC2, index (4 bytes), size of the blob (8), bytes per chunk (4), BLAKE3 of the "
        "payload (32), payload; "
        f"{FRAME_OVERHEAD} bytes precede the payload. By default, the payload has "
        f"{DEFAULT_CHUNK_BYTES} bytes. A chunk with magic SHC3 has no digest. In an enrolled "
        "fleet, an envelope with magic SHK1 protects such a chunk. In other fleets, the first "
        "copy of a chunk is sent in this form, and only the digest of the blob protects it, so "
        "damaged chunks are sent again with digests. A chunk with magic SHC4 also has no digest, and its "
        "payload is compressed (RFC 1951); the server sends graphs in this form."
    )
    return _binary("Chunk", summary, text)


def _channel(topic: str, names: Iterable[str], description: str) -> dict[str, Any]:
    address = topic.replace("FLEET", "{fleet}")
    used = {name: text for name, text in _PARAMETERS.items() if f"{{{name}}}" in address}
    return {
        "address": address,
        "description": description,
        "parameters": {name: {"description": text} for name, text in used.items()},
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
    }


def _channels() -> dict[str, Any]:
    topics = Topics("FLEET")
    to_device, to_server, events = (
        [model.__name__ for model in models]
        for models in (_SERVER_TO_DEVICE, _DEVICE_TO_SERVER, _RUN_EVENTS)
    )
    shared = "Chunks of a blob, published once for all devices that wait for the blob."
    asked = "Requests of the command line to a running server."
    return {
        "deviceStatus": _channel(
            topics.status("{device}"), ["DeviceStatus"], "Retained status, with a last will."
        ),
        "deviceProfile": _channel(
            topics.profile("{device}"), ["DeviceProfile"], "Retained description of a device."
        ),
        "deviceTask": _channel(
            topics.task("{device}"), to_device, "From the server to one device, with QoS 1."
        ),
        "deviceReply": _channel(
            topics.reply("{device}"), to_server, "From one device to the server, with QoS 1."
        ),
        "deviceKey": _channel(
            topics.key("{device}"),
            ["GroupKey"],
            "Retained key for one device of an enrolled fleet.",
        ),
        "devicePapers": _channel(
            topics.papers("{device}"),
            ["Papers"],
            "Retained documents that the operator has signed.",
        ),
        "blob": _channel(f"{topics.root}/blobs/{{digest}}/{{index}}", ["BlobChunk"], shared),
        "upload": _channel(
            f"{topics.root}/uploads/{{task}}/{{index}}", ["UploadChunk"], "Chunks of an update."
        ),
        "serverStatus": _channel(
            topics.server_status, ["ServerStatus"], "Retained status of the server."
        ),
        "serverControl": _channel(
            topics.server_control, ["RunRequest", "SteerRequest", "Ask"], asked
        ),
        "serverEvents": _channel(
            topics.server_events, events, "Reports of a running server about its runs."
        ),
    }


def document() -> dict[str, Any]:
    """The whole AsyncAPI 3.0 document as plain JSON values, seen from the server."""
    schemas: dict[str, Any] = {}
    for model in MESSAGES:
        schemas.update(
            model.model_json_schema(ref_template="#/components/schemas/{model}").get("$defs", {})
        )
    key = "number of the epoch (4 bytes), and the sealed key of 32 bytes (magic SHS2)."
    sent = {"deviceTask", "deviceKey", "devicePapers", "blob", "serverStatus", "serverEvents"}
    channels = _channels()
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Shoal fleet protocol",
            "version": str(messages.SCHEMA_VERSION),
            "description": (
                "The messages between a Shoal server and its devices over MQTT 5. Names match "
                f"{NAME_PATTERN}. A message is refused and counted if it is unknown or oversized, "
                "belongs to another round, or has a wrong digest."
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
                **{model.__name__: _message(model) for model in MESSAGES},
                "BlobChunk": _chunk("One chunk of a blob on its way to the devices."),
                "UploadChunk": _chunk("One chunk of an update on its way to the server."),
                "GroupKey": _binary("GroupKey", "The key under which a device reads blobs.", key),
            },
            "schemas": dict(sorted(schemas.items())),
        },
    }


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=1, sort_keys=False)
    sys.stdout.write("\n")
