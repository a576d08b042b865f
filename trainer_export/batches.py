"""Random batches for the checks of graphs, derived from a seed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer_export.loss import Loss
from trainer_export.losses.cross_entropy import MaskedCrossEntropy
from trainer_export.losses.own import OwnLoss
from trainer_export.model_inputs import Signature

# FLOPs of a training step for one sample; larger models are compared on fewer samples, which takes
# a third of the time.
_LARGE_FLOPS = 2e9
_IGNORED = 0.2  # share of token labels that are ignored
_CROSS_ENTROPY = MaskedCrossEntropy()


@dataclass(frozen=True)
class SizedBatches:
    """Random batches for a model and a loss.

    Attributes:
        vocabulary: upper bound of the tokens.
        sizes: number of samples of each batch, in turn.
        steps: number of compared training steps.
    """

    signature: Signature
    vocabulary: int = 2
    sizes: tuple[int, ...] = (8, 3)
    seed: int = 0
    loss: Loss = _CROSS_ENTROPY
    steps: int = 6

    def sized_for(self, flops: int) -> "SizedBatches":
        """Return two steps of different sizes for a large model.

        Args:
            flops: FLOPs of a training step for one sample.
        """
        if flops <= _LARGE_FLOPS:
            return self
        return self.few()

    def few(self) -> "SizedBatches":
        """Return two steps of different sizes on few samples.

        Two, because some terms are 0 in the first step, such as the distance from its start.
        """
        return replace(self, sizes=(3, 2), steps=2)

    def draw(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of samples and targets; the seed determines them."""
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
            if bounds is not None:  # include both ends, for targets that are true or false
                return (
                    torch.randint(0, 2, shape, generator=generator) * (bounds[1] - bounds[0])
                    + bounds[0]
                )
            return torch.randn(shape, generator=generator)
        y = torch.randint(0, self.signature.classes, shape, generator=generator)
        if target.shape:  # some ignored labels
            y = torch.where(
                torch.rand(shape, generator=generator) < _IGNORED,
                -1,
                y,
            )
        return y

    def again(self, attempt: int) -> "SizedBatches":
        """Return different batches of the same kind; attempt 0 returns these batches."""
        return replace(self, seed=self.seed + attempt)

    def noise(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        count: int,
        step: int,
    ) -> dict[str, Tensor]:
        """Return random numbers for layers that need them; they differ between steps.

        Args:
            shapes: shapes for one sample, by path of the layer.
            count: number of samples.
            step: number of the step.
        """
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        noises = {}
        for path, shape in shapes.items():
            noises[path] = torch.rand((count, *shape), generator=generator)
        return noises

    def mask(self) -> Tensor:
        """Return a label mask without one label, so that masking is compared, too."""
        mask = torch.ones(self.signature.classes)
        mask[-1] = 0.0
        return mask
