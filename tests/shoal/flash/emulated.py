"""A board with a card in it, emulated: its supply can be cut, and who has its key may log in."""

import os
import subprocess
import time
from pathlib import Path

from tests.brokers import free_port

__all__ = ["FIRMWARE", "Board"]

FIRMWARE = Path("/usr/share/qemu-efi-aarch64/QEMU_EFI.fd")


class Board:
    """Its network is this computer's, which it knows as 10.0.2.2; its clock has stopped in 2001.

    Args:
        card: the image.
        log: for what it says on its console.
        key: private key of its operator.
    """

    def __init__(self, card: Path, log: Path, key: Path) -> None:
        self._log = log
        self._key = key
        self._port = free_port()
        # On a Cortex-A72 Linux changes page tables at every system call, and each time the emulator
        # forgets addresses: a quarter of its work. `max` has what makes that needless (E0PD), as
        # newer processors do.
        command = [
            "qemu-system-aarch64",
            "-M",
            "virt",
            "-cpu",
            "max,pauth=off,sve=off",
            "-smp",
            "2",
            "-m",
            "1024",
        ]
        command += [
            "-accel",
            "tcg,thread=multi",
            "-bios",
            str(FIRMWARE),
            "-rtc",
            "base=2001-01-01T00:00:00",
        ]
        command += ["-drive", f"if=none,id=card,file={card},format=raw,cache=writethrough"]
        command += ["-device", "virtio-blk-pci,drive=card", "-device", "virtio-rng-pci"]
        command += ["-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{self._port}-:22"]
        command += ["-device", "virtio-net-pci,netdev=net,romfile="]
        self._command = [*command, "-display", "none", "-monitor", "none", "-serial", f"file:{log}"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)

    def lose_power(self) -> None:
        """At once, whatever it does."""
        if self._process:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def cpu_seconds(self) -> float:
        """What emulating it has cost this computer since its supply is on, whatever else ran
        here.
        """
        assert self._process is not None
        spent = (
            Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        )
        return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:] if self._log.exists() else ""

    def does(self, command: str, seconds: float = 600.0, given: bytes = b"") -> str:
        """What a command of the operator's says, once the board lets them in."""
        options = [
            "StrictHostKeyChecking=accept-new",
            f"UserKnownHostsFile={self._log}.hosts",
            "BatchMode=yes",
        ]
        options += ["LogLevel=ERROR", "ConnectTimeout=120"]
        ssh = [
            "ssh",
            "-i",
            str(self._key),
            "-p",
            str(self._port),
            *(f"-o{option}" for option in options),
        ]
        deadline = time.monotonic() + seconds
        while True:
            left = max(1.0, deadline - time.monotonic())
            done = subprocess.run(
                [*ssh, "shoal-admin@127.0.0.1", command],
                input=given,
                capture_output=True,
                timeout=left,
                check=False,
            )
            if done.returncode != 255:  # of ssh itself, as long as the board does not answer
                assert done.returncode == 0, done.stderr.decode()
                return done.stdout.decode()
            assert time.monotonic() < deadline, done.stderr.decode()
            assert self._process is not None
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"the board is gone; it said {self.said()}")
