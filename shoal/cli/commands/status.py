"""Show how a run stands."""

from shoal.cli.common import DEFAULT_STORE, AsJson, RunId, StoreFolder, Watch
from shoal.cli.extras import needs


def _status(
    store: StoreFolder = DEFAULT_STORE, run: RunId = None, as_json: AsJson = False, watch: Watch = False
) -> None:
    with needs("server"):
        from shoal.cli.stored import STATUS

    STATUS.show(store, run, as_json=as_json, watch=watch)
