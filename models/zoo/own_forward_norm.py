"""Batch norms of a subclass with its own forward, which the static batch norm keeps.

timm's `BatchNormAct2d`, for example, normalises, drops and activates in one layer. Its forward runs
unchanged, except that its normalising function takes the statistics of the batch.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fleet_protocol.errors import ModelError
from models.zoo.layers import StaticBatchNorm


class OwnForwardNorm(StaticBatchNorm):
    """A static batch norm whose forward is that of another class."""

    _forward_of: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the other class."""
        with _Normalising(self) as normalising:
            result = self._forward_of.forward(self, *args, **kwargs)
        if not normalising.count:
            raise ModelError(
                f"{self._forward_of.__name__} has its own forward, which does not call"
                " torch.nn.functional.batch_norm, so its statistics cannot be those of the batch;"
                " hold a BatchNorm in a module beside it, or replace the layer"
            )
        return result


class _Normalising(TorchFunctionMode):
    """Lets a layer normalise what is passed to PyTorch's function for it."""

    def __init__(self, layer: OwnForwardNorm) -> None:
        super().__init__()
        self._layer = layer
        self.count = 0

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        self.count += 1
        x: Tensor = args[0] if args else (kwargs or {})["input"]
        return self._layer.normalise(x)


def keep_forward(layer: nn.Module, norm: StaticBatchNorm) -> OwnForwardNorm:
    """Return a static batch norm with the forward, layers and attributes of another norm.

    Args:
        layer: the norm whose forward to keep, of a subclass of one of PyTorch's.
        norm: has its parameters and statistics.
    """
    own = type(layer)
    wrapper: Any = type(f"Static{own.__name__}", (OwnForwardNorm, own), {"_forward_of": own})
    kept = wrapper.__new__(wrapper)
    kept.__dict__.update(vars(layer))
    for name in ("_parameters", "_buffers"):
        kept.__dict__[name] = dict(getattr(layer, name)) | dict(getattr(norm, name))
    kept.__dict__["_modules"] = dict(layer._modules)  # noqa: SLF001 - no public name
    # It would count the batches, but graphs return only parameters.
    kept._buffers["num_batches_tracked"] = None  # noqa: SLF001 - no public name
    kept.mode = norm.mode
    kept.last_mean = None
    kept.last_var = None
    result: OwnForwardNorm = kept
    return result
