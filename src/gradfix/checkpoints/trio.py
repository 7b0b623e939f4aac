"""Can these checkpoints be combined? Every tensor is accounted for before anything is computed.

`check_pair` and `plan_transport` decide by names, shapes and dtypes. Bytes are read to tell stored copies of a
tied tensor (a few entries of each tensor), and packed integers, which must not differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from gradfix.checkpoints.copies import repeated, same_bytes, stored_copies
from gradfix.checkpoints.kinds import STATISTICS, is_buffer, quantised, refuse_quantised
from gradfix.checkpoints.open import Checkpoint
from gradfix.errors import IncompatibleCheckpoints

# Modules that model classes put on top of an encoder; a fine-tune may drop those of its base.
HEADS = frozenset(
    {
        *("cls", "lm_head", "classifier", "pre_classifier", "score", "head", "heads", "qa_outputs", "pooler"),
        *("predictions", "generator_predictions", "discriminator_predictions"),
    }
)
ONLY_IN_TARGET = "only in the target"
DROPPED_HEAD = "a head the fine-tune dropped"


@dataclass(frozen=True)
class Plan:
    """The fate of every tensor of the target, and of the fine-tune's extra ones."""

    transported: list[str]
    copied: dict[str, str] = field(default_factory=dict)  # name -> reason
    extra: dict[str, str] = field(default_factory=dict)  # in the fine-tune only -> what is done with it
    tied: dict[str, str] = field(
        default_factory=dict
    )  # transported with another, of which it is a stored copy
    needless: dict[str, str] = field(
        default_factory=dict
    )  # of the fine-tune, no loss to the target -> reason


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
    return floating(base, weights)


def floating(checkpoint: Checkpoint, names: list[str]) -> list[str]:
    return [name for name in names if checkpoint.info(name).dtype.is_floating_point]


def _buffers(*checkpoints: Checkpoint) -> set[str]:
    """What is a buffer wherever it is stored; a weight that one file holds as integers is none."""
    found = [(name, is_buffer(name, c.info(name))) for c in checkpoints for name in c.names()]
    return {name for name, _ in found} - {name for name, buffer in found if not buffer}


def _unrepeated(checkpoint: Checkpoint, names: set[str], originals: Iterable[str]) -> list[str]:
    """The names that are no copies of one of the originals."""
    return sorted(names - set(repeated(checkpoint, sorted(names), originals)))


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


def plan_transport(
    base: Checkpoint,
    tuned: Checkpoint,
    target: Checkpoint,
    *,
    head: str = "error",
    strict: bool = False,
) -> Plan:
    """Decide what happens to each tensor.

    A tensor that only the fine-tune has (a new head) follows the `head` policy; one that only the
    target has, or that belongs to a head the fine-tune dropped, is copied; one that base and fine-tune share but the
    target lacks is an error. Buffers are the target's. A stored copy of a transported tensor is moved with it, and
    one that a file leaves out is not missed."""
    for checkpoint in (base, tuned, target):
        refuse_quantised(checkpoint)
    trio = _Trio(base, tuned, target)
    trio.refuse_lost()
    needless = trio.needless()
    moved = trio.moved()
    extra = _plan_extra(base, tuned, sorted(trio.after - trio.before - trio.buffers - set(needless)), head)
    tied = trio.tied(moved, set(extra))
    transported = {*moved, *tied}
    copied = {name: trio.reason(name, extra) for name in target.names() if name not in transported}
    if strict:
        _refuse_unshared([*extra, *(name for name, why in copied.items() if why == ONLY_IN_TARGET)])
    return Plan(
        [name for name in target.names() if name in transported], copied, extra, tied,
        {name: why for name, why in needless.items() if name not in trio.goal},
    )  # fmt: skip


class _Trio:
    """Base, fine-tune and target, and who has which tensor."""

    def __init__(self, base: Checkpoint, tuned: Checkpoint, target: Checkpoint) -> None:
        self.base, self.tuned, self.target = base, tuned, target
        self.before, self.after, self.goal = set(base.names()), set(tuned.names()), set(target.names())
        self.buffers = _buffers(base, tuned, target)
        self.both = [name for name in base.names() if name in self.after]
        self.dropped = {name for name in self.before - self.after if HEADS & set(name.split("."))}

    def refuse_lost(self) -> None:
        names = self.before - self.after - self.dropped - self.buffers
        lost = _unrepeated(self.base, names, self.both)
        if lost:
            raise IncompatibleCheckpoints(
                f"{self.tuned} lacks {len(lost)} tensors of its base {self.base}, first {lost[0]!r}. "
                "Is it a fine-tune of that base? A LoRA folder needs its adapter_config.json."
            )

    def needless(self) -> dict[str, str]:
        """Tensors of the fine-tune that base or target can do without, and why; raises for a weight without a home."""
        at_home = [name for name in self.both if name in self.goal]
        homeless = [name for name in self.both if name not in self.goal and name not in self.buffers]
        copies = repeated(self.base, homeless, at_home)
        copies = {name: first for name, first in copies.items() if same_bytes(self.tuned, name, first)}
        homeless = sorted(set(homeless) - set(copies))
        if homeless:
            raise IncompatibleCheckpoints(
                f"{self.target} lacks {len(homeless)} tensors of {self.base}, first {homeless[0]!r}: not the same "
                f"architecture. Run `gradfix inspect {self.base} {self.target}` to see all."
            )
        copies |= repeated(self.tuned, sorted(self.after - self.before - self.buffers), self.both)
        reasons = {name: f"a copy of {first}" for name, first in copies.items()}
        return reasons | dict.fromkeys(self.after & self.buffers, "a buffer")

    def moved(self) -> list[str]:
        """The weights all three have under the same name, checked."""
        shared = {*self.both} & self.goal - self.buffers
        names = [name for name in self.target.names() if name in shared]
        _check_shapes(self.base, self.tuned, names)
        _check_shapes(self.base, self.target, names)
        _check_packed(self.base, self.tuned, names)
        return [name for name in floating(self.target, names) if not name.endswith(STATISTICS)]

    def tied(self, moved: list[str], extra: set[str]) -> dict[str, str]:
        """Stored copies in the target of what is moved, each with its original.

        A fine-tune may have untied what its target ties: then both are moved, each by its own update."""
        movable = set(moved)
        others = [
            name
            for name in self.target.names()
            if name not in movable | extra | self.buffers and not name.endswith(STATISTICS)
        ]
        return {
            name: first
            for name, first in stored_copies(self.target, [*moved, *others]).items()
            if first in movable
            and (name not in movable or all(same_bytes(c, name, first) for c in (self.base, self.tuned)))
        }

    def reason(self, name: str, extra: Mapping[str, str]) -> str:
        """Why a tensor of the target stays as it is."""
        if name in extra:
            return "replaced by the fine-tune's head"
        if name in self.dropped:
            return DROPPED_HEAD
        if name not in self.before | self.after:
            return ONLY_IN_TARGET
        if name.endswith(STATISTICS):
            return "running statistics of the target"
        if not self.target.info(name).dtype.is_floating_point:
            return "not a floating tensor"
        return "a buffer" if name in self.buffers else "a copy that base or fine-tune does not store"


def _refuse_unshared(names: list[str]) -> None:
    if names:
        raise IncompatibleCheckpoints(
            f"--strict: {len(names)} tensors are not shared by all three, first {min(names)!r}."
        )


def _plan_extra(base: Checkpoint, tuned: Checkpoint, names: list[str], head: str) -> dict[str, str]:
    if not names:
        return {}
    if head == "error":
        raise IncompatibleCheckpoints(
            f"{tuned} has {len(names)} tensors that {base} lacks, first {names[0]!r}: a head trained with the "
            "fine-tune. Choose --head copy (take the tuned head as it is) or --head skip (leave it out)."
        )
    return dict.fromkeys(names, "copied from the fine-tune" if head == "copy" else "skipped")


def _check_packed(base: Checkpoint, tuned: Checkpoint, names: list[str]) -> None:
    """Integers that training changed are packed weights; to copy the target's would lose the change."""
    for name in names:
        info = tuned.info(name)
        if info.dtype.is_floating_point or len(info.shape) < 2 or name.endswith(STATISTICS):
            continue
        pairs = zip(base.chunks(name), tuned.chunks(name), strict=True)
        if base.info(name) != info or not all(torch.equal(*pair) for pair in pairs):
            raise quantised(tuned, name, info)


class Trio:
    """Stand-in with the interface of the coming trio."""

    def __init__(self, given, sources, base, tuned, vocabulary, plan, head):  # type: ignore[no-untyped-def]
        self.given, self.sources, self.base, self.tuned = given, sources, base, tuned
        self.target, self.vocabulary, self.plan, self.head = sources["target"], vocabulary, plan, head
        self.heads = list(plan.extra)

    @classmethod
    def open(cls, base, tuned, target, *, head="error", strict=False):  # type: ignore[no-untyped-def]
        from gradfix.checkpoints.open import open_checkpoint
        from gradfix.checkpoints.prefix import match_prefix
        from gradfix.checkpoints.vocabulary import match_vocabulary

        given = {"base": base, "tuned": tuned, "target": target}
        before, goal = open_checkpoint(base), open_checkpoint(target)
        after = open_checkpoint(tuned, base=before)
        sources = {"base": before, "tuned": after, "target": goal}
        before, after = match_prefix(before, goal), match_prefix(after, goal)
        before, after, rows = match_vocabulary(before, after, goal)
        plan = plan_transport(before, after, goal, head=head, strict=strict)
        return cls(given, sources, before, after, rows, plan, head)

    def fingerprints(self):  # type: ignore[no-untyped-def]
        return {role: source.fingerprint() for role, source in self.sources.items()}
