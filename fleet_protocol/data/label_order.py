"""Numbers the labels of samples as in the fleet's contract, by name."""

from dataclasses import replace

import numpy as np

from fleet_protocol.data.dataset import DataSet
from fleet_protocol.data.name_lists import list_names
from fleet_protocol.data.terms import ContractTerms
from fleet_protocol.errors import MismatchError
from fleet_protocol.manifest import Manifest

PLACEHOLDERS = 'labels = ["<name of label 0>", "<name of label 1>", ...]'
"""The line that sets the names of labels, as a message shows it."""


def order_labels(
    data: DataSet,
    contract: ContractTerms,
    *,
    own_labels: bool,
) -> DataSet:
    """Number the labels of samples as in a contract.

    Args:
        data: samples with or without names of labels.
        contract: contract of the fleet.
        own_labels: whether a source may number its labels in its own order if the contract has no
            names for them.

    Raises:
        MismatchError: the contract lacks a label, or the order of labels is not set or ambiguous.
    """
    names = data.label_names
    if not names:
        _check_numbers(data, contract)
        return data
    if not contract.labels:
        if own_labels or data.facts.labels_said:
            return data
        raise MismatchError(
            f"{data.source} has the labels {list_names(names)}, and nothing sets their order, so "
            "this board would number them by itself: set all labels of the model in its order "
            f"for all boards, {PLACEHOLDERS} in [contract] of fleet.toml; or, if the server "
            "cannot, write the same line into [data] of every device.toml"
        )
    # From here on the contract sets the order, not the user.
    facts = replace(data.facts, labels=contract.labels, labels_said=False)
    if names == contract.labels:
        return replace(data, facts=facts)
    # Only labels that occur: the file may list more.
    unknown = sorted(present_names(data) - set(contract.labels))
    if unknown:
        raise MismatchError(
            f"{data.source} has the label {unknown[0]!r}, which is not a label of the fleet "
            f"({list_names(contract.labels)}): rename it or move its samples away, or name it in "
            "[contract] labels of fleet.toml"
        )
    places = {name: place for place, name in enumerate(contract.labels)}
    # -1 for a name without samples, which no label refers to.
    new_numbers = np.array([places.get(name, -1) for name in names], np.int64)
    # Negative labels mark what does not count, and stay.
    return replace(data, y=np.where(data.y >= 0, new_numbers[data.y], data.y), facts=facts)


def check_own_labels(data: DataSet, manifest: Manifest) -> None:
    """Check that a board's own list of labels names as many labels as the model has.

    Args:
        data: samples after `reconcile`; if the fleet's contract names labels, nothing is checked.
        manifest: manifest of the model.

    Raises:
        MismatchError: it names more or fewer.
    """
    names = data.label_names
    learns_labels = manifest.recipe.loss.target == "int64"
    if not data.facts.labels_said or not learns_labels or len(names) == manifest.classes:
        return
    raise MismatchError(
        f"`labels` in [data] of device.toml names {len(names)} labels for {data.source} "
        f"({list_names(names)}), but {manifest.arch} {manifest.tier} has {manifest.classes} "
        f"classes: name all labels of the model in its order, {PLACEHOLDERS}, or set them "
        "for all boards in [contract] of fleet.toml"
    )


def present_names(data: DataSet) -> frozenset[str]:
    """Return the names of labels that samples have; a listed label may have no sample."""
    if not data.label_names:
        return frozenset()
    return frozenset(data.label_names[number] for number in np.unique(data.y) if number >= 0)


def _check_numbers(data: DataSet, contract: ContractTerms) -> None:
    """Check that labels without names are not ambiguous.

    They are not if the fleet's names are these numbers in their places. Neither are those of an
    array, which cannot have names, if the fleet's names could not be its numbers.
    """
    # The fleet's names may be "0", "1", ... in their order.
    places = [str(place) for place in range(len(contract.labels))]
    if not contract.labels or [*contract.labels] == places or data.y.dtype.kind == "f":
        return
    names_are_numbers = all(name.isdecimal() for name in contract.labels)
    if data.facts.labels_nameable:
        if names_are_numbers:
            remedy = (
                "set `labels` in [data] of device.toml to the names that the file uses, if it "
                "uses those of the fleet"
            )
        else:
            remedy = (
                f"set it in [data] of device.toml, {PLACEHOLDERS}, with a name of the fleet for "
                "each number that the file uses, the first for 0"
            )
        raise MismatchError(
            f"{data.source} has numbers as labels, and the fleet's labels have names "
            f"({list_names(contract.labels)}), so the name of each number is ambiguous: {remedy}"
        )
    if names_are_numbers:
        raise MismatchError(
            f"{data.source} has numbers as labels, and the fleet's labels have numbers as names "
            f"in another order ({list_names(contract.labels)}), so their meaning is ambiguous: "
            "set labels in the order of the numbers in [contract] of fleet.toml"
        )
