"""Random batches that graphs are checked with, a function of a seed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer_export.loss import Loss
from trainer_export.losses.cross_entropy import MaskedCrossEntropy
from trainer_export.losses.own import OwnLoss
from trainer_export.model_inputs import Signature

# Of one sample's training step: a model above is compared on fewer samples, in a third of the time.
_LARGE_FLOPS = 2e9
_IGNORED = 0.2  # share of the labels of tokens that count for nothing
_CROSS_ENTROPY = MaskedCrossEntropy()


@dataclass(frozen=True)
class SizedBatches:
    """Random batches for a model and a loss.

    Attributes:
        vocabulary: tokens are below it.
        sizes: samples of each batch, in turn.
        steps: of a training that is compared.
    """

    signature: Signature
    vocabulary: int = 2
    sizes: tuple[int, ...] = (8, 3)
    seed: int = 0
    loss: Loss = _CROSS_ENTROPY
    steps: int = 6

    def sized_for(self, flops: int) -> "SizedBatches":
        """Return two steps of unlike sizes for a large model.

        Args:
            flops: of a training step for one sample.
        """
        if flops <= _LARGE_FLOPS:
            return self
        return replace(self, sizes=(3, 2), steps=2)

    def take(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some pairs of samples and targets, the same ones for the same seed."""
        generator = torch.Generator().manual_seed(self.seed)
        for i in range(count):
            shape = (self.sizes[i % len(self.sizes)], *self.signature.input_shape)
            if self.signature.input_dtype == "int64":
                x = torch.randint(0, self.vocabulary, shape, generator=generator)
            else:
                x = torch.randn(shape, generator=generator)
                x = self.signature.row.with_tokens(x, self.vocabulary) if self.signature.row else x
            yield x, self._targets(shape[0], generator)

    def _targets(self, count: int, generator: torch.Generator) -> Tensor:
        if isinstance(self.loss, OwnLoss):
            return self.loss.drawn(count, generator)
        target = self.loss.target(self.signature.output)
        shape = (count, *target.shape)
        if target.dtype == "float32":
            bounds = self.loss.bounds
            if bounds is not None:  # both ends, as labels that hold or do not
                return (
                    torch.randint(0, 2, shape, generator=generator) * (bounds[1] - bounds[0])
                    + bounds[0]
                )
            return torch.randn(shape, generator=generator)
        y = torch.randint(0, self.signature.classes, shape, generator=generator)
        if target.shape:  # some labels that count for nothing
            y = torch.where(torch.rand(shape, generator=generator) < _IGNORED, -1, y)
        return y

    def again(self, attempt: int) -> "SizedBatches":
        """Return other batches of the same kind, the same ones for attempt 0."""
        return replace(self, seed=self.seed + attempt)

    def noise(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        count: int,
        step: int,
    ) -> dict[str, Tensor]:
        """Return random numbers for layers that need them, other ones at each step.

        Args:
            shapes: for one sample, by path of the layer.
            count: number of samples.
            step: number of the step.
        """
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        noises = {}
        for path, shape in shapes.items():
            noises[path] = torch.rand((count, *shape), generator=generator)
        return noises

    def mask(self) -> Tensor:
        """Return a label mask with one label missing, so that masking is compared too."""
        mask = torch.ones(self.signature.classes)
        mask[-1] = 0.0
        return mask
