"""Reads the file of a table, ``tables/<name>.toml``, and its base files, as an experiment.

The arms are the combinations of the axes' options. Layers define an arm: a layer applies to the
arms and scales in its ``when``; later layers override earlier ones, and those of a scale come last.
A word in braces is the arm's option of that axis, or one of the layers' ``words``. Layers, claims
and notes follow those of the base.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

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
from reproduction.short_forms import expand

_FOLDER = Path(__file__).with_name("tables")
_JOINED = ("layers", "claims", "notes", "checked")
Options = Mapping[str, tuple[str, ...]]
Words = Mapping[str, str]
"""Options of an arm by axis, or words that replace others in texts."""


class Layer(FrozenModel):
    """The common properties of some arms.

    Attributes:
        when: options by axis or ``scale``, one or several; empty for all arms and scales.
        words: replacements in texts and settings.
        measures: names of the figures to read, instead of those of earlier layers.
        published: row and column of the published number, by measure.
        settings: tables of ``sim.toml``, and those of `short_forms`.
    """

    when: Mapping[str, str | tuple[str, ...]] = {}
    words: Mapping[str, str] = {}
    measures: tuple[str, ...] = ()
    published: Mapping[str, tuple[str, str]] = {}
    settings: Mapping[str, Any] = {}

    def applies(self, options: Words) -> bool:
        """Return whether it applies to an arm with these options.

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
    # One combination without words, so that a claim without `each` is made once.
    each: tuple[Options, ...] = ({},)

    @model_validator(mode="after")
    def _bound(self) -> Self:
        has_bound = self.at_least is not None or self.at_most is not None
        # Without a bound no result could contradict the sentence.
        if bool(self.says) != has_bound:
            raise ValueError("a claim needs both `says` and a bound; a comparison has neither")
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
    """One table: the attributes of `Experiment`, and the definition of its arms.

    Attributes:
        paper: paper whose file of published numbers counts; empty where no paper has the table, as
            is the url.
        numbers: name of the paper's table whose published numbers count; empty for that of the
            table's own name.
        test: paired differences (logarithms of ratios) over the seeds, with the t interval of 95 %.
        arm: name of an arm, with the axes' names in braces.
        about: description of an arm, in the same form.
        earlier_defaults: tables of ``sim.toml``, as in `Arm`, for all arms.
        axes: their options; the first varies slowest.
        without: combinations of options without an arm.
        repeated: sentences of claims that another table states, too, by the name of that table.
    """

    paper: str
    url: str
    section: int
    rank: int
    title: str
    arm: str
    about: str
    numbers: str = ""
    earlier_defaults: Mapping[str, Any] = {}
    axes: Options
    without: tuple[Options, ...] = ()
    seeds: Mapping[Scale, tuple[int, ...]]
    selected: Mapping[Scale, tuple[str, ...]]
    # One for each scale, because figures are judged at all three.
    decides: Mapping[Scale, int] = Field(min_length=3)
    # There is only one test so far; files name it, so that they remain valid beside a second one.
    test: Literal["paired-t-95"]
    layers: tuple[Layer, ...]
    claims: tuple[ClaimLines, ...]
    notes: tuple[str, ...]
    checked: tuple[str, ...] = ()
    repeated: Mapping[str, tuple[str, ...]] = {}

    @model_validator(mode="after")
    def _axes_are_known(self) -> Self:
        # A layer with a misspelt axis would apply to no arm, and nothing would show it.
        axes = {*self.axes, "scale"}
        conditions: list[Mapping[str, Any]] = list(self.without)
        for layer in self.layers:
            conditions.append(layer.when)
        for options in conditions:
            unknown = sorted(options.keys() - axes)
            if unknown:
                name = unknown[0]
                raise ValueError(f"unknown axis {name!r}{suggestion(name, self.axes)}")
        return self

    def experiment(self, table: str) -> Experiment:
        """Return the table, of this name."""
        published = None
        if self.paper:
            published = published_tables(self.paper).get(self.numbers or table)
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
            repeated=self._repeated(claims),
        )

    def _repeated(self, claims: Sequence[Claim]) -> Mapping[str, str]:
        """Return the other table that states a claim, by the claim's sentence.

        Raises:
            ConfigError: the table has no such claim.
        """
        sentences = [claim.says for claim in claims]
        tables: dict[str, str] = {}
        for table, repeated in self.repeated.items():
            for sentence in repeated:
                # A misspelt sentence would leave its claim undecided, and nothing would show it.
                if sentence not in sentences:
                    raise ConfigError(f"repeated.{table}: no claim says {sentence!r}")
                tables[sentence] = table
        return tables

    def _has_arm(self, options: Words) -> bool:
        """Return whether there is an arm of some options."""
        # Conditions in `without` mean the same as those of layers.
        absent = [Layer(when=condition) for condition in self.without]
        return not any(layer.applies(options) for layer in absent)

    def _arm(self, options: Words, published: PublishedTable | None) -> Arm:
        """Return the arm of some options."""
        words = dict(options)
        measures: tuple[str, ...] = ()
        cells: dict[str, tuple[str, str]] = {}
        for layer in self.layers:
            # Name, measures and published figures of an arm are the same at all scales.
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
            # Computed on demand: there are hundreds of arms, and a command uses few of them at one
            # scale.
            settings=partial(self._settings, options),
            published=numbers,
            earlier_defaults=self.earlier_defaults,
        )

    def _settings(self, options: Words, scale: Scale) -> Settings:
        """Return the settings of an arm at a scale."""
        conditions = {**options, "scale": scale}
        layers = [layer for layer in self.layers if layer.applies(conditions)]
        # Layers of a scale come after all others; the sort is stable.
        layers.sort(key=lambda layer: "scale" in layer.when)
        words = dict(options)
        settings: dict[str, Any] = {}
        for layer in layers:
            words.update(layer.words)
            settings = merged(settings, layer.settings)
        return expand(_filled(settings, words))


def table_names() -> tuple[str, ...]:
    """Return the names of the tables' files, sorted.

    A file whose name begins with ``_`` has the common parts of several tables.
    """
    names = [path.stem for path in _FOLDER.glob("[!_]*.toml")]
    return tuple(sorted(names))


def read_table(name: str) -> Experiment:
    """Read one of `table_names`.

    Raises:
        ConfigError: a file is invalid, for example because of an unknown key or word.
    """
    try:
        file = validate_config(_document(name), TableFile, source=f"{name}.toml")
        return file.experiment(name)
    except KeyError as error:
        problem = f"{name}.toml: neither an axis nor a layer defines the word {error}"
        raise ConfigError(problem) from error


def _document(name: str) -> dict[str, Any]:
    own = read_toml(_FOLDER / f"{name}.toml")
    base: dict[str, Any] = {}
    if "base" in own:
        base = _document(own.pop("base"))
    document = merged(base, own)
    # The table's keys override other keys of the base; these lists are prepended.
    for key in _JOINED:
        of_base = base.get(key, ())
        of_table = own.get(key, ())
        document[key] = [*of_base, *of_table]
    return document


def _combinations(options: Options) -> Iterator[dict[str, str]]:
    for values in product(*options.values()):
        yield dict(zip(options, values, strict=True))


def _filled(value: Any, words: Words) -> Any:
    """Substitute words in all texts of a value."""
    # Before sequences, because a text is one.
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


def _read_tables() -> Mapping[str, Experiment]:
    experiments = list(map(read_table, table_names()))
    # The sort is stable, so tables of one section remain sorted by name.
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
        ConfigError: there is none; the message names the closest one.
    """
    if table not in TABLES:
        raise ConfigError(f"unknown table {table!r}{suggestion(table, TABLES)}")
    return TABLES[table]


def parse_scale(text: str) -> Scale:
    """Return a scale by its name.

    Raises:
        ConfigError: there is none; the message names the closest one.
    """
    for scale in SCALES:
        if scale == text:
            return scale
    raise ConfigError(f"unknown scale {text!r}{suggestion(text, SCALES)}")
