"""Handles the broker's refusal of a message during a run.

A refused message is not sent again. If a task depends on it, the task ends, so that its round does
not wait for a device that will never receive the message.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from broker_server.rounds.collecting import OpenTask
from broker_server.service.connection import RunServices
from broker_server.service.replies import BARRED, BARRED_SECONDS
from broker_server.store import TaskPhase
from fleet_protocol.errors import RefusalReason
from fleet_protocol.folded_lines import FoldedLines
from fleet_protocol.refusals import TOPIC_REFUSED, Reaction, explain, refusal_of_code
from fleet_protocol.topics import BlobTopic, DeviceTopic, Topics
from fleet_protocol.transport import BrokerAddress, Refused

KIND = "broker-refuses"
"""Kind of the line in the log of a store."""


def describe_refusal(refused: Refused, address: BrokerAddress) -> str:
    """Return what a broker refuses, why, and what to do."""
    return f"the broker at {address} refuses {refused} {explain(refused.code)}"


class BrokerRefusals:
    """Handles the broker's refusals in a run.

    Args:
        services: services of the run.
        topics: topics of the fleet.
        address: address of the broker.
    """

    def __init__(self, services: RunServices, topics: Topics, address: BrokerAddress) -> None:
        self._store = services.store
        self._reporter = services.reporter
        self._blobs = services.blobs
        self._fleet = services.fleet
        self._topics = topics
        self._address = address
        self._lines = FoldedLines(lambda _level, line: self._reporter.note(KIND, line))

    def receive(self, refused: Refused, tasks: Mapping[str, OpenTask]) -> None:
        """Log a refusal, and end the open tasks that depend on the refused message."""
        why = describe_refusal(refused, self._address)
        # Refusals of chunks of one blob share a line, so the index is left out.
        self._lines.error(f"{refused.topic.rpartition('/')[0]} {refused.code}", why)
        too_large = refusal_of_code(refused.code).message is Reaction.SHRINK
        reason = (
            RefusalReason.TOO_LARGE_FOR_BROKER if too_large else RefusalReason.REFUSED_BY_BROKER
        )
        topic = self._topics.parse(refused.topic)
        if isinstance(topic, DeviceTopic) and refused.code in TOPIC_REFUSED:
            # Every further offer would be refused, and some brokers end the connection each time.
            why_barred = f"declined, {reason.value}: {why}; {BARRED}"
            self._fleet.bar(topic.device, why_barred, BARRED_SECONDS)
        # A message that no device waits for ends no task.
        devices = self._devices_without(refused)
        for task in tasks.values():
            if task.record.device in devices and not task.record.phase.answered:
                self._end(task, reason, why)

    def _devices_without(self, refused: Refused) -> Collection[str]:
        """Return the devices that cannot continue without the refused message."""
        match self._topics.parse(refused.topic):
            case DeviceTopic(device, "task"):
                return {device}
            case BlobTopic(digest):
                return self._blobs.waiting_for(digest)
            case _:
                return ()

    def _end(self, task: OpenTask, reason: RefusalReason, why: str) -> None:
        record = task.record
        detail = f"{reason.value}: {why}"
        # Stored first, so that a restarted server does not wait for the device, either.
        self._store.settle([record.id], TaskPhase.DECLINED, detail)
        task.record = replace(record, phase=TaskPhase.DECLINED, detail=detail)
        self._reporter.refused(reason, why, device=record.device, number=record.round)
