"""Computes losses and gradients in PyTorch.

The module of a model runs for a single virtual device, or once for several devices together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from fleet_protocol.manifest import Manifest
from models.zoo.dropout import NoiseLayer
from simulation.torch_backend.losses import Losses
from simulation.torch_backend.rows import Layout, Place


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
