"""The devices of a fleet as they last reported to the server: presence and profiles."""

import time
from collections.abc import Collection, Iterable

from broker_server.store import DeviceRecord
from broker_server.store.remedies import REVOKED
from fleet_protocol.messages import DeviceProfile, DeviceStatus, Profile


class Fleet:
    """Presence and profiles of devices.

    Known devices count as offline until the broker's retained messages show otherwise.

    Attributes:
        declined: devices that are not selected in the run in progress, with the reason: their data
            does not fit, until they reconnect or their data changes; or the broker refuses their
            messages, for some time.
    """

    def __init__(self, known: Iterable[DeviceRecord] = ()) -> None:
        self._profiles: dict[str, Profile | None] = {}
        for record in known:
            self._profiles[record.id] = None if record.state == REVOKED else record.profile
        self._online: set[str] = set()  # by their last status
        self._silent: set[str] = set()
        self._not_members: set[str] = set()
        self.declined: dict[str, str] = {}
        self._barred: dict[str, float] = {}  # until when on time.monotonic()

    def bar(self, device: str, why: str, seconds: float) -> None:
        """Select a device no more for some time, even if it reconnects or its data changes."""
        self.declined[device] = why
        self._barred[device] = time.monotonic() + seconds

    def forget_declined(self) -> None:
        """Select all devices again, because a new run begins."""
        self.declined.clear()
        self._barred.clear()

    # Messages from devices.

    def receive(self, message: DeviceStatus | DeviceProfile) -> bool:
        """Record a device's status or profile; return whether it came online or went offline."""
        device = message.device
        was_online = self.is_online(device)
        self._silent.discard(device)
        if isinstance(message, DeviceProfile):
            self._receive_profile(device, message.profile)
        else:
            self._receive_status(device, online=message.online)
        return was_online != self.is_online(device)

    def _receive_profile(self, device: str, profile: Profile) -> None:
        # With other samples the device's data may fit again.
        if profile.examples != self.announced_examples(device) and device not in self._barred:
            self.declined.pop(device, None)
        self._profiles[device] = profile

    def _receive_status(self, device: str, *, online: bool) -> None:
        self._profiles.setdefault(device)
        if online:
            self._online.add(device)
        else:
            self._online.discard(device)
            # A refusing broker may end the connection each time, which does not change its rules.
            if device not in self._barred:
                self.declined.pop(device, None)

    def mark_silent(self, device: str) -> None:
        """Count a device as offline until its next message, whatever the broker reports."""
        self._silent.add(device)

    def mark_active(self, device: str) -> None:
        """Record that a message of a device arrived, whatever its content."""
        self._silent.discard(device)

    def limit_to_members(self, members: Collection[str]) -> list[str]:
        """Count devices that are not members as offline, until they are members again.

        A wrong clock may cause that for an hour.

        Returns:
            Ids of the known devices that are no longer members, or are members again.
        """
        devices = set(self._online)
        for device, profile in self._profiles.items():
            if profile is not None:
                devices.add(device)
        before = self._not_members
        self._not_members = devices - set(members)
        return sorted(before ^ self._not_members)

    # Which devices are online.

    def knows(self, device: str) -> bool:
        """Return whether the device ever announced itself."""
        return device in self._profiles

    @property
    def known(self) -> frozenset[str]:
        """Return the ids of all devices that ever announced themselves."""
        return frozenset(self._profiles)

    def is_online(self, device: str) -> bool:
        """Return whether the device is a member, connected as far as we know, and not silent."""
        if device in self._silent or device in self._not_members:
            return False
        return device in self._online

    @property
    def online(self) -> tuple[str, ...]:
        """Return the ids of the devices that are online, sorted."""
        return tuple(sorted(self._online - self._silent - self._not_members))

    @property
    def absent(self) -> set[str]:
        """Return the ids of the devices that are known, are members, and are not online."""
        return self._profiles.keys() - set(self.online) - self._not_members

    @property
    def without_profile(self) -> set[str]:
        """Return the ids of the devices that are online, but have not sent a profile."""
        return {device for device in self.online if self._profiles[device] is None}

    def why_away(self, device: str) -> str:
        """Return why a device that is not in `profiles` is not selected."""
        if device in self._online & self._silent:
            return "connected, but silent: it can be selected again after its next message"
        return self.declined.get(device, "offline")

    # The last reports of devices.

    def profiles(self) -> dict[str, Profile]:
        """Return the profiles of the devices that may be selected, by id in order."""
        now = time.monotonic()
        for device in [name for name, until in self._barred.items() if until <= now]:
            del self._barred[device]
            self.declined.pop(device, None)
        profiles = {}
        for device in self.online:
            profile = self._profiles[device]
            if profile is not None and device not in self.declined:
                profiles[device] = profile
        return profiles

    def announced_examples(self, device: str) -> int | None:
        """Return how many samples a device last reported; None if it never did."""
        profile = self._profiles.get(device)
        return None if profile is None else profile.examples

    def findings(self, device: str) -> tuple[str, ...]:
        """Return the data findings that a device last reported."""
        profile = self._profiles.get(device)
        if profile is None or profile.findings is None:
            return ()
        return profile.findings

    def labels_digest(self, device: str) -> str | None:
        """Return the digest of the order of a device's own labels; None if it has none."""
        profile = self._profiles.get(device)
        return None if profile is None else profile.labels_digest

    def releases(self, *, sets: bool = False) -> dict[str, str]:
        """Return the releases that devices report to run, by id; with `sets`, their artifact sets.

        Devices that accept no releases are left out.
        """
        releases = {}
        for device in self._profiles.keys() - self._not_members:
            profile = self._profiles[device]
            if profile is None:
                continue
            release = profile.sets if sets else profile.release
            if release is not None:
                releases[device] = release
        return releases
