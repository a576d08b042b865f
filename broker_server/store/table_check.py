"""Checks that a database has the tables of a store and nothing else.

Anything else may be a stranger's program: SQLite itself runs triggers, views, generated columns,
checks and indices on expressions when it reads or writes.
"""

import sqlite3

from broker_server.store import schema
from fleet_protocol.foreign_files import quoted

_EARLIER = frozenset({"shoal_store"})  # tables of earlier versions
_TABLES = frozenset({*schema.metadata.tables, schema.mark.table.name, *_EARLIER})
_EXPRESSION = -2  # SQLite's value instead of a column's number


def _index_names() -> frozenset[str | None]:
    names: set[str | None] = set()
    for table in schema.metadata.tables.values():
        names.update(index.name for index in table.indexes)
    return frozenset(names)


_KNOWN = {"table": _TABLES, "index": _index_names()}
"""The names in a store's database, by kind."""


def unexpected_part(opened: sqlite3.Connection) -> str | None:
    """Return an object of a database that no store has, for a message; None if there is none.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    for kind, name, sql in opened.execute("SELECT type, name, sql FROM sqlite_master"):
        name_words = f"a {kind} {quoted(str(name))}"
        # SQLite itself creates the index of a primary key.
        is_automatic = kind == "index" and sql is None
        if name not in _KNOWN.get(kind, frozenset()) and not is_automatic:
            return name_words
        if kind == "table":
            problem = _unexpected_column(opened, name)
        else:
            problem = _expression_in_index(opened, name)
        if problem is None and "CHECK" in str(sql).upper():
            problem = "a check"
        if problem is not None:
            return f"{name_words} with {problem}"
    return None


def _unexpected_column(opened: sqlite3.Connection, table: str) -> str | None:
    expected = schema.metadata.tables.get(table)
    query = "SELECT name, dflt_value, hidden FROM pragma_table_xinfo(?)"
    for name, default, hidden in opened.execute(query, (table,)):
        if hidden:
            return f"a generated column {quoted(str(name))}"
        if expected is not None and name not in expected.columns:
            return f"a column {quoted(str(name))}"
        if "(" in str(default):
            return f"a column {quoted(str(name))} whose default is computed"
    return None


def _expression_in_index(opened: sqlite3.Connection, index: str) -> str | None:
    columns = opened.execute("SELECT cid FROM pragma_index_xinfo(?)", (index,))
    is_expression = any(column == _EXPRESSION for (column,) in columns)
    return "an expression" if is_expression else None
