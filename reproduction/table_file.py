"""Read the file of a table, ``tables/<name>.toml``, and those it is based on, as an experiment.

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
from reproduction.published import Published, PublishedTable, published_tables

_FOLDER = Path(__file__).with_name("tables")
_JOINED = ("layers", "claims", "notes", "checked")
Options = Mapping[str, tuple[str, ...]]
Words = Mapping[str, str]
"""Options of an arm by axis, or words that stand for others in texts."""


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

    def applies(self, options: Words) -> bool:
        """Return whether it is for an arm of these options.

        A layer that names an axis which the arm lacks is for other tables.
        """
        for axis, wanted in self.when.items():
            allowed = (wanted,) if isinstance(wanted, str) else wanted
            if options.get(axis) not in allowed:
                return False
        return True


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
        has_bound = self.at_least is not None or self.at_most is not None
        if bool(self.says) != has_bound:
            raise ValueError(
                "a claim says something and has a bound, and what has none is a comparison that "
                "says nothing"
            )
        return self

    def claims(self) -> Iterator[Claim]:
        """Yield a claim for each combination of words."""
        for options in self.each:
            for words in _combinations(options):
                yield Claim(
                    says=self.says.format(**words),
                    left=self.left.format(**words),
                    right=self.right.format(**words),
                    measure=self.measure.format(**words),
                    how=self.how,
                    at_least=self.at_least,
                    at_most=self.at_most,
                )


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
        axes = {*self.axes, "scale"}
        conditions: list[Mapping[str, Any]] = list(self.without)
        for layer in self.layers:
            conditions.append(layer.when)
        for options in conditions:
            unknown = sorted(options.keys() - axes)
            if unknown:
                name = unknown[0]
                raise ValueError(f"there is no axis {name!r}{suggestion(name, self.axes)}")
        return self

    def experiment(self, table: str) -> Experiment:
        """Return the table, of this name."""
        published = None
        if self.paper:
            published = published_tables(self.paper).get(table)
        arms: list[Arm] = []
        for options in _combinations(self.axes):
            if self._has_arm(options):
                arms.append(self._arm(options, published))
        claims: list[Claim] = []
        for lines in self.claims:
            claims += lines.claims()
        return Experiment(
            table=table,
            title=self.title,
            url=self.url,
            section=self.section,
            rank=self.rank,
            arms=tuple(arms),
            seeds=self.seeds,
            decides=self.decides,
            selected=self.selected,
            claims=tuple(claims),
            notes=self.notes,
            checked=self.checked,
        )

    def _has_arm(self, options: Words) -> bool:
        """Return whether there is an arm of some options."""
        absent = [Layer(when=condition) for condition in self.without]
        return not any(layer.applies(options) for layer in absent)

    def _arm(self, options: Words, published: PublishedTable | None) -> Arm:
        """Return the arm of some options."""
        words = dict(options)
        measures: tuple[str, ...] = ()
        cells: dict[str, tuple[str, str]] = {}
        for layer in self.layers:
            if "scale" not in layer.when and layer.applies(options):
                words.update(layer.words)
                measures = layer.measures or measures
                cells.update(layer.published)
        numbers: dict[str, Published] = {}
        if published is not None:
            for measure, (row, column) in cells.items():
                row_name = row.format(**words)
                column_name = column.format(**words)
                number = published.number(row_name, column_name)
                if number is not None:
                    numbers[measure] = number
        return Arm(
            name=self.arm.format(**words),
            about=self.about.format(**words),
            measures=tuple(map(measure_named, measures)),
            settings=partial(self._settings, options),
            published=numbers,
        )

    def _settings(self, options: Words, scale: Scale) -> Settings:
        """Return the settings of an arm at a scale."""
        conditions = {**options, "scale": scale}
        layers = [layer for layer in self.layers if layer.applies(conditions)]
        # Layers of a scale count after all others; a sort keeps the order of equal ones.
        layers.sort(key=lambda layer: "scale" in layer.when)
        words = dict(options)
        settings: dict[str, Any] = {}
        for layer in layers:
            words.update(layer.words)
            settings = merged(settings, layer.settings)
        return _computed(_filled(settings, words))


def table_names() -> tuple[str, ...]:
    """Return the names of the tables' files, sorted.

    A file whose name begins with ``_`` has what several tables have in common.
    """
    names = [path.stem for path in _FOLDER.glob("[!_]*.toml")]
    return tuple(sorted(names))


def read_table(name: str) -> Experiment:
    """Read one of `table_names`.

    Raises:
        ConfigError: if its files have a mistake, such as an unknown key or word.
    """
    try:
        document = _document(name)
        file = validate_config(document, TableFile, source=f"{name}.toml")
        return file.experiment(name)
    except KeyError as error:
        raise ConfigError(f"{name}.toml: no axis and no layer has the word {error}") from error


def _document(name: str) -> dict[str, Any]:
    own = read_toml(_FOLDER / f"{name}.toml")
    base: dict[str, Any] = {}
    if "base" in own:
        base = _document(own.pop("base"))
    document = merged(base, own)
    # Other keys of the base give way to the table's own; these come before them.
    for key in _JOINED:
        of_base = base.get(key, ())
        of_table = own.get(key, ())
        document[key] = [*of_base, *of_table]
    return document


def _combinations(options: Options) -> Iterator[dict[str, str]]:
    for values in product(*options.values()):
        yield dict(zip(options, values, strict=True))


def _filled(value: Any, words: Words) -> Any:
    """Put words into all texts of a value."""
    if isinstance(value, str):
        return value.format(**words)
    if isinstance(value, Mapping):
        table = {}
        for key, entry in value.items():
            table[key] = _filled(entry, words)
        return table
    if isinstance(value, Sequence):
        return [_filled(entry, words) for entry in value]
    return value


def _computed(settings: Settings) -> Settings:
    """Write out the tables that a file has in a shorter form.

    These are ``levels``, HeteroFL's, and ``fleet``, the kinds of devices.
    """
    written = dict(settings)
    levels: Settings = {}
    if "levels" in settings:
        levels = _level_tables(**written.pop("levels"))
    fleet: Settings = {}
    if "fleet" in settings:
        count = settings["devices"]["count"]
        kinds = _kinds(count, **written.pop("fleet"))
        fleet = {"devices": {"types": kinds}}
    return merged(levels, fleet, written)


def _level_tables(row: str, **sizes: list[int] | int) -> Settings:
    """Return the settings of a row of levels such as ``a-b-e``, all equally likely.

    Args:
        row: the levels, the widest first, which is the global model's.
        sizes: settings of the architecture at level a, which shrink with the global model.
    """
    levels = row.split("-")
    top = LEVEL_RATES[levels[0]]
    widths: list[float] = []
    shares: list[str] = []
    for level in levels:
        widths.append(LEVEL_RATES[level] / top)
        shares.append(f"{level}1")
    settings = {}
    for name, size in sizes.items():
        settings[name] = _scaled(size, top)
    model = {"settings": settings, "widths": widths}
    if len(levels) == 1:
        return {"model": model}
    mix = "-".join(shares)
    return {"model": model, "tiers": {"assign": "dynamic", "levels": mix}}


def _scaled(size: Any, rate: float) -> Any:
    """Return a size, or a list of sizes, times a rate; at least 1."""
    if isinstance(size, list):
        return [_scaled(entry, rate) for entry in size]
    return max(1, int(size * rate))


def _kinds(
    count: int,
    *,
    shares: str = "",
    links: Sequence[float] = (),
    dropout: float = 0.0,
    **limits: Sequence[float] | Mapping[str, float],
) -> list[Settings]:
    """Return kinds of devices with limits.

    Args:
        count: number of devices.
        shares: of each kind, such as ``1:2:7``, if the limits are a list.
        links: if the limits are by type; there is one device of each type at each link.
        dropout: of all devices.
        limits: a single key of a kind, such as ``max_width``, with its values.
    """
    common = {"dropout": dropout} if dropout else {}
    ((key, values),) = limits.items()
    kinds: list[Settings] = []
    if isinstance(values, Mapping):
        for (kind, limit), link in product(values.items(), links):
            device = {"type": kind, "link": link, key: limit}
            kinds.append({**device, "count": 1, **common})
        return kinds
    weights = list(map(int, shares.split(":")))
    total = sum(weights)
    counts = [count * weight // total for weight in weights]
    # What does not divide is of the last kind.
    counts[-1] += count - sum(counts)
    for number, limit in zip(counts, values, strict=True):
        kinds.append({"count": number, key: limit, **common})
    return kinds


def _read_tables() -> Mapping[str, Experiment]:
    experiments = list(map(read_table, table_names()))
    experiments.sort(key=lambda experiment: experiment.section)
    tables = {}
    for experiment in experiments:
        tables[experiment.table] = experiment
    return MappingProxyType(tables)


TABLES: Mapping[str, Experiment] = _read_tables()
"""All experiments by the name of their table, in the order of the specification."""


def find_experiment(table: str) -> Experiment:
    """Return an experiment by the name of its table.

    Raises:
        ConfigError: if there is none; the message names the closest one.
    """
    if table not in TABLES:
        raise ConfigError(f"no table {table!r} to reproduce{suggestion(table, TABLES)}")
    return TABLES[table]


def parse_scale(text: str) -> Scale:
    """Return a scale by its name.

    Raises:
        ConfigError: if there is none; the message names the closest one.
    """
    for scale in SCALES:
        if scale == text:
            return scale
    raise ConfigError(f"no scale {text!r}{suggestion(text, SCALES)}")
