"""Changes a store for an operator: promotes a version, rolls back to one, or releases a device."""

from broker_server.store import Store, promotion, queries
from broker_server.store.export import load_version
from broker_server.updates.quarantine import release
from fleet_protocol.errors import ConfigError
from shoal.client import Verb


def act_on_run(
    store: Store, verb: Verb, run: str | None, version: int | None = None, device: str = ""
) -> str:
    """Promote a version, roll back to one, or release a device for selection in the next round.

    Args:
        store: the store, open for writing.
        verb: ``promote``, ``rollback`` or ``release``.
        run: name or id of the run, or a prefix of its id; None for the newest.
        version: number of the version to promote or to roll back to.
        device: id of the device to release.

    Returns:
        The run's id.

    Raises:
        ConfigError: the store has no such run or version, or it refused no update of this device.
    """
    run_id = queries.find_run(store, run).id
    if verb == "release":
        release(store, run_id, device)
        return run_id
    if version is None:
        raise ConfigError(f"{verb}: no version given; add ?version=N")
    # It refuses a version that does not exist, or whose weights were removed.
    record = load_version(store, run_id, version).record
    if verb == "promote":
        promotion.promote(store, record)
    else:
        promotion.roll_back(store, record)
    return run_id
