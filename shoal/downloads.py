"""Writes global versions as files for other programs: safetensors, a state dict of torch, ONNX."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast

import numpy as np

from broker_server.rounds.tier_version import TierVersion, tier_version
from broker_server.settings.fleet import FleetConfig
from broker_server.store import RunRecord, Store, VersionRecord, queries
from broker_server.store.export import ExportedVersion, export_safetensors, load_version
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import ConfigError, ShoalError
from fleet_protocol.graphs.check import read_checked_graph
from fleet_protocol.manifest import parameter_input
from shoal.extras import needs
from shoal.load_lines import load_lines
from shoal.sources import LocalStore, Source

FileFormat = Literal["safetensors", "torch", "onnx"]
SUFFIXES: Mapping[str, str] = MappingProxyType(
    {"safetensors": "safetensors", "torch": "pt", "onnx": "onnx"}
)

ELSEWHERE = Path("the downloaded file")
"""Name of a file in the lines that load it, if its place is not known, as on the page."""


@dataclass(frozen=True)
class Download:
    """The result of a download.

    Attributes:
        record: the version, with the evaluation of the written model, if any.
        lines: lines of Python that load the file; empty if they are not known here.
        note: further information for the user; may be empty.
    """

    record: VersionRecord
    lines: tuple[str, ...] = ()
    note: str = ""


def save_version(
    opened: Store,
    run: str | None,
    version: int,
    tier: str | None,
    file_format: FileFormat,
    path: Path,
    shown: Path | None = None,
    artifacts: Path | None = None,
) -> Download:
    """Write a global version, or a tier of it, to a file, which may replace an existing one.

    Args:
        opened: the store.
        run: the run's id; None for the newest.
        version: number of the version.
        tier: the tier; None for the whole model.
        file_format: format of the file.
        path: path of the file.
        shown: path in the lines if another machine loads the file; by default `path`.
        artifacts: folder of exported sets, see `stored_context`.

    Raises:
        ConfigError: there is no such version, the tier is not exported, a faithful file of this
            format is impossible, or a package for the format is not installed.
        StorageError: the file cannot be written.
    """
    exported = load_version(opened, run, version)
    if tier is None and file_format == "safetensors":
        return _save_whole(opened, exported, path, shown, artifacts)
    found = tier_version(opened, exported, tier, artifacts)
    if file_format == "onnx":
        _save_onnx(found, path)
    elif file_format == "torch":
        _save_torch(found, path)
    else:
        export_safetensors(found.exported, path)
    return _written(found, file_format, path, shown)


def _save_whole(
    opened: Store,
    exported: ExportedVersion,
    path: Path,
    shown: Path | None,
    artifacts: Path | None,
) -> Download:
    """Write the tensors of a version from the store, with fitting statistics if its artifacts are
    available.
    """
    try:
        found = tier_version(opened, exported, None, artifacts)
    except ShoalError as error:  # only the store has been copied
        run = queries.find_run(opened, exported.record.run)
        of_whole = FleetConfig.stored(run.config).evaluation.tier is None
        record = _judged(exported.record, run, None)
        statistics = exported.statistics if of_whole else {}
        export_safetensors(replace(exported, record=record, statistics=statistics), path)
        return Download(record, note=f"cannot show how to load the file: {error}")
    statistics = found.exported.statistics
    export_safetensors(replace(exported, record=found.exported.record, statistics=statistics), path)
    return _written(found, "safetensors", path, shown)


def _written(
    found: TierVersion, file_format: FileFormat, path: Path, shown: Path | None
) -> Download:
    lines = load_lines(found, file_format, shown or path, here=shown is None)
    return Download(found.exported.record, lines, found.note or found.lacking)


def save(
    source: Source,
    run: RunRecord,
    version: int,
    of: Mapping[str, str],
    path: Path,
    artifacts: Path | None = None,
) -> Download:
    """Write a version, or the ``tier`` `of` it, in a ``format``, like `save_version`."""
    tier = of.get("tier")
    kind = cast("FileFormat", of["format"])
    if isinstance(source, LocalStore):
        return save_version(source.store, run.id, version, tier, kind, path, artifacts=artifacts)
    data, lines, note = source.weights(version, run.id, **of)
    write_atomically(path, data)
    known = next(view.version for view in source.versions(run.id) if view.version.number == version)
    lines = tuple(line.replace(repr(str(ELSEWHERE)), repr(str(path))) for line in lines)
    return Download(_judged(known, run, tier), lines, note)


def _judged(version: VersionRecord, run: RunRecord, tier: str | None) -> VersionRecord:
    """Return a version with facts about one tier, None for the whole model.

    The run may have judged another.
    """
    if version.evaluation is None or tier == FleetConfig.stored(run.config).evaluation.tier:
        return version
    return replace(version, evaluation=version.evaluation.of(tier or ""))


def _save_onnx(found: TierVersion, path: Path) -> None:
    """Write a model for stock onnxruntime.

    Raise a ConfigError without onnx, or without its norms' statistics.
    """
    with needs("export"):
        from trainer_export.formats.onnx import runnable  # noqa: PLC0415  (torch and onnx)

    found.require_statistics()
    tensors = {parameter_input(name): value for name, value in found.exported.weights.items()}
    tensors |= found.exported.statistics
    data = found.config.evaluation.data
    manifest = found.artifacts.manifest
    metadata = found.exported.metadata | {
        "tier": found.artifacts.tier.id,
        "classes": str(manifest.classes),
    }
    if data is not None:  # a sample becomes (x * scale - mean) / std
        metadata["preprocessing"] = data.model_dump_json(
            include={"shape", "scale", "mean", "std", "transforms"}
        )
    graph = read_checked_graph(found.artifacts.path(manifest.graphs["onnx/infer"]))
    write_atomically(path, runnable(graph, tensors, metadata))


def _save_torch(found: TierVersion, path: Path) -> None:
    """Write the state of the user's class, for ``load_state_dict(torch.load(path,
    weights_only=True))``.

    Raises a ConfigError without torch.
    """
    try:
        import torch  # noqa: PLC0415  (nothing else here needs it)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--format torch needs torch, which is not installed here; use --format safetensors, "
            "whose lines load the file on a machine with torch"
        ) from error

    buffer = io.BytesIO()
    torch.save(
        {name: torch.from_numpy(np.array(value)) for name, value in found.own_state().items()},
        buffer,
    )
    write_atomically(path, buffer.getvalue())
