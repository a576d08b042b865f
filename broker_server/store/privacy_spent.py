"""Computes the privacy that a run has spent so far: epsilon after every round.

A device's part in a round is a Gaussian mechanism, and k of them equal one with k^-1/2 times the
multiplier. Sampling devices does not lower epsilon, because anyone may see which devices are
selected: epsilon is that of the device that was selected most often. `central` compares a device's
update with no update in its place, so the multiplier is that of the configuration. `local` compares
its samples with any others, whose bounded updates are up to twice the bound apart, so the
multiplier is half of that.

The server draws new noise for every sum, and two sums of the same updates with different noise
reveal more than one. A store that is restored from a backup repeats rounds which the lost server
may have closed: such rounds count twice. The log names them, and backups carry the log.
"""

import math
from collections import Counter
from functools import lru_cache
from importlib.util import find_spec

from broker_server.settings.fleet import FleetConfig
from broker_server.settings.privacy import PrivacyConfig
from broker_server.store.machine import FINAL, RoundState
from broker_server.store.records import RunRecord
from broker_server.store.repository import Store
from fleet_protocol.errors import ConfigError

_REPEATED = "round-repeated"
"""Kind of the log lines that name a round whose sum may have been released before."""


def require_accountant() -> None:
    """Raise an error if the accountant is missing.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("dp_accounting") is None:
        raise ConfigError("dp_accounting is not installed here: pip install 'shoal[privacy]'")


@lru_cache(maxsize=4096)
def epsilon_after(config: PrivacyConfig, times: int) -> float:
    """Return epsilon of a device that was selected a number of times."""
    # Imported late: scipy takes a second.
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian  # noqa: PLC0415

    if not times:
        return 0.0
    multiplier = config.mechanism_multiplier / math.sqrt(times)
    return float(get_epsilon_gaussian(multiplier, config.delta))


def epsilon_by_round(store: Store, run: RunRecord) -> dict[int, float]:
    """Return epsilon after every round of a run, by number of the round.

    The mapping is empty if no device's part is hidden, or no accountant is installed.
    """
    config = FleetConfig.stored(run.config).privacy
    if config is None or find_spec("dp_accounting") is None:
        return {}
    asked: dict[int, list[str]] = {}
    for task in store.planned_tasks(run.id):
        asked.setdefault(task.round, []).append(task.device)
    # The server publishes no sum of a round that was given up. If devices add the noise, their
    # updates have been sent all the same.
    unpublished = {RoundState.ABANDONED} if config.where == "central" else set()
    repeats = store.count_lines_by_round(run.id, _REPEATED)
    times: Counter[str] = Counter()
    epsilons = {}
    for record in store.rounds(run.id):
        if record.state not in unpublished:
            for device in asked.get(record.number, ()):
                times[device] += 1 + repeats.get(record.number, 0)
        most_times = max(times.values(), default=0)
        epsilons[record.number] = epsilon_after(config, most_times)
    return epsilons


def count_rounds_again(store: Store, lost_rounds: int) -> dict[str, tuple[int, ...]]:
    """Count rounds twice which a lost server may have closed after a backup.

    Args:
        store: the restored store.
        lost_rounds: number of rounds that it may have closed, at least the one that was in
            progress.

    Returns:
        The numbers of these rounds, by run, for unfinished runs with central noise.
    """
    rounds = {}
    for run in store.runs():
        privacy = FleetConfig.stored(run.config).privacy
        is_over = run.status not in {"running", "paused"}
        if is_over or privacy is None or privacy.where != "central":
            continue
        first = 1
        for record in store.rounds(run.id):
            if record.state in FINAL:
                first = record.number + 1
        numbers = tuple(range(first, first + lost_rounds))
        for number in numbers:
            detail = "its sum may have been released before the store was restored; it counts twice"
            store.log(_REPEATED, detail, run=run.id, number=number)
        rounds[run.id] = numbers
    return rounds
