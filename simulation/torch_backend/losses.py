"""Losses of a recipe for several virtual devices at once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from fleet_protocol.manifest import Manifest
from trainer_export.loss import Answer, Loss, loss_named
from trainer_export.losses.cross_entropy import MaskedCrossEntropy

Losses = Callable[[Any, Tensor, Tensor | None], Tensor]
_IGNORED = -100  # the value of an ignored label in PyTorch's cross entropy


def losses_of(
    manifest: Manifest, own: Mapping[str, Any], knobs: Mapping[str, float] | None = None
) -> Losses:
    """Return the loss of a recipe, for one batch of each of some devices.

    Args:
        manifest: manifest with the recipe.
        own: losses of the user's file by name.
        knobs: numbers of the loss that a task sets; None for none.

    Returns:
        A function of outputs ``[k, batch, ...]``, targets ``[k, batch, ...]`` and masks ``[k,
        classes]`` (or None, for ones) to the mean loss of each batch, float32 ``[k]``.

    Raises:
        ConfigError: the loss is not known here.
    """
    spec = manifest.recipe.loss
    loss = loss_named(spec.name, spec.settings, own)
    if loss == MaskedCrossEntropy():
        return _cross_entropies
    return _DeviceLosses(loss, manifest.classes, knobs or {})


@dataclass(frozen=True)
class _DeviceLosses:
    """Computes any loss of a recipe, device by device."""

    loss: Loss
    classes: int
    knobs: Mapping[str, float]

    def __call__(self, outputs: Any, y: Tensor, mask: Tensor | None) -> Tensor:
        """Return the loss of each device; for arguments see `losses_of`."""
        if self.loss.masked and mask is None:
            mask = torch.ones((len(y), self.classes), device=y.device)
        losses = []
        for device, labels in enumerate(y):
            output = tree_map(lambda head, device=device: head[device], outputs)
            device_mask = None
            if self.loss.masked and mask is not None:
                device_mask = mask[device]
            answer = Answer(labels, device_mask, knobs=self.knobs)
            losses.append(self.loss.value(output, answer))
        return torch.stack(losses)


def _cross_entropies(logits: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Return the loss of `trainer_export.losses.cross_entropy` for every device.

    Arguments are as for `Batch`.
    """
    devices = len(y)
    if mask is not None:
        logits = logits * mask.view(devices, *[1] * (logits.dim() - 2), -1)
    logits = logits.flatten(0, -2)
    labels = y.flatten()
    if y.dim() == 2:
        losses = functional.cross_entropy(logits, labels, reduction="none")
        return losses.view(devices, -1).mean(1)
    labels = torch.where(labels < 0, _IGNORED, labels)
    losses = functional.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="none")
    # A batch in which no label counts has loss 0; PyTorch's own mean would be 0 / 0.
    counts = (y >= 0).flatten(1).sum(1).clamp(min=1)
    return losses.view(devices, -1).sum(1) / counts
