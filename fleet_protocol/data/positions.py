"""Says what of samples is read by position although the fleet's contract has names."""

from fleet_protocol.data.contract import NO_CONTRACT, ContractTerms
from fleet_protocol.data.dataset import DataSet


def describe_positions(
    data: DataSet, contract: ContractTerms | None, *, own_labels: bool = False
) -> str:
    """What of samples is taken by position where the contract has names, for people.

    Empty where names decide.

    Args:
        data: as a reader gives it.
        contract: of the fleet; None where it has none.
        own_labels: whether the labels are the board's own business.
    """
    contract = contract or NO_CONTRACT
    named = own_labels or data.label_names or data.y.dtype.kind == "f"
    labels = () if named else contract.labels
    columns = () if data.column_names else contract.columns
    taken = [
        f"{what} are taken by position (0 is {names[0]!r}, {len(names) - 1} is {names[-1]!r})"
        for what, names in (("labels", labels), ("columns", columns))
        if names
    ]
    return ", and ".join(taken)
