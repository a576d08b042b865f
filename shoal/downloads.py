"""Writes global versions for other programs: safetensors, a state dict of torch, ONNX, folders."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

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
from shoal.package_folders import write_peft, write_transformers
from shoal.sources import LocalStore, Source

FileFormat = Literal["safetensors", "torch", "onnx"]
FolderFormat = Literal["transformers", "peft"]
SUFFIXES: Mapping[str, str] = MappingProxyType(
    {"safetensors": ".safetensors", "torch": ".pt", "onnx": ".onnx"}
)
"""Suffix of the default name of each format; a folder has none."""

ELSEWHERE = Path("the downloaded file")
"""Name of a file in the lines that load it if its path is unknown, as on the page."""


@dataclass(frozen=True)
class Download:
    """The result of a download.

    Attributes:
        record: the version, with the evaluation of the written model, if any.
        lines: lines of Python that load the file; empty if they are unknown.
        note: further information for the user; may be empty.
    """

    record: VersionRecord
    lines: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Selection:
    """The contents of a file.

    Attributes:
        run: the run's id; None for the newest.
        version: number of the version.
        tier: the tier; None for the whole model.
        file_format: format of the file, or of the folder.
    """

    run: str | None
    version: int
    tier: str | None
    file_format: FileFormat | FolderFormat


def save_version(
    opened: Store,
    selection: Selection,
    path: Path,
    shown: Path | None = None,
    artifacts: Path | None = None,
) -> Download:
    """Write a global version, or a tier of it, to a file or folder; existing files are replaced.

    Args:
        opened: the store.
        selection: what is written.
        path: path of the file, or of the folder of a format that has several files.
        shown: path in the lines that load the file, if another machine loads it; by default `path`.
        artifacts: folder of exported sets, see `stored_context`.

    Raises:
        ConfigError: there is no such version, the tier is not exported, the format cannot represent
            the model, or a package for the format is not installed.
        StorageError: the file cannot be written.
    """
    tier = selection.tier
    file_format = selection.file_format
    exported = load_version(opened, selection.run, selection.version)
    if tier is None and file_format == "safetensors":
        return _save_whole(opened, exported, path, shown, artifacts)
    # Everything else needs the artifact set: for a tier's shapes, or for the class.
    content = tier_version(opened, exported, tier, artifacts)
    _WRITERS[file_format](content, path)
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
        # The artifact sets are missing: somebody copied only the store.
        run = queries.find_run(opened, exported.record.run)
        record = _with_evaluation_of(exported.record, run, None)
        # The store has the statistics of the tier that the run evaluates.
        evaluates_whole = FleetConfig.stored(run.config).evaluation.tier is None
        statistics = exported.statistics if evaluates_whole else {}
        export_safetensors(replace(exported, record=record, statistics=statistics), path)
        return Download(record, note=f"cannot show how to load the file: {error}")
    statistics = content.exported.statistics
    record = content.exported.record
    # Not the weights of `content`, which also has the frozen tensors of the artifact set.
    export_safetensors(replace(exported, record=record, statistics=statistics), path)
    return _download(content, "safetensors", path, shown)


def _download(
    content: TierVersion, file_format: FileFormat | FolderFormat, path: Path, shown: Path | None
) -> Download:
    """Return the contents of a file and how to load it."""
    lines = load_lines(content, file_format, shown or path, here=shown is None)
    return Download(content.exported.record, lines, content.remarks)


def save(
    source: Source,
    run: RunRecord,
    selection: Selection,
    path: Path,
    artifacts: Path | None = None,
) -> Download:
    """Write a version from a store or its page to a file, like `save_version`.

    Args:
        source: the store or page.
        run: the run.
        selection: what of this run is written.
        path: path of the file.
        artifacts: folder of exported sets, for a store on this machine.

    Raises:
        ConfigError: as `save_version`, and if a page would have to send a folder.
    """
    tier = selection.tier
    if isinstance(source, LocalStore):
        return save_version(source.store, selection, path, artifacts=artifacts)
    if selection.file_format in get_args(FolderFormat):
        raise ConfigError(
            f"--format {selection.file_format} writes a folder, which a page does not send; run the"
            " command with --store on the machine of the store"
        )
    query: dict[str, str] = {"format": selection.file_format}
    if tier is not None:
        query["tier"] = tier
    data, lines, note = source.weights(selection.version, run.id, **query)
    write_atomically(path, data)
    records = [view.version for view in source.versions(run.id)]
    record = next(record for record in records if record.number == selection.version)
    # The page did not know where the file would lie.
    lines = tuple(line.replace(repr(str(ELSEWHERE)), repr(str(path))) for line in lines)
    return Download(_with_evaluation_of(record, run, tier), lines, note)


def _with_evaluation_of(version: VersionRecord, run: RunRecord, tier: str | None) -> VersionRecord:
    """Return a version with the evaluation of one tier, None for the whole model.

    The run may have evaluated another tier.
    """
    if version.evaluation is None or tier == FleetConfig.stored(run.config).evaluation.tier:
        return version
    return replace(version, evaluation=version.evaluation.of_tier(tier or ""))


def _save_onnx(content: TierVersion, path: Path) -> None:
    """Write a model for stock onnxruntime.

    Raises a ConfigError if onnx is not installed, or if statistics of norms are missing.
    """
    with needs("export"):
        from trainer_export.formats.onnx import runnable  # noqa: PLC0415  (torch and onnx)

    content.require_statistics()
    # Under the names of the graph's inputs, which become its constants.
    tensors = {parameter_input(name): value for name, value in content.exported.weights.items()}
    tensors |= content.exported.statistics
    data = content.config.evaluation.data
    manifest = content.artifacts.manifest
    metadata = content.exported.metadata | {
        "tier": content.artifacts.tier.id,
        "classes": str(manifest.classes),
    }
    if data is not None:
        # Programs that run the model need this preprocessing: (x * scale - mean) / std.
        metadata["preprocessing"] = data.model_dump_json(
            include={"shape", "scale", "mean", "std", "transforms"}
        )
    graph = read_checked_graph(content.artifacts.path(manifest.graphs["onnx/infer"]))
    write_atomically(path, runnable(graph, tensors, metadata))


def _save_torch(content: TierVersion, path: Path) -> None:
    """Write the state of the user's class, as `torch.load` and ``load_state_dict`` read it.

    Raises a ConfigError if torch is not installed.
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
        # Copies, because torch warns about arrays that cannot be written.
        state[name] = torch.from_numpy(np.array(value))
    # Through memory, so that a full disk leaves no half-written file.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getvalue())


def _save_safetensors(content: TierVersion, path: Path) -> None:
    export_safetensors(content.exported, path)


_WRITERS: Mapping[str, Callable[[TierVersion, Path], None]] = MappingProxyType(
    {
        "safetensors": _save_safetensors,
        "torch": _save_torch,
        "onnx": _save_onnx,
        "transformers": write_transformers,
        "peft": write_peft,
    }
)
