"""The data contract of a simulation's own files: that of a fleet whose server has the test set."""

from collections.abc import Sequence

from fleet_protocol.data import DataSet
from fleet_protocol.data.column_order import order_columns
from fleet_protocol.data.label_order import PLACEHOLDERS, present_names
from fleet_protocol.data.name_lists import list_names
from fleet_protocol.data.terms import NO_CONTRACT, DataContract
from fleet_protocol.errors import MismatchError

_SAY_ALL = f"list all labels in order in [data.test] of sim.toml: {PLACEHOLDERS}"


def common_contract(train: Sequence[DataSet], test: Sequence[DataSet]) -> DataContract:
    """Build one contract for the files of all devices and of the server.

    The labels are those in a table, or else those of the test set in the order of their names; the
    columns are those of the test set.

    Args:
        train: samples of the devices.
        test: samples of the server.

    Raises:
        MismatchError: a column has no name, two tables list labels in different orders, or samples
            have a label that the contract lacks.
    """
    sets = [*test, *train]
    # Labels in a table have priority: their order decides the number of each.
    labels = _configured_labels(sets) or _test_labels(test)
    _check_labels(train, test, labels)
    tables: list[DataSet] = []
    fillers: list[float] = []
    for data in sets:
        if data.column_names:
            tables.append(data)
        if data.facts.filled is not None:
            fillers.append(data.facts.filled)
    # One column order for all files: that of the test set, which comes first in `sets`.
    if tables:
        order_columns(tables[0], NO_CONTRACT)
    return DataContract(
        labels=labels,
        columns=tables[0].column_names if tables else (),
        missing=fillers[0] if fillers else None,
    )


def _configured_labels(sets: Sequence[DataSet]) -> tuple[str, ...]:
    """Return the labels in the order of the tables; empty if no table lists them."""
    # Equal lists in several tables are one, so the list is the key.
    sources: dict[tuple[str, ...], str] = {}
    for data in sets:
        if data.facts.labels_said:
            sources[data.label_names] = data.source
    if len(sources) > 1:
        first, second, *_ = sources
        raise MismatchError(
            f"{sources[second]} has the labels {list_names(second)}, and {sources[first]}"
            f" {list_names(first)}; set the same `labels` in both tables"
        )
    return next(iter(sources), ())


def _test_labels(test: Sequence[DataSet]) -> tuple[str, ...]:
    """Return the labels of the test set, in the order of their names."""
    names: set[str] = set()
    for data in test:
        names.update(data.label_names)
    return tuple(sorted(names))


def _check_labels(
    train: Sequence[DataSet], test: Sequence[DataSet], labels: tuple[str, ...]
) -> None:
    """Check that every name is among the labels of the contract."""
    for data in (*test, *train):
        unknown = sorted(present_names(data) - set(labels))
        # Without any names, labels are numbers, and there is nothing to compare.
        if unknown and labels:
            raise MismatchError(
                f"{data.source} has the label {unknown[0]!r}, which is not among the labels of"
                f" the test set or of `labels` ({list_names(labels)}); boards of a fleet would"
                f" refuse it. Rename it, remove its samples, or {_SAY_ALL}"
            )
        if unknown:
            raise MismatchError(
                f"{data.source} has the labels {list_names(sorted(unknown))}, but"
                f" {test[0].source} has numbers without names, so the number of each name is"
                f" ambiguous: {_SAY_ALL}"
            )
