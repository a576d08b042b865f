"""Changes a store for an operator: promotes a version, rolls back to one, or releases a device."""

from broker_server.store import Store, promotion, queries
from broker_server.store.export import load_version
from broker_server.updates.quarantine import release
from fleet_protocol.errors import ConfigError
from shoal.client import Verb


def act_on_run(
    store: Store, verb: Verb, run: str | None, version: int | None = None, device: str = ""
) -> str:
    """Promote a version or roll back to it, or release a device, which the next round asks again.

    Args:
        store: the store, open for writing.
        verb: ``promote``, ``rollback`` or ``release``.
        run: id of the run, or its beginning; None for the newest.
        version: number of the version to promote or to roll back to.
        device: id of the device to release.

    Returns:
        The run's id.

    Raises:
        ConfigError: the store has no such run or version, or no update of this device was refused
            in it.
    """
    run_id = queries.find_run(store, run).id
    if verb == "release":
        release(store, run_id, device)
        return run_id
    if version is None:
        raise ConfigError(f"{verb}: which version? Give ?version=N")
    record = load_version(store, run_id, version).record
    if verb == "promote":
        promotion.promote(store, record)
    else:
        promotion.roll_back(store, record)
    return run_id
