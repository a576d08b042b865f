"""Readers of what private parts, windows and memories add: offers, updates, files of a board."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from broker_server.store import TaskRecord
from broker_server.updates.checks import check_metadata, check_tensors
from broker_server.updates.values import ExpectedUpdate
from device_runtime.training.own_model_files import OwnModelFiles
from device_runtime.training.own_settings import read_settings
from device_runtime.training.routines import routine_of
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest
from fleet_protocol.mapped_tensors import blob_in
from fleet_protocol.messages import (
    BlobRef,
    Done,
    Evaluation,
    Offer,
    TaskMetrics,
    TierChoice,
    TrainSettings,
    parse_server_message,
)
from fleet_protocol.messages.instructions import Upload
from fleet_protocol.weights import encode_weights

WINDOW = "w1.00-d4-t0.50-p1"
_REF = BlobRef(digest="ab" * 32, size=100_000, chunk_bytes=98_304)
_TASK = {"fleet": "lab", "run": "r1", "round": 3, "task": "r1-3-pi"}
_TRAIN = TrainSettings(
    learning_rate=0.1,
    epochs=1,
    batch_size=8,
    seed=1,
    proximal_mu=0.1,
    optimizer_state="keep",
    knobs={"distillation": 0.5, "inner": 1.0},
)
Read = Callable[[int, bytes], None]


def _offer(routine: str, **fields: object) -> Offer:
    return Offer(
        **_TASK,
        version=2,
        choices=(TierChoice(tier=WINDOW, artifact_set=_REF, weights=_REF),),
        train=_TRAIN,
        seconds_left=60,
        routine=routine,
        upload=Upload(encoding="int4", feedback=False),
        **fields,
    )


OFFERS = (
    _offer("private", stays=("head.weight", "head.bias"), settings={"private_epochs": 3}),
    _offer("private", settings={"copy_model": True, "mu": 0.1, "adapt_epochs": 1, "compare": True}),
    _offer("dynamic"),
)
"""Tasks of a window, with what stays, a copy, numbers of a loss with exits, and a memory."""

DONE = Done(
    **_TASK,
    device="pi",
    update=_REF,
    tier=WINDOW,
    metrics=TaskMetrics(
        labels=(),
        fetch_seconds=0.1,
        train_seconds=1.5,
        resident_bytes=100,
        evaluation=Evaluation(examples=3, loss=0.5, accuracy=0.5),
        shared_evaluation=Evaluation(examples=3, loss=0.7, accuracy=0.4),
    ),
)
"""The report of a board that compares its model with that of the fleet."""


def offers() -> tuple[tuple[bytes, ...], Read]:
    """Offers whose routine reads its settings, as before a board joins a round."""

    def read(_: int, data: bytes) -> None:
        offer = parse_server_message(data)
        if not isinstance(offer, Offer):
            raise RefusedError(RefusalReason.MALFORMED, "another message")
        routine = routine_of(offer)
        read_settings(routine.settings, offer.settings, f"routine {routine.name}")

    return tuple(offer.to_bytes() for offer in OFFERS), read


def kept_files(folder: Path) -> tuple[tuple[bytes, ...], Read]:
    """Files in which a board keeps private values and memories of several tiers."""
    files = OwnModelFiles(folder, prefix="private-")
    tensors = {"head.weight": np.ones((3, 4), np.float32), "head.bias": np.zeros(3, np.float32)}
    files.save_tiers("r1", 1, {"w1.00-d4": tensors, "w0.50-d4": tensors})
    (path,) = folder.glob("private-*")
    whole = path.read_bytes()

    def read(_: int, data: bytes) -> None:
        path.write_bytes(data)
        tiers = files.load_tiers("r1", 2)
        held = sum(value.nbytes for kept in tiers.values() for value in kept.values())
        assert held <= len(data), "tensors larger than the file that they were read from"

    return (whole,), read


def updates(manifest: Manifest) -> tuple[tuple[bytes, ...], Read]:
    """Updates of a tier of which a parameter stays: that one is never taken."""
    *shared, private = manifest.parameters
    offer = OFFERS[0].model_copy(update={"stays": (private.name,)})
    task = TaskRecord(
        id=offer.task,
        run=offer.run,
        round=offer.round,
        device="pi",
        kind="train",
        tier=manifest.tier,
        plan_key="p",
        version=2,
        artifact_set=_REF,
        weights=_REF,
    )
    expected = ExpectedUpdate(task, manifest, offer)
    metadata = {"task": task.id, "run": task.run, "round": "3", "version": "2", "tier": task.tier}
    samples = []
    for specs in (shared, manifest.parameters):
        arrays = {spec.name: np.ones(spec.shape, np.float32) for spec in specs}
        samples.append(encode_weights(arrays, metadata))

    def read(_: int, data: bytes) -> None:
        stated, tensors = blob_in(data)
        check_metadata(stated, task)
        check_tensors(tensors, expected)
        assert set(tensors) == {spec.name for spec in shared}, "a private part was taken"

    return tuple(samples), read
