"""List the runs of a store, newest first."""

from shoal.cli.common import DEFAULT_STORE, AsJson, StoreFolder, Watch
from shoal.cli.extras import needs


def _runs(store: StoreFolder = DEFAULT_STORE, as_json: AsJson = False, watch: Watch = False) -> None:
    with needs("server"):
        from shoal.cli.stored import RUNS

    RUNS.show(store, None, as_json=as_json, watch=watch)
