"""Choose the attention mask of a model of texts: the form that exports, if it hides the same.

A package makes of its mask, one number per token, the one that it adds to the scores of attention.
That conversion often depends on the number of samples. A mask for the scores is used unchanged, so
this module makes one if the model computes the same with it. Some blocks also hide tokens that are
far away, which only shows on samples that are long enough.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from models.zoo.package_call import Mask, PackageCall, PackageOutput

_SAMPLES = 3
_PADDED = 3  # tokens at the end of the last sample
_SPREAD = 0.3  # of the parameters, so that attention is far from even
_TOLERANCE = 1e-4  # of the largest output


def choose_mask(
    module: nn.Module,
    call: PackageCall,
    vocabulary: int,
    length: int,
) -> PackageCall:
    """Return a call with the mask of the scores that hides what the package's own mask hides.

    Args:
        module: a model that takes ``attention_mask``; its parameters are changed.
        call: its call without a mask.
        vocabulary: number of different tokens.
        length: number of tokens of a sample.

    Returns:
        The call, with the package's own mask if no other one is the same.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_SPREAD * drawn)
    module.eval()
    tokens = torch.randint(0, vocabulary, (_SAMPLES, length), generator=generator)
    tokens = torch.where(
        tokens == call.padding,
        (call.padding + 1) % vocabulary,
        tokens,
    )
    if call.padding >= 0:
        padded = min(_PADDED, length // 2)
        tokens[-1, length - padded :] = call.padding
    present = tokens != call.padding
    own = replace(call, mask="padding")
    expected = _run(module, own, tokens)
    forms: tuple[Mask, ...] = ("scores", "causal")
    for mask in forms:
        form = replace(call, mask=mask)
        returned = _run(module, form, tokens)
        if expected is not None and returned is not None and _agree(expected, returned, present):
            return form
    return own


def _run(
    module: nn.Module,
    call: PackageCall,
    tokens: Tensor,
) -> Tensor | None:
    """Return what a model computes with a mask; None if it fails, or returns several tensors."""
    args, keywords = call(module, (tokens,), {})
    try:
        with torch.no_grad():
            returned = PackageOutput()(module, args, module(*args, **keywords))
    except Exception:  # noqa: BLE001 - a package that does not take this mask raises anything
        return None
    return returned if isinstance(returned, Tensor) else None


def _agree(expected: Tensor, returned: Tensor, present: Tensor) -> bool:
    """Return whether outputs are the same; what is computed at padding does not count."""
    if expected.shape != returned.shape:
        return False
    if expected.shape[:2] == present.shape:
        expected = expected[present]
        returned = returned[present]
    difference = (expected - returned).abs().max()
    return bool(difference <= _TOLERANCE * expected.abs().max())
