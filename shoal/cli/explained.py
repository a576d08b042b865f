"""What `shoal rounds show` prints."""

from pathlib import Path

from broker_server.store import Store
from broker_server.store.explaining import DeviceInRound, explain_round
from broker_server.store.queries import RoundView, plain, rounds
from shoal.cli.console import print_json, print_rows, say, seconds_text
from shoal.cli.source import Asked, opened


def show_round(store: Path, number: int, run: str | None, *, as_json: bool, url: str = "") -> None:
    """Say what became of every device in a round of a run (None for the newest), and why.

    Raises:
        ConfigError: the store has no such run or round.
        StorageError: there is no store.
    """
    look = Asked[Store, tuple[list[DeviceInRound], list[RoundView]]](
        lambda known, of: (explain_round(known, number, of), rounds(known, of, first=number, last=number)),
        lambda page, of: (page.explained(number, of), page.rounds(of, first=number, last=number)),
    )
    with opened(store, url) as source:
        rows, (view,) = look(source, run)
    record = view.round
    if as_json:
        print_json(plain(rows))
        return
    ended = "" if record.ending is None else f", ended by {record.ending.value}"
    took = "" if record.collect_seconds is None else f" after {record.collect_seconds:.2f} s"
    say(f"round {number} of run {record.run}: {record.state.value}{ended}{took}")
    wanted = "" if record.wanted is None else f"{record.wanted} updates wanted, "
    say(f"  {wanted}{record.quorum} make a quorum")
    if record.reason or record.note:
        say(f"  {record.reason or record.note}")
    print_rows("devices", [_cells(row) for row in rows], empty="no device was asked")
    if record.left_out is not None and record.left_out.more:
        say(f"and {record.left_out.more} more that were not asked")


def _cells(row: DeviceInRound) -> dict[str, str]:
    return {
        "device": row.device,
        "outcome": row.outcome,
        "tier": row.tier or "-",
        "answered": seconds_text(row.answered_seconds),
        "norm": _number(row.norm),
        "bound": _number(row.norm_bound),
        "version": "-" if row.version is None else str(row.version),
        "weight": _number(row.weight),
        "samples": "-" if row.samples is None else str(row.samples),
        "refused": str(row.refusals),
        "why": row.why,
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
