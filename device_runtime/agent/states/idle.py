"""The state of the agent that waits for an offer, and fetches a release meanwhile."""

import contextlib
import time
from typing import TYPE_CHECKING

from typing_extensions import override

from device_runtime.agent.context import Context
from device_runtime.agent.machine import Event
from device_runtime.agent.offers import begin_task
from device_runtime.agent.states.collecting import Collecting
from device_runtime.agent.task_in_hand import blob_refs, graph_files
from device_runtime.agent.worker import Job, WorkDone, WorkFailed, WorkReport
from device_runtime.self_test import set_test
from device_runtime.training.routines import ROUTINES
from fleet_protocol.errors import RefusalReason, RefusedError, StorageError
from fleet_protocol.manifest import Manifest, parse_manifest
from fleet_protocol.messages import BlobRef

if TYPE_CHECKING:
    from fleet_protocol.identity.release import Release

# After so many seconds without a task the board tries again what was too large for it.
_REST_SECONDS = 600.0
_PAUSED_SECONDS = 10.0  # after which a release may be fetched again if the conditions hold


class Idle(Collecting):
    """Waits for an offer; one may have arrived while the last task was dropped.

    For a release of artifact sets it fetches the manifest, then the files of a training task, and
    takes a step in another process. If it lacks memory for a manifest's step, the next one follows.
    """

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._release_number = 0  # of the release that is fetched
        self._files: tuple[BlobRef, ...] = ()  # of its artifact set, once the manifest is on disk
        self._rest_ends_at = 0.0

    @override
    def leave(self) -> None:
        self.ctx.services.worker.cancel()
        super().leave()

    @override
    def enter(self) -> None:
        ctx = self.ctx
        ctx.services.journal.follow(None)
        if ctx.services.config.conditions.new_data is not None:
            ctx.check_conditions()  # the task that has just ended may have used up the new data
        ctx.announce_state()
        self._rest_ends_at = time.monotonic() + _REST_SECONDS
        offer = ctx.pending_offer
        if offer is None:
            self.on_wake()
            return
        ctx.pending_offer = None
        begin_task(ctx, offer)

    @override
    def on_wake(self) -> None:
        releases = self.ctx.releases
        now = time.monotonic()
        wanted = None if self.ctx.measurements.paused else releases.wanted
        if now >= self._rest_ends_at:
            self.ctx.services.memory.record_survival()
            self.enter()
            return
        if wanted is not None and self._is_fetching(wanted[0].number):
            super().on_wake()
            return
        self._fetch.close()
        self.wake_at = self._rest_ends_at if releases.wanted is None else now + _PAUSED_SECONDS
        if wanted is not None:
            release, ref = wanted
            self._release_number = release.number
            self._files = ()
            self._guarded(lambda: self._collect(ref))

    def _is_fetching(self, number: int) -> bool:
        return self._release_number == number and not self._fetch.complete

    @override
    def _proceed(self) -> None:
        wanted = self.ctx.releases.wanted
        if wanted is None or not self._fetch.complete:
            return
        release, ref = wanted
        if release.sets:
            self._stage(release, ref)
            return
        file = self.ctx.services.blobs.path(ref.digest)
        self.ctx.releases.move("whole", release.number, str(file))
        self.ctx.post(Event.STOP)

    def _stage(self, release: "Release", ref: BlobRef) -> None:
        """Fetch the files that an artifact set's manifest names; test the set once they are there.

        Raises:
            RefusedError: the manifest is of another tier, or the set and all its plans are too
                large for this board.
        """
        services = self.ctx.services
        manifest = parse_manifest(services.blobs.read(ref.digest))
        if ref not in release.manifests(manifest.tier):
            raise RefusedError(
                RefusalReason.MALFORMED,
                f"the release names another manifest for tier {manifest.tier}",
            )
        # Checked again when the files are on disk, because other programs may have taken memory
        # meanwhile.
        too_large = self._why_too_large(manifest)
        if too_large:
            self._want_less_memory(too_large)
            return
        graphs = ROUTINES["train"].graphs(manifest, self.ctx.need_setup())
        if not self._files:
            self._collect_files(manifest, graphs, ref.chunk_bytes)
        elif services.worker.current is None:
            path = services.blobs.path(ref.digest)
            root = services.blobs.root

            def test(_job: Job) -> tuple[int, str]:
                return release.number, set_test(path, root, graphs)

            # In another process: a set that exhausts the memory must not take the agent down.
            services.worker.start("a set", test)

    def _want_less_memory(self, reason: str) -> None:
        """Continue with the release's next manifest; without one, refuse it for this reason."""
        releases = self.ctx.releases
        if not releases.want_less_memory() or releases.wanted is None:
            raise RefusedError(RefusalReason.UNSUPPORTED, reason)
        self.ctx.services.journal.info(f"{reason}: it takes the next plan of the release")
        _release, ref = releases.wanted
        self._files = ()
        self._collect(ref)

    def _why_too_large(self, manifest: Manifest) -> str:
        """Return why a set's step is too large for the free memory; empty if it is not."""
        memory = self.ctx.services.memory
        load = memory.measure("training", manifest.tier, manifest.peak_memory_bytes)
        too_large = memory.too_large
        lacks_memory = 0 < load.free < load.peak
        forbidden = too_large is not None and too_large.forbids(load.phase, load.peak)
        if not lacks_memory and not forbidden:
            return ""
        if too_large is not None:
            return too_large.explanation
        return f"{manifest.tier} needs {load.peak} bytes of memory, and {load.free} are free"

    def _collect_files(
        self,
        manifest: Manifest,
        graphs: tuple[str, ...],
        chunk_bytes: int,
    ) -> None:
        refs = blob_refs(graph_files(manifest, graphs), chunk_bytes)
        self._files = tuple(refs)
        self.ctx.staged = [ref.digest for ref in refs]
        self._collect(*refs)

    @override
    def on_work(self, event: WorkReport | WorkDone | WorkFailed) -> None:
        """Record whether the artifact set has passed its test in the other process."""
        ctx = self.ctx
        wanted = ctx.releases.wanted
        if isinstance(event, WorkFailed):
            ctx.fail(event.error)
        if wanted is None or not isinstance(event, WorkDone) or not isinstance(event.result, tuple):
            return
        number, why_not = event.result
        release, ref = wanted
        if number != release.number:
            return
        if not why_not:
            ctx.services.cache.add_staged(ref.digest, ctx.staged)
        outcome = "unfit" if why_not else "passed"
        with contextlib.suppress(StorageError):  # it is tried again when the server sends it again
            ctx.releases.move(outcome, release.number, why_not, sets=True)
        ctx.services.journal.info(f"artifact sets: {ctx.releases.sets}")
        ctx.staged = ()
        ctx.publish_status()
