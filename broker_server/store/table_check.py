"""Whether a database has the tables of a store and nothing else: what else there is may be a
program of a stranger's.

SQLite runs triggers, views, generated columns, checks and indices on expressions by itself, when it
reads or writes.
"""

import sqlite3

from broker_server.store import schema
from fleet_protocol.foreign_files import quoted

_EARLIER = frozenset({"shoal_store"})  # which earlier versions had
_TABLES = frozenset({*schema.metadata.tables, schema.mark.table.name, *_EARLIER})
_INDICES = frozenset(
    index.name for table in schema.metadata.tables.values() for index in table.indexes
)
_EXPRESSION = -2  # in place of a column's number, as SQLite says it


def unexpected_part(opened: sqlite3.Connection) -> str | None:
    """What a database has that no store has, for a message; None where there is nothing.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    for kind, name, sql in opened.execute("SELECT type, name, sql FROM sqlite_master"):
        named = f"a {kind} {quoted(str(name))}"
        known = {"table": _TABLES, "index": _INDICES}.get(kind, frozenset())
        automatic = kind == "index" and sql is None  # of a primary key
        if name not in known and not automatic:
            return named
        problem = _strange_column(opened, name) if kind == "table" else _strange_index(opened, name)
        if problem is None and "CHECK" in str(sql).upper():
            problem = "a check"
        if problem is not None:
            return f"{named} with {problem}"
    return None


def _strange_column(opened: sqlite3.Connection, table: str) -> str | None:
    known = schema.metadata.tables.get(table)
    for _, name, _, _, default, _, hidden in opened.execute(
        "SELECT * FROM pragma_table_xinfo(?)", (table,)
    ):
        if hidden:
            return f"a generated column {quoted(str(name))}"
        if known is not None and name not in known.columns:
            return f"a column {quoted(str(name))}"
        if "(" in str(default):
            return f"a column {quoted(str(name))} whose default is computed"
    return None


def _strange_index(opened: sqlite3.Connection, index: str) -> str | None:
    columns = opened.execute("SELECT cid FROM pragma_index_xinfo(?)", (index,))
    return "an expression" if any(column == _EXPRESSION for (column,) in columns) else None
