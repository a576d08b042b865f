"""Reads the file of a table, ``tables/<name>.toml``, and those it is based on, into an experiment.

The arms are the combinations of the axes' options. What an arm is comes in layers: a layer applies
to the arms and scales that it names in ``when``, and the later of two counts, those of a scale
after all others. A word in braces is the arm's option of that axis, or one of the layers'
``words``. Layers, claims and notes follow those of the base.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from broker_server.settings.assignment import LEVEL_RATES
from fleet_protocol.configuration import read_toml, validate_config
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel
from reproduction.experiment import (
    SCALES,
    Arm,
    Claim,
    Experiment,
    Scale,
    Settings,
    merged,
    suggestion,
)
from reproduction.measures import measure_named
from reproduction.published import PublishedTable, published_tables

_FOLDER = Path(__file__).with_name("tables")
_JOINED = ("layers", "claims", "notes", "checked")
Options = Mapping[str, tuple[str, ...]]


class Layer(FrozenModel):
    """What some arms have in common.

    Attributes:
        when: options by axis or ``scale``, one or several; empty for all arms and scales.
        words: to stand in texts and settings.
        measures: names of the figures that are read, instead of those of earlier layers.
        published: row and column of the published number, by measure.
        settings: tables of ``sim.toml``, and of `_computed`.
    """

    when: Mapping[str, str | tuple[str, ...]] = {}
    words: Mapping[str, str] = {}
    measures: tuple[str, ...] = ()
    published: Mapping[str, tuple[str, str]] = {}
    settings: Mapping[str, Any] = {}

    def applies(self, options: Mapping[str, str]) -> bool:
        """Whether it is for an arm of these options.

        Those it names and the arm lacks are for other tables.
        """
        return all(
            options.get(axis) in ((wanted,) if isinstance(wanted, str) else wanted)
            for axis, wanted in self.when.items()
        )


class ClaimLines(FrozenModel):
    """Claims of one form: `Claim`, once for each combination of the words in ``each``."""

    says: str = ""
    left: str
    right: str = ""
    measure: str
    how: Literal["minus", "over"] = "minus"
    at_least: float | None = None
    at_most: float | None = None
    each: tuple[Options, ...] = ({},)

    @model_validator(mode="after")
    def _bound(self) -> Self:
        if bool(self.says) != (self.at_least is not None or self.at_most is not None):
            raise ValueError(
                "a claim says something and has a bound, and what has none is a comparison that says nothing"
            )
        return self

    def claims(self) -> Iterator[Claim]:
        """All of them."""
        for words in (words for options in self.each for words in _combinations(options)):
            texts = {
                name: getattr(self, name).format(**words)
                for name in ("says", "left", "right", "measure")
            }
            yield Claim(**texts, how=self.how, at_least=self.at_least, at_most=self.at_most)


class TableFile(FrozenModel):
    """One table: the attributes of `Experiment`, and what makes its arms.

    Attributes:
        paper: whose file of published numbers counts; empty where no paper has the table, as is the
            url.
        test: paired differences (logarithms of ratios) over the seeds, with the t interval of 95 %.
        arm: name of an arm, with the axes' names in braces.
        about: what an arm is, likewise.
        axes: their options; the first varies slowest.
        without: combinations of options of which there is no arm.
    """

    paper: str
    url: str
    section: int
    rank: int
    title: str
    arm: str
    about: str
    axes: Options
    without: tuple[Options, ...] = ()
    seeds: Mapping[Scale, tuple[int, ...]]
    selected: Mapping[Scale, tuple[str, ...]]
    decides: Mapping[Scale, int] = Field(min_length=3)
    test: Literal["paired-t-95"]
    layers: tuple[Layer, ...]
    claims: tuple[ClaimLines, ...]
    notes: tuple[str, ...]
    checked: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _axes_are_known(self) -> Self:
        for options in (*(layer.when for layer in self.layers), *self.without):
            if unknown := sorted(options.keys() - {*self.axes, "scale"}):
                raise ValueError(
                    f"there is no axis {unknown[0]!r}{suggestion(unknown[0], self.axes)}"
                )
        return self

    def experiment(self, table: str) -> Experiment:
        """The table of this name."""
        own = {
            name: getattr(self, name)
            for name in (
                "title",
                "url",
                "section",
                "rank",
                "seeds",
                "decides",
                "selected",
            )
        }
        published = published_tables(self.paper).get(table) if self.paper else None
        absent = [Layer(when=options) for options in self.without]
        kept = [
            o for o in _combinations(self.axes) if not any(layer.applies(o) for layer in absent)
        ]
        arms = [self._arm(options, published) for options in kept]
        claims = tuple(claim for lines in self.claims for claim in lines.claims())
        return Experiment(
            table=table,
            arms=tuple(arms),
            claims=claims,
            notes=self.notes,
            checked=self.checked,
            **own,
        )

    def _arm(self, options: Mapping[str, str], published: PublishedTable | None) -> Arm:
        layers = [
            layer for layer in self.layers if "scale" not in layer.when and layer.applies(options)
        ]
        words = merged(options, *(layer.words for layer in layers))
        cells = {measure: cell for layer in layers for measure, cell in layer.published.items()}
        numbers = {
            measure: published.number(row.format(**words), column.format(**words))
            for measure, (row, column) in cells.items()
            if published is not None
        }
        return Arm(
            self.arm.format(**words),
            self.about.format(**words),
            tuple(
                map(
                    measure_named,
                    [layer.measures for layer in layers if layer.measures][-1],
                )
            ),
            partial(self._settings, options),
            {measure: number for measure, number in numbers.items() if number is not None},
        )

    def _settings(self, options: Mapping[str, str], scale: Scale) -> Settings:
        layers = [layer for layer in self.layers if layer.applies({**options, "scale": scale})]
        layers.sort(key=lambda layer: "scale" in layer.when)
        words = merged(options, *(layer.words for layer in layers))
        found: dict[str, Any] = _filled(merged(*(layer.settings for layer in layers)), words)
        return _computed(found)


def table_names() -> tuple[str, ...]:
    """Names of the tables' files, sorted.

    One that begins with ``_`` is what several have in common.
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("[!_]*.toml")))


def read_table(name: str) -> Experiment:
    """Read one of `table_names`.

    Raises:
        ConfigError: a mistake in its files, such as an unknown key or word.
    """
    try:
        return validate_config(_document(name), TableFile, source=f"{name}.toml").experiment(name)
    except KeyError as error:
        raise ConfigError(f"{name}.toml: no axis and no layer has the word {error}") from error


def _document(name: str) -> dict[str, Any]:
    own = read_toml(_FOLDER / f"{name}.toml")
    base = _document(own.pop("base")) if "base" in own else {}
    return {
        **merged(base, own),
        **{key: [*base.get(key, ()), *own.get(key, ())] for key in _JOINED},
    }


def _combinations(options: Options) -> Iterator[dict[str, str]]:
    for values in product(*options.values()):
        yield dict(zip(options, values, strict=True))


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return value.format(**words)
    if isinstance(value, Mapping):
        return {key: _filled(item, words) for key, item in value.items()}
    return [_filled(item, words) for item in value] if isinstance(value, Sequence) else value


def _computed(settings: Settings) -> Settings:
    """Settings with the tables that a file has in a shorter form: ``levels``, HeteroFL's, and
    ``fleet``, of devices.
    """
    plain = {key: value for key, value in settings.items() if key not in {"levels", "fleet"}}
    levels = _level_tables(**settings["levels"]) if "levels" in settings else {}
    fleet = (
        {"devices": {"types": _kinds(settings["devices"]["count"], **settings["fleet"])}}
        if "fleet" in settings
        else {}
    )
    return merged(levels, fleet, plain)


def _level_tables(row: str, **sizes: list[int] | int) -> Settings:
    """A row of levels such as ``a-b-e``, the widest first, all equally likely.

    The first is the global model's: ``sizes``, settings of the architecture at level a, shrink with
    it.
    """
    levels = row.split("-")
    top = LEVEL_RATES[levels[0]]

    def scaled(size: Any) -> Any:
        return [scaled(one) for one in size] if isinstance(size, list) else max(1, int(size * top))

    model = {
        "settings": {name: scaled(size) for name, size in sizes.items()},
        "widths": [LEVEL_RATES[level] / top for level in levels],
    }
    mix = {"assign": "dynamic", "levels": "-".join(f"{level}1" for level in levels)}
    return {"model": model, **({"tiers": mix} if len(levels) > 1 else {})}


def _kinds(
    count: int,
    *,
    shares: str = "",
    links: Sequence[float] = (),
    dropout: float = 0.0,
    **limits: Sequence[float] | Mapping[str, float],
) -> list[Settings]:
    """Kinds of devices with limits: in shares such as ``1:2:7`` of ``count``, or of each type one
    at each link.
    """
    often = {"dropout": dropout} if dropout else {}
    ((key, most),) = limits.items()
    if isinstance(most, Mapping):
        each = {"count": 1, **often}
        return [
            {"type": kind, "link": link, key: limit, **each}
            for kind, limit in most.items()
            for link in links
        ]
    parts = [int(part) for part in shares.split(":")]
    counts = [count * part // sum(parts) for part in parts]
    counts[-1] += count - sum(counts)
    return [
        {"count": number, key: limit, **often} for number, limit in zip(counts, most, strict=True)
    ]


TABLES: Mapping[str, Experiment] = MappingProxyType(
    {
        table.table: table
        for table in sorted(map(read_table, table_names()), key=lambda table: table.section)
    }
)
"""In the order of the specification."""


def find_experiment(table: str) -> Experiment:
    """An experiment by the name of its table.

    Raises:
        ConfigError: there is none; the message names the closest one.
    """
    if table not in TABLES:
        raise ConfigError(f"no table {table!r} to reproduce{suggestion(table, TABLES)}")
    return TABLES[table]


def parse_scale(text: str) -> Scale:
    """A scale by its name.

    Raises:
        ConfigError: there is none; the message names the closest one.
    """
    for scale in SCALES:
        if scale == text:
            return scale
    raise ConfigError(f"no scale {text!r}{suggestion(text, SCALES)}")
