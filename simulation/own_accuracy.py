"""The accuracies of devices on their own samples: of all together, and of the worst tenth.

A mean hides devices that a method serves badly, such as those with rare labels.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from broker_server.store import Store, TaskRecord

_TENTH = 10


@dataclass(frozen=True)
class Hits:
    """The result of a device on its own samples.

    Attributes:
        correct: number of right answers; a product of accuracy and examples may not be whole.
        examples: number of judged labels, at least 1.
    """

    correct: float
    examples: int

    @property
    def accuracy(self) -> float:
        """Return the share of right answers."""
        return self.correct / self.examples


def mean_accuracy(hits: Iterable[Hits]) -> float | None:
    """Return the accuracy over the samples of all devices; None without samples."""
    correct = 0.0
    examples = 0
    for device in hits:
        correct += device.correct
        examples += device.examples
    if not examples:
        return None
    return correct / examples


def worst_tenth(hits: Iterable[Hits]) -> float | None:
    """Return the mean accuracy of the tenth of the devices with the lowest accuracies.

    The tenth is rounded up, and its devices have equal weights. None without devices.
    """
    accuracies = sorted(device.accuracy for device in hits)
    if not accuracies:
        return None
    count = -(-len(accuracies) // _TENTH)
    return fmean(accuracies[:count])


def reported_hits(tasks: Sequence[TaskRecord]) -> dict[str, Hits]:
    """Return the devices' results in the evaluations that they report after training."""
    hits = {}
    for task in tasks:
        if task.kind != "train" or task.metrics is None:
            continue
        evaluation = task.metrics.evaluation
        if evaluation is None or evaluation.accuracy is None or not evaluation.examples:
            continue
        correct = evaluation.accuracy * evaluation.examples
        hits[task.device] = Hits(correct, evaluation.examples)
    return hits


@dataclass
class NewestHits:
    """The newest reported result of each device, which few of the devices report in a round.

    Attributes:
        store: store with the tasks of the run.
        run: id of the run.
    """

    store: Store
    run: str
    _newest: dict[str, Hits] = field(default_factory=dict)
    _last: int = 0

    def until(self, number: int, tasks: Sequence[TaskRecord]) -> Mapping[str, Hits]:
        """Return the newest results up to a round.

        Args:
            number: number of the round; later than in the call before.
            tasks: the tasks that count in this round.
        """
        # A process that resumes a run reads the earlier rounds once.
        for earlier in range(self._last + 1, number):
            self._newest.update(reported_hits(self.store.tasks(self.run, earlier)))
        self._newest.update(reported_hits(tasks))
        self._last = number
        return self._newest
