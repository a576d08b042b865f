"""The sub-models that an export is about: their settings, their weights, what they take and return."""

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
    "layers must not depend on sizes that are cut, which may be equal in one tier and not in another: decide by a"
    " setting, or by the sizes of the whole model, cut.axes[name].size"
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
        path = ([*traceback.current_meta.get("nn_module_stack", {}).values()] or [("",)])[-1][0]
        if (
            name.startswith("conv") and len(args) > 3
        ):  # what a width must not change, though shapes may stay
            name = f"{name} with stride, padding and dilation {args[3:6]}"
        if name != "__get__":
            self.places.setdefault(
                (path, name),
                place_of(traceback.current_meta, line_of(sys._getframe(1))),  # noqa: SLF001
            )
        return func(*args, **(kwargs or {}))


def calls_of(model: nn.Module, x: Tensor) -> Calls:
    """What a model calls on a batch of samples; its mode is changed."""
    calls = _Calls()
    with recorded_modules(model), calls:
        set_mode(model, "eval")(x)
    return calls.places


def refuse_unlike(
    name: str, narrow: nn.Module, theirs: Calls, shapes: Mapping[str, Any], x: Tensor
) -> None:
    """See that a tier, whose mode is changed, computes what the whole model does on the same
    samples.

    Theirs are `calls_of` the model of full width and the same depth; the shapes are those of the
    tier's parameters, as the layout foresees them.

    Raises:
        ExportError: it has other parameters, or calls functions that the whole model does not, or
            the reverse.
    """
    found = {key: tuple(value.shape) for key, value in narrow.named_parameters()}
    odd = next((key for key in {**shapes, **found} if shapes.get(key) != found.get(key)), None)
    if odd is not None:
        raise ExportError(
            f"{name}: parameter {odd} is {found.get(odd, 'not there')} and should be {shapes.get(odd, 'not there')};"
            f" {_REMEDY}"
        )
    ours = calls_of(narrow, x)
    for more, less, where in ((ours, theirs, "alone"), (theirs, ours, "not")):
        for key, place in more.items():
            if key not in less:
                raise ExportError(f"{name}: {place} calls {key[1]} {where} in this tier; {_REMEDY}")


@dataclass(frozen=True)
class Export:
    """What an export is about.

    Attributes:
        seed: of the weights and batches of the checks.
        whole: what the whole model calls, by depth and labels, once it is asked for.
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
        """What the model takes and returns, but for the shape of its labels."""
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
        """What a tier takes and returns.

        Raises:
            ExportError: as of `Signature.with_places_of`; or its classes are in another dimension,
                which as many places hide and one class more shows.
        """
        layout = self.layout
        row = self.signature
        known = replace(
            row, classes=layout.classes_of(tier), base=tuple(layout.base_of(tier))
        ).with_places_of(module)
        place = 0 if len(known.places) > 1 else len(known.places)
        if not known.heads and known.output.count(known.classes) > 1:
            more = Cut(tier.width, tier.depth, enlarge=dict.fromkeys(layout.label_axes, 1))
            with torch.random.fork_rng(devices=[]), SkippedInitialization(), torch.no_grad():
                wider = prepared(call_builder(self.arch, more, self.settings(tier)), "eval")(
                    known.samples(2)
                )
            grown = [at for at, size in enumerate(wider.shape[1:]) if size != known.output[at]]
            if grown and place not in grown:
                raise ExportError(
                    f"the model has its classes in dimension {grown[0] + 1} of [batch, {str([*known.output])[1:]}, and"
                    f" graphs read them in dimension {place + 1}; let it return"
                    f" logits.movedim({grown[0] + 1}, {place + 1})"
                )
        return known

    def settings(self, tier: Tier) -> Mapping[str, Any]:
        """The settings that a tier is built with: the model's, with the labels of a head of its
        own.
        """
        own = tier.id in self.layout.heads
        return (
            {**self.layout.settings, "classes": self.layout.classes_of(tier)}
            if own
            else self.layout.settings
        )

    def head(self, tier: Tier) -> dict[str, NDArray[np.float32]]:
        """The initial weights of a tier's own head; empty if it has none.

        Raises:
            ConfigError: the model's setting ``classes`` is not the number of its labels.
        """
        own = self.layout.own_head(tier)
        shapes = self.layout.shapes(tier)
        drawn = initial_weights(self.arch, self.settings(tier), self.seed) if own else {}
        head = {item.name: drawn[item.name] for item in own}
        for name, value in head.items():
            if value.shape != shapes[name]:
                raise ConfigError(
                    f"{self.arch.name}: with classes = {self.layout.classes_of(tier)} the parameter {name} is"
                    f" {value.shape}, not {shapes[name]}; a head of a tier's own needs `classes` to be its labels"
                )
        return head

    def module(self, tier: Tier) -> nn.Module:
        """The sub-model with weights that hide nothing, as a scale of 1, a shift of 0 or a matrix
        of zeros would.

        Raises:
            ExportError: it is another model each time it is built, or than the whole one, not only
                a narrower one.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            module: nn.Module = build(self.arch, tier, settings=self.settings(tier))
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.dim() < 2 or not parameter.any():
                        parameter.add_(0.1 * torch.randn_like(parameter))
            name = f"{self.arch.name}: {tier.id}"
            x = random_samples(module, self.arch.row(self.layout.settings))
            with SkippedInitialization():
                again = build(self.arch, tier, settings=self.settings(tier))
            _refuse_drawn(name, prepared(module, "eval"), again, x)
            if tier.width < 1:
                shapes = {**self.layout.shapes(tier), **self.layout.base_of(tier)}
                samples_ = self.signature.samples(2)
                refuse_unlike(
                    name,
                    prepared(module, "eval"),
                    self._whole(tier, samples_),
                    shapes,
                    samples_,
                )
        return module

    def _whole(self, tier: Tier, x: Tensor) -> Calls:
        key = (tier.depth, self.layout.classes_of(tier))
        if key not in self.whole:
            with SkippedInitialization():
                whole = build(self.arch, 1.0, tier.depth, self.settings(tier))
            self.whole[key] = calls_of(whole, x)
        return self.whole[key]


def _refuse_drawn(name: str, module: nn.Module, again: nn.Module, x: Tensor) -> None:
    """See that a tier built twice is one model, since each is built anew and given its parameters,
    nothing else.
    """
    with torch.no_grad():
        first = heads_of(module(x)).values()
        second = heads_of(
            functional_call(set_mode(again, "eval"), dict(module.named_parameters()), (x,))
        ).values()
    if not all(torch.allclose(a, b, equal_nan=True) for a, b in zip(first, second, strict=True)):
        pairs = zip(module.named_buffers(), again.named_buffers(), strict=True)
        odd = next(
            (f"buffer {path}" for (path, a), (_, b) in pairs if not torch.equal(a, b)),
            "what is no parameter",
        )
        raise ExportError(
            f"{name}: built a second time the model computes something else with the same parameters, so that tiers"
            f" would not be parts of one model: {odd} is drawn at random; make it a parameter with"
            " requires_grad=False, which all tiers share"
        )
