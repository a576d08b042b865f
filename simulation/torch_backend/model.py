"""A model of the zoo for training in PyTorch itself: alone, or once for several virtual devices at
the same time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import Manifest
from models import Tier, build
from models.architecture import Architecture
from models.zoo.dropout import NoiseLayer
from models.zoo.layers import StaticBatchNorm, set_mode
from simulation.torch_backend.rows import Layout
from trainer_export.loss import Answer, loss_named
from trainer_export.losses.cross_entropy import MaskedCrossEntropy

Losses = Callable[[Any, Tensor, Tensor | None], Tensor]

_PROBE_BATCH = 2
_IGNORED = -100  # what PyTorch's cross entropy takes for a label that counts for nothing


class NativeNorm(StaticBatchNorm):
    """A static batch norm that trains with PyTorch's own kernel, faster than the one written for
    exporters.
    """

    def __init__(self, norm: StaticBatchNorm) -> None:
        """Stand in for a norm, with its parameters and its mode."""
        super().__init__(norm.weight.numel(), norm.eps)
        self.weight = norm.weight
        self.bias = norm.bias
        self.mode = norm.mode

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each channel of x, float32 [batch, channels, ...], and scale and shift it."""
        if self.mode != "train":
            return super().forward(x)
        # Not functional.batch_norm, which refuses a last batch of one sample; its variance is 0
        # here as on a device.
        return torch.batch_norm(
            x,
            self.weight,
            self.bias,
            None,
            None,
            True,
            0.0,
            self.eps,
            torch.backends.cudnn.enabled,
        )


def make_model(
    architecture: Architecture,
    settings: Mapping[str, Any] | None,
    manifest: Manifest,
    base: Mapping[str, NDArray[Any]] | None = None,
) -> nn.Module:
    """Build the module of an artifact set, in mode train, with its frozen tensors as buffers.

    Raises:
        ConfigError: the module does not have the parameters of the manifest.
        PlanError: the architecture has no such tier.
    """
    module: nn.Module = build(architecture, Tier(manifest.width, manifest.depth), settings=settings)
    for name, value in (base or {}).items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        delattr(owner, leaf)
        owner.register_buffer(leaf, torch.tensor(value), persistent=False)
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    expected = {spec.name: spec.shape for spec in manifest.parameters}
    if found != expected:
        odd = min(
            name for name, _ in found.items() ^ expected.items()
        )  # the same one whatever the order of a set
        raise ConfigError(
            f"{architecture.name} with these settings is not what artifact set {manifest.arch} "
            f"{manifest.tier} was "
            f"exported from: parameter {odd} is {found.get(odd, 'missing')} here and "
            f"{expected.get(odd, 'missing')} "
            "there; export the set again"
        )
    for path, norm in [
        (path, m) for path, m in module.named_modules() if isinstance(m, StaticBatchNorm)
    ]:
        module.set_submodule(path, NativeNorm(norm))
    return set_mode(module, "train")


def used_parameters(module: nn.Module, manifest: Manifest) -> frozenset[str]:
    """The parameters that the logits of a module in mode train depend on.

    Torch's random state stays as it was.
    """
    parameters = dict(module.named_parameters())
    dtype = torch.int64 if manifest.input_dtype == "int64" else torch.float32
    with torch.random.fork_rng(devices=[]):
        heads = tree_leaves(module(torch.zeros((_PROBE_BATCH, *manifest.input_shape), dtype=dtype)))
        total = sum(head.sum() for head in heads)
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        total, list(parameters.values()), allow_unused=True
    )
    return frozenset(
        name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None
    )


class Batch(NamedTuple):
    """A batch of each of some devices."""

    devices: slice  # which rows take part, ``k`` of them one behind the other
    x: Tensor  # samples ``[k, batch, ...]``
    # labels, int64 ``[k, batch]``, or ``[k, batch, tokens]`` where negative ones count for nothing
    y: Tensor
    mask: (
        Tensor | None
    )  # 1 for labels the device has, else 0, float32 ``[k, classes]``; None where all have all labels
    noise: Sequence[
        Tensor
    ]  # float32 ``[k, batch, ...]`` for every noise layer of the manifest, in its order


class Stepper(Protocol):
    """Computes losses and gradients of some devices on one batch each."""

    def gradients(self, batch: Batch, out: Tensor) -> Tensor:
        """One forward and backward pass: the mean loss of each batch, float32 ``[k]``.

        What is in `out`, float32 ``[k, trained entries]``, is overwritten with the gradients.
        """
        ...


class Alone:
    """One device: the module's own parameters, which become views of the row, float32 ``[1,
    entries]``, run eagerly.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        rows: Tensor,
        manifest: Manifest,
        losses: Losses,
    ) -> None:
        self._module = module
        self._places = layout.moving
        self._layers = _noise_layers(module, manifest)
        self._losses = losses
        parameters = dict(module.named_parameters())
        for place in layout.places:
            parameters[place.name].data = place.view(rows[0])
        self._moving = [parameters[place.name] for place in self._places]

    def gradients(self, batch: Batch, out: Tensor) -> Tensor:  # noqa: D102 - the protocol says what it does
        assert batch.devices == slice(0, 1)
        with _fed(self._layers, [numbers[0] for numbers in batch.noise]):
            logits = self._module(batch.x[0])
        losses = self._losses(tree_map(lambda head: head[None], logits), batch.y, batch.mask)
        found = torch.autograd.grad(losses[0], self._moving, materialize_grads=True)
        torch.cat(
            [place.row(g[None]) for place, g in zip(self._places, found, strict=True)],
            1,
            out=out,
        )
        return losses.detach()


class Together:
    """Several devices: the module mapped over their rows, so that their convolutions become one
    grouped one.

    The gradient of the sum of the losses is that of every device's own loss, since no row meets
    another. The module is in mode train, and its own parameters are not used; the layout is not
    channels-last, in which grouped convolutions have no kernel of their own.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        rows: Tensor,
        manifest: Manifest,
        losses: Losses,
    ) -> None:
        self._places = layout.moving
        self._rows = rows
        self._layout = layout
        self._losses = losses
        self._leaves: dict[tuple[int, int], dict[str, Tensor]] = {}
        layers = _noise_layers(module, manifest)

        def forward(parameters: dict[str, Tensor], x: Tensor, noise: Sequence[Tensor]) -> Any:
            with _fed(layers, noise):
                return functional_call(module, parameters, (x,))

        self._forward = torch.vmap(forward)

    def gradients(self, batch: Batch, out: Tensor) -> Tensor:  # noqa: D102 - the protocol says what it does
        leaves = self._views(batch.devices)
        losses = self._losses(
            self._forward(leaves, batch.x, list(batch.noise)), batch.y, batch.mask
        )
        moving = [leaves[place.name] for place in self._places]
        found = torch.autograd.grad(losses.sum(), moving, materialize_grads=True)
        torch.cat(
            [place.row(g) for place, g in zip(self._places, found, strict=True)],
            1,
            out=out,
        )
        return losses.detach()

    def _views(self, devices: slice) -> dict[str, Tensor]:
        """The parameters of some rows, as leaves of the graph.

        Made once, since they share the rows' memory.
        """
        key = devices.start, devices.stop
        if key not in self._leaves:
            rows = self._rows[devices]
            views = {place.name: place.view(rows).detach() for place in self._layout.places}
            self._leaves[key] = {name: view.requires_grad_() for name, view in views.items()}
        return self._leaves[key]


def _noise_layers(module: nn.Module, manifest: Manifest) -> list[NoiseLayer]:
    layers = [module.get_submodule(spec.name) for spec in manifest.noise]
    return [layer for layer in layers if isinstance(layer, NoiseLayer)]


@contextmanager
def _fed(layers: Sequence[NoiseLayer], noise: Sequence[Tensor]) -> Iterator[None]:
    """Give layers their random numbers for one forward pass."""
    for layer, numbers in zip(layers, noise, strict=True):
        layer.noise = numbers
        layer.used = 0
    try:
        yield
    finally:
        for layer in layers:
            layer.noise = None


def losses_of(manifest: Manifest, own: Mapping[str, Any]) -> Losses:
    """The loss of a recipe, for one batch of each of some devices.

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

    def each(outputs: Any, y: Tensor, mask: Tensor | None) -> Tensor:
        masks: Sequence[Tensor | None] = [None] * len(y)
        if loss.masked:
            masks = list(
                torch.ones((len(y), manifest.classes), device=y.device) if mask is None else mask
            )
        rows = [tree_map(lambda head, place=place: head[place], outputs) for place in range(len(y))]
        return torch.stack(
            [
                loss.value(output, Answer(*pair))
                for output, *pair in zip(rows, y, masks, strict=True)
            ]
        )

    return each


def _cross_entropies(logits: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """The loss of `trainer_export.losses.cross_entropy` for every device.

    Arguments as for `Batch`.
    """
    devices = len(y)
    if mask is not None:
        logits = logits * mask.view(devices, *[1] * (logits.dim() - 2), -1)
    labels = y.flatten()
    if y.dim() == 2:
        return (
            functional.cross_entropy(logits.flatten(0, -2), labels, reduction="none")
            .view(devices, -1)
            .mean(1)
        )
    # A batch in which no label counts has loss 0; PyTorch's own mean would be 0 / 0.
    labels = torch.where(labels < 0, _IGNORED, labels)
    losses = functional.cross_entropy(
        logits.flatten(0, -2), labels, ignore_index=_IGNORED, reduction="none"
    )
    counts = (y >= 0).flatten(1).sum(1).clamp(min=1)
    return losses.view(devices, -1).sum(1) / counts
