"""The contract of a simulation's own files: that of a fleet whose server has the test set."""

from collections.abc import Sequence

from fleet_protocol.data import DataSet
from fleet_protocol.data.column_order import order_columns
from fleet_protocol.data.label_order import PLACEHOLDERS, present_names
from fleet_protocol.data.name_lists import list_names
from fleet_protocol.data.terms import NO_CONTRACT, DataContract
from fleet_protocol.errors import MismatchError

_SAY_ALL = f"say all labels in their order in [data.test] of sim.toml: {PLACEHOLDERS}"


def common_contract(train: Sequence[DataSet], test: Sequence[DataSet]) -> DataContract:
    """Make one contract for the files of all devices and of the server.

    Labels are those that a table says, else those of the test set in the order of their names;
    columns are those of the test set.

    Args:
        train: samples of the devices, as read.
        test: samples of the server, as read.

    Raises:
        MismatchError: a column has no name, two tables say labels in different orders, or samples
            have a label that the contract lacks.
    """
    sets = [*test, *train]
    labels = _configured_labels(sets) or _test_labels(test)
    _check_labels(train, test, labels)
    tables: list[DataSet] = []
    fillers: list[float] = []
    for data in sets:
        if data.column_names:
            tables.append(data)
        if data.facts.filled is not None:
            fillers.append(data.facts.filled)
    if tables:
        order_columns(tables[0], NO_CONTRACT)
    return DataContract(
        labels=labels,
        columns=tables[0].column_names if tables else (),
        missing=fillers[0] if fillers else None,
    )


def _configured_labels(sets: Sequence[DataSet]) -> tuple[str, ...]:
    """Return the labels in the order that tables say; none where no table does."""
    sources: dict[tuple[str, ...], str] = {}
    for data in sets:
        if data.facts.labels_said:
            sources[data.label_names] = data.source
    if len(sources) > 1:
        first, second, *_ = sources
        raise MismatchError(
            f"{sources[second]} has the labels {list_names(second)}, and {sources[first]}"
            f" {list_names(first)}; say the same `labels` in both tables"
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
        if unknown and labels:
            raise MismatchError(
                f"{data.source} has the label {unknown[0]!r}, which is none of the labels of the"
                f" test set or of `labels` ({list_names(labels)}), so that boards of a fleet would"
                f" refuse it: rename it or move its samples away, or {_SAY_ALL}"
            )
        if unknown:
            raise MismatchError(
                f"{data.source} has the labels {list_names(sorted(unknown))}, and {test[0].source}"
                f" numbers without names, so the number of each name is ambiguous: {_SAY_ALL}"
            )
