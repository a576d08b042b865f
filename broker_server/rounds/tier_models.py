"""The weights of a tier in a global version, which devices are sent and which are evaluated."""

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

    They are the weights that are sent to its devices, with the leading units. A tier that the run
    does not train is cut from the global weights.

    Raises:
        BlobError: they cannot be read.
    """
    layout = context.artifacts.layout
    weights = open_tensors(blobs.path(version.digest))
    # The whole model needs no plan.
    if tier == layout.tier(1.0):
        return weights
    plan = compile_plan(layout, make_plan(layout, tier))
    trained = {tier_set.tier for tier_set in context.tiers}
    if tier not in trained:
        # A method may send weights from an old version's state, which may have been removed.
        return plan.slice(weights)
    request = PlanRequest(tier, "", version.number, context.config.seed)
    return context.strategy.send(plan, request, open_model(blobs, version))


def judged_model(
    context: RunContext, version: VersionRecord, blobs: BlobStore
) -> tuple[Tensors, Tensors]:
    """Return the input of a repeated evaluation: the evaluated tier's weights and statistics.

    The statistics are those of its static batch norms; they are empty if none are stored.

    Raises:
        BlobError: they cannot be read.
    """
    weights = model_of(context, context.judged.tier, version, blobs)
    if version.statistics_digest is None:
        return weights, {}
    return weights, open_tensors(blobs.path(version.statistics_digest))
