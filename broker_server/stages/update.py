"""An update on its way through the stages, and how far it is from the weights that were sent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from broker_server.strategies.strategy import Contribution

Tensors = Mapping[str, NDArray[Any]]


class Distance(NamedTuple):
    """How far an update is from the weights that were sent to its device.

    Attributes:
        norm: Euclidean norm of the difference over all tensors.
        values: number of entries of the update.
    """

    norm: float
    values: int


@dataclass(frozen=True, kw_only=True)
class Update(Contribution):
    """A stored update on its way into the sums; a method sees only its `Contribution`.

    Its weight is `metrics.weight`, and the rows of label axes that it may move are those of
    `metrics.labels`.

    Attributes:
        version: number of the global version from which it was made.
        sent: reads the weights that were sent to its device, float32 tensors of the same names.
        distance: distance from the sent weights, as it was measured when the update arrived, or
            when the secure sum was added up; None after a restart of the server, which measures it
            when the update is folded.
        announced: samples that its device announced before; None if it has not.
    """

    version: int
    sent: Callable[[], Tensors]
    distance: Distance | None = None
    announced: int | None = None
