"""Base, fine-tune and target: opened, matched and accounted for once, before anything is computed.

`Trio.open` shows base and fine-tune under the target's names and in the order of its token rows, and decides the
fate of every tensor by names, shapes and dtypes. Bytes are read to tell stored copies of a tied tensor (a few entries
of each tensor), and packed integers, which must not differ."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from gradfix.checkpoints.kinds import (
    STATISTICS,
    heads_among,
    is_buffer,
    quantised,
    refuse_quantised,
    repeated,
    same_bytes,
    stored_copies,
)
from gradfix.checkpoints.matched import TOKEN_TABLE, another_shape, is_output_table, match_prefix, match_vocabulary
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.weights import Checkpoint, Source
from gradfix.errors import IncompatibleCheckpoints, UnsafeResult

ACROSS = "`--method best` (or bico, theseus) works across shapes."


class Fate(Enum):
    """What becomes of a tensor: how the manifest counts it, and why; `{of}` is the tensor it goes with."""

    TRANSPORTED = ("transported", "")
    TIED = ("transported", "tied to {of}")
    HEAD_COPIED = ("copied", "head of the fine-tune, copied from the fine-tune")
    HEAD_NEW = ("copied", "a new head in place of the fine-tune's, which does not fit; taught by its answers")
    HEAD_SKIPPED = ("skipped", "head of the fine-tune, skipped")
    DROPPED_HEAD = ("copied", "a head the fine-tune dropped")
    ONLY_IN_TARGET = ("copied", "only in the target")
    NOT_ASKED = ("copied", "no part of the task")
    STATISTICS = ("copied", "running statistics of the target")
    INTEGERS = ("copied", "not a floating tensor")
    BUFFER = ("copied", "a buffer")
    UNSTORED_COPY = ("copied", "a copy that base or fine-tune does not store")
    SPARE_BUFFER = ("skipped", "a buffer")  # of the fine-tune; the target has no place for it and needs none
    SPARE_COPY = ("skipped", "a copy of {of}")
    SPARE_TABLE = ("skipped", "an output table trained apart; base and target have one for input and output")
    NO_VOTES = ("copied", "no votes")
    ALPHA_ZERO = ("copied", "alpha is 0")
    ANOTHER_SHAPE = ("copied", "the bases have other shapes")
    TAKEN = ("copied", "taken as it is from {of}")

    @property
    def kind(self) -> str:
        return self.value[0]


BROUGHT = (Fate.HEAD_COPIED, Fate.HEAD_NEW)  # heads that come from elsewhere than the target
HEAD_FATES = {"copy": Fate.HEAD_COPIED, "new": Fate.HEAD_NEW, "skip": Fate.HEAD_SKIPPED}  # by policy


@dataclass(frozen=True)
class TensorFate:
    """The fate of one tensor, and the tensor it goes with, if any."""

    fate: Fate
    of: str | None = None

    @property
    def kind(self) -> str:
        return self.fate.kind

    @property
    def reason(self) -> str:
        return str(self.fate.value[1]).replace("{of}", str(self.of))

    def as_json(self) -> dict[str, str]:
        return {"fate": self.kind, **({"reason": self.reason} if self.reason else {})}


class Fates(dict[str, TensorFate]):
    """The fate of every tensor of target and fine-tune, by name; those that move stand in the target's order."""

    @property
    def moved(self) -> list[str]:
        """What is transported, stored copies of tied tensors included."""
        return [name for name, fate in self.items() if fate.kind == "transported"]

    @property
    def tied(self) -> dict[str, str]:
        """Stored copies that move with another tensor, and with which."""
        return {name: str(fate.of) for name, fate in self.items() if fate.fate is Fate.TIED}

    @property
    def heads(self) -> list[str]:
        """What only the fine-tune has, copied or skipped, and what stands in for it."""
        heads = (*BROUGHT, Fate.HEAD_SKIPPED)
        return sorted(name for name, fate in self.items() if fate.fate in heads)

    def leaving(self, names: Collection[str]) -> Fates:
        """The same, but these tensors of the target, and stored copies of them, are no part of the task."""
        plain = (Fate.TRANSPORTED, Fate.TIED, Fate.ONLY_IN_TARGET)
        left = {n for n, fate in self.items() if fate.fate in plain and (n in names or fate.of in names)}
        return Fates({n: TensorFate(Fate.NOT_ASKED) if n in left else fate for n, fate in self.items()})

    @property
    def copied(self) -> list[str]:
        """What the output has as it is: from the target or, where it is a head, from the fine-tune."""
        return [name for name, fate in self.items() if fate.kind == "copied"]


class Trio:
    """Base, fine-tune and target as one thing.

    `base` and `tuned` are shown as the target names its tensors and orders its token rows; `sources` are all three
    as their files are, `given` as the user named them. `vocabulary` says for the manifest how rows were matched.

    `apart` says in what the target's shape is another than the base's. Then nothing is matched: base and fine-tune are
    as their files are, and every tensor of the target stays unless a method that works across shapes changes it."""

    def __init__(
        self,
        sources: Mapping[str, Checkpoint],
        given: Mapping[str, Any],
        head: str,
        strict: bool,
        leave: Collection[str] = (),
        across: bool = False,
    ) -> None:
        self.sources, self.given, self.head = dict(sources), dict(given), head
        self.target = self.sources["target"]
        self.apart = another_shape(self.sources["base"], self.target)
        if self.apart is not None and across and not strict:
            self._keep_apart(head)
            return
        base, tuned = (match_prefix(self.sources[role], self.target) for role in ("base", "tuned"))
        self.base, self.tuned, self.vocabulary = match_vocabulary(base, tuned, self.target)
        self.fates = _Account(self.base, self.tuned, self.target).fates(head, strict).leaving(leave)
        self._count()
        if self.apart is not None:
            raise IncompatibleCheckpoints(f"{self.target} has another shape than {base}: {self.apart}. {ACROSS}")

    def _keep_apart(self, head: str) -> None:
        """Base and fine-tune must go together all the same."""
        self.tuned, self.vocabulary = self.sources["tuned"], {}
        self.base = match_prefix(self.sources["base"], self.tuned)
        refuse_quantised(self.target)
        own = _Account(self.base, self.tuned, self.base).fates(head, False)
        self.fates = Fates(dict.fromkeys(self.target.names(), TensorFate(Fate.ANOTHER_SHAPE)))
        self.fates |= {name: fate for name, fate in own.items() if name in own.heads}
        self._count()

    def _count(self) -> None:
        self.moved, self.tied = self.fates.moved, self.fates.tied
        self.heads, self.copied = self.fates.heads, self.fates.copied

    @classmethod
    def open(
        cls,
        base: Source | Checkpoint,
        tuned: Source | Checkpoint,
        target: Source | Checkpoint,
        *,
        head: str = "error",
        strict: bool = False,
        leave: Collection[str] = (),
        across: bool = False,
    ) -> Trio:
        """Open and match all three, or say why they do not go together.

        A tensor that only the fine-tune has (a new head), and a head that not all three have in one shape, follow the
        `head` policy; one that only the target has,
        or that belongs to a head the fine-tune dropped, is copied; one that base and fine-tune share but the target
        lacks is an error. Buffers are the target's. A stored copy of a transported tensor is moved with it, and one
        that a file leaves out is not missed. What `leave` names is no part of the task and stays the target's. With
        `across` a target of another shape is no error: see `apart`."""
        before, goal = open_checkpoint(base), open_checkpoint(target)
        sources = {"base": before, "tuned": open_checkpoint(tuned, base=before), "target": goal}
        return cls(sources, {"base": base, "tuned": tuned, "target": target}, head, strict, leave, across)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the result should know about the three."""
        return (*self.base.notes, *self.tuned.notes, *self.target.notes)

    def fingerprints(self) -> dict[str, str]:
        return {role: source.fingerprint() for role, source in self.sources.items()}


def check_pair(base: Checkpoint, tuned: Checkpoint) -> list[str]:
    """Names of the weights both sides share; raises when names or shapes differ.

    Buffers stay out, and so does a tied tensor's copy that only one side stores."""
    refuse_quantised(base)
    refuse_quantised(tuned)
    before, after = set(base.names()), set(tuned.names())
    buffers = _buffers(base, tuned)
    shared = [name for name in base.names() if name in after]
    weights = [name for name in shared if name not in buffers]
    missing = [
        name
        for side, names in ((base, before - after), (tuned, after - before))
        for name in _unrepeated(side, names - buffers, shared)
    ]
    if missing:
        raise IncompatibleCheckpoints(
            f"{base} and {tuned} differ in {len(missing)} tensor names, first {min(missing)!r}. "
            f"Run `gradfix inspect {base} {tuned}` to see all."
        )
    _check_shapes(base, tuned, weights)
    _check_packed(base, tuned, weights)
    return _floating(base, weights)


class _Account:
    """Who of the three has which tensor, and what follows for it."""

    def __init__(self, base: Checkpoint, tuned: Checkpoint, target: Checkpoint) -> None:
        self.base, self.tuned, self.target = base, tuned, target
        for checkpoint in (base, tuned, target):
            refuse_quantised(checkpoint)
        self.before, self.after, self.goal = set(base.names()), set(tuned.names()), set(target.names())
        self.buffers = _buffers(base, tuned, target)
        self.both = [name for name in base.names() if name in self.after]
        self.dropped = heads_among(base, self.before - self.after - self.buffers)
        self.replaced = self._replaced()

    def _replaced(self) -> set[str]:
        """Heads of base and fine-tune that not all three have in one shape, such as one of other classes."""
        odd = [
            name
            for name in self.both
            if name not in self.buffers
            and not TOKEN_TABLE.search(name)
            and (name not in self.goal or len({c.info(name).shape for c in (self.base, self.tuned, self.target)}) > 1)
        ]
        return heads_among(self.tuned, odd) | heads_among(self.base, odd) if odd else set()

    def fates(self, head: str, strict: bool) -> Fates:
        self._refuse_lost()
        spare = self._spare()
        moved = self._moved()
        new = sorted((self.after - self.before | self.replaced) - self.buffers - set(spare))
        heads = dict.fromkeys(new, self._head_fate(new, head)) if new else {}
        tied = self._tied(moved, set(heads))
        transported = {name: TensorFate(Fate.TRANSPORTED) for name in moved}
        transported |= {name: TensorFate(Fate.TIED, first) for name, first in tied.items()}
        names = self.target.names()
        stay = {name: heads.get(name) or self._stays(name) for name in names if name not in transported}
        if strict:
            _refuse_unshared([*heads, *(n for n, why in stay.items() if why.fate is Fate.ONLY_IN_TARGET)])
        found = Fates(stay)
        found |= {name: transported[name] for name in names if name in transported}
        found |= heads
        found |= {name: why for name, why in spare.items() if name not in self.goal}
        if set(found) != self.goal | self.after:
            raise UnsafeResult("not every tensor is accounted for; this is a bug, please report it.")
        return found

    def _refuse_lost(self) -> None:
        names = self.before - self.after - self.dropped - self.buffers
        lost = _unrepeated(self.base, names, self.both)
        if lost:
            raise IncompatibleCheckpoints(
                f"{self.tuned} lacks {len(lost)} tensors of its base {self.base}, first {lost[0]!r}. "
                "Is it a fine-tune of that base? A LoRA folder needs its adapter_config.json."
            )

    def _spare(self) -> dict[str, TensorFate]:
        """Tensors of the fine-tune that base or target can do without; raises for a weight without a home."""
        at_home = [name for name in self.both if name in self.goal]
        homeless = [n for n in self.both if n not in self.goal and n not in self.buffers | self.replaced]
        copies = repeated(self.base, homeless, at_home)
        copies = {name: first for name, first in copies.items() if same_bytes(self.tuned, name, first)}
        homeless = sorted(set(homeless) - set(copies))
        if homeless:
            raise IncompatibleCheckpoints(
                f"{self.target} lacks {len(homeless)} tensors of {self.base}, first {homeless[0]!r}: not the same "
                f"architecture. Run `gradfix inspect {self.base} {self.target}` to see all."
            )
        copies |= repeated(self.tuned, sorted(self.after - self.before - self.buffers), self.both)
        added = [n for n in self.after - self.before - self.goal if n.endswith(".weight") and TOKEN_TABLE.search(n)]
        apart = [name for name in added if is_output_table(name)]
        spare = dict.fromkeys(apart if any(map(TOKEN_TABLE.search, at_home)) else [], TensorFate(Fate.SPARE_TABLE))
        spare |= {name: TensorFate(Fate.SPARE_COPY, first) for name, first in copies.items()}
        return spare | dict.fromkeys(sorted(self.after & self.buffers), TensorFate(Fate.SPARE_BUFFER))

    def _moved(self) -> list[str]:
        """The weights all three have under the same name, checked."""
        shared = {*self.both} & self.goal - self.buffers - self.replaced
        names = [name for name in self.target.names() if name in shared]
        _check_shapes(self.base, self.tuned, names)
        _check_shapes(self.base, self.target, names)
        _check_packed(self.base, self.tuned, names)
        return [name for name in _floating(self.target, names) if not name.endswith(STATISTICS)]

    def _head_fate(self, names: list[str], head: str) -> TensorFate:
        if head == "error":
            raise IncompatibleCheckpoints(
                f"{self._about_head(names)}. Choose --head copy (take the tuned head as it is) or --head skip (leave it "
                "out)."
            )
        return TensorFate(HEAD_FATES[head])

    def _about_head(self, names: list[str]) -> str:
        added = [name for name in names if name not in self.replaced]
        if added:
            return (
                f"{self.tuned} has {len(added)} tensors that {self.base} lacks, first {added[0]!r}: a head trained with "
                "the fine-tune"
            )
        name = names[0]
        if name not in self.goal:
            return f"{self.target} has no {name!r}, a head of {self.tuned} and its base"
        shapes = [f"{list(c.info(name).shape)} in {c}" for c in (self.tuned, self.base, self.target)]
        return f"the head {name!r} is {shapes[0]}, {shapes[1]} and {shapes[2]}"

    def _tied(self, moved: list[str], heads: set[str]) -> dict[str, str]:
        """Stored copies in the target of what is moved, each with its original.

        A fine-tune may have untied what its target ties: then both are moved, each by its own update."""
        movable = set(moved)
        others = [
            name
            for name in self.target.names()
            if name not in movable | heads | self.buffers and not name.endswith(STATISTICS)
        ]
        return {
            name: first
            for name, first in stored_copies(self.target, [*moved, *others]).items()
            if first in movable
            and (name not in movable or all(same_bytes(c, name, first) for c in (self.base, self.tuned)))
        }

    def _stays(self, name: str) -> TensorFate:
        """Why a tensor of the target stays as it is."""
        if name in self.dropped:
            return TensorFate(Fate.DROPPED_HEAD)
        if name not in self.before | self.after:
            return TensorFate(Fate.ONLY_IN_TARGET)
        if name.endswith(STATISTICS):
            return TensorFate(Fate.STATISTICS)
        if not self.target.info(name).dtype.is_floating_point:
            return TensorFate(Fate.INTEGERS)
        return TensorFate(Fate.BUFFER if name in self.buffers else Fate.UNSTORED_COPY)


def _floating(checkpoint: Checkpoint, names: list[str]) -> list[str]:
    return [name for name in names if checkpoint.info(name).dtype.is_floating_point]


def _buffers(*checkpoints: Checkpoint) -> set[str]:
    """What is a buffer wherever it is stored; a weight that one file holds as integers is none."""
    found = [(name, is_buffer(name, c.info(name))) for c in checkpoints for name in c.names()]
    return {name for name, _ in found} - {name for name, buffer in found if not buffer}


def _unrepeated(checkpoint: Checkpoint, names: set[str], originals: Iterable[str]) -> list[str]:
    """The names that are no copies of one of the originals."""
    return sorted(names - set(repeated(checkpoint, sorted(names), originals)))


def _refuse_unshared(names: list[str]) -> None:
    if names:
        raise IncompatibleCheckpoints(
            f"--strict: {len(names)} tensors are not shared by all three, first {min(names)!r}."
        )


def _check_shapes(left: Checkpoint, right: Checkpoint, names: list[str]) -> None:
    for name in names:
        a, b = left.info(name), right.info(name)
        if a.shape == b.shape:
            continue
        if len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[1]:
            raise IncompatibleCheckpoints(
                f"tensor {name!r} has {a.shape[0]} rows in {left} and {b.shape[0]} in {right}: the vocabularies "
                "differ. Give checkpoints with tokenizers on both sides so that rows can be matched by token."
            )
        raise IncompatibleCheckpoints(
            f"tensor {name!r} is {list(a.shape)} in {left} and {list(b.shape)} in {right}. "
            f"Run `gradfix inspect {left} {right}` to see all."
        )


def _check_packed(base: Checkpoint, tuned: Checkpoint, names: list[str]) -> None:
    """Integers that training changed are packed weights; to copy the target's would lose the change."""
    for name in names:
        info = tuned.info(name)
        if info.dtype.is_floating_point or len(info.shape) < 2 or name.endswith(STATISTICS):
            continue
        pairs = zip(base.chunks(name), tuned.chunks(name), strict=True)
        if base.info(name) != info or not all(torch.equal(*pair) for pair in pairs):
            raise quantised(tuned, name, info)
