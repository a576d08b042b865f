"""Describes, for each tier, how weights of a run load into the class that the user wrote, and tries it out.

Random weights and statistics are loaded into a fresh model of the class, which must then compute what the exported one
does. Where it does not, or has no place for something, the description says so, and `shoal export-weights` refuses to
write a file that would load and be wrong.
"""

import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleet_protocol.errors import ShoalError
from fleet_protocol.manifest import statistic_mean, statistic_variance
from models.architecture import Architecture, build
from models.conversion_switch import unconverted
from models.layout import thaw
from models.own_class import Builder, OwnClass, is_dotted, is_identifier
from models.slicing import Tensors
from models.tier import Tier
from models.user_lines import first_line
from models.zoo.conversion import origin_of
from models.zoo.exchange import samples
from models.zoo.restoring import Restored, Untouched
from trainer_export.exported import Export
from trainer_export.model_inputs import heads_of, norms, prepared

_TOLERANCE = 1e-3  # of the largest output: what both compute in another order, and a norm of few numbers makes larger
_USER_FILES = "shoal_user_models_"  # how a registry names the modules of users' files


def own_class(export: Export, tier: Tier, module: nn.Module) -> bytes:
    """The file with the description of a tier's class; `module` is the tier's exported model, which stays as it is."""
    origin = origin_of(module)
    settings = export.settings(tier)
    builder = _builder_of(export.arch, tier, settings, converts=origin is not None)
    restored = origin or Untouched.of(module).restored(lambda _path, _layer: False, converted=False)
    own = restored.own.model_copy(update={"builder": builder})
    if origin is not None and not own.problem:
        own = own.model_copy(update={"problem": _difference(export, tier, module, restored)})
    return own.to_bytes(restored.arrays())


def _difference(export: Export, tier: Tier, module: nn.Module, restored: Restored) -> str:
    """What is wrong with a fresh model of the class that has the weights of the exported one; empty for nothing."""
    model = prepared(module, "eval")
    tensors = _drawn(model, restored.own, export.seed)
    x = samples(module, export.arch.row(export.layout.settings))
    arch = replace(export.arch, build=inspect.unwrap(export.arch.build))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _plain_kernels():
            wanted = heads_of(model(x))
            torch.manual_seed(export.seed + 1)  # what it draws, the state must make up for
            fresh: nn.Module = build(arch, tier, settings=export.settings(tier), convert=False)
            values = restored.own.values(tensors, restored.arrays(), 0)
            fresh.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in values.items()})
            found = heads_of(fresh.eval()(x))
    except ShoalError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - of the user's class; the export itself goes well without it
        return f"the weights cannot be loaded into the class as it is before the conversion: {first_line(error)}"
    if all(_alike(found.get(name), value) for name, value in wanted.items()):
        return ""
    return (
        "the class as it is before the conversion computes something else with the same weights and statistics: what"
        " it has beside its state, such as buffers with persistent=False, is another each time it is built"
    )


def _drawn(model: nn.Module, own: OwnClass, seed: int) -> Tensors:
    """The tensors of a model as a run has them, with statistics that are drawn, and put into its norms.

    A norm without a scale in the user's class has one here that stays 1, and a shift that stays 0.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    for path, norm in norms(model):
        norm.running_mean = torch.randn(norm.running_mean.shape, generator=generator) * 0.1
        norm.running_var = torch.rand(norm.running_var.shape, generator=generator) + 0.5
        tensors[statistic_mean(path)] = norm.running_mean
        tensors[statistic_variance(path)] = norm.running_var
        if f"{path}.weight" not in own.needed:
            norm.weight = nn.Parameter(torch.ones_like(norm.weight))
            norm.bias = nn.Parameter(torch.zeros_like(norm.bias))
    return {name: value.numpy() for name, value in tensors.items()}


def _alike(found: Tensor | None, wanted: Tensor) -> bool:
    if found is None or found.shape != wanted.shape:
        return False
    size = float(wanted.abs().max()) if wanted.numel() else 0.0
    return torch.allclose(found, wanted, rtol=0, atol=_TOLERANCE * size, equal_nan=True)


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """While this holds, encoders take no shortcut past what is padded, and nobody is warned of what is tried."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(value=fast)


def _builder_of(arch: Architecture, tier: Tier, settings: Mapping[str, Any], *, converts: bool) -> Builder | None:
    """Where Python finds the architecture; None where no line of Python can import it by a name.

    What was converted may have been by its builder.
    """
    function = inspect.unwrap(arch.build)
    module = sys.modules.get(function.__module__)
    held = vars(module).items() if module is not None else ()
    name = next((key for key, value in held if isinstance(value, Architecture) and value.build is function), None)
    if name is None or module is None:
        return None
    is_own_file = module.__name__.startswith(_USER_FILES) or module.__name__ == "__main__"
    file = str(Path(module.__file__).resolve()) if is_own_file and module.__file__ else None
    imported = Path(file).stem if file else module.__name__
    if not (is_dotted(imported) and is_identifier(name)):  # such as my-models.py
        return None
    return Builder(
        module=imported,
        file=file,
        name=name,
        settings={key: thaw(value) for key, value in settings.items() if value != arch.defaults[key]},
        converts=converts and _converts(replace(arch, build=function), tier, settings),
    )


def _converts(arch: Architecture, tier: Tier, settings: Mapping[str, Any]) -> bool:
    with torch.random.fork_rng(devices=[]), unconverted() as left_out:
        build(arch, tier, settings=settings)
    return bool(left_out)
