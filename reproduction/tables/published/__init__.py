"""Reads the published numbers, one TOML file per paper beside this one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Published", "PublishedTable", "papers", "published_tables"]

_FOLDER = "reproduction.tables.published"
_ABSENT = "-"


@dataclass(frozen=True)
class Published:
    """A number as a paper prints it.

    Attributes:
        value: the number, in the unit of its column.
        spread: standard deviation that the paper gives with it, if any.
    """

    value: float
    spread: float | None = None


@dataclass(frozen=True)
class PublishedTable:
    """One table of a paper.

    Attributes:
        name: such as ``heterofl-1``.
        columns: their names.
        rows: cells by row name, in the order of the columns: a `Published`, a text (a rounded size such as
            ``1.6 M``), or None where the paper has nothing.
    """

    name: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[Published | str | None, ...]]

    def number(self, row: str, column: str) -> Published | None:
        """The number in a cell.

        Args:
            row: name of a row.
            column: name of a column of numbers.

        Returns:
            The number; None where the paper has none.

        Raises:
            KeyError: there is no such row or column, or it holds no numbers; a mistake in an experiment.
        """
        if row not in self.rows or column not in self.columns:
            raise KeyError(f"the published table {self.name} has no cell {row!r}, {column!r}")
        cell = self.rows[row][self.columns.index(column)]
        if isinstance(cell, str):
            raise KeyError(f"the published table {self.name} has a text in cell {row!r}, {column!r}: {cell!r}")
        return cell

    def text(self, row: str, column: str) -> str:
        """The text in a cell of rounded sizes.

        Raises:
            KeyError: the cell holds no text.
        """
        cell = self.rows[row][self.columns.index(column)]
        if not isinstance(cell, str):
            raise KeyError(f"the published table {self.name} has no text in cell {row!r}, {column!r}")
        return cell


def papers() -> tuple[str, ...]:
    """The papers there are published numbers of, sorted."""
    names = (path.name for path in files(_FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def published_tables(paper: str) -> Mapping[str, PublishedTable]:
    """The tables of a paper.

    Args:
        paper: one of `papers`.

    Raises:
        ValueError: a row has not as many cells as there are columns; a mistake in the file.
    """
    text = files(_FOLDER).joinpath(f"{paper}.toml").read_text(encoding="utf-8")
    tables = {name: _table(name, table) for name, table in tomllib.loads(text).items()}
    return MappingProxyType(tables)


def _table(name: str, table: Mapping[str, Any]) -> PublishedTable:
    columns = tuple(table["columns"])
    rows = {row: tuple(_cell(cell) for cell in cells) for row, cells in table["rows"].items()}
    for row, cells in rows.items():
        if len(cells) != len(columns):
            raise ValueError(f"{name}, row {row!r}: {len(cells)} cells for {len(columns)} columns")
    return PublishedTable(name, columns, MappingProxyType(rows))


def _cell(cell: Any) -> Published | str | None:
    if cell == _ABSENT:
        return None
    if isinstance(cell, str):
        return cell
    if isinstance(cell, list):
        value, spread = cell
        return Published(float(value), float(spread))
    return Published(float(cell))
