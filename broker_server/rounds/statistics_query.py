"""The query that asks devices for the batch norm statistics of a new version.

Devices do one task at a time, so they are asked before the next round begins.
"""

import math
import random
from collections.abc import Mapping, Sequence

from broker_server.rounds.collecting import Collection
from broker_server.rounds.collection_end import ClosingRule
from broker_server.rounds.dispatch import Services, gather
from broker_server.rounds.norm_statistics import Answer, Statistics, combine_statistics
from broker_server.rounds.planning import open_collection, statistics_tasks
from broker_server.rounds.round_records import training_tasks
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.sent_weights import store_sent_weights
from broker_server.store import RoundRecord, TaskPhase, TaskRecord, VersionRecord
from broker_server.store.machine import RoundEvent
from broker_server.updates.quarantine import quarantined
from broker_server.updates.statistics_screen import ReceivedStatistics, screen_statistics
from fleet_protocol import control
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import BlobRef


class StatisticsMissingError(Exception):
    """Too few devices returned statistics; the text gives the reason."""


class StatisticsQuery:
    """Requests batch norm statistics from the devices of one run."""

    def __init__(self, context: RunContext, services: Services) -> None:
        self._context = context
        self._config = context.config.evaluation
        self._dispatcher = services.dispatcher
        self._store = services.store
        self._blobs = services.blobs
        self._updates = services.updates
        # A server that has just started learns only after this time which devices are online.
        self._settled = self._dispatcher.now() + self._dispatcher.settling_seconds

    def ask(self, record: RoundRecord, version: VersionRecord, judged: BlobRef) -> Statistics:
        """Request the statistics of the evaluated weights from devices, and combine their answers.

        Tasks that a killed server had stored are offered again; other devices are not selected.

        Raises:
            StatisticsMissingError: no device can answer, or too few do.
            StopRequested: the server must end.
        """
        judged = self._as_sent(judged)
        tasks = self._store.tasks(record.run, record.number, "statistics")
        if not tasks:
            tasks = self._plan(record, version, judged)
            self._store.add_tasks(tasks)
        self._dispatcher.blobs.serve({judged.digest: self._blobs.path(judged.digest)})
        collection = open_collection(self._context, tasks, self._closing_rule(len(tasks)))
        reporter = self._dispatcher.reporter
        devices = tuple(task.device for task in tasks)
        event = control.StatisticsStarted(
            **reporter.stamp,
            round=record.number,
            devices=devices,
        )
        reporter.emit(event)
        return self._collect(collection)

    def _as_sent(self, judged: BlobRef) -> BlobRef:
        """Return the weights as a round's download encodes them, so that devices reuse them."""
        if self._context.config.download.encoding == "fp32":
            return judged
        weights = open_tensors(self._blobs.path(judged.digest))
        return store_sent_weights(self._context, weights, self._blobs, durable=True).ref

    def _plan(
        self, record: RoundRecord, version: VersionRecord, judged: BlobRef
    ) -> list[TaskRecord]:
        devices = self._able_devices(record)
        if not devices:
            raise StatisticsMissingError("no device is online to provide batch norm statistics")
        # Rounded first: 0.07 * 100 is a little more than 7, and must not ask an eighth device.
        count = math.ceil(round(self._config.statistics_fraction * len(devices), 9))
        seed = f"{self._context.config.seed}/statistics/{version.number}"
        draw = random.Random(seed)  # noqa: S311  (a reproducible draw, not a secret)
        # The draw is reproducible because the devices come in the order of their ids.
        chosen = sorted(draw.sample(devices, count))
        return statistics_tasks(self._context, chosen, version, record.number, judged)

    def _able_devices(self, record: RoundRecord) -> list[str]:
        """Return the online devices with data and a runtime that are neither busy nor refused."""
        trained = self._store.tasks(record.run, record.number, "train")
        unavailable = self._unavailable(record, trained)
        self._wait_for_trained(trained)
        devices = []
        for device, profile in self._dispatcher.fleet.profiles().items():
            if device in unavailable:
                continue
            # A batch norm has no variance over a single sample.
            if profile.examples > 1 and profile.backends and not profile.unable:
                devices.append(device)
        return devices

    def _unavailable(self, record: RoundRecord, trained: Sequence[TaskRecord]) -> set[str]:
        """Return devices that are still training, and those whose updates were refused."""
        context = self._context
        late = training_tasks(context, self._store, record.number + 1)
        unavailable: set[str] = set()
        for task in late:
            if not task.phase.answered:
                unavailable.add(task.device)
        for task in trained:
            if task.phase is TaskPhase.REFUSED:
                unavailable.add(task.device)
        quarantine = quarantined(self._store, context.run, context.config)
        for device, until in quarantine.items():
            if record.number <= until:
                unavailable.add(device)
        return unavailable

    def _wait_for_trained(self, trained: Sequence[TaskRecord]) -> None:
        """Wait until the devices that trained are online, or a new server has settled."""
        merged: set[str] = set()
        for task in trained:
            if task.phase is TaskPhase.MERGED:
                merged.add(task.device)
        while self._dispatcher.now() < self._settled:
            if merged <= set(self._dispatcher.fleet.online):
                return
            self._dispatcher.pump(self._settled)

    def _closing_rule(self, asked: int) -> ClosingRule:
        now = self._dispatcher.now()
        config = self._context.config.round
        return ClosingRule(
            share=self._config.statistics_quorum,
            wanted=asked,
            opened=now,
            deadline=now + config.deadline_seconds,
            grace=config.grace,
        )

    def _collect(self, collection: Collection) -> Statistics:
        self._dispatcher.open(collection)
        decision = gather(self._dispatcher, collection)
        self._dispatcher.close("the statistics query is over")
        self._store.settle([task.record.id for task in collection.unanswered], TaskPhase.MISSED)
        if decision.event is RoundEvent.GIVE_UP:
            raise StatisticsMissingError(f"batch norm statistics: {decision.reason}")
        norms = [spec.name for spec in self._context.judged.manifest.statistics]
        answers = self._screened(self._received(collection), collection.number)
        if not answers:
            raise StatisticsMissingError("the batch norm statistics of all devices were refused")
        return combine_statistics(answers, norms, self._config.combine)

    def _received(self, collection: Collection) -> dict[str, ReceivedStatistics]:
        """Load the answers in the order of the tasks, which is the order of the devices' ids."""
        received: dict[str, ReceivedStatistics] = {}
        for name, task in collection.tasks.items():
            record = task.record
            if record.phase is not TaskPhase.RECEIVED:
                continue
            if record.metrics is not None and record.update_digest is not None:
                tensors = self._updates.tensors(record.update_digest)
                received[name] = ReceivedStatistics(record, record.metrics.batches or 1, tensors)
        return received

    def _screened(self, received: Mapping[str, ReceivedStatistics], number: int) -> list[Answer]:
        """Return the answers as they count; those that are unlike the others are refused."""
        answers: list[Answer] = []
        for name, verdict in screen_statistics(received, self._context.config.robust).items():
            answer = received[name]
            if verdict.reason is not None:
                self._dispatcher.reporter.refused(
                    verdict.reason,
                    f"batch norm statistics: {verdict.detail}",
                    device=answer.task.device,
                    number=number,
                )
                continue
            tensors = dict(answer.tensors)
            scale = verdict.screening.scale
            if scale < 1:
                tensors = {key: scale * tensor for key, tensor in tensors.items()}
            answers.append((verdict.screening.samples, tensors))
        return answers
