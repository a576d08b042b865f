"""Exports the model of a ``fleet.toml`` that has ``[model.export]``, unless that was done before.

A file beside the artifact sets keeps a digest of everything that the export was made from.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from broker_server.settings.export import ExportTable
from broker_server.settings.fleet import FleetConfig, ModelConfig
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.data import load_data
from fleet_protocol.data.terms import ContractTerms
from fleet_protocol.digests import file_digest
from fleet_protocol.errors import StorageError
from fleet_protocol.recipe import RecipeTable
from shoal.cli.export_arguments import ExportArguments
from shoal.extras import needs

if TYPE_CHECKING:
    from models.architecture import Architecture
    from models.registry import Registry


def export_if_changed(written: FleetConfig, path: Path) -> None:
    """Export the model of a configuration, if it has a table for that and anything has changed.

    Args:
        written: the configuration as it was written, with relative paths.
        path: its file.

    Raises:
        ShoalError: the model cannot be exported, or the test set cannot be read.
    """
    config = written.resolved(path.resolve().parent)
    table = config.model.export
    if table is None:
        return
    model = config.model
    note = model.artifacts / f"{model.arch}.exported"
    # Relative paths, so that a folder that was copied to a server without PyTorch stays valid.
    made_from = _digest(written, table)
    is_there = (model.artifacts / model.arch / "layout.json").is_file()
    if is_there and note.is_file() and note.read_text(encoding="utf-8") == made_from:
        return
    with needs("export"):
        from shoal.cli.exporting import export  # noqa: PLC0415  (torch)
    options = ExportArguments(
        arch=model.arch,
        models=table.models,
        widths=_listed(table.widths),
        depths=_listed(table.depths or ()),
        trained=_listed(table.trained),
        recipe=path,
        out=model.artifacts,
        # The table lists every tier; one that it no longer has must not be trained.
        replace=True,
    )
    # Standard output is for the result of the command that exports.
    with contextlib.redirect_stdout(sys.stderr):
        export(options, _completion(config, table))
    try:
        write_atomically(note, made_from.encode())
    except OSError as error:
        raise StorageError(f"{note} cannot be written: {error.strerror or error}") from error


def _listed(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values))


def _digest(written: FleetConfig, table: ExportTable) -> str:
    """Return a digest of the model's code, its table, the recipe and the contract."""
    facts = written.model_dump(mode="json", include={"model", "contract"})
    facts["data"] = written.evaluation.model_dump(mode="json", include={"data"})
    if table.models is not None:
        # The model may import files beside it.
        files = sorted({table.models, *table.models.parent.glob("*.py")})
        facts["code"] = {file.name: file_digest(file) for file in files if file.is_file()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _completion(
    config: FleetConfig, table: ExportTable
) -> "Callable[[Architecture, Registry], Mapping[str, Any]]":
    """Return a function that adds input shape and classes, where an architecture has them."""

    def complete(architecture: "Architecture", registry: "Registry") -> Mapping[str, Any]:
        chosen = dict(table.settings)
        wanted = {"input_shape", "classes"} & set(architecture.defaults) - set(chosen)
        # A model with several inputs has a shape for each.
        if isinstance(architecture.defaults.get("input_shape"), Mapping):
            wanted.discard("input_shape")
        if not wanted or config.evaluation.data is None:
            return chosen
        known = _facts_of_data(config, registry)
        return {name: known[name] for name in wanted if name in known} | chosen

    return complete


def _facts_of_data(config: FleetConfig, registry: "Registry") -> Mapping[str, Any]:
    """Return the shape of a sample and the number of labels, from the contract and the test set."""
    source = config.evaluation.data
    if source is None:
        return {}
    data = load_data(source)
    terms = config.contract or ContractTerms()
    known: dict[str, Any] = {"input_shape": tuple(data.x.shape[1:])}
    if terms.columns:
        known["input_shape"] = (len(terms.columns),)
    labels = len(terms.labels or data.label_names) or source.classes or 0
    if labels:
        known["classes"] = labels
    elif data.y.dtype.kind == "f" or _takes_numbers(config.model, registry):
        # A model has an output for each of a sample's numbers.
        known["classes"] = int(np.prod(data.y.shape[1:]))
    else:
        known["classes"] = int(data.y.max()) + 1
    return known


def _takes_numbers(model: ModelConfig, registry: "Registry") -> bool:
    """Return whether targets that happen to be whole are numbers, by the loss of the recipe."""
    from trainer_export.loss import loss_named  # noqa: PLC0415  (torch)

    loss = (model.recipe or RecipeTable()).loss
    return loss_named(loss.name, loss.settings, registry.own).takes_numbers
