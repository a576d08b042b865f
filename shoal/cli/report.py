"""The report of a comparison: one HTML page with embedded plots, and the same numbers as JSON."""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from fleet_protocol.blob_store import write_atomically
from shoal.cli.console import bytes_text, seconds_text

# A palette for colour-blind readers (Okabe and Ito); the global model always has the first colour.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass(frozen=True)
class DevicePoint:
    """The work of one device in one round."""

    device: str
    tier: str  # the sub-model it trained
    examples: int  # training samples
    train_loss: float | None  # mean loss of the last epoch, if it trained
    local_accuracy: (
        float | None
    )  # accuracy of the trained sub-model on the device's held-out samples, if any
    train_seconds: float


@dataclass(frozen=True)
class RoundPoint:
    """One closed round."""

    number: int  # from 1
    accuracy: float | None  # accuracy of the merged model on the server's test set, if evaluated
    loss: float | None  # loss of the merged model, likewise
    seconds: float  # seconds from planning to closing
    devices: tuple[DevicePoint, ...]
    # the recipe's metrics of the merged model on the test set
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Heading:
    """The name of a run of the comparison.

    Attributes:
        key: its key in the JSON.
        title: its displayed name.
        about: its description.
    """

    key: str
    title: str
    about: str


@dataclass(frozen=True)
class Arm(Heading):
    """One run of the comparison."""

    rounds: tuple[RoundPoint, ...]  # in order
    wire_bytes: int  # bytes of MQTT packets at the server's connection
    payload_bytes: int  # bytes of the blobs in these packets
    seconds: float  # seconds of the whole run
    refusals: Mapping[str, int]  # refused messages and updates, by reason

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the final merged model."""
        evaluated = [point.accuracy for point in self.rounds if point.accuracy is not None]
        return evaluated[-1] if evaluated else None


@dataclass(frozen=True)
class Report:
    """Several runs on the same fleet and data, the main one first.

    `devices` maps each device to its tier.
    """

    title: str
    data: str
    arch: str
    devices: Mapping[str, str]
    seed: int
    seconds: float
    settings: Mapping[str, str]
    arms: tuple[Arm, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the numbers of the report as plain JSON values."""
        main = self.arms[0]
        return {
            **asdict(self),
            "accuracy": {arm.key: arm.accuracy for arm in self.arms},
            "rounds": len(main.rounds),
            "devices": len(self.devices),
            "fleet": dict(self.devices),
            "wire_bytes": main.wire_bytes,
            "payload_bytes": main.payload_bytes,
        }


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write ``report.html`` and ``report.json``, and return their paths.

    Raises a StorageError if the folder is not writable.
    """
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415

    # Names in the report may come from users, so the page escapes them.
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        files("shoal.cli").joinpath("report.html.j2").read_text(encoding="utf-8")
    )
    page = template.render(
        report=report,
        rows=arm_rows(report),
        plots=[
            (
                "Accuracy of the merged model on the server's test set",
                _accuracy_plot(report),
            ),
            (
                f"Training loss on each device ({report.arms[0].title})",
                _loss_plot(report.arms[0]),
            ),
            (
                f"Where the devices' time goes ({report.arms[0].title})",
                _time_plot(report.arms[0]),
            ),
        ],
    )
    html = folder / "report.html"
    numbers = folder / "report.json"
    write_atomically(html, page.encode())
    write_atomically(numbers, json.dumps(report.to_json(), indent=1).encode())
    return html, numbers


def arm_rows(report: Report) -> list[dict[str, str]]:
    """Return a row for each run, by the headings of a table."""
    return [
        {
            "run": arm.title,
            "accuracy": "-" if arm.accuracy is None else f"{arm.accuracy:.4f}",
            "rounds": str(len(arm.rounds)),
            "time per round": seconds_text(
                fmean(at.seconds for at in arm.rounds) if arm.rounds else None
            ),
            "on the wire": bytes_text(arm.wire_bytes),
            "payload": bytes_text(arm.payload_bytes),
            "refused": ", ".join(f"{count} {reason}" for reason, count in arm.refusals.items())
            or "none",
        }
        for arm in report.arms
    ]


def _figure(width: float = 7.2, height: float = 3.4) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    return figure, axes


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    # Without the XML declaration before it, the picture can stand inside the page.
    return buffer.getvalue().partition("<svg")[1] + buffer.getvalue().partition("<svg")[2]


def _whole_numbers(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _accuracy_plot(report: Report) -> str:
    figure, axes = _figure()
    for arm, colour in zip(report.arms, COLOURS, strict=False):
        points = [
            (point.number, point.accuracy) for point in arm.rounds if point.accuracy is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=colour,
                label=f"{arm.title} ({points[-1][1]:.3f})",
                linewidth=1.8,
            )
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy")
    axes.legend(frameon=False, loc="lower right")
    _whole_numbers(axes)
    return _svg(figure)


def _by_device(arm: Arm) -> dict[str, list[tuple[int, DevicePoint]]]:
    devices: dict[str, list[tuple[int, DevicePoint]]] = {}
    for point in arm.rounds:
        for device in point.devices:
            devices.setdefault(device.device, []).append((point.number, device))
    return dict(sorted(devices.items()))


def _tier_colours(arm: Arm) -> dict[str, str]:
    tiers = sorted({device.tier for point in arm.rounds for device in point.devices}, reverse=True)
    # More tiers than colours repeat colours.
    return dict(zip(tiers, COLOURS * len(tiers), strict=False))


def _loss_plot(arm: Arm) -> str:
    figure, axes = _figure()
    colours = _tier_colours(arm)
    labelled: set[str] = set()
    for points in _by_device(arm).values():
        tier = points[-1][1].tier
        series = [
            (number, device.train_loss)
            for number, device in points
            if device.train_loss is not None
        ]
        if series:
            # One entry in the legend for each tier, not for each device.
            label = None if tier in labelled else tier
            labelled.add(tier)
            axes.plot(
                *zip(*series, strict=True),
                color=colours[tier],
                label=label,
                linewidth=1.2,
                alpha=0.85,
            )
    axes.set_xlabel("round")
    axes.set_ylabel("mean loss, last epoch")
    axes.set_yscale("log")
    if labelled:
        axes.legend(frameon=False, title="tier")
    _whole_numbers(axes)
    return _svg(figure)


def _time_plot(arm: Arm) -> str:
    devices = _by_device(arm)
    # Inches: a margin, and a bar for each device.
    figure, axes = _figure(height=0.8 + 0.32 * max(len(devices), 1))
    colours = _tier_colours(arm)
    for row, (name, points) in enumerate(devices.items()):
        seconds = [device.train_seconds for _, device in points]
        tier = points[-1][1].tier
        axes.barh(row, sum(seconds) / len(seconds), color=colours[tier])
        axes.text(
            sum(seconds) / len(seconds),
            row,
            f" {tier}, {points[-1][1].examples} samples",
            va="center",
            fontsize=8,
        )
        axes.text(0, row, f"{name} ", va="center", ha="right", fontsize=8)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel("mean training time per round, seconds")
    # Room for the texts to the left and right of the bars.
    axes.margins(x=0.3)
    axes.grid(axis="x", alpha=0.25)
    return _svg(figure)
