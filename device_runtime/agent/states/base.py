"""What every state of the agent is: an object that lives from entry to exit and posts events."""

from device_runtime.agent.context import Context
from device_runtime.agent.worker import WorkDone, WorkFailed, WorkReport
from fleet_protocol.errors import RefusedError
from fleet_protocol.messages import ServerMessage, Shares, Sum

NEVER = float("inf")


class DeviceState:
    """A state that does nothing; the others override what concerns them."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.wake_at = NEVER

    def enter(self) -> None:
        """Act; may post events."""

    def leave(self) -> None:
        """Let go of what belongs to the state alone."""

    def on_chunk(self, digest: str, frame: bytes) -> None:
        """A chunk of a blob arrived; nobody waits for it here."""
        del frame  # whatever it holds
        self.ctx.uplink.decline_chunk(digest)

    def on_message(self, message: ServerMessage) -> None:
        """The server speaks of a secure sum, or said what does not fit this state: late, or a
        repetition.
        """
        member = self.ctx.need_task().member
        if isinstance(message, Sum) and member is not None:
            try:
                told = member.answer(message)
            except RefusedError as error:
                self.ctx.fail(error)
            else:
                if told:
                    self.ctx.send(Shares, **told)
            return
        self.ctx.kit.journal.info(f"ignored {message.type} in state {self.ctx.state.value}")

    def on_repeat(self) -> None:
        """The server wants to know how the task in hand stands."""

    def on_work(self, event: WorkReport | WorkDone | WorkFailed) -> None:
        """The worker thread reports."""

    def on_wake(self) -> None:
        """``wake_at`` has come."""
