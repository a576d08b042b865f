"""The store as one object: every method is one transaction and returns frozen records."""

from broker_server.store.device_table import DeviceTable
from broker_server.store.round_table import RoundTable
from broker_server.store.run_table import RunTable
from broker_server.store.version_table import VersionTable


class Store(RunTable, DeviceTable, RoundTable, VersionTable):
    """The database of a fleet: its runs, log, devices, rounds, tasks and global versions.

    See `broker_server.store.database.Database` for how it is opened.
    """
