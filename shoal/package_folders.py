"""Writes a version as a folder of transformers, or as an adapter of peft.

Neither package is needed here: the exporter wrote the configuration of each tier beside its graphs.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from broker_server.rounds.tier_version import TierVersion
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import BlobError, ConfigError
from models.package_form import PackageForm
from models.slicing import Tensors

ADAPTER_BASE = "base"
"""Folder of the model that an adapter belongs to, within the folder of the adapter."""

_READER = {"format": "pt"}  # transformers refuses a file that names no reader
_PEFT_PREFIX = "base_model.model."  # where peft's models have the package's
_CLASSIFIERS = "Classification"  # in the names of classes whose outputs are labels


def write_transformers(content: TierVersion, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors``; adapters are merged into their weights.

    Other files of the folder stay, such as those of a tokenizer.

    Raises:
        ConfigError: the model does not come from transformers, or its state is incomplete.
        StorageError: a file cannot be written.
    """
    form = form_of(content)
    _write_model(content, form, form.merged_state(content.own_state()), folder)


def write_peft(content: TierVersion, folder: Path) -> None:
    """Write an adapter of peft, and the model that it belongs to in the folder ``base``.

    Raises:
        ConfigError: the model does not come from transformers, has no adapters, or trains
            parameters that an adapter cannot hold.
        StorageError: a file cannot be written.
    """
    form = form_of(content)
    if not form.adapters:
        raise ConfigError(
            f"--format peft: {content.exported.arch} has no low-rank adapters; use --format"
            " transformers, which writes the whole model"
        )
    state = content.own_state()
    whole = form.base_state(state)
    modules = _trained_modules(content, form, whole)
    _write_model(content, form, whole, folder / ADAPTER_BASE)
    config = form.adapter_config(state, modules)
    config["base_model_name_or_path"] = str(folder / ADAPTER_BASE)
    tensors: dict[str, NDArray[Any]] = {}
    for name, factor in form.factors(state):
        tensors[_PEFT_PREFIX + name] = factor
    for name, value in whole.items():
        # peft reads all tensors of a module that it trains.
        if any(name.startswith(f"{module}.") for module in modules):
            tensors[_PEFT_PREFIX + name] = value
    _write_tensors(tensors, content, folder / "adapter_model.safetensors")
    _write_json(config, folder / "adapter_config.json")


def form_of(content: TierVersion) -> PackageForm:
    """Return how the package stores the model of a version.

    Raises:
        ConfigError: no package has the model, or the package cannot read it.
    """
    try:
        described = content.own_class
    except BlobError as error:
        raise ConfigError(f"{error}; --format needs the description of the class") from error
    form = None if described is None else described[0].form
    if form is None:
        raise ConfigError(
            f"{content.exported.arch} is not a model of transformers, or its artifact set is from"
            " an earlier `shoal export`: export it again, or use --format safetensors or torch"
        )
    if form.problem:
        raise ConfigError(
            f"{content.exported.arch}: {form.problem}; use --format torch, whose lines build your"
            " own model, in which peft can merge its adapters (merge_and_unload)"
        )
    return form


def _write_model(content: TierVersion, form: PackageForm, state: Tensors, folder: Path) -> None:
    _write_tensors(state, content, folder / "model.safetensors")
    # Last, so that a folder with a configuration is complete.
    _write_json(_with_labels(form, content), folder / "config.json")


def _with_labels(form: PackageForm, content: TierVersion) -> dict[str, Any]:
    """Return the configuration with the names of the fleet's labels, if it has such names."""
    config = dict(form.config)
    contract = content.config.contract
    labels = () if contract is None else contract.labels
    fits = len(labels) == content.artifacts.manifest.classes
    if _CLASSIFIERS in form.class_name and labels and fits:
        config["id2label"] = {str(number): name for number, name in enumerate(labels)}
        config["label2id"] = {name: number for number, name in enumerate(labels)}
    return config


def _trained_modules(
    content: TierVersion, form: PackageForm, whole: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the modules that train without an adapter.

    Raises:
        ConfigError: one is a layer with an adapter, or peft could not tell it from another one.
    """
    adapted = {adapter.layer for adapter in form.adapters}
    trained: dict[str, None] = {}  # a set in the order of the parameters
    for spec in content.artifacts.manifest.parameters:
        name = form.renamed.get(spec.name, spec.name)
        if name:
            trained[name.rpartition(".")[0]] = None
    paths = _paths_of(whole)
    for module in trained:
        alike = [path for path in paths if path.endswith(module) and path != module]
        if module in adapted or alike or not module:
            reason = "has an adapter, too"
            if alike or not module:
                reason = f"has a name that peft cannot tell from {alike[0] if alike else 'others'}"
            raise ConfigError(
                f"--format peft: {module or 'the model'} trains and {reason}; use --format"
                " transformers, which merges the adapters"
            )
    return tuple(trained)


def _paths_of(names: Iterable[str]) -> list[str]:
    """Return the paths of all modules that have some tensors."""
    paths: dict[str, None] = {}
    for name in names:
        modules = name.split(".")
        for count in range(1, len(modules)):
            paths[".".join(modules[:count])] = None
    return list(paths)


def _write_tensors(tensors: Tensors, content: TierVersion, path: Path) -> None:
    arrays: dict[str, NDArray[Any]] = {}
    for name, value in tensors.items():
        arrays[name] = np.ascontiguousarray(value)
    write_atomically(path, save(arrays, {**content.exported.metadata, **_READER}))


def _write_json(values: Mapping[str, Any], path: Path) -> None:
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False)
    write_atomically(path, f"{text}\n".encode())
