"""The base of the agent's states: an object that lives from entry to exit and posts events."""

from device_runtime.agent.context import Context
from device_runtime.agent.worker import WorkDone, WorkFailed, WorkReport
from fleet_protocol.errors import ShoalError
from fleet_protocol.messages import ServerMessage, Shares, Sum
from fleet_protocol.transport import Refused

NEVER = float("inf")


class DeviceState:
    """A state that does nothing; subclasses override the methods that they need.

    Attributes:
        ctx: what all states share.
        wake_at: ``time.monotonic()`` at which the loop calls `on_wake`.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.wake_at = NEVER

    def enter(self) -> None:
        """Begin the state's work; may post events."""

    def leave(self) -> None:
        """Release what belongs only to this state."""

    def on_chunk(self, digest: str, frame: bytes, arrived_at: float) -> None:
        """Decline a chunk of a blob that this state does not wait for."""
        del frame  # whatever the chunk holds
        del arrived_at
        self.ctx.uplink.decline_chunk(digest)

    def on_message(self, message: ServerMessage) -> None:
        """Answer a step of a secure sum; any other message is late here, or a repetition."""
        task = self.ctx.need_task()
        member = task.member
        if not isinstance(message, Sum) or member is None:
            self.ctx.services.journal.info(
                f"ignored {message.type} in state {self.ctx.state.value}"
            )
            return
        try:
            answer = member.answer(message)
            if "revealed" in answer:
                # On disk before the server has the shares.
                weights = task.record.choice.weights.digest
                self.ctx.services.opened_sums.record(task.offer, weights)
        except ShoalError as error:
            self.ctx.fail(error)
            return
        if answer:
            self.ctx.send(Shares, **answer)

    def on_refused(self, refused: Refused) -> None:
        """Handle the broker's refusal of a message or subscription; the link has logged it."""

    def on_repeat(self) -> None:
        """Answer the server's question about the progress of the current task."""

    def on_work(self, event: WorkReport | WorkDone | WorkFailed) -> None:
        """Handle a report of the worker thread."""

    def on_wake(self) -> None:
        """Act when ``wake_at`` has come."""
