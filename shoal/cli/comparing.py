"""Two runs side by side, as tables and as JSON."""

from collections.abc import Mapping
from typing import Any

from broker_server.store import Store, queries
from shoal.cli.console import flat, print_rows
from shoal.cli.source import Asked
from shoal.cli.stored import Shown, number_text


def comparison(other: str) -> Shown[queries.Comparison]:
    """A run beside another one."""
    look = Asked[Store, queries.Comparison](
        lambda store, run: queries.compare(store, run or "", other), lambda client, run: client.compare(run, other)
    )
    return Shown(look, _draw_comparison, _compared)


def _compared(view: queries.Comparison) -> list[dict[str, Any]]:
    of = dict(zip(("run", "other_run"), view.runs, strict=True))

    def whole(value: Any) -> Any:  # a list of records under one name would take that name from all settings
        return value if flat({"": value}).keys() == {""} else str(value)

    both: dict[str, Mapping[Any, tuple[Any, Any]]] = {"setting": view.settings, "accuracy": view.accuracies}
    return [
        {**of, "what": what, "name": str(name), "value": whole(value), "other_value": whole(other)}
        for what, found in both.items()
        for name, (value, other) in found.items()
    ]


def _draw_comparison(view: queries.Comparison) -> None:
    def side_by_side(first: str, rows: Mapping[Any, tuple[Any, Any]]) -> list[dict[str, str]]:
        return [
            {first: str(key), **dict(zip(view.runs, map(str, values), strict=True))} for key, values in rows.items()
        ]

    print_rows("settings that differ", side_by_side("setting", view.settings), empty="the settings are the same")
    judged = {key: (number_text(one), number_text(other)) for key, (one, other) in view.accuracies.items()}
    print_rows("accuracy", side_by_side("version", judged), empty="no version was judged")
