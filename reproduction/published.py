"""Reads the published numbers, one TOML file per paper in ``tables/published``."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, RootModel, model_validator
from typing_extensions import Self

from fleet_protocol.configuration import load_config
from fleet_protocol.frozen import FrozenModel

_FOLDER = Path(__file__).parent / "tables" / "published"


@dataclass(frozen=True)
class Published:
    """A number as a paper prints it, in the unit of its column.

    Attributes:
        value: the number.
        spread: the published standard deviation; None without one.
    """

    value: float
    spread: float | None = None


def _cell(cell: Any) -> Any:
    """Return the value of a cell of the file; the model's validation finds mistakes."""
    # A value with its spread.
    if isinstance(cell, list):
        return Published(*cell)
    # Also sizes such as `1.6 M`, which are compared by eye only.
    if isinstance(cell, str):
        return None if cell == "-" else cell
    return Published(float(cell))


Cell = Annotated[Published | str | None, BeforeValidator(_cell)]


class PublishedTable(FrozenModel):
    """One table of a paper: the names of its columns, and cells by row name in their order.

    A cell is a `Published`, a text (a rounded size such as ``1.6 M``), or None if the paper has no
    value.
    """

    columns: tuple[str, ...]
    rows: Mapping[str, tuple[Cell, ...]]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        columns = len(self.columns)
        for row, cells in self.rows.items():
            count = len(cells)
            if count != columns:
                raise ValueError(f"row {row!r} has {count} cells for {columns} columns")
        return self

    def number(self, row: str, column: str) -> Published | None:
        """Return the number in a cell; None if the paper has no number, or no such row.

        Raises:
            ValueError: there is no such column.
        """
        if row not in self.rows:
            return None
        place = self.columns.index(column)
        cell = self.rows[row][place]
        return cell if isinstance(cell, Published) else None


class _Paper(RootModel[Mapping[str, PublishedTable]]):
    """The tables of a paper by name."""


def papers() -> tuple[str, ...]:
    """Return the names of the papers that have published numbers, sorted."""
    names = [path.stem for path in _FOLDER.glob("*.toml")]
    return tuple(sorted(names))


def published_tables(paper: str) -> Mapping[str, PublishedTable]:
    """Return the tables of a paper, which is one of `papers`, by name such as ``heterofl-1``.

    Raises:
        ConfigError: the file is invalid, for example because a row has a wrong number of cells.
    """
    return load_config(_FOLDER / f"{paper}.toml", _Paper).root
