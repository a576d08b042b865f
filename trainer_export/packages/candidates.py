"""The forms in which discovery tries arguments: each apart, and several of them as one axis.

Some arguments only hold together. Layers that a residual joins have equal sizes, each stage of a
list may have to follow the one before it, and query heads are shared out among key heads.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from trainer_export.packages.axis_forms import (
    AxisForm,
    groups_form,
    heads_form,
    name_of,
    width_form,
)
from trainer_export.packages.survey import OTHER_LAYERS, Effect, Surveyed, with_effects

_ROUNDINGS = (8, 16, 4, 32)
_HALF = 2  # what the constructor divides by, as where a hidden layer has half of the size
_MOST_HEADS = 3  # numbers of heads that are tried for one argument
_MANY = 12  # arguments that change sizes
_MOST_SETS = 8  # sets of arguments that are tried as one axis

Entries = tuple[Surveyed, ...]


def hides_sizes(movable: Sequence[Surveyed]) -> bool:
    """Return whether arguments hardly show the sizes of the layers, or each layer has its own.

    Args:
        movable: the arguments that change sizes.
    """
    is_rounded = any(entry.effect is Effect.ROUNDED for entry in movable)
    return is_rounded or len(movable) > _MANY


def forms_of(entry: Surveyed, heads: Sequence[Surveyed]) -> Iterator[AxisForm]:
    """Yield the forms of one argument, the plain width first.

    Args:
        entry: the argument.
        heads: the arguments that count heads or groups.
    """
    if entry.effect is Effect.WIDTH:
        yield width_form(entry.place, entry.size)
        numbers: dict[int, None] = {}
        for head in heads:
            has_dimensions = 1 < head.size < entry.size
            if has_dimensions and entry.size % head.size == 0:
                numbers[head.size] = None
        for number in [*numbers][:_MOST_HEADS]:
            yield heads_form(entry.place, entry.size, number)
        if entry.size % _HALF == 0 and entry.size > _HALF:
            yield groups_form({entry.place: entry.size}, entry.size // _HALF)
    # A constructor that refuses one more unit may take a whole group more, as for a norm of groups.
    if entry.effect is Effect.ROUNDED or entry.reason:
        for units in _ROUNDINGS:
            if entry.size % units == 0 and entry.size > units:
                yield groups_form({entry.place: entry.size}, entry.size // units)


def usual_assignments(
    movable: Sequence[Surveyed], heads: Sequence[Surveyed]
) -> Iterator[list[AxisForm]]:
    """Yield forms of all arguments that may hold at once, the finest first.

    The usual form is the plain width, or inside of heads if the constructor refuses one more unit.
    Then equal sizes in lists become one axis each, then the entries of a list, and then all equal
    sizes, such as those of a stream and the layer that reads it. At last, streams of heads are cut
    by whole heads, as where the dimensions of a head have fixed places.
    """
    partitions = (
        _joined(movable, _place_of),
        _joined(movable, _size_in_list),
        _joined(movable, _list_or_place),
        _joined(movable, _size_of),
    )
    yielded: list[list[AxisForm]] = []
    for partition in partitions:
        forms = _usual_forms(partition, heads)
        if forms and forms not in yielded:
            yielded.append(forms)
            yield forms
    for forms in [*yielded]:
        whole = _by_whole_heads(forms, heads)
        if whole not in yielded:
            yielded.append(whole)
            yield whole


def _by_whole_heads(forms: Sequence[AxisForm], heads: Sequence[Surveyed]) -> list[AxisForm]:
    """Return forms with streams cut by whole heads, instead of inside each, with their number."""
    streams: defaultdict[int, dict[str, int]] = defaultdict(dict)
    changed: list[AxisForm] = []
    for form in forms:
        if form.kind == "heads":
            streams[form.heads] |= dict.fromkeys(form.factors, form.size)
        else:
            changed.append(form)
    for number, places in streams.items():
        counts: dict[str, int] = {}
        for entry in heads:
            if entry.size == number:
                counts[entry.place] = number
        # A number of heads that changes sizes has its own form, which this one replaces.
        changed = _without_places(changed, counts)
        changed.append(groups_form({**counts, **places}, number))
    return changed


def _without_places(forms: Iterable[AxisForm], places: Mapping[str, int]) -> list[AxisForm]:
    """Return the forms that cut none of some arguments."""
    kept: list[AxisForm] = []
    for form in forms:
        if form.factors.keys().isdisjoint(places):
            kept.append(form)
    return kept


def _usual_forms(partition: Iterable[Entries], heads: Sequence[Surveyed]) -> list[AxisForm] | None:
    """Return a form for each set of arguments; None if a set has no form."""
    forms: list[AxisForm] = []
    for entries in partition:
        usual = [*_forms_of_set(entries, heads)]
        if not usual:
            return None
        # The first form adds one unit, which this constructor may have refused.
        is_second = len(usual) > 1 and _refuses_one_more(entries)
        forms.append(usual[1] if is_second else usual[0])
    return forms


def _refuses_one_more(entries: Entries) -> bool:
    """Return whether the constructor refuses one more unit of an argument, or of several."""
    for entry in entries:
        # Sizes that change together fit to one another, so that no other layers are built.
        is_fitted = len(entries) > 1 and entry.reason == OTHER_LAYERS
        if entry.effect is not Effect.ROUNDED and entry.reason and not is_fitted:
            return True
    return False


def _forms_of_set(entries: Entries, heads: Sequence[Surveyed]) -> Iterator[AxisForm]:
    """Yield the forms of one argument, or of several that one axis cuts."""
    if len(entries) == 1:
        return forms_of(entries[0], heads)
    return joint_forms(entries, heads)


def joint_forms(entries: Sequence[Surveyed], heads: Sequence[Surveyed]) -> Iterator[AxisForm]:
    """Yield the forms of one axis that cuts several arguments together.

    It scales all of them, or cuts equal sizes inside their heads.
    """
    scaled = joint_form(entries)
    if scaled is not None:
        yield scaled
    places = sizes_by_place(entries)
    if len(set(places.values())) > 1:
        return
    for form in forms_of(entries[0], heads):
        if form.kind == "heads":
            factors = dict.fromkeys(places, form.heads)
            yield replace(form, name=name_of([*places]), factors=factors)


def joint_form(entries: Sequence[Surveyed]) -> AxisForm | None:
    """Return one axis that scales several arguments together; None if they have no common unit.

    It is named after the list of which it scales the entries, else as `groups_form` names it.
    """
    places = sizes_by_place(entries)
    units = math.gcd(*places.values())
    if any(entry.effect is Effect.ROUNDED for entry in entries):
        units //= _rounding_of(units)
    # Sizes without a common unit can only be scaled together by 1.
    if units == 1:
        return None
    form = groups_form(places, units)
    lists = set(map(_list_of, places))
    if len(lists) > 1 or len(set(places.values())) == 1:
        return form  # a list may have several sets of equal sizes
    return replace(form, name=lists.pop() or form.name)


def sizes_by_place(entries: Iterable[Surveyed]) -> dict[str, int]:
    """Return the sizes of arguments by their places."""
    sizes: dict[str, int] = {}
    for entry in entries:
        sizes[entry.place] = entry.size
    return sizes


def alike_sets(entries: Sequence[Surveyed]) -> Iterator[Entries]:
    """Yield sets of arguments that one axis may have to cut: equal sizes, and entries of a list."""
    yielded: list[Entries] = []
    for joint in (*_joined(entries, _size_of), *_joined(entries, _list_or_place)):
        if len(joint) > 1 and joint not in yielded:
            yielded.append(joint)
    # Each set costs builds of the model, so their number is bounded.
    yield from yielded[:_MOST_SETS]


def shared_head_sets(entries: Sequence[Surveyed]) -> Iterator[Entries]:
    """Yield all numbers of heads as one set, without and with a stream that consists of them.

    So each key head keeps its number of query heads.
    """
    numbers = _numbers_of_heads(entries)
    if len(numbers) < 2 or not _are_multiples(numbers):
        return
    yield tuple(numbers)
    most = max(number.size for number in numbers)
    for stream in _streams(entries):
        if stream not in numbers and stream.size % most == 0:
            yield (*numbers, stream)


def head_sets(undecided: Sequence[Surveyed]) -> Iterator[Entries]:
    """Yield sets of arguments that one axis may cut by whole heads, the smallest sets first."""
    numbers = _numbers_of_heads(undecided)
    for number in numbers:
        yield (number,)
    for stream in _streams(undecided):
        for number in numbers:
            has_dimensions = number.size < stream.size
            if has_dimensions and stream.size % number.size == 0:
                yield (number, stream)


def _streams(entries: Sequence[Surveyed]) -> list[Surveyed]:
    """Return arguments that may consist of heads, at last those that change only with the heads."""
    widths = with_effects(entries, Effect.WIDTH)
    refused = with_effects(entries, Effect.REFUSED)
    return [*widths, *refused]


def named_heads(entries: Iterable[Surveyed]) -> list[Surveyed]:
    """Return the arguments that are numbers of heads or of groups, judging by their names."""
    named: list[Surveyed] = []
    for entry in entries:
        if "head" in entry.place or "group" in entry.place:
            named.append(entry)
    return named


def _joined(entries: Iterable[Surveyed], key_of: Callable[[Surveyed], Hashable]) -> list[Entries]:
    """Put the arguments of each key together, in their order."""
    sets: defaultdict[Hashable, list[Surveyed]] = defaultdict(list)
    for entry in entries:
        sets[key_of(entry)].append(entry)
    joined: list[Entries] = []
    for joint in sets.values():
        joined.append(tuple(joint))
    return joined


def _rounding_of(size: int) -> int:
    """Return what a size may be rounded to multiples of; the size if no usual number divides it."""
    for rounding in _ROUNDINGS:
        if size % rounding == 0:
            return rounding
    return size


def _place_of(entry: Surveyed) -> str:
    return entry.place


def _size_of(entry: Surveyed) -> int:
    return entry.size


def _size_in_list(entry: Surveyed) -> Hashable:
    """Let equal sizes of lists be joined: of stages that follow one another, or have a residual."""
    return entry.size if _list_of(entry.place) else entry.place


def _list_or_place(entry: Surveyed) -> str:
    return _list_of(entry.place) or entry.place


def _list_of(place: str) -> str:
    """Return the list that a place is within; "" for a place in none."""
    names = place.split(".")
    for number, name in enumerate(names):
        if name.isdecimal():
            return ".".join(names[:number])
    return ""


def _numbers_of_heads(entries: Iterable[Surveyed]) -> list[Surveyed]:
    """Return the arguments that count heads; the size of a head is another."""
    numbers: list[Surveyed] = []
    for entry in named_heads(entries):
        is_size_of_head = "dim" in entry.place or "size" in entry.place
        if not is_size_of_head:
            numbers.append(entry)
    return numbers


def _are_multiples(entries: Sequence[Surveyed]) -> bool:
    smallest = min(entry.size for entry in entries)
    return all(entry.size % smallest == 0 for entry in entries)
