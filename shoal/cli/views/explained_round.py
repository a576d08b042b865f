"""Shows the outcome of every device in one round, and the reason."""

from pathlib import Path

from broker_server.store import RoundRecord
from broker_server.store.explaining import DeviceInRound
from broker_server.store.queries import to_json_values
from shoal.cli.console import print_json, print_rows, print_text, seconds_text
from shoal.sources import open_source


def show_round(store: Path, number: int, run: str | None, *, as_json: bool, url: str = "") -> None:
    """Print the outcome of every device in a round of a run (None: the newest), and the reason.

    Raises:
        ConfigError: the store has no such run or round.
        StorageError: there is no store.
    """
    with open_source(store, url) as source:
        outcomes = source.explained(number, run or "")
        # The round exists, or `explained` would have raised.
        (view,) = source.rounds(run or "", first=number, last=number)
    if as_json:
        print_json(to_json_values(outcomes))
        return
    _draw_head(view.round)
    rows = [_row(outcome) for outcome in outcomes]
    print_rows("devices", rows, empty="no device was selected")
    left_out = view.round.left_out
    # The store names a bounded number of devices that were not selected.
    if left_out is not None and left_out.more:
        print_text(f"and {left_out.more} more that were not selected")


def _draw_head(record: RoundRecord) -> None:
    """Print how the round ended."""
    ended = ""
    if record.ending is not None:
        ended = f", ended by {record.ending.value}"
    duration = ""
    if record.collect_seconds is not None:
        duration = f" after {record.collect_seconds:.2f} s"
    print_text(f"round {record.number} of run {record.run}: {record.state.value}{ended}{duration}")
    wanted = ""
    if record.wanted is not None:
        wanted = f"{record.wanted} updates wanted, "
    print_text(f"  {wanted}the quorum is {record.quorum}")
    # An abandoned round has a reason, a closed one may have a note.
    if record.reason or record.note:
        print_text(f"  {record.reason or record.note}")


def _row(outcome: DeviceInRound) -> dict[str, str]:
    """Return the cells of one device."""
    return {
        "device": outcome.device,
        "outcome": outcome.outcome,
        "tier": outcome.tier or "-",
        "answered": seconds_text(outcome.answered_seconds),
        "norm": _number(outcome.norm),
        "bound": _number(outcome.norm_bound),
        "version": "-" if outcome.version is None else str(outcome.version),
        "weight": _number(outcome.weight),
        "samples": "-" if outcome.samples is None else str(outcome.samples),
        "refused": str(outcome.refusals),
        "why": outcome.why,
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
