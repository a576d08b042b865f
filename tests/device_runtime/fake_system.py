"""A tree like ``/sys`` and ``/proc``, whose readings tests set."""

from dataclasses import dataclass
from pathlib import Path

from fleet_protocol.blob_store import write_atomically

_ROUTES = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"


@dataclass(frozen=True)
class FakeSystem:
    """The tree; a board that reads it sees a whole file, never half of one.

    Attributes:
        root: with ``sys`` and ``proc`` in it.
    """

    root: Path

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, f"{text}\n".encode())

    def battery(self, status: str, percent: int) -> None:
        for name, text in (("type", "Battery"), ("status", status), ("capacity", percent)):
            self.write(f"sys/class/power_supply/BAT0/{name}", text)

    def celsius(self, value: float) -> None:
        self.write("sys/class/thermal/thermal_zone0/temp", int(value * 1000))

    def firmware(self, bits: str) -> None:
        self.write("sys/devices/platform/soc/soc:firmware/get_throttled", bits)

    def cooling(self, state: int) -> None:
        self.write("sys/class/thermal/cooling_device0/type", "cpufreq-cpu0")
        self.write("sys/class/thermal/cooling_device0/cur_state", state)

    def processors(self, busy: int, idle: int) -> None:
        self.write("proc/stat", f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3 4")

    def pressure(self, what: str, percent: float) -> None:
        """Of the last minute; the other figures of the file are of other spans, or of all at
        once.
        """
        lines = [
            f"some avg10=99.00 avg60={percent:.2f} avg300=98.00 total=97",
            "full avg10=1.00 avg60=0.50 avg300=0.25 total=9",
        ]
        self.write(f"proc/pressure/{what}", "\n".join(lines))

    def route(self, **metrics: int) -> None:
        """Default routes by interface."""
        lines = [
            f"{name}\t00000000\t0101A8C0\t0003\t0\t0\t{metric}\t00000000\t0\t0\t0"
            for name, metric in metrics.items()
        ]
        lines.append("lo0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0")
        self.write("proc/net/route", _ROUTES + "\n".join(lines))
