"""The weights of a tier in a global version: those that its devices are sent, and is judged by."""

from broker_server.rounds.run_context import RunContext
from broker_server.store import VersionRecord
from broker_server.strategies.strategy import GlobalModel, PlanRequest
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.mapped_tensors import open_tensors
from models.plan import compile_plan, make_plan
from models.slicing import Tensors
from models.tier import Tier


def open_model(blobs: BlobStore, version: VersionRecord) -> GlobalModel:
    """Return the global model of a version, as views of mapped files.

    Raises:
        BlobError: they cannot be read.
    """
    weights = open_tensors(blobs.path(version.digest))
    if version.state_digest is None:
        return GlobalModel(weights, {})
    return GlobalModel(weights, open_tensors(blobs.path(version.state_digest)))


def model_of(context: RunContext, tier: Tier, version: VersionRecord, blobs: BlobStore) -> Tensors:
    """Return the weights of a tier in a global version.

    They are what its devices are sent, with the leading units. A tier that the run does not train
    is cut from the global weights.

    Raises:
        BlobError: they cannot be read.
    """
    layout = context.artifacts.layout
    weights = open_tensors(blobs.path(version.digest))
    if tier == layout.tier(1.0):
        return weights
    plan = compile_plan(layout, make_plan(layout, tier))
    trained = {tier_set.tier for tier_set in context.tiers}
    if tier not in trained:
        # The state of an old version, which a method may send from, may be gone.
        return plan.slice(weights)
    request = PlanRequest(tier, "", version.number, context.config.seed)
    return context.strategy.send(plan, request, open_model(blobs, version))


def judged_model(
    context: RunContext, version: VersionRecord, blobs: BlobStore
) -> tuple[Tensors, Tensors]:
    """Return what judges a global version again: weights of the judged tier, and its statistics.

    The statistics are those of its static batch norms, empty where none are known.

    Raises:
        BlobError: they cannot be read.
    """
    weights = model_of(context, context.judged.tier, version, blobs)
    if version.statistics_digest is None:
        return weights, {}
    return weights, open_tensors(blobs.path(version.statistics_digest))
