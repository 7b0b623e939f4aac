"""Is this a fine-tune of that base? The size of the change tells, and the cosines tell a user what went wrong."""

from __future__ import annotations

from gradfix.checkpoints.open import Checkpoint
from gradfix.errors import IncompatibleCheckpoints
from gradfix.taskvector import TaskVector

MAX_NORM_RATIO = 0.5


def stranger(
    base: Checkpoint, tuned: Checkpoint, ratio: float, cosine: float, to_target: float | None = None
) -> IncompatibleCheckpoints:
    """The refusal of a fine-tune that is too far from its base."""
    further = "" if to_target is None else f", of base and target {to_target:.3f}"
    return IncompatibleCheckpoints(
        f"{tuned} differs from {base} by {ratio:.0%} of its norm: not a fine-tune of that base? "
        f"Cosine of base and fine-tune {cosine:.3f}{further}. Check the order of --base and --tuned; "
        "--force goes on all the same."
    )


def check_descent(tau: TaskVector, base: Checkpoint, tuned: Checkpoint) -> None:
    """Raise when `tuned - base` is too large for a fine-tune; costs one more reading of the base."""
    square = across = 0.0
    for name, delta in tau.items():
        before = base.read(name).double()
        square += float(before.square().sum())
        across += float((before * delta.double()).sum())
    change = tau.norm() ** 2
    ratio = (change / square) ** 0.5 if square else 0.0
    if ratio > MAX_NORM_RATIO:
        raise stranger(base, tuned, ratio, cosine_after(square, across, change))


def cosine_after(square: float, across: float, change: float) -> float:
    """Cosine of x and x + d from |x|^2, x.d and |d|^2."""
    scale = (square * (square + 2 * across + change)) ** 0.5
    return (square + across) / scale if scale else 0.0
