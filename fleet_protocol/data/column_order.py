"""Puts the columns of samples into the order of the fleet's contract, by name."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.dataset import DataSet
from fleet_protocol.data.name_lists import list_names, toml_list
from fleet_protocol.data.terms import ContractTerms
from fleet_protocol.errors import MismatchError

# A column without a name is empty in the file, or has the name that pandas gives it.
_WITHOUT_NAME = re.compile(r"|Unnamed: \d+")

_CHECK_ROWS = 4096  # tokens are checked in blocks, so that data on disk need not fit into memory


def order_columns(data: DataSet, contract: ContractTerms) -> DataSet:
    """Put columns into the order of a contract, and check the bound of tokens.

    Labels are not needed.

    Raises:
        MismatchError: a column is missing or has no name, or a token is beyond the vocabulary.
    """
    # Tokens have no names, so this comes first.
    _check_tokens(data, contract)
    names = data.column_names
    if not names:
        return data
    if not contract.columns:
        _check_named(data, names)
        return data
    for name in contract.columns:
        if name not in names:
            raise MismatchError(_missing_column(data, name))
    order = [names.index(name) for name in contract.columns]
    return data if order == [*range(len(names))] else _select_columns(data, order, contract)


def _check_tokens(data: DataSet, contract: ContractTerms) -> None:
    several_inputs = bool(data.sample_sizes.inputs)
    if contract.tokens is None or data.x.dtype.kind not in "iu" or several_inputs:
        return
    for start in range(0, len(data.x), _CHECK_ROWS):
        block = data.x[start : start + _CHECK_ROWS]
        if block.size and block.max() >= contract.tokens:
            place = np.argwhere(block >= contract.tokens)[0]
            raise MismatchError(
                f"sample {start + place[0]} in {data.source} has the token "
                f"{int(block[tuple(place)])}, and the fleet's vocabulary has {contract.tokens}, "
                "numbered from 0: make the tokens with the fleet's tokenizer"
            )


def _check_named(data: DataSet, names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        if _WITHOUT_NAME.fullmatch(name):
            with_name = [name for name in names if not _WITHOUT_NAME.fullmatch(name)]
            raise MismatchError(
                f"column {place} of {data.source} has no name: it looks like the index that "
                f"pandas writes. Name the columns to use in [data]: columns = "
                f"{toml_list(with_name)}, or write the table with to_csv(..., index=False)"
            )


def _missing_column(data: DataSet, name: str) -> str:
    """Return the message about a column that is missing.

    Either the file lacks it, or the board's own `columns` leaves it out.
    """
    names = data.column_names
    left_out = data.facts.columns_left_out
    text = (
        f"{data.source} has no column {name!r}, which the fleet's model reads "
        f"(it has {list_names(names)})"
    )
    if name in left_out:
        return (
            f"{text}: the file has it, and `columns` in [data] of device.toml leaves it out; "
            "name it there"
        )
    # A difference only in upper and lower case is likely a typing error.
    for similar in (*names, *left_out):
        if similar.casefold() == name.casefold():
            return f"{text}; {similar!r} is spelled differently: rename it in the file to {name!r}"
    return f"{text}; add it to the file, or rename the column there that has its values"


def _select_columns(
    data: DataSet,
    order: Sequence[int],
    contract: ContractTerms,
) -> DataSet:
    """Select columns of the samples, by position."""
    is_shaped = data.x.ndim != 2
    has_column_figures = bool(data.mean.ndim or data.std.ndim)
    is_subset = len(order) != len(data.column_names)
    # A function or a shape reads the columns in the order of the file, so they cannot change.
    if data.facts.columns_by_place or (is_shaped and (has_column_figures or is_subset)):
        raise MismatchError(
            f"{data.source} has columns other than the fleet's, or in another order, and "
            "`transforms` or `shape` in [data] reads them by position: set columns = "
            f"{toml_list(contract.columns)}"
        )
    flat = data.x.reshape(len(data.x), -1)[:, order]
    return replace(
        data,
        # Figures by column move with the columns.
        x=flat.reshape(data.x.shape) if is_shaped else flat,
        mean=_select(data.mean, order),
        std=_select(data.std, order),
        black=_select(data.black, order),
        facts=replace(data.facts, columns=contract.columns),
    )


def _select(values: NDArray[np.float32], order: Sequence[int]) -> NDArray[np.float32]:
    """Select one value per column; a single value holds for all columns."""
    return values[order] if values.ndim else values
