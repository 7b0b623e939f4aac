"""Task vectors that are never held: differences of files, read side by side, masked on the way, combined by a rule.

Every distinct file is read once per walk, however many vectors share it. The arithmetic runs in worker
threads a few pieces ahead of the reader; pieces arrive in order. As what a stream adds to the target, the files are
hashed and every vector is counted on the way; an interrupted run finds its counts in the journal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gradfix.checkpoints.hashes import InputHashes
from gradfix.checkpoints.trio import Trio
from gradfix.checkpoints.weights import CHUNK, Checkpoint
from gradfix.errors import CorruptInput, UnsafeResult
from gradfix.merging.bundles import Bundle, Merge, PiecePlace, Rule
from gradfix.stream.ballot import Ballot
from gradfix.stream.checkpoint import LEAST_KEPT
from gradfix.stream.pieces import Buffers, all_finite, nonzeros
from gradfix.stream.updates import Counts, Piece, Update, total
from gradfix.system.processor import PieceWorkers, ahead
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import MAX_NORM_RATIO, no_change, not_a_fine_tune
from gradfix.vectors.transported import mask_piece, share

MIXED_UP = "Check the base and tuned of this vector; --force (or `force: true` in the recipe) goes on all the same."
SPAN = 2  # pieces of every file read at a time

T = TypeVar("T")
Votes = SignVotes | str | os.PathLike[str]


@dataclass
class OpenVector:
    """One vector of a merge: its trio, its task's votes, and the mask they make."""

    trio: Trio
    votes: Votes | None
    ballot: Ballot | None = None

    @property
    def base(self) -> Checkpoint:
        return self.trio.base

    @property
    def tuned(self) -> Checkpoint:
        return self.trio.tuned

    def identity(self) -> Any:
        """By what an interrupted run recognises the vector again; None where it cannot."""
        parts = [self.base.identity(), self.tuned.identity()]
        return None if None in parts else [*parts, self.ballot and self.ballot.identity()]

    def judge(self, count: Counts, target: Checkpoint, hashes: InputHashes, force: bool) -> dict[str, Any]:
        """Refuse what is no fine-tune of its base or what a mask emptied; say what became of the vector."""
        ratio = count.norm_ratio()
        if count.nonzero == 0:
            raise no_change(self.base, self.tuned)
        if ratio > MAX_NORM_RATIO and not force:
            raise not_a_fine_tune(self.base, self.tuned, ratio, target, advice=MIXED_UP)
        if self.ballot is not None:
            self.ballot.require(target, hashes)
        if count.kept < LEAST_KEPT * count.nonzero and not force:
            raise UnsafeResult(
                f"the mask keeps {count.kept / count.nonzero:.2%} of {self.tuned}: nothing to speak of is left. "
                "More examples or the veto mask may help; --force (or `force: true` in the recipe) goes on all the same."
            )
        kept = share(count.kept, count.nonzero)
        return {"tuned": str(self.tuned), "kept": kept, "norm_ratio": ratio, **self.trio.vocabulary}


class Input(Protocol):
    """A fine-tune and its base; without a base the weights themselves are merged."""

    @property
    def base(self) -> Checkpoint | None: ...

    @property
    def tuned(self) -> Checkpoint: ...

    ballot: Ballot | None


def files_of(vectors: Sequence[Input]) -> dict[int, Checkpoint]:
    """Every distinct checkpoint of the vectors, by its id."""
    return {id(c): c for vector in vectors for c in (vector.base, vector.tuned) if c is not None}


class Differences(Bundle):
    """The vectors as differences read from files, masked by their ballots where they have one.

    `rounded` is the dtype that the files are rounded to before anything else."""

    def __init__(
        self,
        vectors: Sequence[Input],
        names: Sequence[str],
        counting: Callable[[int], None] | None = None,
        pool: PieceWorkers | None = None,
        rounded: torch.dtype | None = None,
    ) -> None:
        self.vectors, self.counting, self.rounded = vectors, counting, rounded
        self.pool = pool or PieceWorkers()
        self.count, self.notes = len(vectors), []
        self.shapes = {name: vectors[0].tuned.info(name).shape for name in names}
        kinds = {c.info(n).dtype for c in files_of(vectors).values() for n in names}
        self.dtype = torch.float64 if torch.float64 in kinds else torch.float32

    def pieces(self, name: str, size: int) -> Iterator[list[Tensor]]:
        walk = self._walked([name], size)
        return ahead(self.pool, lambda raw: self.all_shown(raw, self.deltas(self.widened(raw))), walk)

    def measured(self, measure: Callable[[list[Tensor]], T], name: str | None = None) -> Iterator[T]:
        names = sorted(self.shapes) if name is None else [name]
        room = Buffers()

        def shown(raw: Raw) -> list[Tensor]:
            return self.all_shown(raw, self.deltas(self.widened(raw, room), room))

        def work(stretch: Raw) -> list[T]:
            return [measure(shown(raw)) for raw in stretch.parts(CHUNK)]

        return chain.from_iterable(ahead(self.pool, work, self._walked(names, SPAN * CHUNK)))

    def _walked(self, names: Iterable[str], size: int) -> Iterator[Raw]:
        """A walk for a method's statistics; `counting` hears how many bytes of the files went by."""
        for name in names:
            for raw in self.raw(name, size, lambda source, name=name: source.chunks(name, size)):  # type: ignore[misc]
                if self.counting is not None:
                    self.counting(sum(p.numel() * p.dtype.itemsize for p in raw.pieces.values()))
                yield raw

    def raw(self, name: str, size: int, read: Callable[[Checkpoint], Iterator[Tensor]]) -> Iterator[Raw]:
        """Every distinct file once, and what each mask is shown."""
        sources = files_of(self.vectors)
        entries = math.prod(self.shapes[name])
        ballots = [
            v.ballot.pieces(name, entries, size) if v.ballot and v.ballot.has(name) else None for v in self.vectors
        ]
        for pieces in zip(*(read(source) for source in sources.values()), strict=True):
            seen = [None if ballot is None else next(ballot) for ballot in ballots]
            yield Raw(dict(zip(sources, pieces, strict=True)), seen)

    def widened(self, raw: Raw, room: Buffers | None = None) -> dict[int, Tensor]:
        """Every file's stretch in float32 or better; in `room` it holds until the next call in this thread."""
        pieces = raw.pieces
        if self.rounded is not None:
            pieces = {key: piece.to(self.rounded) for key, piece in pieces.items()}
        kinds = {key: torch.promote_types(piece.dtype, torch.float32) for key, piece in pieces.items()}
        if room is None:
            return {key: piece.to(kinds[key]) for key, piece in pieces.items()}
        return {key: room.wide(str(key), piece, kinds[key]) for key, piece in pieces.items()}

    def deltas(self, wide: Mapping[int, Tensor], room: Buffers | None = None) -> list[Tensor]:
        """Per vector the difference of its two files, or its only file."""
        deltas = []
        for number, vector in enumerate(self.vectors):
            tuned = wide[id(vector.tuned)]
            if vector.base is None:
                deltas.append(tuned)
            elif room is None or self.dtype is torch.float64:
                deltas.append(tuned - wide[id(vector.base)])
            else:
                own = room.empty(f"delta {number}", len(tuned), self.dtype)
                deltas.append(torch.sub(tuned, wide[id(vector.base)], out=own))
        return deltas

    def all_shown(self, raw: Raw, deltas: list[Tensor]) -> list[Tensor]:
        """What the masks leave of the differences."""
        return [self._shown(*parts) for parts in zip(self.vectors, deltas, raw.seen, strict=True)]

    def _shown(self, vector: Input, delta: Tensor, seen: Tensor | None) -> Tensor:
        if vector.ballot is None:
            return delta.to(self.dtype)
        if seen is None:
            return torch.zeros_like(delta, dtype=self.dtype)
        return mask_piece(vector.ballot.rule, delta, seen, vector.ballot.options).to(self.dtype)


@dataclass(frozen=True)
class Raw:
    """The same stretch of every file (by the checkpoint's id) and of every ballot."""

    pieces: dict[int, Tensor]
    seen: list[Tensor | None]

    def parts(self, size: int) -> Iterator[Raw]:
        """The stretch in pieces of `size` entries; the last may be shorter."""
        for first in range(0, len(next(iter(self.pieces.values()))), size):
            here = slice(first, first + size)
            seen = [None if votes is None else votes[here] for votes in self.seen]
            yield Raw({key: piece[here] for key, piece in self.pieces.items()}, seen)


class Combined(Update):
    """The merged update, piece by piece; `count` says afterwards what was seen of a vector."""

    def __init__(
        self, bundle: Differences, method: Merge, rule: Rule, hashes: InputHashes, settings: list[Any]
    ) -> None:
        self.bundle, self.method, self.rule, self.hashes = bundle, method, rule, hashes
        self.settings = settings  # what the rule was made with
        self.room = Buffers()
        # To trim, to draw or to decompose is more work than to add.
        self.cheap = "density" not in method.options and not method.whole_tensors
        self._counts: dict[str, list[Counts]] = {}

    def planned(self, name: str) -> tuple[Differences, Rule]:
        """The bundle a tensor is read from and the rule for its pieces."""
        return self.bundle, self.rule

    def piece_size(self, name: str) -> int:
        return SPAN * self.rule_size(name)

    def rule_size(self, name: str) -> int:
        """The entries a rule is shown at a time."""
        return self.method.piece_size(self.bundle.shapes[name])

    def pieces(self, name: str) -> Iterator[Piece]:
        size, (bundle, rule) = self.piece_size(name), self.planned(name)
        walk = bundle.raw(name, size, lambda source: self.hashes.chunks(source, name, size))
        for number, raw in enumerate(walk):
            yield _Combination(self, bundle, rule, name, number * SPAN, raw)

    def computed(self, name: str, piece: Piece) -> None:
        assert isinstance(piece, _Combination)
        counts = self._counts.setdefault(name, [Counts() for _ in piece.counts])
        for whole, part in zip(counts, piece.counts, strict=True):
            whole.add(part)

    def facts(self, name: str) -> Any:
        return [asdict(count) for count in self._counts[name]]

    def recall(self, name: str, facts: Any) -> None:
        self._counts[name] = [Counts(**count) for count in facts]

    def count(self, vector: int) -> Counts:
        """What was seen of one vector: entries that differ, those its mask kept, and the squares."""
        return total(counts[vector] for counts in self._counts.values())

    def identity(self) -> Any:
        parts = [vector.identity() for vector in self.bundle.vectors if isinstance(vector, OpenVector)]
        return None if None in parts else [self.settings, parts]

    def judge(self, whole: Counts, target: Checkpoint, force: bool) -> dict[str, Any]:
        judged = [
            vector.judge(self.count(number), target, self.hashes, force)
            for number, vector in enumerate(self.bundle.vectors)
            if isinstance(vector, OpenVector)
        ]
        return {**super().judge(whole, target, force), "vectors": judged}

    def read(self, name: str) -> Tensor:
        """The merged update of a whole tensor."""
        blocks = ahead(self.bundle.pool, lambda piece: torch.cat(list(piece.blocks())), self.pieces(name))
        return torch.cat([torch.empty(0, dtype=self.bundle.dtype), *blocks]).view(self.bundle.shapes[name])


def origin(vector: Input) -> Checkpoint:
    """What a vector's size is measured against."""
    return vector.tuned if vector.base is None else vector.base


def changed(deltas: list[Tensor]) -> int:
    """The entries that at least one of the vectors changes."""
    anywhere = deltas[0] != 0
    for delta in deltas[1:]:
        anywhere |= delta != 0
    return int(anywhere.count_nonzero())


class _Combination(Piece):
    """The same stretch of all files, shown to the rule in parts."""

    def __init__(self, owner: Combined, bundle: Differences, rule: Rule, name: str, index: int, raw: Raw) -> None:
        self.owner, self.bundle, self.rule = owner, bundle, rule
        self.name, self.index, self.raw = name, index, raw
        self.counts = [Counts() for _ in bundle.vectors]

    def blocks(self) -> Iterator[Tensor]:
        shape = self.bundle.shapes[self.name]
        for index, part in enumerate(self.raw.parts(self.owner.rule_size(self.name)), self.index):
            yield self.rule(PiecePlace(self.name, shape, index), self._shown(part))

    def _shown(self, part: Raw) -> list[Tensor]:
        """What the masks leave of the vectors, counted."""
        bundle, room = self.bundle, self.owner.room
        wide = bundle.widened(part, room)
        bases = {id(origin(vector)): wide[id(origin(vector))] for vector in bundle.vectors}
        squares = {key: float(torch.dot(base, base)) for key, base in bases.items()}
        deltas = bundle.deltas(wide, room)
        shown = bundle.all_shown(part, deltas)
        for place, vector in enumerate(bundle.vectors):
            counted = self._counted(vector, part, deltas[place], shown[place])
            counted.base_square = squares[id(origin(vector))]
            self.counts[place].add(counted)
        self.base_square += sum(squares.values()) / len(squares)
        self.present += changed(deltas)
        return shown

    def _counted(self, vector: Input, part: Raw, delta: Tensor, left: Tensor) -> Counts:
        square = float(torch.dot(delta, delta))
        if not math.isfinite(square):
            self._blame(vector, part)
        if vector.ballot is not None:
            return Counts(nonzeros(delta), nonzeros(left), tau_square=square)
        # Nothing is dropped, and a square above zero says that there is something.
        nonzero = delta.numel() if square > 0 else nonzeros(delta)
        return Counts(nonzero, nonzero, tau_square=square)

    def _blame(self, vector: Input, part: Raw) -> None:
        for checkpoint in files_of([vector]).values():
            if not all_finite(part.pieces[id(checkpoint)]):
                raise CorruptInput(f"tensor {self.name!r} of {checkpoint} holds NaN or Inf. Repair or re-export it.")

    def suspects(self) -> list[tuple[Checkpoint, Tensor]]:
        """The vectors have been checked while they were counted."""
        return []
