"""Expands the short forms of a table's file: levels of HeteroFL, and kinds of devices by shares."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from broker_server.settings.assignment import LEVEL_RATES
from reproduction.experiment import Settings, merged


def expand(settings: Settings) -> Settings:
    """Expand the tables that a file has in a short form.

    These are ``levels``, HeteroFL's, and ``fleet``, the kinds of devices.
    """
    written = dict(settings)
    levels: Settings = {}
    if "levels" in settings:
        levels = _level_tables(**written.pop("levels"))
    fleet: Settings = {}
    if "fleet" in settings:
        count = settings["devices"]["count"]
        kinds = _kinds(count, **written.pop("fleet"))
        fleet = {"devices": {"types": kinds}}
    # The full form in a file overrides the value that follows from a short form.
    return merged(levels, fleet, written)


def _level_tables(row: str, **sizes: list[int] | int) -> Settings:
    """Return the settings of a row of levels such as ``a-b-e``, all equally likely.

    Args:
        row: the levels, the widest first, which is the global model's.
        sizes: settings of the architecture at level a, which shrink with the global model.
    """
    levels = row.split("-")
    # A level is a share of the paper's model, a tier one of the global model, which has the row's
    # widest level.
    top = LEVEL_RATES[levels[0]]
    widths: list[float] = []
    shares: list[str] = []
    for level in levels:
        widths.append(LEVEL_RATES[level] / top)
        shares.append(f"{level}1")
    settings = {}
    for name, size in sizes.items():
        settings[name] = _scaled(size, top)
    model = {"settings": settings, "widths": widths}
    # With one level there is nothing to assign.
    if len(levels) == 1:
        return {"model": model}
    mix = "-".join(shares)
    return {"model": model, "tiers": {"assign": "dynamic", "levels": mix}}


def _scaled(size: Any, rate: float) -> Any:
    """Return a size, or a list of sizes, times a rate; at least 1."""
    if isinstance(size, list):
        return [_scaled(entry, rate) for entry in size]
    # A layer without units would cut the network in two.
    return max(1, int(size * rate))


def _kinds(
    count: int,
    *,
    shares: str = "",
    links: Sequence[float] = (),
    dropout: float = 0.0,
    **limits: Sequence[float] | Mapping[str, float],
) -> list[Settings]:
    """Return kinds of devices with limits.

    Args:
        count: number of devices.
        shares: shares of each kind, such as ``1:2:7``, if the limits are a list.
        links: if the limits are by type; there is one device of each type at each link.
        dropout: dropout of all devices.
        limits: a single key of a kind, such as ``max_width``, with its values.
    """
    common = {"dropout": dropout} if dropout else {}
    # Exactly one: files have no way to combine several limits.
    ((key, values),) = limits.items()
    kinds: list[Settings] = []
    if isinstance(values, Mapping):
        for (kind, limit), link in product(values.items(), links):
            device = {"type": kind, "link": link, key: limit}
            kinds.append({**device, "count": 1, **common})
        return kinds
    weights = list(map(int, shares.split(":")))
    total = sum(weights)
    counts = [count * weight // total for weight in weights]
    # The remainder belongs to the last kind.
    counts[-1] += count - sum(counts)
    for number, limit in zip(counts, values, strict=True):
        kinds.append({"count": number, key: limit, **common})
    return kinds
