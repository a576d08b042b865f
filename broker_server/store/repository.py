"""The store as one object: every method is one transaction and returns frozen records."""

from broker_server.store.device_table import DeviceTable
from broker_server.store.log_tables import LogTables
from broker_server.store.round_table import RoundTable
from broker_server.store.run_table import RunTable
from broker_server.store.task_table import TaskTable
from broker_server.store.version_table import VersionTable


class Store(RunTable, DeviceTable, RoundTable, TaskTable, VersionTable, LogTables):
    """The database of a fleet; see `broker_server.store.database.Database` for how it is opened."""
