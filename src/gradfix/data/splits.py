"""Few-shot sets, folds and the check that no example sits on two sides of a decision.

Everything is stratified by label and drawn from a seed; a larger few-shot set contains the smaller one of the
same seed, and a class's draw does not depend on the other classes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gradfix.data.rows import INPUTS, content_of, where
from gradfix.errors import DataError, UsageError
from gradfix.registry import unknown

LOSERS = ("train", "test")
SHOWN = 40  # places of shared examples that a message names
Examples = Sequence[Mapping[str, Any]]


def few_shot(
    examples: Examples, per_class: int, seed: int = 0, allow_fewer: bool = False, labels: Sequence[str] | None = None
) -> list[int]:
    """Indices of `per_class` examples of every label; rows without labels count as one class.

    `labels` names the classes that must be there; by default (or when empty) those of the examples."""
    if per_class < 1:
        raise UsageError(f"{per_class} examples per class is no few-shot set; give 1 or more.")
    groups = _by_label(examples)
    picked: list[int] = []
    for label in labels or groups:
        members = groups.get(label, [])
        if not members or (len(members) < per_class and not allow_fewer):
            raise DataError(
                f"{f'the label {label!r} has' if label else 'there are'} {len(members)} examples, {per_class} were asked for. "
                + (
                    "Add some, or take it out of the label set."
                    if not members
                    else "Add some or allow fewer (--allow-fewer)."
                )
            )
        picked += _shuffled(members, seed, label)[:per_class]
    return sorted(picked)


def folds(examples: Examples, k: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """k stratified pairs (fit, held out); every example is held out exactly once.

    Repeats of one content share a fold, so that no example judges its own vote; where fewer than k contents
    differ, there are as many folds as contents."""
    if k < 2:
        raise UsageError(f"{k} folds cannot hold anything out; give 2 or more.")
    if len(examples) < k:
        raise DataError(f"{len(examples)} examples cannot be cut into {k} folds.")
    contents = [content_of(example) if _shows(example) else str(index) for index, example in enumerate(examples)]
    k = min(k, len(set(contents)))
    if k < 2:
        raise DataError(f"all {len(examples)} examples are the same; none can be held out. Add different ones.")
    held: list[list[int]] = [[] for _ in range(k)]
    homes: dict[str, int] = {}
    for label, members in _by_label(examples).items():
        for index in _shuffled(members, seed, label):
            held[homes.setdefault(contents[index], len(homes) % k)].append(index)
    return [(sorted(set(range(len(examples))) - set(part)), sorted(part)) for part in held]


def in_turns(examples: Examples, seed: int = 0) -> list[int]:
    """All indices in an order whose every stretch holds the labels in their shares, as far as whole examples can."""
    turns: dict[int, float] = {}
    drawn = random.Random(seed)
    for label, members in _by_label(examples).items():
        for place, index in enumerate(_shuffled(members, seed, label)):
            turns[index] = (place + drawn.random()) / len(members)
    return sorted(turns, key=lambda index: (turns[index], index))


def check_disjoint(splits: Mapping[str, Examples]) -> list[str]:
    """Raise when examples' contents stand in two splits, all of them in one message; return notes on repeats inside one."""
    seen: dict[str, tuple[str, str]] = {}
    shared: dict[tuple[str, str], list[tuple[str, str]]] = {}
    notes = []
    for name, examples in splits.items():
        repeats = 0
        for index, example in enumerate(examples):
            key, here = content_of(example), where(example, index)
            if key not in seen:
                seen[key] = (name, here)
            elif seen[key][0] == name:
                repeats += 1
            else:
                other, there = seen[key]
                shared.setdefault((other, name), []).append((there, here))
        if repeats:
            notes.append(f"{name}: {repeats} of {len(examples)} examples repeat an earlier one.")
    if shared:
        raise DataError(_shared_words(shared))
    return notes


def _shared_words(shared: Mapping[tuple[str, str], Sequence[tuple[str, str]]]) -> str:
    parts = []
    for (one, other), ((there, here), *more) in shared.items():
        text = f"the same example is in {one} ({there}) and in {other} ({here})"
        if more:
            listed = ", ".join(f"{a} = {b}" for a, b in more[:SHOWN])
            rest = f" and {len(more) - SHOWN} others" if len(more) > SHOWN else ""
            text += f", and so are {len(more)} more, {len(more) + 1} in all ({listed}{rest})"
        parts.append(text)
    return (
        f"{'; '.join(parts)}. A choice made on such an example would flatter itself: remove them from one side, or let "
        "--drop-duplicates train (or test) do it."
    )


def without_duplicates(
    sides: Mapping[str, list[Any] | None], lose: str | None
) -> tuple[dict[str, list[Any] | None], list[str]]:
    """The sides, ordered from train to test, without the examples they share; `lose` is the end that gives them up.

    None keeps all. Notes say how many went."""
    if lose is None:
        return dict(sides), []
    if lose not in LOSERS:
        raise UsageError(unknown("--drop-duplicates", lose, list(LOSERS)))
    kept: dict[str, list[Any] | None] = {}
    notes, taken = [], set[str]()
    for name in sides if lose == "test" else reversed(list(sides)):
        rows = sides[name]
        kept[name] = None if rows is None else [row for row in rows if content_of(row) not in taken]
        gone = len(rows or ()) - len(kept[name] or ())
        if gone:
            notes.append(f"{name}: {gone} of {len(rows or ())} examples were dropped, they are in another split, too")
        if rows and not kept[name]:
            raise DataError(f"every example of {name} is in another split, too: nothing would be left of it.")
        taken |= {content_of(row) for row in kept[name] or ()}
    return {name: kept[name] for name in sides}, notes


def without_overlap(examples: Examples, *others: Examples) -> list[int]:
    """Indices of the examples whose content is in none of the others."""
    taken = {content_of(example) for other in others for example in other}
    return [index for index, example in enumerate(examples) if content_of(example) not in taken]


def _shows(example: Mapping[str, Any]) -> bool:
    """Whether there is a known input to tell repeats by; a task of one's own may read other columns."""
    return any(example.get(name) is not None for name in INPUTS)


def _by_label(examples: Examples) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        groups[str(example.get("label") or "")].append(index)
    if not groups:
        raise DataError("there are no examples to draw from.")
    return dict(sorted(groups.items()))


def _shuffled(members: Sequence[int], seed: int, label: str) -> list[int]:
    # A string seed is hashed with sha512 by random.Random, so it is the same on every machine.
    order = list(members)
    random.Random(f"{seed}:{label}").shuffle(order)
    return order
