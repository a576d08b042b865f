"""Stores of any size for the page, written as a server would have left them, without anybody having
trained.
"""

import hashlib
import random
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from sqlalchemy import insert

from broker_server.service.registry import Registry
from broker_server.service.rollout_state import Rollout
from broker_server.settings.fleet import FleetConfig
from broker_server.store import (
    DeviceRecord,
    LeftOut,
    RoundRecord,
    RunRecord,
    Store,
    TaskPhase,
    TaskRecord,
    schema,
)
from broker_server.store.configurations import save_config
from broker_server.store.machine import RoundEvent, RoundState
from broker_server.store.records import VersionRecord
from broker_server.store.rows import to_row
from broker_server.store.task_records import Screening, Timing
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.errors import RefusalReason
from fleet_protocol.identity.release import Release
from fleet_protocol.messages import BlobRef, Evaluation, Measured, TaskMetrics
from tests.broker_server.artifacts import ARCH, CLASSES, export_tiny
from tests.broker_server.peer import profile

RUN = "20260101-000000-abcd"
RELEASED = (
    "running 8 0 0",
    "running 0 0 0",
    "failed 8 0 0 its self-test failed: no numpy",
    "trial 8 0 1",
)
TIERS = ("w1.00-d1", "w0.50-d1")
HOSTILE = "<img src=x onerror=alert(1)>"


def ref(text: str, size: int = 1000) -> BlobRef:
    return BlobRef(digest=hashlib.sha256(text.encode()).hexdigest(), size=size, chunk_bytes=1024)


def tier_of(number: int) -> str:
    """Every third device can hold the whole model."""
    return TIERS[number % 3 > 0]


def made(
    folder: Path, devices: int = 6, rounds: int = 4, asked: int = 4, *, hostile: bool = False
) -> Path:
    """A store of a run of `rounds` closed rounds and one that collects; some devices miss, one is
    refused.
    """
    draw = random.Random(1)
    now = time.time()
    export_tiny(folder / "artifacts")
    names = [f"pi-{number:04}" for number in range(devices)]
    config = FleetConfig.model_validate(
        {
            "fleet": "lab",
            "store": folder / "store",
            "model": {"artifacts": folder / "artifacts", "arch": ARCH},
            "round": {"rounds": rounds + 2, "deadline_seconds": 60},
            "strategy": {"name": "fedrolex"},
        }
    )
    seen = []
    records = []
    tasks = []
    versions = [version(0, None, now - 60 * (rounds + 1))]
    for number, name in enumerate(names):
        width = 1.0 if tier_of(number) == TIERS[0] else 0.5
        said = profile(max_width=width, examples=20 + number, release=RELEASED[number % 4])
        seen.append(DeviceRecord("lab", name, number % 5 != 4, "idle", said, now - 9000, now - 10))
    for number in range(1, rounds + 2):
        began = now - 60 * (rounds + 1 - number) - 30
        over = number <= rounds
        chosen = sorted(draw.sample(range(devices), min(asked, devices)))
        left = {
            name: "offline" if at % 5 == 4 else "not drawn"
            for at, name in enumerate(names)
            if at not in chosen
        }
        judged = evaluation(number, rounds)
        record = RoundRecord(
            RUN, number, RoundState.CLOSED if over else RoundState.COLLECTING, number - 1, 2, None, began, began,
            began + 50 if over else None, judged if over else None, None, wanted=asked,
            ending=RoundEvent.DEADLINE if over else None, collect_seconds=40.0 if over else None,
            left_out=LeftOut(reasons=left),
        )  # fmt: skip
        records.append(record)
        tasks += [task(draw, number, at, names[at], over=over) for at in chosen]
        if over:
            versions.append(version(number, judged, began + 50))
    run = RunRecord(
        RUN,
        "lab",
        ARCH,
        config.model_dump_json(),
        "running",
        None,
        now - 9000,
        None,
        5_200_000,
        5_000_000,
    )
    with closing(Store(folder / "store")) as store:
        save_config(store.folder, RUN, run.config)
        for table, rows in (
            (schema.runs, [run]), (schema.devices, seen), (schema.versions, versions),
            (schema.rounds, records), (schema.tasks, tasks),
        ):  # fmt: skip
            with store._begin() as connection:
                connection.execute(insert(table), [to_row(row) for row in rows])
        store.log(
            "round-started",
            f"{HOSTILE if hostile else 'devices'} asked",
            run=RUN,
            number=1,
            device=names[1],
        )
        roll_out(folder, names)
        store.count_refusal(RUN, names[0], RefusalReason.FORGED, "server", 2)
    return folder / "store"


def roll_out(folder: Path, names: list[str]) -> None:
    """Two releases of the fleet's folder: every second board was asked for the newest, all for the
    one before.
    """
    Registry().write(folder)
    fixed = {"signed": "00", "stages": (0.05, 0.5, 1.0), "within_seconds": 1e9, "most_failed": 0.3}
    for number, path in (
        (1_767_000_000, folder / "rollouts" / "1767000000.json"),
        (8, folder / "rollout.json"),
    ):
        path.parent.mkdir(exist_ok=True)
        release = Release(fleet="lab", number=number, builds={"aarch64-3.11": ref("a runtime")})
        asked = dict.fromkeys(names[:: 1 if number > 8 else 2], float(number))
        told = {names[1]: f"failed {number} 0 0 {HOSTILE}"} if number > 8 else {}
        ended, stopped = (number + 5.0, "the operator stopped it") if number > 8 else (0.0, "")
        made = Rollout(
            release=release, asked=asked, told=told, ended=ended, stopped=stopped, **fixed
        )
        path.write_text(made.model_dump_json())


def evaluation(number: int, rounds: int) -> VersionEvaluation:
    accuracy = 0.9 - 0.6 / (1 + number)
    tiers = {TIERS[1]: Evaluation(examples=100, loss=1.1, accuracy=accuracy - 0.1)}
    present = (60.0, 40.0, *[0.0] * (CLASSES - 2))
    hits = tuple(float(round(count * accuracy)) for count in present)
    counted = Measured(name="f1", rule="f1", value=accuracy, sums=(hits, present, present))
    return VersionEvaluation(
        examples=100, loss=2 / (1 + number), accuracy=accuracy, metrics=(counted,), tiers=tiers
    )


def version(number: int, judged: VersionEvaluation | None, at: float) -> VersionRecord:
    return VersionRecord(RUN, number, number, ref(f"v{number}").digest, None, None, at, judged)


def task(draw: random.Random, number: int, at: int, device: str, *, over: bool) -> TaskRecord:
    tier = tier_of(at)
    made = TaskRecord(
        f"t{number}-{at}",
        RUN,
        number,
        device,
        "train",
        tier,
        tier,
        number - 1,
        ref(tier),
        ref(f"{tier}/{number}"),
    )
    if not over:
        return made
    if draw.random() < 0.3:
        return replace(made, phase=TaskPhase.MISSED, timing=Timing(left=12.0))
    own = Evaluation(examples=10, loss=1.0, accuracy=0.9 if tier == TIERS[0] else 0.5)
    told = TaskMetrics(
        examples=20 + at, batches=10, labels=tuple(range(CLASSES)), train_loss=2 / number, fetch_seconds=1.5,
        train_seconds=10 + at % 7, resident_bytes=90_000_000 + at, evaluation=own,
    )  # fmt: skip
    return replace(
        made, phase=TaskPhase.MERGED, metrics=told, update_size=900, update_digest=ref("u").digest,
        timing=Timing(answered=14 + at % 7), screening=Screening(norm=0.5, samples=20, declared=20),
    )  # fmt: skip
