"""PyTorch to train, eval, statistics and infer graphs for every sub-model shape, checked and stored."""

from __future__ import annotations

from trainer_export.artifact_set import FORMATS, Format, Progress, TierReport, export_architecture
from trainer_export.recipe import Recipe

__all__ = ["FORMATS", "Format", "Progress", "Recipe", "TierReport", "export_architecture"]
