"""Lets virtual devices choose their tier like boards, by the times of the emulated clock."""

from collections.abc import Mapping

from broker_server.rounds.collecting import OpenTask
from broker_server.store import Store
from device_runtime.training.choosers import Situation, TierChooser, chooser_of
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import TaskMetrics
from models.tier import Tier
from simulation.board_times import BoardTimes
from simulation.virtual_fleet import VirtualBoard


class TierChoices:
    """Chooses tiers for devices, and keeps their memories.

    The memories are replayed from the store, so a killed simulation resumes with the same choices.
    """

    def __init__(self, store: Store, boards: Mapping[str, VirtualBoard], times: BoardTimes) -> None:
        self._store = store
        self._boards = boards
        self._times = times
        self._memories: dict[str, FrozenModel] = {}
        self._replayed = 0  # the last round that is in the memories
        self._efficiencies: dict[str, float] = {}  # of the last choices, by device

    def choose(self, task: OpenTask) -> None:
        """Let the device of a task choose its tier, if its instructions allow it."""
        chooser = chooser_of(task.instructions)
        if chooser is None:
            return
        record = task.record
        self._replay(record.run, record.round, chooser)
        decision = chooser.choose(self._memories.get(record.device), self._situation(task))
        if decision.efficiency is not None:
            self._efficiencies[record.device] = decision.efficiency
        if task.choose_tier(decision.tier):
            self._store.choose_tier(task.record)

    def reported(self, device: str, metrics: TaskMetrics) -> TaskMetrics:
        """Return what a device reports of its task: also the efficiency that it chose by."""
        efficiency = self._efficiencies.get(device)
        if efficiency is None:
            return metrics
        return metrics.model_copy(update={"efficiency": efficiency})

    def _situation(self, task: OpenTask) -> Situation:
        record = task.record
        train = task.instructions.train
        board = self._boards[record.device]
        tiers = tuple(choice.tier for choice in record.choices)
        narrowest = min(map(Tier.parse, tiers))
        return Situation(
            tiers=tiers,
            steps=train.steps_for(board.examples),
            bytes_per_second=self._times.bytes_per_second(board.index, record.round),
            step_seconds=self._times.step_seconds(board.index, record.round, narrowest, train),
        )

    def _replay(self, run: str, before: int, chooser: TierChooser) -> None:
        """Bring the memories up to a round, from the losses in the store."""
        for number in range(self._replayed + 1, before):
            for task in self._store.tasks(run, number, "train"):
                if task.metrics is None or task.metrics.mean_loss is None:
                    continue
                memory = self._memories.get(task.device)
                loss = task.metrics.mean_loss
                self._memories[task.device] = chooser.learn(memory, number, loss)
            self._replayed = number
