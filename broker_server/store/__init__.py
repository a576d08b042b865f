"""The store: everything that a server must know after a crash."""

from broker_server.stages.screening import Screening as Screening
from broker_server.store.records import DeviceRecord as DeviceRecord
from broker_server.store.records import EventRecord as EventRecord
from broker_server.store.records import LeftOut as LeftOut
from broker_server.store.records import RefusalRecord as RefusalRecord
from broker_server.store.records import RoundRecord as RoundRecord
from broker_server.store.records import RunRecord as RunRecord
from broker_server.store.records import VersionRecord as VersionRecord
from broker_server.store.repository import Store as Store
from broker_server.store.task_records import Alternative as Alternative
from broker_server.store.task_records import Alternatives as Alternatives
from broker_server.store.task_records import Outcome as Outcome
from broker_server.store.task_records import TaskPhase as TaskPhase
from broker_server.store.task_records import TaskRecord as TaskRecord
from broker_server.store.task_records import Timing as Timing
