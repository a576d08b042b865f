"""The messages of the protocol: frozen values, JSON on the wire, validated on arrival.

Control messages are small and readable with ``mosquitto_sub``; tensors are sent as chunks
(``blobs``). Every message carries the schema version, the fleet and a sequence number; task
messages carry run, round and task as well.
"""

from fleet_protocol.messages.bounds import Ranges as Ranges
from fleet_protocol.messages.header import SCHEMA_VERSION as SCHEMA_VERSION
from fleet_protocol.messages.instructions import Chooser as Chooser
from fleet_protocol.messages.instructions import Instructions as Instructions
from fleet_protocol.messages.instructions import TierChoice as TierChoice
from fleet_protocol.messages.instructions import TrainSettings as TrainSettings
from fleet_protocol.messages.parsing import MESSAGE_LIMIT_BYTES as MESSAGE_LIMIT_BYTES
from fleet_protocol.messages.parsing import parse_device_message as parse_device_message
from fleet_protocol.messages.parsing import parse_presence as parse_presence
from fleet_protocol.messages.parsing import parse_server_message as parse_server_message
from fleet_protocol.messages.presence import DeviceProfile as DeviceProfile
from fleet_protocol.messages.presence import DeviceStatus as DeviceStatus
from fleet_protocol.messages.presence import ServerStatus as ServerStatus
from fleet_protocol.messages.to_device import Ask as Ask
from fleet_protocol.messages.to_device import Cancel as Cancel
from fleet_protocol.messages.to_device import Introduce as Introduce
from fleet_protocol.messages.to_device import Offer as Offer
from fleet_protocol.messages.to_device import ServerMessage as ServerMessage
from fleet_protocol.messages.to_device import Sum as Sum
from fleet_protocol.messages.to_device import TaskAnswer as TaskAnswer
from fleet_protocol.messages.to_device import UploadAck as UploadAck
from fleet_protocol.messages.to_device import UploadMissing as UploadMissing
from fleet_protocol.messages.to_device import UploadRefused as UploadRefused
from fleet_protocol.messages.to_server import Accept as Accept
from fleet_protocol.messages.to_server import DeviceMessage as DeviceMessage
from fleet_protocol.messages.to_server import Done as Done
from fleet_protocol.messages.to_server import NeedChunks as NeedChunks
from fleet_protocol.messages.to_server import Predicted as Predicted
from fleet_protocol.messages.to_server import Progress as Progress
from fleet_protocol.messages.to_server import Refuse as Refuse
from fleet_protocol.messages.to_server import Shares as Shares
from fleet_protocol.messages.values import BlobRef as BlobRef
from fleet_protocol.messages.values import Evaluation as Evaluation
from fleet_protocol.messages.values import Measured as Measured
from fleet_protocol.messages.values import Name as Name
from fleet_protocol.messages.values import Profile as Profile
from fleet_protocol.messages.values import TaskMetrics as TaskMetrics
