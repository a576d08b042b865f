"""What a tier is in a global version: the weights that its devices are sent, and that it is judged
by.
"""

from broker_server.rounds.run_context import RunContext
from broker_server.store import VersionRecord
from broker_server.strategies.strategy import GlobalModel, PlanRequest
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.mapped_tensors import open_tensors
from models.plan import compile_plan, make_plan
from models.slicing import Tensors
from models.tier import Tier


def open_model(blobs: BlobStore, version: VersionRecord) -> GlobalModel:
    """The global model of a version, as views of mapped files.

    A BlobError where they cannot be read, also below.
    """
    state = {} if version.state_digest is None else open_tensors(blobs.path(version.state_digest))
    return GlobalModel(open_tensors(blobs.path(version.digest)), state)


def model_of(context: RunContext, tier: Tier, version: VersionRecord, blobs: BlobStore) -> Tensors:
    """What a tier is in a global version: the model that its devices are sent, with the leading
    units.

    Of a tier that the run does not train it is a cut of the global weights.
    """
    layout = context.artifacts.layout
    weights = open_tensors(blobs.path(version.digest))
    if tier == layout.tier(1.0):
        return weights
    plan = compile_plan(layout, make_plan(layout, tier))
    if all(item.tier != tier for item in context.tiers):
        return plan.slice(weights)  # the state of an old version may be gone
    request = PlanRequest(tier, "", version.number, context.config.seed)
    return context.strategy.send(plan, request, open_model(blobs, version))


def judged_model(
    context: RunContext, version: VersionRecord, blobs: BlobStore
) -> tuple[Tensors, Tensors]:
    """What judges a global version again: the weights of the judged tier, and the known statistics
    of its norms.
    """
    statistics = (
        open_tensors(blobs.path(version.statistics_digest)) if version.statistics_digest else {}
    )
    return model_of(context, context.judged.tier, version, blobs), statistics
