"""A bench of rounds: a server in this process, light devices in a few others, and the bare broker
beside them.
"""

import contextlib
import os
import resource
import secrets
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from broker_server.service.membership import hosted_broker
from broker_server.service.receivers import Receivers
from broker_server.service.server import Server
from broker_server.settings.fleet import BrokerConfig, FleetConfig, ModelConfig
from broker_server.settings.rounds import RoundConfig
from fleet_protocol import control
from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import Manifest, ParameterSpec
from fleet_protocol.recipe_spec import OptimizerSpec, RecipeSpec
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress
from fleet_protocol.weights import encode_weights
from models.axes import Axis, AxisKind
from models.dims import Dim
from models.layout import HEAD, Layout, Parameter, block_name
from shoal.bench.bare import BareRound, Middle
from shoal.bench.processes import device_processes
from shoal.bench.settings import FleetBench

ARCH = "bench"
_INPUTS = 64
_CLASSES = 10


def _layout(payload_bytes: int) -> Layout:
    hidden = max(1, payload_bytes // (4 * (_INPUTS + _CLASSES)))
    return Layout(
        arch=ARCH,
        settings={},
        axes={
            "inputs": Axis("inputs", _INPUTS, AxisKind.FIXED),
            "hidden": Axis("hidden", hidden),
            "classes": Axis("classes", _CLASSES, AxisKind.FIXED),
        },
        parameters=(
            Parameter(
                "body.weight",
                (hidden, _INPUTS),
                (Dim("hidden"), Dim("inputs")),
                block_name(1),
            ),
            Parameter("head.weight", (_CLASSES, hidden), (Dim("classes"), Dim("hidden")), HEAD),
        ),
        statistics=(),
        depth=1,
        depths=(1,),
        label_axes=("classes",),
        input_shape=(_INPUTS,),
        input_dtype="float32",
        classes=_CLASSES,
    )


def write_architecture(root: Path, payload_bytes: int) -> None:
    """Write an artifact folder of one tier, the whole model, whose parameters have nearly so many
    bytes.
    """
    layout = _layout(payload_bytes)
    tier = layout.tier(1.0)
    folder = root / ARCH / tier.id
    folder.mkdir(parents=True, exist_ok=True)
    specs = []
    offset = 0
    for item in layout.parameters:
        axes = tuple(dim.axis for dim in item.dims)
        specs.append(
            ParameterSpec(
                name=item.name,
                shape=item.shape,
                axes=axes,
                block=item.block,
                offset=offset,
            )
        )
        offset += specs[-1].nbytes
    manifest = Manifest(
        arch=ARCH,
        settings={},
        tier=tier.id,
        width=tier.width,
        depth=tier.depth,
        classes=layout.classes,
        input_shape=layout.input_shape,
        input_dtype="float32",
        recipe=RecipeSpec(optimizer=OptimizerSpec(name="sgd")),
        parameters=tuple(specs),
        states=(),
        statistics=(),
        graphs={},
        flops_per_sample=1,
        flops_per_step_sample=1,
        peak_memory_bytes=1,
    )
    rng = np.random.default_rng(0)
    weights = {item.name: rng.standard_normal(item.shape, np.float32) for item in layout.parameters}
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    (root / ARCH / "layout.json").write_text(layout.to_json())
    (root / ARCH / "init.safetensors").write_bytes(encode_weights(weights))


@dataclass(frozen=True)
class FleetFigures:
    """What was found; medians over the counted rounds."""

    devices: int
    update_bytes: int
    round_seconds: float  # from the offers to the new version
    paho_seconds: float  # of the bare fan-out and fan-in of the same bytes by clients of paho
    cpu_ms_per_update: (
        float  # processor time of the server, its network thread and its receivers included
    )
    paho_cpu_ms_per_update: float  # of the process in the middle of the baseline
    merged: int  # updates merged in the counted rounds
    asked: int  # updates asked for in the counted rounds
    # peak memory of the process that held the server and, before it, the middle of the baseline;
    # and of its receivers
    resident_bytes: int
    wire_bytes: int  # what the server exchanged in all rounds
    payload_bytes: int  # what of it was blobs that were needed
    bytes_by_kind: dict[
        str, int
    ]  # what the devices exchanged in all rounds, by kind of topic and way


@dataclass
class _Watch:
    """Reads the processor's clock when a round begins and ends."""

    began: float = 0.0
    rounds: list[control.RoundClosed] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    update_bytes: int = 0
    receivers: Receivers | None = None

    def _cpu_seconds(self) -> float:
        return time.process_time() + (
            self.receivers.cpu_seconds if self.receivers is not None else 0.0
        )

    def __call__(self, event: control.RunEvent) -> None:
        if isinstance(event, control.RunStarted):
            self.began = self._cpu_seconds()
        elif isinstance(event, control.UpdateReceived):
            self.update_bytes = event.size
        elif isinstance(event, control.RoundClosed):
            now = self._cpu_seconds()
            self.rounds.append(event)
            self.cpu_seconds.append(now - self.began)
            self.began = now


def bench_fleet(bench: FleetBench) -> FleetFigures:
    """Measure the fleet over one broker, and before and after it the baseline, as a machine's pace
    changes.

    Raises:
        ConfigError: there are fewer than two rounds.
        ShoalError: a round could not be closed.
    """
    if bench.rounds < 2:
        raise ConfigError("the first round warms up: take two rounds or more")
    bench.folder.mkdir(parents=True, exist_ok=True)
    write_architecture(bench.folder / "artifacts", bench.payload_bytes)
    with contextlib.ExitStack() as stack:
        url = bench.broker
        if (
            hosted := hosted_broker(
                BrokerConfig(url=url, port=bench.port), ARCH, bench.folder / "broker"
            )
        ) is not None:
            url = stack.enter_context(hosted).url
        bare = _bare(bench, url)
        watch, finished, count, held = _fleet(bench, url)
        bare += _bare(bench, url)
    counted = watch.rounds[1:]
    cpu = [
        1000 * used / max(1, len(event.merged))
        for used, event in zip(watch.cpu_seconds, watch.rounds, strict=True)
    ]
    return FleetFigures(
        devices=bench.devices,
        update_bytes=watch.update_bytes,
        round_seconds=statistics.median(event.round_seconds for event in counted),
        paho_seconds=statistics.median(item.seconds for item in bare),
        cpu_ms_per_update=statistics.median(cpu[1:]),
        paho_cpu_ms_per_update=statistics.median(
            1000 * item.cpu_seconds / bench.devices for item in bare
        ),
        merged=sum(len(event.merged) for event in counted),
        asked=sum(len(event.merged) + len(event.missing) for event in counted),
        resident_bytes=held,
        wire_bytes=finished.wire_bytes,
        payload_bytes=finished.payload_bytes,
        bytes_by_kind=count,
    )


def _peak_bytes(pid: int) -> int:
    """Peak memory of a process; what `resource` says of a child begins with what its parent had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _bare(bench: FleetBench, url: str) -> list[BareRound]:
    fleet = f"bare-{secrets.token_hex(4)}"
    size = RoundConfig().chunk_bytes
    data = os.urandom(bench.payload_bytes)
    chunks = tuple(data[at : at + size] for at in range(0, len(data), size))
    with (
        Middle(Topics(fleet), BrokerAddress.parse(url)) as middle,
        device_processes("bare", fleet, url, bench.devices, bench.processes),
    ):
        return middle.rounds(bench.devices, chunks, bench.rounds)


def _fleet(bench: FleetBench, url: str) -> tuple[_Watch, control.RunFinished, dict[str, int], int]:
    watch = _Watch()
    fleet = f"bench-{secrets.token_hex(4)}"
    config = FleetConfig(
        fleet=fleet,
        store=bench.folder / fleet,
        broker=BrokerConfig(url=url, receivers=bench.receivers),
        model=ModelConfig(artifacts=bench.folder / "artifacts", arch=ARCH),
        round=RoundConfig(
            rounds=bench.rounds,
            min_devices=bench.devices,
            deadline_seconds=bench.deadline_seconds,
            quorum=0.5,
        ),
        keep_versions=1,
    )
    with (
        device_processes("light", fleet, url, bench.devices, bench.processes) as exchanged,
        Server(fleet, config.store, config.broker, listener=watch) as server,
    ):
        watch.receivers = server.receivers
        finished = server.run(config)
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        held += sum(map(_peak_bytes, server.receivers.pids)) if server.receivers is not None else 0
    return watch, finished, dict(sorted(exchanged.items())), held
