"""The part of the model that a board keeps for itself: ``[private]`` (specification 6)."""

from typing import Annotated

from pydantic import Field, model_validator

from broker_server.strategies.private_parts import PrivateModel
from fleet_protocol.frozen import FrozenModel

_MU = 0.1

Part = Annotated[str, Field(min_length=1, max_length=200)]


class PrivateConfig(FrozenModel):
    """Parts of the model, or a copy of all of it, that each board trains for itself.

    Private parts never leave the board: the server starts a board with the initial values of the
    fleet, and merges the other parameters. Boards evaluate the result on their held-out samples.

    Attributes:
        parts: the parts whose values each board keeps to itself between rounds: blocks (``stem``,
            ``block1`` ..., ``head``), modules by path, or patterns (``stem.norm*``).
        private_epochs: number of initial passes over the samples in which a board trains only its
            private parts; in the remaining passes, it trains only the other parts. None trains all
            parts together.
        copy_model: whether each board also keeps a copy of the whole model; after an update, the
            board trains the copy further and pulls it towards the fleet's weights.
        mu: strength with which the copied model is pulled towards the fleet's weights; None for
            0.1.
        adapt_epochs: number of passes over a board's samples that adapt its model before the
            evaluation. The adapted model is neither kept nor sent. None for no adaptation.
        compare: whether boards also evaluate the model without their own parts.
    """

    parts: tuple[Part, ...] = ()
    private_epochs: int | None = Field(default=None, ge=1, le=10_000)
    copy_model: bool = False
    mu: float | None = Field(default=None, ge=0, le=1e6)
    adapt_epochs: int | None = Field(default=None, ge=1, le=10_000)
    compare: bool = False

    @model_validator(mode="after")
    def _one_kind(self) -> "PrivateConfig":
        if bool(self.parts) == self.copy_model:
            raise ValueError(
                'private: name the parts that boards keep (parts = ["head"]), or set '
                "copy_model = true for a copy of the whole model, but not both"
            )
        if self.private_epochs is not None and self.copy_model:
            raise ValueError(
                "private.private_epochs needs private.parts: a copy of the whole model has "
                "no other parameters to hold still; remove it"
            )
        if self.mu is not None and not self.copy_model:
            raise ValueError(
                "private.mu pulls a copy of the model, but private.copy_model is not set; remove mu"
            )
        return self

    @property
    def kept(self) -> PrivateModel:
        """Return the same for the strategies."""
        mu = _MU if self.mu is None else self.mu
        return PrivateModel(
            self.parts, self.private_epochs, self.copy_model, mu, self.adapt_epochs, self.compare
        )


def kept_of(table: PrivateConfig | None) -> PrivateModel:
    """Return what devices keep for themselves: nothing without the table."""
    return PrivateModel() if table is None else table.kept
