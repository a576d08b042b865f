"""How devices hide their updates before they send them: they bound the change and add noise."""

from broker_server.strategies.private_merge import Noise
from broker_server.strategies.stage import Stage, stated
from broker_server.strategies.traits import Trait
from fleet_protocol.messages.instructions import Hiding

# A sum needs less noise than each update does, and here every update carries enough for itself.
STAGES = stated(
    Stage(
        name='privacy.where = "local"',
        remedy="remove [privacy]",
        setting="privacy",
        wanted=lambda run: run.privacy is not None and run.privacy.where == "local",
        needs=frozenset({Trait.LABELS_HIDDEN, Trait.ASSIGNED_TIERS, Trait.NO_STATISTICS}),
        breaks=frozenset({Trait.SERVER_NOISE, Trait.EVALUATIONS}),
    ),
)


def hiding_of(noise: Noise) -> Hiding:
    """Return the instructions of a device's task: the bound, and the deviation of the noise."""
    return Hiding(clip=noise.clip, deviation=noise.clip * noise.noise_multiplier)
