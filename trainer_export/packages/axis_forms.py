"""How a cut is asked for an argument of a constructor: for a width, heads, groups or a depth."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import did_you_mean
from models.cut import CLASSES, Cut

Kind = Literal["width", "heads", "groups", "depth", "classes"]

CUTS: tuple[Kind, ...] = ("width", "heads", "groups")
"""The forms of axes that a width cuts."""

_NUMBERED = ("heads", "groups")


@dataclass(frozen=True)
class AxisForm:
    """One question to a cut, and the arguments that its answer sets.

    Example:
        >>> form = AxisForm("hidden_size", "heads", 64, 4, {"hidden_size": 4})
        >>> form.sizes(Cut(0.5)), form.call
        ({'hidden_size': 32}, "cut.heads('hidden_size', 4, 16)")
    """

    name: str  # of the axis
    kind: Kind
    size: int  # of the whole model: units, or dimensions of all heads, or blocks
    heads: int  # for ``heads`` their number, else 1
    factors: Mapping[str, int]  # by place: what the answer is multiplied by

    @property
    def call(self) -> str:
        """The question as a builder writes it."""
        if self.kind == "heads":
            return f"cut.heads({self.name!r}, {self.heads}, {self.size // self.heads})"
        if self.kind in {"width", "groups"}:
            return f"cut.{self.kind}({self.name!r}, {self.size})"
        return f"cut.{self.kind}({CLASSES if self.kind == CLASSES else self.size})"

    def sizes(self, cut: Cut) -> dict[str, int]:
        """Ask a cut, and return the size of each argument.

        The number of labels is that of the whole model.
        """
        answer = self._ask(cut)
        sizes: dict[str, int] = {}
        for place, factor in self.factors.items():
            sizes[place] = answer * factor
        return sizes

    def sizes_at(self, width: float) -> dict[str, int]:
        """Return the size of each argument in a tier of some width and full depth."""
        return self.sizes(Cut(width))

    def _ask(self, cut: Cut) -> int:
        if self.kind == "heads":
            return cut.heads(self.name, self.heads, self.size // self.heads)
        if self.kind == "width":
            return cut.width(self.name, self.size)
        if self.kind == "groups":
            return cut.groups(self.name, self.size)
        if self.kind == "depth":
            return cut.depth(self.size)
        return cut.classes(self.size)


def width_form(place: str, size: int) -> AxisForm:
    """Return the plain width of an argument."""
    return AxisForm(place, "width", size, 1, {place: 1})


def heads_form(place: str, size: int, heads: int) -> AxisForm:
    """Return an argument that is cut inside its heads."""
    return AxisForm(place, "heads", size, heads, {place: heads})


def groups_form(sizes: Mapping[str, int], groups: int) -> AxisForm:
    """Return arguments of which whole groups are cut together, see `name_of`.

    Example:
        >>> sizes = {"text_config.num_heads": 4, "vision_config.num_heads": 8}
        >>> groups_form(sizes, 4).call
        "cut.groups('num_heads', 4)"
    """
    factors = {place: size // groups for place, size in sizes.items()}
    return AxisForm(name_of([*sizes]), "groups", groups, 1, factors)


def name_of(places: Sequence[str]) -> str:
    """Return the name of an axis: that of its first argument, without its place in a model's part.

    Args:
        places: the arguments. If all lie in one configuration of a part, that stays in the name.
    """
    first = places[0]
    part, dot, argument = first.rpartition(".")
    is_shared = all(place.startswith(part + dot) for place in places)
    # The number of an entry in a list says nothing without the list.
    return first if is_shared or argument.isdecimal() else argument


def depth_form(place: str, size: int) -> AxisForm:
    """Return an argument that is the number of blocks."""
    return AxisForm(place, "depth", size, 1, {place: 1})


def classes_form(place: str, size: int) -> AxisForm:
    """Return an argument that is the number of labels."""
    return AxisForm(CLASSES, "classes", size, 1, {place: 1})


@dataclass(frozen=True)
class AxisDecision:
    """A user's decision about arguments: a form, or that they stay whole."""

    places: tuple[str, ...]
    form: AxisForm | None  # None for arguments that stay whole


def parse_pins(texts: Iterable[str], sizes: Mapping[str, int]) -> tuple[AxisDecision, ...]:
    """Read ``--axis`` options, such as ``hidden_size=heads:4,name=stream`` or ``n_inner=off``.

    Args:
        texts: the options. Arguments that one axis cuts are joined by ``+``.
        sizes: the whole numbers of the model's arguments.

    Raises:
        ConfigError: if one is not of this form, or there is no such argument, or two options
            decide about one argument, or give one name to two axes.
    """
    pins: list[AxisDecision] = []
    decided: set[str] = set()
    names: set[str] = set()
    for text in texts:
        pin = _parse_pin(text, sizes)
        again = decided.intersection(pin.places)
        if again:
            raise ConfigError(f"--axis: {text!r}: another option decides about {min(again)}")
        decided.update(pin.places)
        if pin.form is not None and pin.form.name in names:
            raise ConfigError(
                f"--axis: {text!r}: another axis has the name {pin.form.name!r}; choose different"
                " names, or cut both arguments together, as in A+B=groups:4"
            )
        if pin.form is not None:
            names.add(pin.form.name)
        pins.append(pin)
    return tuple(pins)


def _parse_pin(text: str, sizes: Mapping[str, int]) -> AxisDecision:
    left, equals, right = text.partition("=")
    places = tuple(left.split("+"))
    form_text, _, name = right.partition(",name=")
    if not equals or not form_text:
        raise ConfigError(
            f"--axis: {text!r} is not of the form ARGUMENT=FORM, for example hidden_size=heads:4"
        )
    chosen: dict[str, int] = {}
    for place in places:
        if place not in sizes:
            raise ConfigError(
                f"--axis: {place!r} is not an argument whose value is a whole number above 1"
                f"{did_you_mean(place, sizes)}; there are {', '.join(sizes) or 'none'}"
            )
        chosen[place] = sizes[place]
    if form_text == "off":
        if name:
            raise ConfigError(f"--axis: {text!r}: off makes no axis, so leave out the name")
        return AxisDecision(places, None)
    form = _parse_form(text, form_text, chosen)
    return AxisDecision(places, replace(form, name=name) if name else form)


def _parse_form(
    text: str,
    form_text: str,
    chosen: Mapping[str, int],
) -> AxisForm:
    kind, _, number_text = form_text.partition(":")
    place, size = next(iter(chosen.items()))
    number = _parse_number(text, kind, number_text)
    for value in chosen.values():
        if number < 1 or value % number:
            raise ConfigError(f"--axis: {text!r}: {number} does not divide {value}")
    if kind == "groups":
        return groups_form(chosen, number)
    if len(chosen) > 1:
        raise ConfigError(f"--axis: {text!r}: only groups cut several arguments together")
    if kind == "heads":
        return heads_form(place, size, number)
    forms = {"width": width_form, "depth": depth_form, "classes": classes_form}
    return forms[kind](place, size)


def _parse_number(text: str, kind: str, number: str) -> int:
    """Return the number behind a form; 1 for a form that has none."""
    if kind not in get_args(Kind):
        raise ConfigError(
            f"--axis: {text!r} has no form {kind!r}; there are {', '.join(get_args(Kind))}, off"
        )
    if (kind in _NUMBERED) != number.isdigit():
        raise ConfigError(
            f"--axis: {text!r}: heads and groups need a number, as in heads:4; other forms"
            " take none"
        )
    return int(number) if number else 1
