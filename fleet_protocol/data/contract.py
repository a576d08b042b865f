"""Brings samples into the form of the fleet's contract, or refuses them before any training.

Names decide, never positions: labels and columns are put into the order of the contract by name.
"""

import math

from pydantic import ValidationError

from fleet_protocol.data.column_order import order_columns
from fleet_protocol.data.dataset import DataSet
from fleet_protocol.data.facts import shape_remedy
from fleet_protocol.data.label_order import order_labels
from fleet_protocol.data.summary import summarise
from fleet_protocol.data.terms import NO_CONTRACT, ContractTerms, DataContract
from fleet_protocol.errors import ConfigError, MismatchError
from fleet_protocol.frozen import problems


def complete_contract(data: DataSet, terms: ContractTerms = NO_CONTRACT) -> DataContract:
    """Return a contract with the terms that are set, completed from a server's own samples.

    Args:
        data: samples, after `reconcile` with `terms`.
        terms: the terms that are set already.

    Raises:
        MismatchError: a column of a table has no name.
        ConfigError: names are not printable, or too long together.
    """
    # A column without a name must not become a term of the fleet.
    order_columns(data, terms)
    update = {
        "labels": terms.labels or data.label_names,
        "columns": terms.columns or data.column_names,
        "summary": summarise(data, tokens=terms.tokens is not None),
    }
    try:
        # Validated again, because names come from a file.
        return DataContract.model_validate(dict(terms) | update)
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
    # Columns come first: the checks below see samples as the model takes them.
    data = order_columns(data, contract)
    _check_shape(data, contract)
    data = order_labels(data, contract, own_labels=own_labels)
    _check_filled(data, contract)
    _check_range(data, contract)
    return data


def _check_shape(data: DataSet, contract: ContractTerms) -> None:
    """Check that samples have the shape of the server's own samples, which the model takes."""
    summary = contract.summary if isinstance(contract, DataContract) else None
    if summary is None:
        return
    own = data.x.shape[1:]
    wanted = tuple(summary.shape)
    # A model of several inputs takes flat samples.
    is_flat = len(wanted) == 1 and math.prod(own) == wanted[0]
    if own == wanted or is_flat:
        return
    raise MismatchError(
        f"samples in {data.source} have shape {[*own]}, but the fleet's have {[*wanted]}: "
        f"{shape_remedy(own, wanted)}"
    )


def _check_filled(data: DataSet, contract: ContractTerms) -> None:
    """Check that missing values were replaced with the fleet's number."""
    filled = data.facts.filled
    # Without columns in the contract, samples have no rule for missing values.
    if filled is None or not contract.columns or contract.missing == filled:
        return
    if contract.missing is None:
        rule = "has no rule for them"
        remedy = (
            f"set missing = {filled:g} in [evaluation.data] or [contract] of fleet.toml, or leave "
            "such lines out"
        )
    else:
        rule = f"uses {contract.missing:g}"
        remedy = f"set missing = {contract.missing:g} in [data] of device.toml"
    raise MismatchError(
        f"{data.source} has {filled:g} for missing values, and the fleet {rule}: {remedy}"
    )


def _check_range(data: DataSet, contract: ContractTerms) -> None:
    if contract.range is None:
        return
    allowed_lowest, allowed_highest = contract.range
    # In the same form as the range: scaled and shifted.
    summary = summarise(data, tokens=contract.tokens is not None)
    lowest = min(summary.lowest)
    highest = max(summary.highest)
    if lowest >= allowed_lowest and highest <= allowed_highest:
        return
    raise MismatchError(
        f"values in {data.source} range from {lowest:g} to {highest:g} as the model sees them, "
        f"but the fleet's range from {allowed_lowest:g} to {allowed_highest:g}: set `scale` in "
        "[data] of device.toml (1/255 = 0.00392156862745098 for pixels), or `mean` and `std`"
    )
