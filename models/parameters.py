"""The tensors of a global model: trained parameters, and the statistics of norms."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from fleet_protocol.foreign_files import Label
from models.dims import Dim

_Dim = Annotated[Dim, PlainValidator(Dim.from_json), PlainSerializer(Dim.to_json)]


@dataclass(frozen=True)
class Parameter:
    """A trained tensor of the global model."""

    name: Label  # dotted path
    shape: tuple[int, ...]  # in the global model
    dims: tuple[_Dim, ...]
    block: Label  # ``stem``, ``block1`` ..., or ``head``


@dataclass(frozen=True)
class Statistic:
    """A static batch norm, whose mean and variance vectors are computed after training."""

    name: Label
    dims: tuple[_Dim, ...]
    block: Label

    @property
    def tensors(self) -> tuple[str, str]:
        """Return the names of mean and variance among the tensors of a graph."""
        return f"stat.{self.name}.mean", f"stat.{self.name}.var"
