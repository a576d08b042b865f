"""What a run has let out of a device's samples so far: epsilon after every round.

A device's part in a round is a Gaussian mechanism, and k of them are one of k^-1/2 times the
multiplier. Nothing is taken off for the drawing of devices, since everybody may see who is asked:
told is the epsilon of whoever was asked most often. `central` is about a device's update or none in
its place, so the multiplier is that of the configuration; `local` about its samples or any others,
whose bounded updates are up to twice the bound apart, so it is half of that.
"""

import math
from collections import Counter
from functools import lru_cache
from importlib.util import find_spec

from broker_server.settings.fleet import FleetConfig
from broker_server.settings.privacy import PrivacyConfig
from broker_server.store import RunRecord, Store
from broker_server.store.machine import RoundState
from fleet_protocol.errors import ConfigError


def require_accountant() -> None:
    """See that the accountant is installed, or raise a ConfigError."""
    if find_spec("dp_accounting") is None:
        raise ConfigError("dp_accounting is not installed here: pip install 'shoal[privacy]'")


@lru_cache(maxsize=4096)
def epsilon_after(config: PrivacyConfig, times: int) -> float:
    """Epsilon of a device that was asked so many times."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian  # noqa: PLC0415  (scipy: a second)

    if not times:
        return 0.0
    multiplier = config.mechanism_multiplier / math.sqrt(times)
    return float(get_epsilon_gaussian(multiplier, config.delta))


def epsilon_by_round(store: Store, run: RunRecord) -> dict[int, float]:
    """Epsilon after every round of a run, by number of the round.

    There is none where nothing hides a device's part, or who looks has no accountant.
    """
    config = FleetConfig.stored(run.config).privacy
    if config is None or find_spec("dp_accounting") is None:
        return {}
    asked: dict[int, list[str]] = {}
    for task in store.planned_tasks(run.id):
        asked.setdefault(task.round, []).append(task.device)
    # The sum of a round that was given up is let out to nobody; what devices send by themselves is
    # out.
    silent = {RoundState.ABANDONED} if config.where == "central" else set()
    times: Counter[str] = Counter()
    found = {}
    for record in store.rounds(run.id):
        if record.state not in silent:
            times.update(asked.get(record.number, ()))
        found[record.number] = epsilon_after(config, max(times.values(), default=0))
    return found
