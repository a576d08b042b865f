"""The sub-models of an export: their settings, weights, inputs and outputs."""

import logging
import sys
from collections.abc import Mapping, Sequence
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
from models.shares import frozen_parameters
from models.tier import Tier
from models.zoo.builds import SkippedInitialization
from models.zoo.initial_state import initial_weights
from models.zoo.layers import set_mode
from models.zoo.randomized_model import random_samples
from models.zoo.single_output import take_single_output
from trainer_export.batch_uses import Known
from trainer_export.model_inputs import Signature, heads_of, prepared
from trainer_export.progress import Counter
from trainer_export.recipe import Recipe
from trainer_export.rewriting import line_of, place_of
from trainer_export.traced_program import recorded_modules

_LOG = logging.getLogger(__name__)

_REMEDY = (
    "the choice of layers must not depend on cut sizes, because these may be equal in only some"
    " tiers: use a setting, or the sizes of the whole model, cut.axes[name].size"
)

_SHAPING = frozenset(
    {
        "__len__",
        "broadcast_to",
        "contiguous",
        "dim",
        "expand",
        "expand_as",
        "flatten",
        "reshape",
        "size",
        "squeeze",
        "unflatten",
        "unsqueeze",
        "view",
    }
)
"""Functions that read sizes, or compute nothing and keep the order of entries.

A model may leave one out where it would change nothing, such as the copies of key heads in a tier
with as many query heads.
"""

Calls = Mapping[tuple[str, str], str]
"""The location of the first call, by module and name of the function."""


class _Calls(TorchFunctionMode):
    """Records the location of the first call of each function by each module."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[tuple[str, str], str] = {}

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name.startswith("conv") and len(args) > 3:
            # A width must not change these arguments, even if the shapes stay the same.
            name = f"{name} with stride, padding and dilation {args[3:6]}"
        # Reading an attribute of a tensor computes nothing.
        if name != "__get__" and not _only_shapes(name, args):
            modules = list(traceback.current_meta.get("nn_module_stack", {}).values())
            path = modules[-1][0] if modules else ""
            line = line_of(sys._getframe(1))  # noqa: SLF001 - no public name
            # Only the first call: that a module calls a function more often shows in its shapes.
            self.places.setdefault((path, name), place_of(traceback.current_meta, line))
        return func(*args, **(kwargs or {}))


def _only_shapes(name: str, args: Sequence[Any]) -> bool:
    """Return whether a call reads a size, or keeps all entries in their order."""
    if name != "__getitem__":
        return name in _SHAPING
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(_takes_all(entry) for entry in index)


def _takes_all(part: Any) -> bool:
    """Return whether a part of an index takes a whole dimension, or adds one."""
    if isinstance(part, slice):
        return part == slice(None)
    return part is None or part is ...


def calls_of(model: nn.Module, x: Tensor) -> Calls:
    """Return the functions that a model calls on a batch; its mode is changed."""
    calls = _Calls()
    # In evaluation, because layers of training draw noise and would differ without a cut.
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
    """Check that a tier calls the same functions as the whole model on the same samples.

    Args:
        name: name of the tier, for messages.
        narrow: the tier, whose mode is changed.
        whole: `calls_of` the model of full width and the same depth.
        shapes: shapes of the tier's parameters in the layout.
        x: samples.

    Raises:
        ExportError: its parameters differ from the layout, or only one of the two models calls some
            function.
    """
    actual = {}
    for key, value in narrow.named_parameters():
        actual[key] = tuple(value.shape)
    # Both directions, in the order of the layout first: a missing parameter and one too many are
    # both errors.
    for key in {**shapes, **actual}:
        if shapes.get(key) != actual.get(key):
            raise ExportError(
                f"{name}: parameter {key} is {actual.get(key, 'missing')} and should be"
                f" {shapes.get(key, 'missing')}; {_REMEDY}"
            )
    own = calls_of(narrow, x)
    for call, place in own.items():
        if call not in whole:
            raise ExportError(
                f"{name}: {place} calls {call[1]} in this tier, but not in the whole model;"
                f" {_REMEDY}"
            )
    for call, place in whole.items():
        if call not in own:
            raise ExportError(
                f"{name}: {place} does not call {call[1]} in this tier, but does in the whole"
                f" model; {_REMEDY}"
            )


@dataclass(frozen=True)
class Export:
    """An architecture with its layout and recipe, whose tiers are exported.

    Attributes:
        seed: seed of the weights and batches of the checks.
        whole: calls of the whole model by depth and labels, computed when a tier needs them.
        known: where the traced programs use the batch size.
    """

    arch: Architecture
    layout: Layout
    recipe: Recipe
    seed: int = 0
    counter: Counter = field(default_factory=lambda: Counter(None, 0))
    whole: dict[tuple[int, int], Calls] = field(
        default_factory=dict,
        repr=False,
        compare=False,
    )
    known: Known = field(default_factory=dict, repr=False, compare=False)

    @property
    def signature(self) -> Signature:
        """The model's inputs and outputs, without the shape of its labels."""
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
        """Return the inputs and outputs of a tier.

        Raises:
            ExportError: see `Signature.with_places_of`; also if the classes are in another
                dimension. If that has the same size, only a model with one class more reveals it.
        """
        layout = self.layout
        signature = replace(
            self.signature,
            classes=layout.classes_of(tier),
            base=(*frozen_parameters(layout, tier), *layout.base_of(tier)),
        ).with_places_of(module)
        if not signature.heads and signature.output.count(signature.classes) > 1:
            self._refuse_other_dimension(tier, signature)
        if not layout.label_axes and self.recipe.loss.target(signature.output).dtype == "int64":
            raise ConfigError(
                f"{self.arch.name} does not use cut.classes(n), which the loss"
                f" {self.recipe.loss.name} for labels needs: build the last layer with it, as in"
                " nn.Linear(hidden, cut.classes(classes)), or choose a loss for numbers, such"
                " as mean-squared-error"
            )
        return signature

    def _refuse_other_dimension(
        self,
        tier: Tier,
        signature: Signature,
    ) -> None:
        """Refuse a model whose classes are not in the dimension that graphs read.

        With one class more the dimension of the classes is larger.
        """
        read = 0 if len(signature.places) > 1 else len(signature.places)
        # Samples of zeros suffice, since only shapes are compared.
        more = Cut(
            tier.width,
            tier.depth,
            enlarge=dict.fromkeys(self.layout.label_axes, 1),
        )
        with torch.random.fork_rng(devices=[]), SkippedInitialization(), torch.no_grad():
            # Not `build`, because an enlarged cut is not a tier.
            built = self._returning_one(call_builder(self.arch, more, self.settings(tier)))
            output = prepared(built, "eval")(signature.samples(2))
        sizes = enumerate(output.shape[1:])
        grown = []
        for axis, size in sizes:
            if size != signature.output[axis]:
                grown.append(axis)
        if grown and read not in grown:
            raise ExportError(
                f"the model has its classes in dimension {grown[0] + 1} of [batch,"
                f" {str([*signature.output])[1:]}, but graphs read them in dimension {read + 1};"
                f" return logits.movedim({grown[0] + 1}, {read + 1})"
            )

    def settings(self, tier: Tier) -> Mapping[str, Any]:
        """Return the settings to build a tier with.

        They are the model's settings, with the number of labels of the tier's own head.
        """
        settings = self.layout.settings
        if tier.id not in self.layout.heads:
            return settings
        return {**settings, "classes": self.layout.classes_of(tier)}

    def head(self, tier: Tier) -> dict[str, NDArray[np.float32]]:
        """Return the initial weights of a tier's own head; empty if it has none.

        Raises:
            ConfigError: the model's setting ``classes`` is not its number of labels.
        """
        own = self.layout.own_head(tier)
        if not own:
            return {}
        shapes = self.layout.shapes(tier)
        # Drawn with a whole model of the tier's labels, so that the head starts like any head of
        # its size.
        drawn = initial_weights(self.arch, self.settings(tier), self.seed)
        head = {}
        for parameter in own:
            head[parameter.name] = drawn[parameter.name]
        for name, value in head.items():
            if value.shape != shapes[name]:
                raise ConfigError(
                    f"{self.arch.name}: with classes = {self.layout.classes_of(tier)} the"
                    f" parameter {name} is {value.shape}, not {shapes[name]}; for a tier with"
                    " its own head, the setting `classes` must be the number of labels"
                )
        return head

    def module(self, tier: Tier) -> nn.Module:
        """Return the sub-model with weights that reveal every difference.

        A scale of 1, a shift of 0 or a matrix of zeros would hide some. Parameters that the tier
        does not train have no gradient, so that a trace of the backward pass ends above them.

        Raises:
            ExportError: the model differs each time it is built, or differs from the whole model in
                more than its width.
        """
        settings = self.settings(tier)
        # The checks draw as well, and must not change what the caller draws afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            module = self._returning_one(build(self.arch, tier, settings=settings))
            _shake(module)
            name = f"{self.arch.name}: {tier.id}"
            x = random_samples(module, self.arch.row(self.layout.settings))
            # Weights are not needed a second time: the first model's are put in.
            with SkippedInitialization():
                again = self._returning_one(build(self.arch, tier, settings=settings))
            _refuse_drawn(name, prepared(module, "eval"), again, x)
            # A tier of full width is the whole model of its depth; there is nothing to compare it
            # with.
            if tier.width < 1:
                shapes = {**self.layout.shapes(tier), **self.layout.base_of(tier)}
                zeros = self.signature.samples(2)
                whole = self._whole(tier, zeros)
                refuse_unlike(name, prepared(module, "eval"), whole, shapes, zeros)
            else:
                self._warn_of_output(name, module, x)
        for frozen in frozen_parameters(self.layout, tier):
            module.get_parameter(frozen).requires_grad_(False)
        return module

    def _warn_of_output(self, name: str, module: nn.Module, x: Tensor) -> None:
        """Print what looks wrong in a model's outputs for the loss."""
        with torch.no_grad():
            warning = self.recipe.loss.output_warning(prepared(module, "eval")(x))
        if warning is not None:
            _LOG.warning("%s: %s", name, warning)

    def _returning_one(self, module: nn.Module) -> nn.Module:
        """Let a model return the one tensor that it returns in an object.

        A loss that takes several outputs gets what the model returns.
        """
        if self.recipe.loss.takes_several:
            return module
        return take_single_output(module)

    def _whole(self, tier: Tier, x: Tensor) -> Calls:
        """Return the calls of the model of full width, which is built once for all tiers."""
        key = (tier.depth, self.layout.classes_of(tier))
        if key not in self.whole:
            with SkippedInitialization():
                built = build(self.arch, 1.0, tier.depth, self.settings(tier))
            whole = self._returning_one(built)
            self.whole[key] = calls_of(whole, x)
        return self.whole[key]


def _shake(module: nn.Module) -> None:
    """Move vectors, and tensors of zeros, away from their initial values."""
    with torch.no_grad():
        for parameter in module.parameters():
            # Scales begin at 1, shifts and some matrices at 0: there a wrong gradient could pass as
            # a right one.
            if parameter.dim() < 2 or not parameter.any():
                parameter.add_(0.1 * torch.randn_like(parameter))


def _refuse_drawn(
    name: str,
    module: nn.Module,
    again: nn.Module,
    x: Tensor,
) -> None:
    """Check that building a tier twice gives the same model.

    The model is built again and gets only the parameters.
    """
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    with torch.no_grad():
        first = heads_of(module(x)).values()
        second = heads_of(
            functional_call(
                set_mode(again, "eval"),
                parameters,
                (x,),
            )
        ).values()
    pairs = zip(first, second, strict=True)
    are_close = all(torch.allclose(left, right, equal_nan=True) for left, right in pairs)
    if are_close:
        return
    drawn = "a tensor that is not a parameter"
    for (path, a), (_, b) in zip(module.named_buffers(), again.named_buffers(), strict=True):
        if not torch.equal(a, b):
            drawn = f"buffer {path}"
            break
    raise ExportError(
        f"{name}: a second instance with the same parameters gives different outputs, so the"
        f" tiers would not be parts of one model: {drawn} is drawn at random; make it a"
        " parameter with requires_grad=False, which all tiers share"
    )
