"""The messages of the protocol: frozen values, JSON on the wire, validated on arrival.

Control messages are small and readable with ``mosquitto_sub``; tensors travel as chunks (``blobs``). Every message
carries the schema version, the fleet and a sequence number; task messages carry run, round and task as well.
"""

from fleet_protocol.messages.bounds import Ranges
from fleet_protocol.messages.header import SCHEMA_VERSION
from fleet_protocol.messages.instructions import Chooser, Instructions, TierChoice, TrainSettings
from fleet_protocol.messages.parsing import parse_device_message, parse_presence, parse_server_message
from fleet_protocol.messages.presence import DeviceProfile, DeviceStatus, ServerStatus
from fleet_protocol.messages.to_device import Cancel, Offer, ServerMessage, Sum, UploadAck, UploadMissing, UploadRefused
from fleet_protocol.messages.to_server import Accept, DeviceMessage, Done, NeedChunks, Progress, Refuse, Shares
from fleet_protocol.messages.values import BlobRef, Evaluation, Measured, Name, Profile, TaskMetrics

__all__ = [
    "SCHEMA_VERSION",
    "Accept",
    "BlobRef",
    "Cancel",
    "Chooser",
    "DeviceMessage",
    "DeviceProfile",
    "DeviceStatus",
    "Done",
    "Evaluation",
    "Instructions",
    "Measured",
    "Name",
    "NeedChunks",
    "Offer",
    "Profile",
    "Progress",
    "Ranges",
    "Refuse",
    "ServerMessage",
    "ServerStatus",
    "Shares",
    "Sum",
    "TaskMetrics",
    "TierChoice",
    "TrainSettings",
    "UploadAck",
    "UploadMissing",
    "UploadRefused",
    "parse_device_message",
    "parse_presence",
    "parse_server_message",
]
