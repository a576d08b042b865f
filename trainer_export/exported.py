"""The sub-models of an export: their settings, their weights, and what they take and return."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import traceback
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fleet_protocol.errors import ConfigError, ExportError
from models.architecture import Architecture, build, call_builder
from models.cut import Cut
from models.layout import Layout
from models.tier import Tier
from models.zoo.builds import SkippedInitialization
from models.zoo.initial_state import initial_weights
from models.zoo.layers import set_mode
from models.zoo.randomized_model import random_samples
from trainer_export.batch_uses import Known
from trainer_export.model_inputs import Signature, heads_of, prepared
from trainer_export.progress import Counter
from trainer_export.recipe import Recipe
from trainer_export.rewriting import line_of, place_of
from trainer_export.traced_program import recorded_modules

_REMEDY = (
    "layers must not depend on sizes that are cut, which may be equal in one tier and not in"
    " another: decide by a setting, or by the sizes of the whole model, cut.axes[name].size"
)

Calls = Mapping[tuple[str, str], str]
"""The place of the first call, by module and name of the function."""


class _Calls(TorchFunctionMode):
    """Remembers where each module called which function first."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[tuple[str, str], str] = {}

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name.startswith("conv") and len(args) > 3:
            # A width must not change these, though shapes may stay.
            name = f"{name} with stride, padding and dilation {args[3:6]}"
        if name != "__get__":
            modules = list(traceback.current_meta.get("nn_module_stack", {}).values())
            path = modules[-1][0] if modules else ""
            line = line_of(sys._getframe(1))  # noqa: SLF001 - no public name
            self.places.setdefault((path, name), place_of(traceback.current_meta, line))
        return func(*args, **(kwargs or {}))


def calls_of(model: nn.Module, x: Tensor) -> Calls:
    """Return what a model calls on a batch of samples; its mode is changed."""
    calls = _Calls()
    with recorded_modules(model), calls:
        set_mode(model, "eval")(x)
    return calls.places


def refuse_unlike(
    name: str,
    narrow: nn.Module,
    whole: Calls,
    shapes: Mapping[str, Any],
    x: Tensor,
) -> None:
    """Check that a tier computes what the whole model does on the same samples.

    Args:
        name: of the tier, for messages.
        narrow: the tier, whose mode is changed.
        whole: `calls_of` the model of full width and the same depth.
        shapes: of the tier's parameters, as the layout foresees them.
        x: samples.

    Raises:
        ExportError: it has other parameters, or calls functions that the whole model does not, or
            the reverse.
    """
    actual = {}
    for key, value in narrow.named_parameters():
        actual[key] = tuple(value.shape)
    for key in {**shapes, **actual}:
        if shapes.get(key) != actual.get(key):
            raise ExportError(
                f"{name}: parameter {key} is {actual.get(key, 'not there')} and should be"
                f" {shapes.get(key, 'not there')}; {_REMEDY}"
            )
    own = calls_of(narrow, x)
    for call, place in own.items():
        if call not in whole:
            raise ExportError(f"{name}: {place} calls {call[1]} alone in this tier; {_REMEDY}")
    for call, place in whole.items():
        if call not in own:
            raise ExportError(f"{name}: {place} calls {call[1]} not in this tier; {_REMEDY}")


@dataclass(frozen=True)
class Export:
    """An architecture with its layout and recipe, of which tiers are exported.

    Attributes:
        seed: of the weights and batches of the checks.
        whole: what the whole model calls, by depth and labels, once a tier needs it.
        known: where the programs of the tiers that were traced use the batch.
    """

    arch: Architecture
    layout: Layout
    recipe: Recipe
    seed: int = 0
    counter: Counter = field(default_factory=lambda: Counter(None, 0))
    whole: dict[tuple[int, int], Calls] = field(default_factory=dict, repr=False, compare=False)
    known: Known = field(default_factory=dict, repr=False, compare=False)

    @property
    def signature(self) -> Signature:
        """The model's inputs and outputs, but for the shape of its labels."""
        layout = self.layout
        row = self.arch.row(self.layout.settings)
        return Signature(
            layout.input_shape,
            layout.input_dtype,
            layout.classes,
            row=row,
            known=self.known,
        )

    def signature_of(self, tier: Tier, module: nn.Module) -> Signature:
        """Return what a tier takes and returns.

        Raises:
            ExportError: as of `Signature.with_places_of`; or its classes are in another dimension,
                which as many places hide and one class more shows.
        """
        layout = self.layout
        signature = replace(
            self.signature,
            classes=layout.classes_of(tier),
            base=tuple(layout.base_of(tier)),
        ).with_places_of(module)
        if not signature.heads and signature.output.count(signature.classes) > 1:
            self._refuse_other_dimension(tier, signature)
        if not layout.label_axes and self.recipe.loss.target(signature.output).dtype == "int64":
            raise ConfigError(
                f"{self.arch.name} never asked for cut.classes(n), and the loss "
                f"{self.recipe.loss.name} learns labels: make the last layer with it, as in "
                "nn.Linear(hidden, cut.classes(classes)), or choose a loss of numbers, such as "
                "mean-squared-error"
            )
        return signature

    def _refuse_other_dimension(self, tier: Tier, signature: Signature) -> None:
        """Refuse a model whose classes are not where graphs read them.

        With one class more the dimension of the classes is larger.
        """
        read = 0 if len(signature.places) > 1 else len(signature.places)
        more = Cut(tier.width, tier.depth, enlarge=dict.fromkeys(self.layout.label_axes, 1))
        with torch.random.fork_rng(devices=[]), SkippedInitialization(), torch.no_grad():
            built = call_builder(self.arch, more, self.settings(tier))
            output = prepared(built, "eval")(signature.samples(2))
        sizes = enumerate(output.shape[1:])
        grown = []
        for axis, size in sizes:
            if size != signature.output[axis]:
                grown.append(axis)
        if grown and read not in grown:
            raise ExportError(
                f"the model has its classes in dimension {grown[0] + 1} of"
                f" [batch, {str([*signature.output])[1:]}, and graphs read them in dimension"
                f" {read + 1}; let it return logits.movedim({grown[0] + 1}, {read + 1})"
            )

    def settings(self, tier: Tier) -> Mapping[str, Any]:
        """Return the settings that a tier is built with.

        They are the model's, with the labels of a head of its own.
        """
        settings = self.layout.settings
        if tier.id not in self.layout.heads:
            return settings
        return {**settings, "classes": self.layout.classes_of(tier)}

    def head(self, tier: Tier) -> dict[str, NDArray[np.float32]]:
        """Return the initial weights of a tier's own head; empty if it has none.

        Raises:
            ConfigError: the model's setting ``classes`` is not the number of its labels.
        """
        own = self.layout.own_head(tier)
        if not own:
            return {}
        shapes = self.layout.shapes(tier)
        drawn = initial_weights(self.arch, self.settings(tier), self.seed)
        head = {}
        for parameter in own:
            head[parameter.name] = drawn[parameter.name]
        for name, value in head.items():
            if value.shape != shapes[name]:
                raise ConfigError(
                    f"{self.arch.name}: with classes = {self.layout.classes_of(tier)} the parameter"
                    f" {name} is {value.shape}, not {shapes[name]}; a head of a tier's own needs"
                    " `classes` to be its labels"
                )
        return head

    def module(self, tier: Tier) -> nn.Module:
        """Return the sub-model with weights that hide nothing.

        A scale of 1, a shift of 0 or a matrix of zeros would.

        Raises:
            ExportError: it is another model each time it is built, or than the whole one, not only
                a narrower one.
        """
        settings = self.settings(tier)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            module: nn.Module = build(self.arch, tier, settings=settings)
            _shake(module)
            name = f"{self.arch.name}: {tier.id}"
            x = random_samples(module, self.arch.row(self.layout.settings))
            with SkippedInitialization():
                again = build(self.arch, tier, settings=settings)
            _refuse_drawn(name, prepared(module, "eval"), again, x)
            if tier.width < 1:
                shapes = {**self.layout.shapes(tier), **self.layout.base_of(tier)}
                zeros = self.signature.samples(2)
                whole = self._whole(tier, zeros)
                refuse_unlike(name, prepared(module, "eval"), whole, shapes, zeros)
        return module

    def _whole(self, tier: Tier, x: Tensor) -> Calls:
        """Return what the model of full width calls; it is built once for all tiers."""
        key = (tier.depth, self.layout.classes_of(tier))
        if key not in self.whole:
            with SkippedInitialization():
                whole = build(self.arch, 1.0, tier.depth, self.settings(tier))
            self.whole[key] = calls_of(whole, x)
        return self.whole[key]


def _shake(module: nn.Module) -> None:
    """Move vectors, and tensors of zeros, away from where they begin."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() < 2 or not parameter.any():
                parameter.add_(0.1 * torch.randn_like(parameter))


def _refuse_drawn(name: str, module: nn.Module, again: nn.Module, x: Tensor) -> None:
    """Check that a tier built twice is one model.

    Each is built anew and gets its parameters, nothing else.
    """
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    with torch.no_grad():
        first = heads_of(module(x)).values()
        second = heads_of(functional_call(set_mode(again, "eval"), parameters, (x,))).values()
    if all(torch.allclose(a, b, equal_nan=True) for a, b in zip(first, second, strict=True)):
        return
    drawn = "what is no parameter"
    for (path, a), (_, b) in zip(module.named_buffers(), again.named_buffers(), strict=True):
        if not torch.equal(a, b):
            drawn = f"buffer {path}"
            break
    raise ExportError(
        f"{name}: built a second time the model computes something else with the same parameters,"
        f" so that tiers would not be parts of one model: {drawn} is drawn at random; make it a"
        " parameter with requires_grad=False, which all tiers share"
    )
