"""Shapes and axis orders of element-wise results, from those of their operands."""

from collections.abc import Sequence

from trainer_export.lowering.values import Dim, Shape, Value, hint, is_single


def leading_order(operands: Sequence[Value], rank: int, stored: Shape) -> tuple[int, ...]:
    """Return the axis order of an element-wise operator.

    The largest operand keeps its order. Among equals, an order that is not plain wins, because it
    comes from an operator that works in that order, and neighbouring operators will do so, too.
    Parameters and their gradients are the exception: parameter and state are read and written in
    plain order, so a gradient is transposed once.
    """
    # A size that is not a number depends on the batch, which parameters and their states never do.
    of_batch = any(not isinstance(size, int) for size in stored)
    candidates = []
    for value in operands:
        if value.rank == rank:
            candidates.append(value)
    leader = max(candidates, key=lambda value: (hint(value.stored), value.is_plain != of_batch))
    return leader.order


def batch_factor(size: Dim) -> int:
    """Return the number that multiplies the batch size in a size."""
    return 1 if isinstance(size, int) else int(size.as_coeff_Mul()[0])


def lifted_shape(shape: Shape, result: Shape, target: Shape) -> Shape | None:
    """Return an operand's shape once an element-wise result is reshaped to ``target``.

    Returns:
        None if the operand cannot follow.
    """
    if shape == result:
        return target
    if is_single(shape):
        return ()
    if is_single(shape[:-1]) and shape[-1] == result[-1]:
        return (shape[-1],)
    return (*target[:-1], 1) if shape[-1] == 1 and shape[:-1] == result[:-1] else None


def broadcast_shape(operands: Sequence[Value], rank: int) -> tuple[Shape, Shape]:
    """Return the common shape, and the sizes of it that are stored by an operand.

    Sizes that depend on the batch are not compared: they are equal, or 1.
    """
    shape: list[Dim] = [1] * rank
    stored: list[Dim] = [1] * rank
    for value in operands:
        for axis, (size, stored_size) in enumerate(
            zip(value.shape, value.stored, strict=True),
            rank - value.rank,
        ):
            # The last operand wins: sizes beside 1 are equal, as PyTorch has checked while it
            # traced.
            if size != 1:
                shape[axis] = size
            if stored_size != 1:
                stored[axis] = stored_size
    return tuple(shape), tuple(stored)
