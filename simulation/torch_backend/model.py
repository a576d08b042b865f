"""Builds a model of the zoo for training in PyTorch, and computes losses and gradients with it.

A model runs for a single virtual device, or once for several devices together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import Manifest
from models import Tier, build
from models.architecture import Architecture
from models.zoo.dropout import NoiseLayer
from models.zoo.layers import StaticBatchNorm, set_mode
from models.zoo.own_forward_norm import OwnForwardNorm
from models.zoo.single_output import take_single_output
from simulation.torch_backend.rows import Layout, Place
from trainer_export.loss import Answer, Loss, loss_named
from trainer_export.losses.cross_entropy import MaskedCrossEntropy

Losses = Callable[[Any, Tensor, Tensor | None], Tensor]

_INFER = "onnx/infer"
_PROBE_BATCH = 2
_IGNORED = -100  # the value of an ignored label in PyTorch's cross entropy


class NativeNorm(StaticBatchNorm):
    """A static batch norm that trains with PyTorch's own kernel.

    That kernel is faster than the one written for exporters.
    """

    def __init__(self, norm: StaticBatchNorm) -> None:
        """Stand in for a norm, with its parameters and its mode."""
        super().__init__(norm.weight.numel(), norm.eps)
        self.weight = norm.weight
        self.bias = norm.bias
        self.mode = norm.mode

    @override
    def normalise(self, x: Tensor) -> Tensor:
        if self.mode != "train":
            return super().normalise(x)
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

    Args:
        architecture: the architecture of the set.
        settings: the settings of its export.
        manifest: manifest of the set.
        base: the frozen tensors of the set by name.

    Raises:
        ConfigError: the module does not have the parameters of the manifest.
        PlanError: the architecture has no such tier.
    """
    module: nn.Module = build(architecture, Tier(manifest.width, manifest.depth), settings=settings)
    for name, value in (base or {}).items():
        _freeze(module, name, value)
    _check_shapes(module, architecture, manifest)
    if [spec.name for spec in manifest.graphs[_INFER].outputs] == ["logits"]:
        take_single_output(module)
    # A list, because the loop changes the tree of modules.
    for path, submodule in list(module.named_modules()):
        is_plain = isinstance(submodule, StaticBatchNorm)
        if is_plain and not isinstance(submodule, OwnForwardNorm):
            module.set_submodule(path, NativeNorm(submodule))
    return set_mode(module, "train")


def _freeze(module: nn.Module, name: str, value: NDArray[Any]) -> None:
    """Replace a parameter or buffer of a module by a buffer with this value."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    delattr(owner, attribute)
    owner.register_buffer(attribute, torch.tensor(value), persistent=False)


def _check_shapes(
    module: nn.Module,
    architecture: Architecture,
    manifest: Manifest,
) -> None:
    """Check that a module has the parameters of the manifest; a ConfigError if not."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    expected = {spec.name: spec.shape for spec in manifest.parameters}
    if shapes == expected:
        return
    # The least name, so that the message does not depend on the order of a set.
    odd, _ = min(shapes.items() ^ expected.items())
    raise ConfigError(
        f"{architecture.name} with these settings does not match artifact set {manifest.arch}"
        f" {manifest.tier}: parameter {odd} is {shapes.get(odd, 'missing')} in the model and"
        f" {expected.get(odd, 'missing')} in the set; export the set again"
    )


def used_parameters(module: nn.Module, manifest: Manifest) -> frozenset[str]:
    """Return the parameters that the logits of a module in mode train depend on.

    Torch's random state stays as it was.
    """
    parameters = dict(module.named_parameters())
    # Zeros do: which parameters the logits depend on does not change with the samples.
    dtype = torch.int64 if manifest.input_dtype == "int64" else torch.float32
    samples = torch.zeros((_PROBE_BATCH, *manifest.input_shape), dtype=dtype)
    with torch.random.fork_rng(devices=[]):
        # Noise layers draw from torch's generator here.
        logits = module(samples)
        total = sum(head.sum() for head in tree_leaves(logits))
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        total, list(parameters.values()), allow_unused=True
    )
    used = set()
    for name, gradient in zip(parameters, gradients, strict=True):
        # PyTorch has None for a parameter that the logits do not depend on.
        if gradient is not None:
            used.add(name)
    return frozenset(used)


class Batch(NamedTuple):
    """A batch of each of some devices.

    Attributes:
        devices: which rows take part: ``k`` consecutive ones.
        x: samples ``[k, batch, ...]``.
        y: labels, int64 ``[k, batch]``, or ``[k, batch, tokens]`` where negative ones count for
            nothing.
        mask: 1 for labels the device has, else 0, float32 ``[k, classes]``; None where all have
            all labels.
        noise: float32 ``[k, batch, ...]`` for every noise layer of the manifest, in its order.
    """

    devices: slice
    x: Tensor
    y: Tensor
    mask: Tensor | None
    noise: Sequence[Tensor]


class Stepper(Protocol):
    """Computes losses and gradients of some devices on one batch each."""

    def gradients(self, batch: Batch, out: Tensor) -> Tensor:
        """Do one forward and backward pass.

        Args:
            batch: batch of each device.
            out: overwritten with the gradients, float32 ``[k, trained entries]``.

        Returns:
            The mean loss of each batch, float32 ``[k]``.
        """
        ...


class SingleStepper:
    """Trains one device with the module's own parameters, run eagerly.

    The parameters become views of the device's row, float32 ``[1, entries]``.
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
        self._places = layout.trained_places
        self._layers = _noise_layers(module, manifest)
        self._losses = losses
        parameters = dict(module.named_parameters())
        for place in layout.places:
            parameters[place.name].data = place.view(rows[0])
        self._trained = [parameters[place.name] for place in self._places]

    def gradients(self, batch: Batch, out: Tensor) -> Tensor:  # noqa: D102
        assert batch.devices == slice(0, 1)
        with _feed_noise(self._layers, [numbers[0] for numbers in batch.noise]):
            logits = self._module(batch.x[0])
        stacked_logits = tree_map(_add_device, logits)
        losses = self._losses(stacked_logits, batch.y, batch.mask)
        # Zeros for a parameter that only the proximal pull moves.
        gradients = torch.autograd.grad(
            losses[0],
            self._trained,
            materialize_grads=True,
        )
        _write_rows(self._places, tree_map(_add_device, gradients), out)
        return losses.detach()


class GroupStepper:
    """Trains several devices by mapping the module over their rows.

    Their convolutions become one grouped convolution. The gradient of the sum of the losses is that
    of every device's own loss, since no row meets another. The module is in mode train, and its own
    parameters are not used; the layout is not channels-last, for which grouped convolutions have no
    kernel.
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
        self._places = layout.trained_places
        self._rows = rows
        self._layout = layout
        self._losses = losses
        self._layers = _noise_layers(module, manifest)
        self._parameters: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._forward = torch.vmap(self._forward_single)

    def gradients(self, batch: Batch, out: Tensor) -> Tensor:  # noqa: D102
        parameters = self._parameters_of(batch.devices)
        logits = self._forward(parameters, batch.x, list(batch.noise))
        losses = self._losses(logits, batch.y, batch.mask)
        trained = [parameters[place.name] for place in self._places]
        gradients = torch.autograd.grad(
            losses.sum(),
            trained,
            materialize_grads=True,
        )
        _write_rows(self._places, gradients, out)
        return losses.detach()

    def _forward_single(
        self,
        parameters: dict[str, Tensor],
        x: Tensor,
        noise: Sequence[Tensor],
    ) -> Any:
        """Return the logits of one device; torch.vmap maps it over several."""
        with _feed_noise(self._layers, noise):
            return functional_call(self._module, parameters, (x,))

    def _parameters_of(self, devices: slice) -> dict[str, Tensor]:
        """Return the parameters of some rows, for which gradients can be computed.

        They are made once, since they share the rows' memory.
        """
        key = (devices.start, devices.stop)
        if key not in self._parameters:
            rows = self._rows[devices]
            parameters = {}
            for place in self._layout.places:
                view = place.view(rows).detach()
                parameters[place.name] = view.requires_grad_()
            self._parameters[key] = parameters
        return self._parameters[key]


def _add_device(tensor: Tensor) -> Tensor:
    """Return a tensor of one device as one of several devices, ``[1, ...]``."""
    return tensor[None]


def _write_rows(
    places: Sequence[Place],
    gradients: Sequence[Tensor],
    out: Tensor,
) -> None:
    """Write the gradient of each place, float32 ``[k, *shape]``, to the rows of `out`."""
    entries = []
    for place, gradient in zip(places, gradients, strict=True):
        entries.append(place.row(gradient))
    torch.cat(entries, 1, out=out)


def _noise_layers(module: nn.Module, manifest: Manifest) -> list[NoiseLayer]:
    """Return the layers that need noise, in the order of the manifest."""
    layers = []
    for spec in manifest.noise:
        layer = module.get_submodule(spec.name)
        if isinstance(layer, NoiseLayer):
            layers.append(layer)
    return layers


@contextmanager
def _feed_noise(layers: Sequence[NoiseLayer], noise: Sequence[Tensor]) -> Iterator[None]:
    """Give layers their random numbers for one forward pass."""
    for layer, numbers in zip(layers, noise, strict=True):
        layer.noise = numbers
        layer.used = 0
    try:
        yield
    finally:
        for layer in layers:
            layer.noise = None


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
