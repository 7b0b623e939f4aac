"""Is this a fine-tune of that base? The size of the change tells, and the cosines tell a user what went wrong."""

from __future__ import annotations

from torch import Tensor

from gradfix.checkpoints.open import Checkpoint
from gradfix.errors import IncompatibleCheckpoints
from gradfix.vectors.taskvector import TaskVector

MAX_NORM_RATIO = 0.5
SWAPPED = "Check the order of --base and --tuned; --force goes on all the same."


def stranger(
    base: Checkpoint, tuned: Checkpoint, ratio: float, target: Checkpoint | None = None, advice: str = SWAPPED
) -> IncompatibleCheckpoints:
    """The refusal of a fine-tune that is too far from its base; reads the files once more, for the cosines."""
    further = "" if target is None else f", of base and target {cosine(base, target):.3f}"
    return IncompatibleCheckpoints(
        f"{tuned} differs from {base} by {ratio:.0%} of its norm: not a fine-tune of that base? "
        f"Cosine of base and fine-tune {cosine(base, tuned):.3f}{further}. {advice}"
    )


def check_descent(tau: TaskVector, base: Checkpoint, tuned: Checkpoint) -> None:
    """Raise when `tuned - base` is too large for a fine-tune; costs one more reading of the base."""
    square = sum(_dot(piece, piece) for name in tau for piece in base.chunks(name))
    ratio = tau.norm() / square**0.5 if square else 0.0
    if ratio > MAX_NORM_RATIO:
        raise stranger(base, tuned, ratio)


def cosine(left: Checkpoint, right: Checkpoint) -> float:
    """Over all weights that both have in the same shape."""
    across = ours = theirs = 0.0
    for name in left.names():
        info = left.info(name)
        if name not in right or right.info(name).shape != info.shape or not info.dtype.is_floating_point:
            continue
        for mine, other in zip(left.chunks(name), right.chunks(name), strict=True):
            across += _dot(mine, other)
            ours += _dot(mine, mine)
            theirs += _dot(other, other)
    scale = (ours * theirs) ** 0.5
    return across / scale if scale else 0.0


def _dot(left: Tensor, right: Tensor) -> float:
    return float(left.reshape(-1).double() @ right.reshape(-1).double())
