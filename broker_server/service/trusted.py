"""With which configuration a server goes on with a run that its store has, or begins another like it.

With the one that was kept of it (`broker_server.store.configurations`). What has none, as in a store
from a backup, counts as a request does: as numbers for the server's own configuration.
"""

import logging

from broker_server.settings.fleet import FleetConfig
from broker_server.settings.requested import Wanted, granted, in_words
from broker_server.store import RunRecord, Store
from broker_server.store.configurations import read_kept
from fleet_protocol.errors import ConfigError

_LOG = logging.getLogger(__name__)

_HOW = (
    "Go on with it by `shoal run --config FILE` or `shoal up --config FILE`, where FILE has the settings of the run, or"
    " end it with `shoal stop`"
)


def trusted_config(store: Store, record: RunRecord, own: FleetConfig | None) -> FleetConfig:
    """The configuration with which a stored run may be gone on with, or begun again.

    Where the database says another one, the log tells in what.

    Args:
        store: where the run is.
        record: the run.
        own: the server's own configuration, None for none.

    Raises:
        ConfigError: none was kept, and the database's says what the server's own does not; the message names it.
    """
    kept = read_kept(store.folder, record.id)
    if isinstance(kept, str):
        _LOG.warning("run %s: %s", record.id, kept)
        store.log("configuration-not-kept", kept, run=record.id)
        return _as_a_request(record, own, kept)
    changed = what_differs(kept, record.config)
    if changed:
        why = f"the database's configuration of run {record.id} was changed, and is not used: {changed}"
        _LOG.warning(why)
        store.log("configuration-changed", why, run=record.id)
    return kept


def _as_a_request(record: RunRecord, own: FleetConfig | None, why: str) -> FleetConfig:
    missing = f"run {record.id} is held, as {why}"
    if own is None:
        raise ConfigError(f"{missing}, and this server has no configuration of its own. {_HOW}")
    try:
        return granted(own.as_begun(record.config), Wanted.of(FleetConfig.stored(record.config)))
    except ConfigError as error:
        raise ConfigError(f"{missing}, and of the one in its database is said: {error}. {_HOW}") from error


def note_nameless(store: Store, fleet: str) -> None:
    """Say which runs of a fleet a server leaves as they are, since their ids could lead anywhere as parts of paths."""
    for run in store.nameless(fleet):
        why = (
            f"run {run.id!r} has not ended, but its id is no name that a server gives, so the database was changed: no "
            "server goes on with it, and `shoal run` begins another"
        )
        _LOG.warning(why)
        store.log("run-left-out", why)


def what_differs(config: FleetConfig, stored: str) -> str:
    """The settings in which a configuration is other than a stored one, in words; empty for none."""
    try:
        return in_words(config.other_than(stored))
    except ConfigError as error:
        return str(error)
