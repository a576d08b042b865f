"""Selects the configuration with which a server resumes a stored run, or starts a run like it.

The server uses the configuration that it saved for the run (`broker_server.store.configurations`).
If there is none, as in a store from a backup, it treats the database's configuration like a
request, which sets numbers of its own configuration.
"""

import logging

from broker_server.settings.fleet import FleetConfig
from broker_server.settings.requested import RequestedSettings, grant, name_settings
from broker_server.store import RunRecord, Store
from broker_server.store.configurations import read_saved_config
from fleet_protocol.errors import ConfigError

_LOG = logging.getLogger(__name__)

_HOW = (
    "Resume it with `shoal run --config FILE` or `shoal up --config FILE`, where FILE has "
    "the settings of the run, or end it with `shoal stop`"
)


def trusted_config(store: Store, record: RunRecord, own: FleetConfig | None) -> FleetConfig:
    """Return the configuration with which a stored run may resume, or start again.

    If the database's configuration differs, the log lists the settings.

    Args:
        store: the store of the run.
        record: the run.
        own: the server's own configuration, or None.

    Raises:
        ConfigError: none was saved, and the database's differs from the server's own; the message
            lists the settings.
    """
    saved = read_saved_config(store.folder, record.id)
    if isinstance(saved, str):  # why there is none
        _LOG.warning("run %s: %s", record.id, saved)
        store.log("configuration-not-kept", saved, run=record.id)
        return _config_as_requested(record, own, saved)
    # The saved configuration is used: a changed database must not make the server open any path.
    changed = name_differences(saved, record.config)
    if changed:
        why = (
            f"the database's configuration of run {record.id} was changed, and is not used: "
            f"{changed}"
        )
        _LOG.warning(why)
        store.log("configuration-changed", why, run=record.id)
    return saved


def _config_as_requested(record: RunRecord, own: FleetConfig | None, why: str) -> FleetConfig:
    missing = f"run {record.id} is held, because {why}"
    if own is None:
        raise ConfigError(f"{missing}, and this server was started without a configuration. {_HOW}")
    try:
        return grant(
            # The contract of a run does not change while it continues.
            own.with_stored_contract(record.config),
            RequestedSettings.from_config(FleetConfig.stored(record.config)),
        )
    except ConfigError as error:
        raise ConfigError(
            f"{missing}, and the database's configuration is not accepted: {error}. {_HOW}"
        ) from error


def log_invalid_run_ids(store: Store, fleet: str) -> None:
    """Log the runs that a server ignores: as parts of paths their ids could lead anywhere."""
    for run in store.invalid_run_ids(fleet):
        why = (
            f"run {run!r} has not ended, but no server assigns such an id, so the database was"
            " changed: no server resumes it, and `shoal run` starts another"
        )
        _LOG.warning(why)
        store.log("run-left-out", why)


def name_differences(config: FleetConfig, stored: str) -> str:
    """Name the settings in which a configuration differs from a stored one; empty for none."""
    try:
        return name_settings(config.differing_settings(stored))
    except ConfigError as error:
        return str(error)
