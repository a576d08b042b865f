"""The fleet's contract as a value: names of labels and columns, bounds, and a summary of values."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError, model_validator
from typing_extensions import Self

from fleet_protocol.data.facts import plain_name
from fleet_protocol.data.summary import DataSummary
from fleet_protocol.frozen import FrozenModel

MOST_BYTES = 64 * 1024
"""Greatest size of all names together, in bytes.

Every offer carries the contract, and hosted brokers limit a packet to 128 kB.
"""

CONTRACT_FILE = "contract.json"
"""File in a board's state folder with the last contract that it was offered."""

_LARGEST = 3.4e38  # of float32
_JSON_BYTES = 3  # quotes and comma of a name in JSON

Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
"""One value of a sample."""


def _check_readable(name: str) -> str:
    if not name.isprintable() or name != plain_name(name):
        raise ValueError(
            f"the name {name!r} has characters that cannot be printed, or spaces around it; "
            "rename it"
        )
    return name


Title = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_check_readable)]
"""Name of a label or a column."""


def _check_different(what: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} has the name {name!r} twice")
        seen.add(name)


class ContractTerms(FrozenModel):
    """The terms of a fleet for its samples, ``[contract]`` in ``fleet.toml``.

    An empty or None value sets nothing.

    Attributes:
        labels: names of the model's labels, in the order of their numbers (0, 1, ...).
        columns: names of a table's columns, in the order of the model's inputs.
        tokens: size of the vocabulary; every token is a number below this size.
        range: minimum and maximum value of the samples, in the form that the model receives.
        missing: number that replaces a missing value in a column.
    """

    labels: tuple[Title, ...] = ()
    columns: tuple[Title, ...] = ()
    tokens: int | None = Field(default=None, ge=1, le=2**53)
    range: tuple[Number, Number] | None = None
    missing: Number | None = None

    @model_validator(mode="after")
    def _names_are_few_and_differ(self) -> Self:
        size = sum(len(name.encode()) + _JSON_BYTES for name in (*self.labels, *self.columns))
        if size > MOST_BYTES:
            raise ValueError(
                f"the names of labels and columns take {size} bytes, but a task can carry only "
                f"{MOST_BYTES}; give them shorter names, or number them in an .npz file"
            )
        _check_different("labels", self.labels)
        _check_different("columns", self.columns)
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError("range must be the lowest and the highest value, in this order")
        return self


class DataContract(ContractTerms):
    """The fleet's definition of a sample, as boards receive it.

    Attributes:
        summary: figures of the server's own samples, as the model sees them; None if the server has
            no samples.
    """

    summary: DataSummary | None = None


NO_CONTRACT = DataContract()


def read_contract(folder: Path) -> DataContract | None:
    """Read the contract in a board's state folder; None if there is no readable one."""
    try:
        return DataContract.model_validate_json((folder / CONTRACT_FILE).read_bytes())
    # A board without a readable contract waits for the next offer.
    except (OSError, ValidationError):
        return None
