"""What `shoal rounds show` and `shoal compare` print."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker_server.store import Store, queries
from broker_server.store.explaining import DeviceInRound, explain_round
from broker_server.store.queries import RoundView, rounds, to_json_values
from shoal.cli.console import flat, print_json, print_rows, say, seconds_text
from shoal.cli.source import Asked, opened
from shoal.cli.stored import Shown, number_text


def show_round(store: Path, number: int, run: str | None, *, as_json: bool, url: str = "") -> None:
    """Say what became of every device in a round of a run (None for the newest), and why.

    Raises:
        ConfigError: the store has no such run or round.
        StorageError: there is no store.
    """
    look = Asked[Store, tuple[list[DeviceInRound], list[RoundView]]](
        lambda known, of: (
            explain_round(known, number, of),
            rounds(known, of, first=number, last=number),
        ),
        lambda page, of: (
            page.explained(number, of),
            page.rounds(of, first=number, last=number),
        ),
    )
    with opened(store, url) as source:
        rows, (view,) = look(source, run)
    record = view.round
    if as_json:
        print_json(to_json_values(rows))
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


def comparison(other: str) -> Shown[queries.Comparison]:
    """A run beside another one."""
    look = Asked[Store, queries.Comparison](
        lambda store, run: queries.compare(store, run or "", other),
        lambda client, run: client.compare(run, other),
    )
    return Shown(look, _draw_comparison, _compared)


def _compared(view: queries.Comparison) -> list[dict[str, Any]]:
    of = dict(zip(("run", "other_run"), view.runs, strict=True))

    def whole(
        value: Any,
    ) -> Any:  # a list of records under one name would take that name from all settings
        return value if flat({"": value}).keys() == {""} else str(value)

    both: dict[str, Mapping[Any, tuple[Any, Any]]] = {
        "setting": view.settings,
        "accuracy": view.accuracies,
    }
    return [
        {
            **of,
            "what": what,
            "name": str(name),
            "value": whole(value),
            "other_value": whole(other),
        }
        for what, found in both.items()
        for name, (value, other) in found.items()
    ]


def _draw_comparison(view: queries.Comparison) -> None:
    def side_by_side(first: str, rows: Mapping[Any, tuple[Any, Any]]) -> list[dict[str, str]]:
        return [
            {first: str(key), **dict(zip(view.runs, map(str, values), strict=True))}
            for key, values in rows.items()
        ]

    print_rows(
        "settings that differ",
        side_by_side("setting", view.settings),
        empty="the settings are the same",
    )
    judged = {
        key: (number_text(one), number_text(other)) for key, (one, other) in view.accuracies.items()
    }
    print_rows(
        "accuracy, or loss where there is none",
        side_by_side("version", judged),
        empty="no version was judged",
    )
