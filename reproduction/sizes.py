"""The sizes of the sub-models that a run trained: parameters, operations and bytes.

HeteroFL's tables print them as means over the levels of a row. Here they are means over all updates
of a run, which the devices' draws bring near to that.
"""

from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path

from fleet_protocol.frozen import FrozenModel
from fleet_protocol.manifest import parse_manifest
from simulation.results.rounds import RoundRow

_FLOAT_BYTES = 4
_MEBI = 2**20


class Sizes(FrozenModel):
    """Means over the updates of a run.

    Attributes:
        parameters: number of parameters of the trained sub-models.
        flops: floating point operations of one forward pass of one sample.
    """

    parameters: float
    flops: float

    @property
    def mebibytes(self) -> float:
        """Space of the parameters in float32."""
        return self.parameters * _FLOAT_BYTES / _MEBI


def mean_sizes(rows: Sequence[RoundRow], artifacts: Path) -> Sizes | None:
    """Return the mean sizes of what devices trained; None if they trained nothing.

    Args:
        rows: the rounds.
        artifacts: folder of the exported tiers, each in a folder of its id.
    """
    updates: Counter[str] = Counter()
    for row in rows:
        # A tier counts once for each update, as in the papers' means over devices.
        updates.update(row.tiers)
    total = updates.total()
    if not total:
        return None
    parameters = 0
    flops = 0
    for tier, count in updates.items():
        manifest = parse_manifest((artifacts / tier / "manifest.json").read_bytes())
        parameters += count * sum(prod(spec.shape) for spec in manifest.parameters)
        flops += count * manifest.flops_per_sample
    return Sizes(parameters=parameters / total, flops=flops / total)
