"""Describes how a package builds and stores the model of a tier.

The exporter, which has the package's class, writes this description beside each tier. Programs
without torch and without the package then write a folder that the package reads.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fleet_protocol.errors import BlobError
from fleet_protocol.foreign_files import Label, quoted
from fleet_protocol.frozen import FiniteJson, FrozenModel
from models.slicing import Tensors

_ADAPTERS_LIMIT = 100_000


class PackageBuild(FrozenModel):
    """How the model of a tier is built by its SPEC.

    Attributes:
        spec: the SPEC of the model.
        arguments: arguments that the user gave.
        sizes: arguments that differ in the tier, by their places.
    """

    spec: Label
    arguments: Mapping[str, FiniteJson] = Field(default_factory=dict)
    sizes: Mapping[str, int] = Field(default_factory=dict)


class AdapterForm(FrozenModel):
    """A low-rank adapter of a linear layer: ``W + scale * up @ down``.

    Attributes:
        layer: path of the layer in the package's model.
        weight: name of W in the state of the exported class.
        down: name of the factor [rank, in_features] there.
        up: name of the factor [out_features, rank] there.
        scale: factor of the product.
        transposed: whether W is [in_features, out_features].
    """

    layer: Label
    weight: Label
    down: Label
    up: Label
    scale: Annotated[float, Field(allow_inf_nan=False)]
    transposed: bool = False


class PackageForm(FrozenModel):
    """The form of a tier's model in the package that defines its class.

    Attributes:
        class_name: name of the class in the package.
        config: its configuration with the sizes of the tier, as in ``config.json``.
        adapters: low-rank adapters that the exported class adds to the package's class.
        renamed: names in the state of the exported class with their names in the package's; empty
            for tensors that the package's class does not have.
        problem: why the package does not read the model; empty if it does.
    """

    class_name: Label
    config: Mapping[str, FiniteJson] = Field(default_factory=dict)
    adapters: Annotated[tuple[AdapterForm, ...], Field(max_length=_ADAPTERS_LIMIT)] = ()
    renamed: Mapping[Label, str] = Field(default_factory=dict)
    problem: str = ""

    def base_state(self, state: Tensors) -> dict[str, NDArray[Any]]:
        """Return the state of the package's class without the products of the adapters.

        Args:
            state: state of the exported class, by its names.
        """
        tensors: dict[str, NDArray[Any]] = {}
        for name, value in state.items():
            package_name = self.renamed.get(name, name)
            if package_name:
                tensors[package_name] = value
        return tensors

    def merged_state(self, state: Tensors) -> dict[str, NDArray[Any]]:
        """Return the state of the package's class, with each adapter's product in its weight.

        Args:
            state: state of the exported class, by its names.

        Raises:
            BlobError: the factors of an adapter do not fit its weight.
        """
        merged = dict(state)
        for adapter in self.adapters:
            weight = state[adapter.weight]
            change = _product(adapter, state)
            if change.shape != weight.shape:
                raise BlobError(
                    f"the adapter of {quoted(adapter.layer)} is {list(change.shape)} and its weight"
                    f" {list(weight.shape)}; run `shoal export` again"
                )
            # In double precision, so that the sum is rounded once.
            exact = weight.astype(np.float64) + change
            merged[adapter.weight] = exact.astype(weight.dtype)
        return self.base_state(merged)

    def adapter_config(
        self,
        state: Tensors,
        trained: tuple[str, ...],
    ) -> dict[str, Any]:
        """Return ``adapter_config.json`` as peft reads it.

        Args:
            state: state of the exported class, by its names.
            trained: paths of modules that train without an adapter.
        """
        ranks: dict[str, int] = {}
        alphas: dict[str, float] = {}
        for adapter in self.adapters:
            rank = state[adapter.down].shape[0]
            ranks[adapter.layer] = rank
            # peft divides by the rank of the layer.
            alphas[adapter.layer] = adapter.scale * rank
        first = self.adapters[0].layer
        return {
            "peft_type": "LORA",
            "task_type": None,
            "inference_mode": True,
            "base_model_name_or_path": None,
            "bias": "none",
            "r": ranks[first],
            "lora_alpha": alphas[first],
            "lora_dropout": 0.0,
            "fan_in_fan_out": self.adapters[0].transposed,
            "target_modules": list(ranks),
            "rank_pattern": _unlike_first(ranks),
            "alpha_pattern": _unlike_first(alphas),
            "modules_to_save": list(trained) or None,
        }

    def factors(self, state: Tensors) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the factors of the adapters by the names that peft gives them in a model."""
        for adapter in self.adapters:
            yield f"{adapter.layer}.lora_A.weight", state[adapter.down]
            yield f"{adapter.layer}.lora_B.weight", state[adapter.up]


def _product(adapter: AdapterForm, state: Tensors) -> NDArray[np.float64]:
    """Return what an adapter adds to its weight."""
    up = state[adapter.up].astype(np.float64)
    down = state[adapter.down].astype(np.float64)
    product: NDArray[np.float64] = adapter.scale * (up @ down)
    return product.T if adapter.transposed else product


def _unlike_first(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the first one."""
    first = next(iter(values.values()))
    unlike: dict[str, Any] = {}
    for name, value in values.items():
        if value != first:
            unlike[name] = value
    return unlike
