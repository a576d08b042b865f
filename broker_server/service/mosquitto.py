"""An installed Mosquitto as the server's broker, with TLS, client certificates and access rules.

It updates the list of members while it runs. A new member is admitted after a reload, which does
not interrupt any client. A revoked certificate ends only with its connection, so Mosquitto is
restarted for that; members reconnect by themselves.
"""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from broker_server.service.broker import ChildBroker
from broker_server.service.certificates import withdrawn_serials
from broker_server.service.mosquitto_files import AccessFiles, access_rules, listener
from fleet_protocol.child_process import child_program
from fleet_protocol.errors import ConfigError, ShoalError
from fleet_protocol.identity.enrolment import write_secret

_LOOK_SECONDS = 1.0
_JOIN_SECONDS = 30.0  # longer than one start takes
_PLACES = "/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin"
"""Places where systems install it, besides the folders that are searched for programs."""

_MORE = """\
persistence true
persistence_location {folder}/
autosave_interval 60
log_type error
log_type warning
"""


@dataclass(frozen=True)
class MemberAuthentication:
    """How Mosquitto authenticates members, and refuses everybody else.

    Attributes:
        folder: folder of the fleet, with certificates, key and list of revoked certificates.
        members: returns the names of the current members.
    """

    folder: Path
    members: Callable[[], Collection[str]]


@dataclass(frozen=True)
class _Admission:
    """The members who may connect, and those who no longer may."""

    members: frozenset[str]
    withdrawn: frozenset[int]


class MosquittoBroker(ChildBroker):
    """Mosquitto as a child process of the server.

    Args:
        folder: folder for its configuration, rules, log and stored sessions.
        fleet: fleet for whose topics its rules are.
        port: port that it listens on.
        listen: address that it listens on.
        gate: authenticates members; without it anybody can connect, and nothing is encrypted.
    """

    def __init__(
        self,
        folder: Path,
        fleet: str,
        *,
        port: int = 1883,
        listen: str = "127.0.0.1",
        gate: MemberAuthentication | None = None,
    ) -> None:
        super().__init__(folder.resolve(), port=port, listen=listen)
        self._fleet = fleet
        self._gate = gate
        self.scheme = "mqtt" if gate is None else "mqtts"
        self._admitted = _Admission(frozenset(), frozenset())
        self._ending = threading.Event()
        self._watch: threading.Thread | None = None

    @override
    def start(self) -> None:
        super().start()
        # `ensure` starts the broker again, which must not start a second thread.
        if self._gate is not None and self._watch is None:
            self._ending.clear()
            self._watch = threading.Thread(
                target=self._watch_members, name="broker-members", daemon=True
            )
            self._watch.start()

    @override
    def stop(self, timeout_seconds: float = 5.0) -> None:
        watch = self._watch
        self._watch = None
        # Ended first, or it could start the broker again.
        self._ending.set()
        if watch is not None:
            watch.join(_JOIN_SECONDS)
        super().stop(timeout_seconds)

    @override
    def _command(self) -> list[str]:
        program = installed_mosquitto()
        access = None
        if self._gate is not None:
            self._admitted = self._admission(self._gate)
            access = self._write_access(self._gate)
        text = listener(self.port, self.listen, access) + _MORE.format(folder=self._folder)
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            # By default it would switch to a user who may not read the fleet's keys.
            text += "user root\n"
        config = self._folder / "mosquitto.conf"
        # Only the owner may read it, like the files that it names.
        write_secret(config, text)
        return child_program(program, "-c", str(config))

    def _write_access(self, gate: MemberAuthentication) -> AccessFiles:
        rules = self._folder / "acl"
        write_secret(rules, access_rules(self._fleet, sorted(self._admitted.members)))
        withdrawn = gate.folder / "crl.pem"
        return AccessFiles(
            certificate=gate.folder / "broker.pem",
            key=gate.folder / "broker.key",
            authority=gate.folder / "ca.pem",
            rules=rules,
            # A fleet's folder from before lists of revoked certificates has none.
            withdrawn=withdrawn if withdrawn.exists() else None,
        )

    def _admission(self, gate: MemberAuthentication) -> _Admission:
        return _Admission(
            members=frozenset(gate.members()),
            withdrawn=withdrawn_serials(gate.folder / "crl.pem"),
        )

    def _watch_members(self) -> None:
        while not self._ending.wait(_LOOK_SECONDS):
            # If the broker does not start, the next call of `ensure` starts it, and reports the
            # reason; a file that cannot be read now is read again.
            with contextlib.suppress(ShoalError, OSError):
                self._admit_members()

    def _admit_members(self) -> None:
        """Update the broker to the state of the fleet's folder."""
        # `ensure` and `restart` of other threads change the process, too.
        with self._changing:
            process = self._process
            if self._gate is None or process is None or process.poll() is not None:
                return
            admission = self._admission(self._gate)
            # Mosquitto keeps connections with a revoked certificate, so only a restart ends them.
            if admission.withdrawn != self._admitted.withdrawn:
                self.restart()
            elif admission.members != self._admitted.members:
                self._admitted = admission
                self._write_access(self._gate)
                # Mosquitto reads its rules again, and keeps all connections.
                process.send_signal(signal.SIGHUP)


def installed_mosquitto() -> str:
    """Return the path of the installed Mosquitto.

    Raises:
        ConfigError: it is not installed; the message says what to install.
    """
    program = shutil.which("mosquitto") or shutil.which("mosquitto", path=_PLACES)
    if program is None:
        raise ConfigError(
            "Mosquitto is not installed on this computer, and the server of a fleet with "
            "identities starts it as its broker: `sudo apt install mosquitto` (macOS: `brew "
            "install mosquitto`). For a broker that you run yourself, create the fleet with "
            "`shoal init FLEET --broker mqtts://HOST:8883`"
        )
    return program
