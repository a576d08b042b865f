"""Reports what the export of a tier gave, from its manifest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleet_protocol.manifest import Manifest
from models.tier import Tier


@dataclass(frozen=True)
class PlanReport:
    """A plan of a tier within a bound of memory.

    Attributes:
        peak_memory_bytes: as for the tier.
        recomputed_share: work that a step repeats, as a share of the tier's step.
    """

    peak_memory_bytes: int
    recomputed_share: float


@dataclass(frozen=True)
class TierReport:
    """The result of one tier.

    Attributes:
        parameters: number of scalars.
        trained: how many of them a step changes.
        flops_per_sample: floating point operations of the forward pass of one sample.
        peak_memory_bytes: estimate for training at batch size 32, without the runtime itself.
        worst_deviation: largest deviation from PyTorch of any of its graphs, relative to the
            tensor's largest value.
        skipped: requested formats that are unavailable for the model, each with the reason.
        taken: whether the existing files were reused, because a new export would give the same
            ones.
        plans: its plans with less memory, the largest first.
    """

    tier: Tier
    parameters: int
    trained: int
    flops_per_sample: int
    graph_bytes: int
    peak_memory_bytes: int
    worst_deviation: float
    skipped: Mapping[str, str] = field(default_factory=dict)
    taken: bool = False
    plans: tuple[PlanReport, ...] = ()

    @classmethod
    def from_manifest(
        cls,
        tier: Tier,
        manifest: Manifest,
        plans: Sequence[Manifest] = (),
        *,
        taken: bool,
    ) -> "TierReport":
        """Return the report of a tier from its manifest and those of its plans."""
        reports = []
        for plan in plans:
            reports.append(PlanReport(plan.peak_memory_bytes, plan.recomputed_share or 0.0))
        reports.sort(key=lambda report: -report.peak_memory_bytes)
        return cls(
            tier,
            manifest.parameter_count,
            manifest.trained_count,
            manifest.flops_per_sample,
            sum(spec.size for spec in manifest.graphs.values()),
            manifest.peak_memory_bytes,
            max(check.worst_relative for check in manifest.checks),
            manifest.skipped,
            taken,
            tuple(reports),
        )
