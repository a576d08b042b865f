"""Describes which parts of samples are read by position although the fleet's contract has names."""

from fleet_protocol.data.dataset import DataSet
from fleet_protocol.data.terms import NO_CONTRACT, ContractTerms


def describe_positions(
    data: DataSet, contract: ContractTerms | None, *, own_labels: bool = False
) -> str:
    """Describe which parts of samples are read by position although the contract names them.

    Args:
        data: the samples from a reader.
        contract: contract of the fleet; None if it has none.
        own_labels: whether the labels matter only to this board.

    Returns:
        Text for people; empty if names decide everything.
    """
    contract = contract or NO_CONTRACT
    labels_have_names = own_labels or data.label_names or data.y.dtype.kind == "f"
    by_position: list[tuple[str, tuple[str, ...]]] = []
    if contract.labels and not labels_have_names:
        by_position.append(("labels", contract.labels))
    if contract.columns and not data.column_names:
        by_position.append(("columns", contract.columns))
    clauses = []
    for kind, names in by_position:
        range_text = f"0 is {names[0]!r}, {len(names) - 1} is {names[-1]!r}"
        clauses.append(f"{kind} are assigned by position ({range_text})")
    return ", and ".join(clauses)
