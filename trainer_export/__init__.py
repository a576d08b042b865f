"""PyTorch to train, eval, statistics and infer graphs for every sub-model shape, checked and stored."""

from trainer_export.artifact_set import FORMATS, TierReport, export_architecture
from trainer_export.optimizers.adam import Adam, AdamW
from trainer_export.optimizers.sgd import Sgd
from trainer_export.progress import Progress
from trainer_export.recipe import Recipe
from trainer_export.tier_set import Format

__all__ = [
    "FORMATS",
    "Adam",
    "AdamW",
    "Format",
    "Progress",
    "Recipe",
    "Sgd",
    "TierReport",
    "export_architecture",
]
