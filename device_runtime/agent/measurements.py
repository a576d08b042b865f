"""Measurements of an agent's board, link and training, for the profile that it publishes."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from device_runtime.agent.link_speed import LinkRecord
from device_runtime.agent.memory import MemoryRecord
from device_runtime.agent.releases import Releases
from device_runtime.board import Board, on_battery, runtime_version, temperature
from device_runtime.settings import DeviceConfig
from fleet_protocol.messages import Profile


@dataclass(frozen=True)
class ReportedData:
    """The facts that a board reports about its data.

    Attributes:
        examples: number of training samples.
        findings: the findings in its data.
        labels_digest: digest of the label order that its own table sets.
    """

    examples: int
    findings: tuple[str, ...] = ()
    labels_digest: str | None = None


@dataclass
class Measurements:
    """Measurements; each is None until it is known."""

    board: Board | None = None  # known once the agent has measured the board
    step_seconds: float | None = None  # mean time of a training step in the last task
    link: LinkRecord = field(default_factory=LinkRecord)
    # what computed the training steps of the last task, and why; empty if there is no choice
    provider: str = ""
    unable: str = ""  # why the board cannot train; empty where it can
    paused: str = ""  # why it should not train now; empty if it may

    def refresh(self, sysfs: Path) -> None:
        """Measure again what changes while a board runs; for `sysfs` see `probe`."""
        if self.board is not None:
            self.board = replace(
                self.board,
                temperature_celsius=temperature(sysfs),
                on_battery=on_battery(sysfs),
            )

    def profile(
        self,
        config: DeviceConfig,
        data: ReportedData,
        memory: MemoryRecord,
        releases: Releases,
    ) -> Profile | None:
        """Build the device's profile; None before the board has been measured.

        Args:
            config: the operator's settings.
            data: what the board reports about its data.
            memory: the record of sub-models that were too large for the board.
            releases: the board's releases.
        """
        if self.board is None:
            return None
        too_large = memory.too_large
        fetching = "it fetches a release" if releases.wanted else ""
        return Profile(
            **vars(self.board),
            runtime_version=runtime_version(),
            max_width=config.max_width,
            max_depth=config.max_depth,
            examples=data.examples,
            step_seconds=self.step_seconds,
            link_bytes_per_second=self.link.down.bytes_per_second if self.link.down else None,
            provider=self.provider,
            unable=self.unable or self.paused or fetching,
            memory_below=too_large.peak if too_large else None,
            lowered=too_large.explanation if too_large else None,
            release=releases.record,
            sets=releases.sets,
            findings=data.findings or None,
            labels_digest=data.labels_digest,
        )
