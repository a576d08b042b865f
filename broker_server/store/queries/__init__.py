"""Read-only views of a store for `shoal status`, `devices`, `rounds` and `log`.

`to_json_values` gives each the form that ``--json`` prints. A query for a run that does not exist,
or for an ambiguous beginning of an id, raises a ConfigError.
"""

from broker_server.store.queries.device_views import devices as devices
from broker_server.store.queries.json_values import flat_settings as flat_settings
from broker_server.store.queries.json_values import to_json_values as to_json_values
from broker_server.store.queries.round_views import rounds as rounds
from broker_server.store.queries.run_views import compare as compare
from broker_server.store.queries.run_views import count_closed_rounds as count_closed_rounds
from broker_server.store.queries.run_views import find_run as find_run
from broker_server.store.queries.run_views import is_served as is_served
from broker_server.store.queries.run_views import log as log
from broker_server.store.queries.run_views import runs as runs
from broker_server.store.queries.run_views import simulation_settings as simulation_settings
from broker_server.store.queries.run_views import status as status
from broker_server.store.queries.views import Comparison as Comparison
from broker_server.store.queries.views import DeviceView as DeviceView
from broker_server.store.queries.views import RoundView as RoundView
from broker_server.store.queries.views import RunView as RunView
from broker_server.store.queries.views import StatusView as StatusView
