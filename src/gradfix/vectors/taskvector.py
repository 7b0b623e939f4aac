"""Task vectors: what a fine-tune changed, as an immutable mapping of named tensors.

Values are float32 or better whatever the checkpoints hold. Operators return new vectors and insist
on equal names and shapes: no key is ever dropped in silence. Whether a change is one that a fine-tune makes, its
size tells, and cosines tell a user what went wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from gradfix.checkpoints.kinds import repeated
from gradfix.checkpoints.matched import is_output_table, match_prefix
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.trio import Trio, check_pair
from gradfix.checkpoints.weights import Checkpoint, MemoryCheckpoint, Renamed, Source
from gradfix.checkpoints.write import save_tensors
from gradfix.errors import CorruptInput, IncompatibleCheckpoints, UnsafeResult
from gradfix.vectors.diagnostics import notebook_table

MAX_NORM_RATIO = 0.5
SWAPPED = "Check the order of --base and --tuned; --force goes on all the same."


class TaskVector(Mapping[str, Tensor]):
    """An update to a model's weights, by tensor name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: _working(tensor.detach()) for name, tensor in tensors.items()}

    @classmethod
    def of(cls, trio: Trio) -> TaskVector:
        """What the fine-tune changed in the weights all three share, under the target's names.

        Where the target has another shape: in the weights of its base, under their own names."""
        if trio.apart is not None:
            return cls.own(trio)
        heads = set(trio.heads)
        names = [name for name in trio.base.names() if name not in heads]
        shared = {name: name for name in names if name in trio.tuned and name in trio.target}
        found = cls._between(Renamed(trio.base, shared), Renamed(trio.tuned, shared))
        return found._changing(trio.base, trio.tuned)

    @classmethod
    def own(cls, trio: Trio) -> TaskVector:
        """What the fine-tune changed in its base, in its own names and order."""
        tuned = trio.sources["tuned"]
        base = match_prefix(trio.sources["base"], tuned)
        shared = {n: n for n in base.names() if n in tuned and base.info(n).shape == tuned.info(n).shape}
        return cls._between(Renamed(base, shared), Renamed(tuned, shared))._changing(base, tuned)

    @classmethod
    def between(cls, base: Source | Checkpoint, tuned: Source | Checkpoint) -> TaskVector:
        """`tuned - base`. Each side may be a path, a hub id, a state dict or an nn.Module.

        A LoRA folder as `tuned` is densified onto `base`. Buffers are left out, and so is a tied tensor's copy
        that only one side stores."""
        before = open_checkpoint(base)
        after = open_checkpoint(tuned, base=before)
        before, after = _same_names(before, after)
        return cls._between(before, after)._changing(before, after)

    @classmethod
    def _between(cls, before: Checkpoint, after: Checkpoint) -> TaskVector:
        names = check_pair(before, after)
        delta = {name: _working(after.read(name)) - _working(before.read(name)) for name in names}
        vector = cls(delta)
        for name, tensor in delta.items():
            if not torch.isfinite(tensor).all():
                guilty = after if not torch.isfinite(after.read(name).float()).all() else before
                raise CorruptInput(f"tensor {name!r} of {guilty} holds NaN or Inf. Repair or re-export it.")
        return vector

    def _changing(self, base: Checkpoint, tuned: Checkpoint) -> TaskVector:
        if not any(bool(tensor.any()) for tensor in self.values()):
            raise no_change(base, tuned)
        return self

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __add__(self, other: TaskVector) -> TaskVector:
        return self._zip(other, torch.add)

    def __sub__(self, other: TaskVector) -> TaskVector:
        return self._zip(other, torch.sub)

    def __mul__(self, factor: float) -> TaskVector:
        return self.map(lambda name, tensor: tensor * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> TaskVector:
        return self * (1 / divisor)

    def __neg__(self) -> TaskVector:
        return self.map(lambda name, tensor: -tensor)

    def map(self, function: Callable[[str, Tensor], Tensor]) -> TaskVector:
        return TaskVector({name: function(name, tensor) for name, tensor in self.items()})

    def subset(self, names: Iterable[str]) -> TaskVector:
        return TaskVector({name: self[name] for name in names})

    def renamed(self, mapping: Mapping[str, str]) -> TaskVector:
        return TaskVector({mapping.get(name, name): tensor for name, tensor in self.items()})

    def dot(self, other: Mapping[str, Tensor]) -> float:
        _check_names(self, other)
        return sum(float((self[name].double() * other[name].double()).sum()) for name in self)

    def norm(self) -> float:
        return sum(float(tensor.double().square().sum()) for tensor in self.values()) ** 0.5

    def cosine(self, other: TaskVector) -> float:
        scale = self.norm() * other.norm()
        return self.dot(other) / scale if scale else 0.0

    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.values())

    def to(self, device: torch.device | str) -> TaskVector:
        return self.map(lambda name, tensor: tensor.to(device))

    def _zip(self, other: TaskVector, function: Callable[[Tensor, Tensor], Tensor]) -> TaskVector:
        if not isinstance(other, TaskVector):
            return NotImplemented
        _check_names(self, other)
        return TaskVector({name: function(self[name], other[name]) for name in self})

    def save(self, path: str | os.PathLike[str]) -> None:
        save_tensors(Path(path), {n: t.contiguous() for n, t in self.items()}, {"format": "gradfix.taskvector"})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TaskVector:
        return cls(open_checkpoint(path).state())

    def __repr__(self) -> str:
        return f"TaskVector({len(self)} tensors, {self.numel():,} weights, norm {self.norm():.4g})"

    def _repr_html_(self) -> str:
        largest = sorted(self.items(), key=lambda item: -float(item[1].norm()))[:12]
        rows = [(n, "x".join(map(str, t.shape)), f"{float(t.norm()):.4g}") for n, t in largest]
        return notebook_table(repr(self), ("tensor", "shape", "norm"), rows)


def _working(tensor: Tensor) -> Tensor:
    """float64 stays, everything else is computed in float32."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _check_names(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    if set(left) != set(right):
        odd = sorted(set(left) ^ set(right))
        raise IncompatibleCheckpoints(f"the vectors differ in {len(odd)} tensor names, first {odd[0]!r}.")
    for name in left:
        if left[name].shape != right[name].shape:
            raise IncompatibleCheckpoints(
                f"tensor {name!r} is {tuple(left[name].shape)} in one vector and {tuple(right[name].shape)} in the other."
            )


def _same_names(before: Checkpoint, after: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """When one side is a module and the other a file, speak the module's names on both."""
    for ours, theirs in ((before, after), (after, before)):
        module = getattr(ours, "module", None)
        if module is None or getattr(theirs, "module", None) is not None:
            continue
        if set(ours.names()) <= set(theirs.names()):
            tensors = {name: theirs.read(name) for name in ours.names()}
        else:
            tensors = name_map(module, theirs.names()).to_module(theirs.state())
            tensors = {name: value for name, value in tensors.items() if name in ours}
        mapped = MemoryCheckpoint(tensors, theirs.path)
        return (ours, mapped) if ours is before else (mapped, ours)
    return before, after


def no_change(base: Checkpoint, tuned: Checkpoint) -> UnsafeResult:
    """The refusal of a fine-tune that changes nothing, or nothing that base and target have."""
    both = [name for name in base.names() if name in tuned]
    added = [name for name in tuned.names() if name not in base and is_output_table(name)]
    apart = sorted(set(added) - set(repeated(tuned, added, both)))
    if not apart:
        return UnsafeResult(
            f"{tuned} equals {base} in every weight: the task vector is zero. "
            "Was the base given twice, or the fine-tune saved before training?"
        )
    return UnsafeResult(
        f"{tuned} trained nothing but {apart[0]!r}, apart from the input table that {base} shares with it: there is nothing "
        "to transport. Save base and target with both tables (tie_word_embeddings false), or train the adapter with ensure_weight_tying."
    )


def not_a_fine_tune(
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
        raise not_a_fine_tune(base, tuned, ratio)


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
