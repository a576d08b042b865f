"""Builds the model of an artifact set for training in PyTorch.

`simulation.torch_backend.steppers` computes losses and gradients with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import Manifest
from models import Tier, build
from models.architecture import Architecture
from models.zoo.layers import StaticBatchNorm, set_mode
from models.zoo.own_forward_norm import OwnForwardNorm
from models.zoo.single_output import take_single_output

_INFER = "onnx/infer"
_PROBE_BATCH = 2


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
