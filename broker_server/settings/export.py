"""``[model.export]``: the export that a command does before it starts a server or a run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fleet_protocol.frozen import FiniteJson, FrozenModel

_Ratio = Annotated[float, Field(gt=0, le=1)]


class ExportTable(FrozenModel):
    """``[model.export]``: what `shoal run` and `shoal up` export first, as `shoal export` would.

    They export if the artifact set is missing, or if the model's file, this table or the recipe has
    changed since.

    Attributes:
        models: Python file with your own architectures; None for the zoo.
        widths: widths of the tiers, relative to the global model.
        depths: depths of the tiers in blocks; None for only the full depth.
        trained: shares of the blocks that tiers train, counted from the top; ``head`` trains no
            block.
        settings: settings of the architecture; by default, input shape and classes come from the
            test set and the contract.
    """

    models: Path | None = None
    widths: tuple[_Ratio, ...] = Field(default=(1.0,), min_length=1)
    depths: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(default=None, min_length=1)
    trained: tuple[_Ratio | Literal["head"], ...] = Field(default=(1.0,), min_length=1)
    settings: Mapping[str, FiniteJson] = Field(default_factory=dict)

    def python_files(self) -> Iterator[Path]:
        """Yield the user's file with the model."""
        if self.models is not None:
            yield self.models
