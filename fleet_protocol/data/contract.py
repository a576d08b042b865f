"""The fleet's definition of a sample: names and order of labels and columns, bounds, and a summary
of values.

Names decide, never positions: every reader of data puts labels and columns into the order of the
contract by name, and refuses data that does not fit before any training.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, ValidationError, model_validator
from typing_extensions import Self

from fleet_protocol.data.dataset import DataSet
from fleet_protocol.data.facts import plain_name, shape_remedy
from fleet_protocol.data.summary import DataSummary, summarise
from fleet_protocol.errors import ConfigError, MismatchError
from fleet_protocol.frozen import FrozenModel, problems
from fleet_protocol.manifest import Manifest

MOST_BYTES = 64 * 1024
"""Most bytes of all names: every offer carries the contract, and hosted brokers limit a packet to
128 kB.
"""

CONTRACT_FILE = "contract.json"
"""File in a board's state folder with the last contract that it was offered."""

_SHOWN = 12  # names in a message
_LISTED = 100  # names in a line that somebody copies
_CHECK_ROWS = 4096  # tokens are looked at in pieces, so that data on disk need not fit into memory
PLACEHOLDERS = 'labels = ["<name of label 0>", "<name of label 1>", ...]'
"""The line that says the names of labels, as a message shows it."""

_WITHOUT_NAME = re.compile(
    r"|Unnamed: \d+"
)  # the second is pandas' name for a column that has none


def _readable(name: str) -> str:
    if not name.isprintable() or name != plain_name(name):
        raise ValueError(
            f"the name {name!r} has characters that cannot be printed, or spaces around it; rename it"
        )
    return name


_LARGEST = 3.4e38  # of float32
Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
"""One value of a sample."""

Title = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_readable)]
"""Name of a label or a column."""


def _first_repeated(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


class ContractTerms(FrozenModel):
    """The terms of a fleet for its samples, ``[contract]`` in ``fleet.toml``.

    An empty or None value sets nothing.

    Attributes:
        labels: names in the order of the model's labels 0, 1, ...
        columns: names of the columns of a table in the order of the model's inputs.
        tokens: size of the vocabulary; every token is below it.
        range: lowest and highest value as the model sees them.
        missing: number that replaces a missing value of a column.
    """

    labels: tuple[Title, ...] = ()
    columns: tuple[Title, ...] = ()
    tokens: int | None = Field(default=None, ge=1, le=2**53)
    range: tuple[Number, Number] | None = None
    missing: Number | None = None

    @model_validator(mode="after")
    def _names_are_few_and_differ(self) -> Self:
        size = sum(len(name.encode()) + 3 for name in (*self.labels, *self.columns))
        if size > MOST_BYTES:
            raise ValueError(
                f"the names of labels and columns take {size} bytes, but a task can carry only {MOST_BYTES}; "
                "give them shorter names, or number them in an .npz file"
            )
        for what, names in (("labels", self.labels), ("columns", self.columns)):
            twice = _first_repeated(names)
            if twice is not None:
                raise ValueError(f"{what} has the name {twice!r} twice")
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError("range must be the lowest and the highest value, in this order")
        return self


class DataContract(ContractTerms):
    """The fleet's definition of a sample, as boards receive it.

    Attributes:
        summary: figures of the server's own samples as the model sees them; None if it has none.
    """

    summary: DataSummary | None = None


NO_CONTRACT = DataContract()


def complete_contract(data: DataSet, said: ContractTerms = NO_CONTRACT) -> DataContract:
    """Complete the terms in `said` from a server's own samples.

    Args:
        data: samples, `reconcile` with `said`.
        said: the terms that are set already.

    Raises:
        MismatchError: a column of a table has no name.
        ConfigError: names are not printable, or too long together.
    """
    order_columns(data, said)
    update = {
        "labels": said.labels or data.label_names,
        "columns": said.columns or data.column_names,
        "summary": summarise(data, tokens=said.tokens is not None),
    }
    try:
        return DataContract.model_validate(dict(said) | update)
    except ValidationError as error:
        raise ConfigError(f"{data.source}: {problems(error, 'the names')}") from error


def reconcile(
    data: DataSet, contract: ContractTerms | None, *, own_labels: bool = False
) -> DataSet:
    """Put labels and columns of samples into the order of a contract, by name.

    Sources without names, such as arrays, stay as they are.

    Args:
        data: samples from a reader.
        contract: the fleet's contract, or None.
        own_labels: whether a source may number its labels in its own order if the contract has no
            names for them, because the labels matter only to this board.

    Returns:
        The same samples, or new arrays if the order changes.

    Raises:
        MismatchError: the data does not fit; the message names the file, what differs and what to
            do.
    """
    contract = contract or NO_CONTRACT
    data = order_columns(data, contract)
    _check_shape(data, contract)
    data = _in_labels(data, contract, own_labels=own_labels)
    _check_filled(data, contract)
    _check_range(data, contract)
    return data


def order_columns(data: DataSet, contract: ContractTerms) -> DataSet:
    """Put columns into the order of a contract, and check the bound of tokens.

    Labels are not needed.

    Raises:
        MismatchError: a column is missing or has no name, or a token is beyond the vocabulary.
    """
    _check_tokens(data, contract)
    names = data.column_names
    if not names:
        return data
    if not contract.columns:
        _check_named(data, names)
        return data
    missing = [name for name in contract.columns if name not in names]
    if missing:
        raise MismatchError(_no_column(data, missing[0]))
    order = [names.index(name) for name in contract.columns]
    return data if order == [*range(len(names))] else _picked(data, order, contract)


def _no_column(data: DataSet, name: str) -> str:
    """A column is missing: whether the file lacks it, or the board's own `columns` left it out."""
    names = data.column_names
    text = f"{data.source} has no column {name!r}, which the fleet's model reads (it has {shown(names)})"
    if name in data.facts.columns_left_out:
        return f"{text}: the file has it, and `columns` in [data] of device.toml leaves it out; name it there"
    alike = [
        other
        for other in (*names, *data.facts.columns_left_out)
        if other.casefold() == name.casefold()
    ]
    if alike:
        return f"{text}; {alike[0]!r} is spelled differently: rename it in the file to {name!r}"
    return f"{text}; add it to the file, or rename the column there that has its values"


def _check_named(data: DataSet, names: Sequence[str]) -> None:
    place = next(
        (place for place, name in enumerate(names) if _WITHOUT_NAME.fullmatch(name)),
        None,
    )
    if place is not None:
        others = [name for name in names if not _WITHOUT_NAME.fullmatch(name)]
        raise MismatchError(
            f"column {place} of {data.source} has no name: it looks like the index that pandas writes. Name the "
            f"columns to use in [data]: columns = {_listed(others)}, or write the table with to_csv(..., index=False)"
        )


def _picked(data: DataSet, order: Sequence[int], contract: ContractTerms) -> DataSet:
    """Select columns of the samples, by position."""
    per_column = [array for array in (data.mean, data.std) if array.ndim]
    shaped = data.x.ndim != 2
    if data.facts.columns_by_place or (
        shaped and (per_column or len(order) != len(data.column_names))
    ):
        raise MismatchError(
            f"{data.source} has columns other than the fleet's, or in another order, and `transforms` or `shape` in "
            f"[data] reads them by position: set columns = {_listed(contract.columns)}"
        )
    flat = data.x.reshape(len(data.x), -1)[:, order]
    x = flat.reshape(data.x.shape) if shaped else flat

    def of_columns(values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values[order] if values.ndim else values

    facts = replace(data.facts, columns=contract.columns)
    return replace(
        data,
        x=x,
        mean=of_columns(data.mean),
        std=of_columns(data.std),
        black=of_columns(data.black),
        facts=facts,
    )


def _in_labels(data: DataSet, contract: ContractTerms, *, own_labels: bool) -> DataSet:
    """Number the labels of samples as in a contract."""
    names = data.label_names
    if not names:
        _check_numbers(data, contract)
        return data
    if not contract.labels:
        if own_labels or data.facts.labels_said:
            return data
        raise MismatchError(
            f"{data.source} has the labels {shown(names)}, and nothing sets their order, so this board would "
            f"number them by itself: set all labels of the model in its order for all boards, {PLACEHOLDERS} in "
            "[contract] of fleet.toml; or, if the server cannot, write the same line into [data] of every device.toml"
        )
    facts = replace(data.facts, labels=contract.labels, labels_said=False)
    if names == contract.labels:
        return replace(data, facts=facts)
    unknown = sorted(present_names(data) - set(contract.labels))
    if unknown:
        raise MismatchError(
            f"{data.source} has the label {unknown[0]!r}, which is not a label of the fleet "
            f"({shown(contract.labels)}): rename it or move its samples away, or name it in [contract] labels of "
            "fleet.toml"
        )
    places = {name: place for place, name in enumerate(contract.labels)}
    new_numbers = np.array([places.get(name, -1) for name in names], np.int64)
    return replace(data, y=np.where(data.y >= 0, new_numbers[data.y], data.y), facts=facts)


def check_own_labels(data: DataSet, manifest: Manifest) -> None:
    """See that a board which orders labels by its own `labels` names as many as the model has.

    Args:
        data: as `reconcile`; where the fleet's contract names labels, nothing is looked at.
        manifest: of the model.

    Raises:
        MismatchError: there are more or fewer.
    """
    names = data.label_names
    if (
        not data.facts.labels_said
        or manifest.recipe.loss.target != "int64"
        or len(names) == manifest.classes
    ):
        return
    raise MismatchError(
        f"`labels` in [data] of device.toml names {len(names)} labels for {data.source} ({shown(names)}), and "
        f"{manifest.arch} {manifest.tier} has {manifest.classes} classes: name all labels of the model in its order, "
        f"{PLACEHOLDERS}, or say them for all boards in [contract] of fleet.toml"
    )


def present_names(data: DataSet) -> frozenset[str]:
    """Names of labels that samples have; one that is only said has none."""
    if not data.label_names:
        return frozenset()
    return frozenset(data.label_names[number] for number in np.unique(data.y) if number >= 0)


def _check_numbers(data: DataSet, contract: ContractTerms) -> None:
    """See that numbers as labels mean one thing.

    The names of the fleet are these numbers in their places; or the source is an array, which
    cannot have names, and the names are none that could be its numbers.
    """
    places = [str(place) for place in range(len(contract.labels))]
    if not contract.labels or [*contract.labels] == places or data.y.dtype.kind == "f":
        return
    are_numbers = all(name.isdecimal() for name in contract.labels)
    if data.facts.labels_nameable:
        remedy = (
            "set `labels` in [data] of device.toml to the names that the file uses, if it uses those of the fleet"
            if are_numbers
            else f"set it in [data] of device.toml, {PLACEHOLDERS}, with a name of the fleet for each number that the "
            "file uses, the first for 0"
        )
        raise MismatchError(
            f"{data.source} has numbers as labels, and the fleet's labels have names ({shown(contract.labels)}), so "
            f"the name of each number is ambiguous: {remedy}"
        )
    if not are_numbers:
        return
    raise MismatchError(
        f"{data.source} has numbers as labels, and the fleet's labels have numbers as names in another order "
        f"({shown(contract.labels)}), so their meaning is ambiguous: set labels in the order of the numbers "
        "in [contract] of fleet.toml"
    )


def _check_filled(data: DataSet, contract: ContractTerms) -> None:
    filled = data.facts.filled
    if filled is None or not contract.columns or contract.missing == filled:
        return
    rule = "has no rule for them" if contract.missing is None else f"uses {contract.missing:g}"
    remedy = (
        f"set missing = {filled:g} in [evaluation.data] or [contract] of fleet.toml, or leave such lines out"
        if contract.missing is None
        else f"set missing = {contract.missing:g} in [data] of device.toml"
    )
    raise MismatchError(
        f"{data.source} has {filled:g} for missing values, and the fleet {rule}: {remedy}"
    )


def _check_tokens(data: DataSet, contract: ContractTerms) -> None:
    several_inputs = bool(data.parts[0])
    if contract.tokens is None or data.x.dtype.kind not in "iu" or several_inputs:
        return
    for start in range(0, len(data.x), _CHECK_ROWS):
        piece = data.x[start : start + _CHECK_ROWS]
        if piece.size and piece.max() >= contract.tokens:
            row = start + int(np.argwhere(piece >= contract.tokens)[0][0])
            raise MismatchError(
                f"sample {row} in {data.source} has the token {int(piece.max())}, and the fleet's vocabulary has "
                f"{contract.tokens}, numbered from 0: make the tokens with the fleet's tokenizer"
            )


def _check_shape(data: DataSet, contract: ContractTerms) -> None:
    """See that samples have the shape of the server's own, which is that of the model."""
    summary = contract.summary if isinstance(contract, DataContract) else None
    own = data.x.shape[1:]
    if summary is None or own == tuple(summary.shape):
        return
    if (
        len(summary.shape) == 1 and math.prod(own) == summary.shape[0]
    ):  # a model of several inputs lays them flat
        return
    wanted = [*summary.shape]
    raise MismatchError(
        f"samples in {data.source} have shape {[*own]}, and the fleet's {wanted}: {shape_remedy(own, wanted)}"
    )


def _check_range(data: DataSet, contract: ContractTerms) -> None:
    if contract.range is None:
        return
    lowest, highest = contract.range
    summary = summarise(data, tokens=contract.tokens is not None)
    found_lowest = min(summary.lowest)
    found_highest = max(summary.highest)
    if found_lowest < lowest or found_highest > highest:
        raise MismatchError(
            f"values in {data.source} range from {found_lowest:g} to {found_highest:g} as the model sees them, and the "
            f"fleet's from {lowest:g} to {highest:g}: set `scale` in [data] of device.toml (1/255 = "
            "0.00392156862745098 for pixels), or `mean` and `std`"
        )


def shown(names: Sequence[str]) -> str:
    """Names for people, of many the first."""
    more = f", ... {len(names)} in all" if len(names) > _SHOWN else ""
    return ", ".join(name or "one without a name" for name in names[:_SHOWN]) + more


def _listed(names: Sequence[str]) -> str:
    """Return names as a TOML list."""
    more = ", ..." if len(names) > _LISTED else ""
    return (
        "["
        + ", ".join('"{}"'.format(name.replace('"', '\\"')) for name in names[:_LISTED])
        + more
        + "]"
    )


def read_contract(folder: Path) -> DataContract | None:
    """Read the contract in a board's state folder; None if there is no readable one."""
    try:
        return DataContract.model_validate_json((folder / CONTRACT_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
