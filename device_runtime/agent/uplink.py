"""The link side of an agent: what it says to the fleet, and which blobs it lets come."""

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from device_runtime.agent.journal import Journal
from device_runtime.settings import DeviceConfig
from fleet_protocol.errors import TransportError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Ask, DeviceProfile, DeviceStatus, Offer, Profile
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Farewell, Transport

if TYPE_CHECKING:
    from fleet_protocol.identity.release import Release

_UNWANTED_KEPT = 256


def _differs(profile: Profile, told: Profile | None) -> bool:
    """Whether a profile says something new: speeds are measured in every task, and told with
    something else again.
    """
    known = {
        name
        for name in ("step_seconds", "link_bytes_per_second")
        if told is not None and getattr(told, name)
    }
    return told is None or profile.model_dump(exclude=known) != told.model_dump(exclude=known)


@dataclass
class Uplink:
    """The connection, and the words that go over it."""

    config: DeviceConfig  # the operator's
    journal: Journal  # the log
    link: Transport | None = None  # from probing on
    # blobs whose subscription was given back because chunks came that nobody waits for
    unwanted: set[str] = field(default_factory=set)
    told: Profile | None = None  # the profile that the fleet has; None when it may have none
    said: str = ""  # the state that the fleet was told last
    spoke: float = math.inf  # ``time.monotonic()`` of the last message

    @property
    def topics(self) -> Topics:
        """Topics of the fleet."""
        return Topics(self.config.fleet)

    def need(self) -> Transport:
        """The connection."""
        if self.link is None:
            raise RuntimeError("the device has no link yet; this is a bug")
        return self.link

    def send(
        self, offer: "Offer | Release | Ask", kind: type[FrozenModel], **fields: object
    ) -> None:
        """Send a device message about an offer's task, a release or a request.

        While the broker is away it waits.
        """
        message = kind.model_validate({"task": offer.task, **fields})
        try:
            self.need().publish(self.topics.reply(self.config.device), message.to_bytes())
            self.spoke = time.monotonic()
        except TransportError as error:
            self.journal.warning(
                f"cannot send {kind.__name__}: {error}; it is sent again with the next offer"
            )

    def subscribe_blob(self, digest: str) -> None:
        """Let the chunks of a blob come."""
        self.unwanted.discard(digest)
        try:
            self.need().subscribe(self.topics.blob_filter(digest))
        except TransportError as error:
            self.journal.warning(f"{error}; chunks are asked for again")

    def unsubscribe_blob(self, digest: str) -> None:
        """Let no more chunks of a blob come."""
        self.need().unsubscribe(self.topics.blob_filter(digest))

    def decline_chunk(self, digest: str) -> None:
        """A chunk came that nobody waits for.

        It is an echo of a subscription just ended, or the broker's session still holds one from
        before a crash.
        """
        if digest not in self.unwanted and len(self.unwanted) < _UNWANTED_KEPT:
            self.unwanted.add(digest)
            self.unsubscribe_blob(digest)

    def _status(self, state: str, *, online: bool) -> bytes:
        return DeviceStatus(online=online, state=state).to_bytes()

    def farewell(self, state: str) -> Farewell:
        """The last status, published by the broker when this device vanishes and by itself when it
        leaves.
        """
        return Farewell(self.topics.status(self.config.device), self._status(state, online=False))

    def publish_status(self, state: str | None, profile: Profile | None) -> None:
        """Tell the fleet, retained, what this device does, and what it is if that has changed.

        None says nothing.
        """
        device = self.config.device
        try:
            if profile is not None and _differs(profile, self.told):
                said = DeviceProfile(profile=profile)
                self.need().publish(self.topics.profile(device), said.to_bytes(), retain=True)
                self.told = profile
            if state is not None:
                self.need().publish(
                    self.topics.status(device),
                    self._status(state, online=True),
                    retain=True,
                )
                self.said, self.spoke = state, time.monotonic()
        except TransportError as error:
            self.journal.warning(f"cannot send the status: {error}")
