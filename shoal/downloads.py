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


def save_version(  # noqa: PLR0913  (an argument for each thing that it needs)
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
    content = tier_version(opened, exported, tier, artifacts)
    if file_format == "onnx":
        _save_onnx(content, path)
    elif file_format == "torch":
        _save_torch(content, path)
    else:
        export_safetensors(content.exported, path)
    return _download(content, file_format, path, shown)


def _save_whole(
    opened: Store,
    exported: ExportedVersion,
    path: Path,
    shown: Path | None,
    artifacts: Path | None,
) -> Download:
    """Write the tensors of a whole model, with statistics if its artifact sets are available."""
    try:
        content = tier_version(opened, exported, None, artifacts)
    except ShoalError as error:
        # The store was copied without the artifact sets.
        run = queries.find_run(opened, exported.record.run)
        record = _with_evaluation_of(exported.record, run, None)
        # The store has the statistics of the tier that the run evaluates.
        evaluates_whole = FleetConfig.stored(run.config).evaluation.tier is None
        statistics = exported.statistics if evaluates_whole else {}
        export_safetensors(replace(exported, record=record, statistics=statistics), path)
        return Download(record, note=f"cannot show how to load the file: {error}")
    statistics = content.exported.statistics
    record = content.exported.record
    export_safetensors(replace(exported, record=record, statistics=statistics), path)
    return _download(content, "safetensors", path, shown)


def _download(
    content: TierVersion, file_format: FileFormat, path: Path, shown: Path | None
) -> Download:
    """Return what a file holds and how to load it."""
    lines = load_lines(content, file_format, shown or path, here=shown is None)
    return Download(content.exported.record, lines, content.note or content.lacking)


def save(  # noqa: PLR0913  (an argument for each thing that it needs)
    source: Source,
    run: RunRecord,
    version: int,
    selection: Mapping[str, str],
    path: Path,
    artifacts: Path | None = None,
) -> Download:
    """Write a version of a store, or of the page of one, to a file, like `save_version`.

    Args:
        source: the store or page.
        run: the run.
        version: number of the version.
        selection: the ``format`` of the file, and the ``tier`` if not the whole model.
        path: path of the file.
        artifacts: folder of exported sets, for a store on this machine.
    """
    tier = selection.get("tier")
    if isinstance(source, LocalStore):
        file_format = cast("FileFormat", selection["format"])
        return save_version(
            source.store, run.id, version, tier, file_format, path, artifacts=artifacts
        )
    data, lines, note = source.weights(version, run.id, **selection)
    write_atomically(path, data)
    records = [view.version for view in source.versions(run.id)]
    record = next(record for record in records if record.number == version)
    lines = tuple(line.replace(repr(str(ELSEWHERE)), repr(str(path))) for line in lines)
    return Download(_with_evaluation_of(record, run, tier), lines, note)


def _with_evaluation_of(version: VersionRecord, run: RunRecord, tier: str | None) -> VersionRecord:
    """Return a version with the evaluation of one tier, None for the whole model.

    Its run may have evaluated another.
    """
    if version.evaluation is None or tier == FleetConfig.stored(run.config).evaluation.tier:
        return version
    return replace(version, evaluation=version.evaluation.of(tier or ""))


def _save_onnx(content: TierVersion, path: Path) -> None:
    """Write a model for stock onnxruntime.

    A ConfigError says that onnx is not installed, or that statistics of norms are missing.
    """
    with needs("export"):
        from trainer_export.formats.onnx import runnable  # noqa: PLC0415  (torch and onnx)

    content.require_statistics()
    tensors = {parameter_input(name): value for name, value in content.exported.weights.items()}
    tensors |= content.exported.statistics
    data = content.config.evaluation.data
    manifest = content.artifacts.manifest
    metadata = content.exported.metadata | {
        "tier": content.artifacts.tier.id,
        "classes": str(manifest.classes),
    }
    if data is not None:
        # Programs that run the model need this: a sample becomes (x * scale - mean) / std.
        metadata["preprocessing"] = data.model_dump_json(
            include={"shape", "scale", "mean", "std", "transforms"}
        )
    graph = read_checked_graph(content.artifacts.path(manifest.graphs["onnx/infer"]))
    write_atomically(path, runnable(graph, tensors, metadata))


def _save_torch(content: TierVersion, path: Path) -> None:
    """Write the state of the user's class, as `torch.load` and ``load_state_dict`` read it.

    A ConfigError says that torch is not installed.
    """
    try:
        import torch  # noqa: PLC0415  (nothing else here needs it)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--format torch needs torch, which is not installed here; use --format safetensors, "
            "whose lines load the file on a machine with torch"
        ) from error

    state = {}
    for name, value in content.own_state().items():
        state[name] = torch.from_numpy(np.array(value))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getvalue())
