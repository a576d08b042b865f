"""The base of the agent's states that collect blobs."""

import time
from collections.abc import Callable, Collection

from typing_extensions import override

from device_runtime.agent.blob_fetch import BlobFetch
from device_runtime.agent.context import Context
from device_runtime.agent.refusals import refusal_of, refused_error
from device_runtime.agent.states.base import DeviceState
from fleet_protocol.errors import RefusalReason, ShoalError, StorageError
from fleet_protocol.messages import BlobRef, NeedChunks, Ranges
from fleet_protocol.transport import Refused


class Collecting(DeviceState):
    """Collects blobs; subclasses define their purpose, and continue in `_proceed`."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._fetch = BlobFetch(
            ctx.services.blobs,
            subscribe=ctx.uplink.subscribe_blob,
            unsubscribe=ctx.uplink.unsubscribe_blob,
            request=self._send_request,
            repair_seconds=ctx.services.config.repair_seconds,
        )
        self._made_room = False

    @override
    def leave(self) -> None:
        self._fetch.close()

    @override
    def on_chunk(self, digest: str, frame: bytes, arrived_at: float) -> None:
        if self._fetch.waits_for(digest):
            self._guarded(lambda: self._receive_chunk(digest, frame, arrived_at))
        else:
            super().on_chunk(digest, frame, arrived_at)

    @override
    def on_refused(self, refused: Refused) -> None:
        for digest in self._fetch.digests:
            if refused.topic == self.ctx.uplink.topics.blob_filter(digest):
                self.ctx.fail(refused_error(refused))
                return

    @override
    def on_wake(self) -> None:
        # Requests would pile up in the link, and all be sent when the broker is reachable again.
        if not self.ctx.uplink.need_link().connected:
            self.wake_at = time.monotonic() + self.ctx.services.config.repair_seconds
            return
        count = self._fetch.repair(time.monotonic())
        self.ctx.services.journal.info(f"requested {count} blobs again")
        self.wake_at = self._fetch.repair_at

    def _proceed(self) -> None:
        """Continue after another blob is complete."""

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run an action that writes blobs; an error ends the task or the release.

        If the disk is full, blobs that no task uses are deleted, and the action is tried once more.
        """
        try:
            try:
                action()
            except StorageError as error:
                self._make_room(error)
                action()
        except (ShoalError, OSError) as error:
            self.ctx.fail(error)

    def _make_room(self, error: StorageError) -> None:
        """Delete older blobs, once; an error that is not about disk space is raised again."""
        reason, _detail = refusal_of(error)
        if self._made_room or reason is not RefusalReason.NO_SPACE:
            raise error
        # Only once in a state: if the disk is full again, nothing is left to delete.
        self._made_room = True
        freed = self.ctx.services.cache.evict(self.ctx.blobs_in_use(), everything=True)
        self.ctx.services.journal.warning(f"{error}; freed {freed} bytes of older blobs")

    def _send_request(self, digest: str, ranges: Ranges) -> None:
        self.ctx.send(NeedChunks, digest=digest, ranges=ranges)

    def _receive_chunk(self, digest: str, frame: bytes, arrived_at: float) -> None:  # noqa: ARG002
        if self._fetch.receive_chunk(digest, frame, time.monotonic()):
            self.ctx.services.journal.info(f"fetched {digest[:12]}")
            self._proceed()
        self.wake_at = self._fetch.repair_at

    def _collect(self, *refs: BlobRef, asked: Collection[str] = ()) -> None:
        """Request blobs, except those whose digests are in `asked`, and continue."""
        self._fetch.want(refs, time.monotonic(), asked)
        self.wake_at = self._fetch.repair_at
        self._proceed()
