"""The agent's side of the link: the messages that it sends, and the blobs that it subscribes to."""

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from device_runtime.agent.journal import Journal
from device_runtime.settings import DeviceConfig
from fleet_protocol.errors import BrokerRefusedError, TransportError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Ask, DeviceProfile, DeviceStatus, Offer, Profile
from fleet_protocol.refused_presence import RefusedPresence
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Farewell, Transport

if TYPE_CHECKING:
    from fleet_protocol.identity.release import Release

_UNWANTED_KEPT = 256
_SPEEDS = ("step_seconds", "link_bytes_per_second")


@dataclass
class Uplink:
    """The connection, and the messages that go over it."""

    config: DeviceConfig  # the operator's settings
    journal: Journal  # the log
    link: Transport | None = None  # set once the agent has measured the board
    # blobs that were unsubscribed because unexpected chunks arrived
    unwanted: set[str] = field(default_factory=set)
    sent_profile: Profile | None = None  # the profile that the fleet has; None if it may have none
    sent_state: str = ""  # the state that was last published
    # ``time.monotonic()`` of the last message, or of one that was kept back
    last_sent_at: float = math.inf
    refused_presence: RefusedPresence = field(default_factory=RefusedPresence)

    @property
    def topics(self) -> Topics:
        """Topics of the fleet."""
        return Topics(self.config.fleet)

    def need_link(self) -> Transport:
        """Return the connection."""
        if self.link is None:
            raise RuntimeError("the device has no link yet; this is a bug")
        return self.link

    def send(
        self, subject: "Offer | Release | Ask", kind: type[FrozenModel], **fields: object
    ) -> None:
        """Send a device message about an offer's task, a release or a request.

        It waits while the broker is unreachable.
        """
        message = kind.model_validate({"task": subject.task, **fields})
        topic = self.topics.reply(self.config.device)
        try:
            self.need_link().publish(topic, message.to_bytes())
            self.last_sent_at = time.monotonic()
        except TransportError as error:
            self.journal.warning(
                f"cannot send {kind.__name__}: {error}; it is sent again with the next offer"
            )

    def subscribe_blob(self, digest: str) -> None:
        """Subscribe to the chunks of a blob.

        Raises:
            BrokerRefusedError: the broker refuses the subscription, so no chunk will arrive.
        """
        self.unwanted.discard(digest)
        try:
            self.need_link().subscribe(self.topics.blob_filter(digest))
        except BrokerRefusedError:
            raise
        except TransportError as error:
            self.journal.warning(f"{error}; chunks are requested again")

    def unsubscribe_blob(self, digest: str) -> None:
        """Unsubscribe from the chunks of a blob."""
        self.need_link().unsubscribe(self.topics.blob_filter(digest))

    def decline_chunk(self, digest: str) -> None:
        """End the subscription that an unexpected chunk came from.

        The chunk is late after an unsubscription, or the broker's session still holds a
        subscription from before a crash.
        """
        # Once for each blob: late chunks must not cause a flood of unsubscriptions.
        if digest not in self.unwanted and len(self.unwanted) < _UNWANTED_KEPT:
            self.unwanted.add(digest)
            self.unsubscribe_blob(digest)

    def farewell(self, state: str) -> Farewell:
        """Return the last status.

        The broker publishes it when this device vanishes; the device publishes it when it leaves.
        """
        status = DeviceStatus(online=False, state=state)
        return Farewell(self.topics.status(self.config.device), status.to_bytes())

    def publish_status(self, state: str | None, profile: Profile | None) -> None:
        """Publish, retained, the device's status, and its profile if that has changed.

        None publishes no profile. Nothing is sent for some time after the broker has refused it.
        """
        now = time.monotonic()
        if self.refused_presence.holds(now):
            self.last_sent_at = now
            return
        try:
            if profile is not None and _is_news(profile, self.sent_profile):
                self._publish_profile(profile)
            if state is not None:
                self._publish_state(state)
        except TransportError as error:
            self.journal.warning(f"cannot send the status: {error}")

    def note_refused(self, topic: str) -> None:
        """Keep status and profile back for some time if the broker refuses one of them."""
        device = self.config.device
        if topic in {self.topics.status(device), self.topics.profile(device)}:
            self.refused_presence.note(time.monotonic())
            # The fleet has neither, so both are sent with the next attempt.
            self.sent_profile = None
            self.sent_state = ""

    def _publish_profile(self, profile: Profile) -> None:
        topic = self.topics.profile(self.config.device)
        message = DeviceProfile(profile=profile)
        self.need_link().publish(topic, message.to_bytes(), retain=True)
        self.sent_profile = profile

    def _publish_state(self, state: str) -> None:
        topic = self.topics.status(self.config.device)
        message = DeviceStatus(online=True, state=state)
        self.need_link().publish(topic, message.to_bytes(), retain=True)
        self.sent_state = state
        self.last_sent_at = time.monotonic()


def _is_news(profile: Profile, sent: Profile | None) -> bool:
    """Return whether a profile contains anything new.

    Speeds are measured in every task; they are sent only with another change, unless none was sent
    yet.
    """
    if sent is None:
        return True
    left_out = {name for name in _SPEEDS if getattr(sent, name)}
    return profile.model_dump(exclude=left_out) != sent.model_dump(exclude=left_out)
