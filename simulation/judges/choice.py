"""Which judges a simulation has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from broker_server.rounds.evaluation import Evaluator
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.test_set import load_test_set
from broker_server.store import VersionRecord
from fleet_protocol.blob_store import BlobStore
from simulation.data.held import Parts
from simulation.judges.local import LocalJudge
from simulation.judges.matthews import MatthewsJudge
from simulation.judges.perplexity import PerplexityJudge
from simulation.settings import EvaluationTable

__all__ = ["Judge", "Judges", "chosen_judges"]


class Judge(Protocol):
    """Puts a number to a global version that was evaluated."""

    def judge(self, version: VersionRecord, blobs: BlobStore) -> float:
        """The number."""
        ...


@dataclass(frozen=True)
class Judges:
    """What judges the global versions of a run.

    Attributes:
        evaluator: of the judged tier on the test set, None where the global model cannot be judged.
        local: judges versions on the devices' own parts of the test set, None if nobody wants that.
        others: what else judges them, by the name of the column.
    """

    evaluator: Evaluator | None = None
    local: LocalJudge | None = None
    others: Mapping[str, Judge] = field(default_factory=dict)


def chosen_judges(table: EvaluationTable, context: RunContext, parts: Parts, *, own_models: bool) -> Judges:
    """The judges as configured.

    Args:
        table: how the global model is judged.
        context: the run.
        parts: which part of the test set belongs to which device.
        own_models: whether devices have models of their own, which are judged on those parts instead.

    Raises:
        ConfigError: the test set is not one for a judge that is asked for.
        DataError: it cannot be read.
    """
    judging = context.config.evaluation
    if judging.data is None:
        return Judges()
    data = load_test_set(judging.data, context.judged.manifest)
    evaluator = Evaluator(context.judged, data, batch_size=judging.batch_size, threads=judging.threads)
    others: dict[str, Judge] = {}
    if table.matthews:
        others["matthews"] = MatthewsJudge(context, evaluator, data)
    if table.perplexity:
        others["perplexity"] = PerplexityJudge(context, evaluator, data, table.perplexity)
    local = LocalJudge(context, evaluator, data, parts) if table.local and not own_models else None
    return Judges(evaluator, local, others)
