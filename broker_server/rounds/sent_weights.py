"""Prepares the weights that are sent to devices: cuts, encodes and stores them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from broker_server.rounds.round_records import read_version
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.tier_models import open_model
from broker_server.store import Store, TaskRecord
from broker_server.store.task_records import Alternative
from broker_server.strategies.strategy import GlobalModel, PlanRequest
from broker_server.strategies.traits import Trait
from broker_server.updates.distance import measure
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.digests import matches
from fleet_protocol.encodings import encode_whole, open_weights
from fleet_protocol.messages import BlobRef
from fleet_protocol.units import NO_UNITS, Positions, unit_tensors
from fleet_protocol.weights import weights_parts
from models.plan import Plan, compile_plan
from models.slicing import CompiledPlan, Tensors
from models.tier import Tier


@dataclass(frozen=True)
class SentWeights:
    """Weights in the form in which they are sent to devices."""

    ref: BlobRef
    rounding_loss: float  # norm of the encoding's error, relative to the norm of the weights


def store_sent_weights(
    context: RunContext,
    weights: Tensors,
    blobs: BlobStore,
    *,
    durable: bool,
    units: Mapping[str, Positions] = NO_UNITS,
) -> SentWeights:
    """Encode weights for the download of a run, and store them.

    Args:
        context: the run.
        weights: float32, in the order in which they are sent.
        blobs: blobs that hold them.
        durable: sync them to the disk.
        units: positions of entries in the whole model, for some parameters.

    Raises:
        RefusedError: they cannot be encoded.
        StorageError: the disk is full.
    """
    encoding = context.config.download.encoding
    tensors = encode_whole(weights, encoding) | unit_tensors(units)
    chunks = weights_parts(tensors)
    digest = blobs.put(*chunks, durable=durable)
    size = sum(map(len, chunks))
    loss = 0.0
    if encoding != "fp32":
        squares = []
        for tensor in weights.values():
            squares.append(float(np.vdot(tensor, tensor)))
        norm = math.sqrt(sum(squares))
        lost_norm = measure(open_weights(blobs.path(digest)), weights).norm
        loss = lost_norm / (norm or 1.0)
    ref = BlobRef(digest=digest, size=size, chunk_bytes=context.chunk_bytes)
    return SentWeights(ref, loss)


def cut_weights(
    context: RunContext, request: PlanRequest, plan: Plan, model: GlobalModel, blobs: BlobStore
) -> SentWeights:
    """Cut the weights of a plan from a global model, and store them.

    They are synced to the disk only in a run with a buffer, where a task may outlive the version
    from which it was cut. Otherwise a power cut may lose them, and `restore_sent_weights` cuts them
    again.
    """
    layout = context.artifacts.layout
    compiled = compile_plan(layout, plan)
    sent = context.strategy.send(compiled, request, model)
    weights = {name: sent[name] for name in layout.shapes(request.tier)}
    durable = not context.keeps(Trait.ONE_VERSION)
    units = _units_to_keep(context, plan, compiled)
    return store_sent_weights(context, weights, blobs, durable=durable, units=units)


def _units_to_keep(
    context: RunContext,
    plan: Plan,
    compiled: CompiledPlan,
) -> dict[str, Positions]:
    """Return the positions of entries of which devices keep values, if the next plan has others."""
    units: dict[str, Positions] = {}
    if plan.kind == "static":
        return units
    layout = context.artifacts.layout
    for name in sorted(context.strategy.keeps & compiled.tensors.keys()):
        tensor = compiled.tensors[name]
        if any(map(layout.is_cut, tensor.dims)):
            units[name] = tensor.positions()
    return units


def restore_sent_weights(
    context: RunContext, store: Store, tasks: Sequence[TaskRecord], blobs: BlobStore
) -> None:
    """Cut the weights of an open round again if a power cut lost them.

    Raises:
        BlobError: a global version cannot be read.
        RefusedError: weights cannot be encoded.
        StorageError: the disk is full, or lacks a version.
    """
    # Devices that share a plan share its blob, which can be cut from any of their tasks.
    choices: dict[str, tuple[TaskRecord, Alternative]] = {}
    for task in tasks:
        for choice in task.choices:
            choices[choice.weights.digest] = (task, choice)
    for digest, (task, choice) in choices.items():
        version = read_version(context, store, task.version)
        # A device that trains the whole model is sent the blob of the version itself.
        if digest == version.digest or _is_whole(blobs, digest):
            continue
        blobs.remove(digest)
        tier = Tier.parse(choice.tier)
        request = PlanRequest(tier, task.device, task.version, context.config.seed)
        plan = context.strategy.plan(request).plan
        cut_weights(context, request, plan, open_model(blobs, version), blobs)


def _is_whole(blobs: BlobStore, digest: str) -> bool:
    return blobs.has(digest) and matches(blobs.read_unchecked(digest), digest)
