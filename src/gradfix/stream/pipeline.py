"""All output files in one pass: read in order, compute in workers, write in order.

One thread reads and writes; inputs are hashed where they are read, outputs where they are computed. Nothing waits
at the end of a tensor or a file: while one file reaches the disk the next is computed. A run that was interrupted
goes on after the last tensor its journal vouches for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.hashes import InputHashes, readable
from gradfix.checkpoints.interrupted import Journal
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.safetensors_writer import SafetensorsWriter
from gradfix.checkpoints.weights import CHUNK, Checkpoint
from gradfix.checkpoints.write import JOURNAL
from gradfix.errors import CorruptInput, UnsafeResult
from gradfix.stream.pieces import all_finite
from gradfix.stream.updates import Counts, Mover, NotFiniteError, Piece, Update
from gradfix.system.processor import PieceWorkers, ahead, one_thread

Progress = Callable[[int], None]
Work = Callable[[], tuple[Tensor, Counts]]


@dataclass(frozen=True)
class Content:
    """Where a tensor of the output comes from, and what it is."""

    info: TensorInfo
    source: Checkpoint  # the target, or whoever brings a head
    moved: bool
    abstained: bool = False  # to be moved, but without votes


@dataclass(frozen=True)
class _Job:
    """One piece of one tensor; the end of a file has no tensor."""

    file: str
    name: str = ""
    last: bool = False
    work: Work | None = None
    piece: Piece | None = None

    def run(self) -> tuple[_Job, tuple[Tensor, Counts] | None]:
        return self, None if self.work is None else self.work()


class Pipeline:
    """Writes files; `counts` and `abstained` say afterwards what became of the tensors."""

    def __init__(self, update: Update, mover: Mover, hashes: InputHashes) -> None:
        self.update, self.mover, self.hashes = update, mover, hashes
        self.counts: dict[str, Counts] = {}
        self.abstained: list[str] = []

    def write(
        self, staging: Path, layout: Mapping[str, Mapping[str, Content]], progress: Progress | None = None
    ) -> dict[str, str]:
        """Every file of the layout with its tensors in this order; returns the files' hashes."""
        self._staging, self._layout, self._progress = staging, layout, progress or _silent
        self._journal = Journal(staging)
        _remove_all_but([JOURNAL, *layout], staging)
        self._writers: dict[str, SafetensorsWriter] = {}
        self._done: dict[str, Future[str]] = {}
        with ExitStack() as self._open, one_thread(), ThreadPoolExecutor(1) as self._closer:
            # Reading, hashing and writing take a core of their own; a worker there would wait for Python's lock.
            with PieceWorkers(spare=int(self.update.cheap)) as pool:
                for job, result in ahead(pool, _Job.run, self._jobs()):
                    self._take(job, result)
            hashes = {file: self._done[file].result() for file in layout}
        self._journal.close()
        self._put_in_order()
        return hashes

    def _put_in_order(self) -> None:
        """By file and place, also where a run went on from another: sums over the counts depend on their order."""
        order = [name for contents in self._layout.values() for name in contents]
        abstained = set(self.abstained)
        self.counts = {name: self.counts[name] for name in order if name in self.counts}
        self.abstained = [name for name in order if name in abstained]

    def _take(self, job: _Job, result: tuple[Tensor, Counts] | None) -> None:
        """Hand a computed piece to its file; note a whole tensor in the journal, close a whole file."""
        writer = self._writers[job.file]
        if result is None:
            del self._writers[job.file]
            self._done[job.file] = self._closer.submit(self._close, job.file, writer)
            return
        moved, counted = result
        writer.write(moved)
        content = self._layout[job.file][job.name]
        if job.piece is not None:
            self.update.computed(job.name, job.piece)
            self.counts.setdefault(job.name, Counts()).add(counted)
        if job.last:
            if content.abstained:
                self.abstained.append(job.name)
            self._journal.add(job.file, *writer.reached(), **self._about(job.name, content))
        self._progress(moved.numel() * moved.dtype.itemsize)

    def _about(self, name: str, content: Content) -> dict[str, Any]:
        counts = self.counts.get(name) if content.moved else None
        return {
            "tensor": name,
            "counts": None if counts is None else asdict(counts),
            "facts": None if counts is None else self.update.facts(name),
        }

    def _close(self, file: str, writer: SafetensorsWriter) -> str:
        digest = writer.close()
        self._journal.add(file, writer.size, digest)
        return digest

    def _jobs(self) -> Iterator[_Job]:
        for file, contents in self._layout.items():
            done = self._begin(file, contents)
            if done is None:
                continue
            for name in list(contents)[done:]:
                yield from self._tensor(file, name, contents[name])
            yield _Job(file)

    def _begin(self, file: str, contents: Mapping[str, Content]) -> int | None:
        """Open the file; how many of its tensors are already there, or None where it is whole."""
        journal = self._journal
        finished = journal.finished(file)
        if finished is not None:
            self._done[file] = Future()
            self._done[file].set_result(finished)
            self._recall(file, contents)
            return None
        infos = {name: content.info for name, content in contents.items()}
        writer = SafetensorsWriter(self._staging / file, infos, {"format": "pt"}, journal.reached(file))
        self._writers[file] = self._open.enter_context(writer)
        if not writer.resumed:
            journal.restart(file)
        return self._recall(file, contents)

    def _recall(self, file: str, contents: Mapping[str, Content]) -> int:
        records = self._journal.tensors(file)
        for record in records:
            name = record["tensor"]
            if record["counts"] is not None:
                self.counts[name] = Counts(**record["counts"])
                self.update.recall(name, record["facts"])
            elif contents[name].abstained:
                self.abstained.append(name)
        self._progress(sum(contents[record["tensor"]].info.nbytes for record in records))
        return len(records)

    def _tensor(self, file: str, name: str, content: Content) -> Iterator[_Job]:
        """The tensor's pieces, at least one."""
        writer, left = self._writers[file], content.info.numel
        if left == 0:
            empty = torch.empty(0, dtype=content.info.dtype)
            yield _Job(file, name, True, lambda: (empty, Counts()))
            return
        offset = writer.starts[name]
        for size, work, piece in self._moved(name, content) if content.moved else self._copied(name, content):
            left -= size
            yield _Job(file, name, left == 0, partial(_hashed, work, writer, offset), piece)
            offset += size * content.info.dtype.itemsize

    def _copied(self, name: str, content: Content) -> Iterator[tuple[int, Work, None]]:
        for piece in self.hashes.chunks(content.source, name, CHUNK):
            yield len(piece), partial(self._copy, name, content, piece), None

    def _copy(self, name: str, content: Content, piece: Tensor) -> tuple[Tensor, Counts]:
        copy = piece.to(content.info.dtype)
        if not _finite(copy):
            raise _blame(name, [(content.source, piece)])
        return copy, Counts()

    def _moved(self, name: str, content: Content) -> Iterator[tuple[int, Work, Piece]]:
        size = self.update.piece_size(name)
        targets = self.hashes.chunks(content.source, name, size)
        votes: Iterator[Tensor | None] = repeat(None)
        if self.mover.ballot.rule.sees != "nothing":
            ballot = self.mover.ballot
            votes = readable(ballot.pieces(name, content.info.numel, size), ballot.source)
        for piece, target, seen in zip(self.update.pieces(name), targets, votes, strict=False):
            yield len(target), partial(self._move, name, content, piece, target, seen), piece

    @torch.inference_mode()
    def _move(
        self, name: str, content: Content, piece: Piece, target: Tensor, seen: Tensor | None
    ) -> tuple[Tensor, Counts]:
        out, counts, first = torch.empty(len(target), dtype=content.info.dtype), Counts(), 0
        try:
            for delta in piece.blocks():
                here = slice(first, first + len(delta))
                shown = None if seen is None else seen[here]
                counts.add(self.mover.move(out[here], delta, target[here], shown))
                first = here.stop
        except NotFiniteError:
            raise _blame(name, [*piece.suspects(), (content.source, target)]) from None
        if first != len(target):
            raise UnsafeResult(f"tensor {name!r}: {first} entries for {len(target)}; this is a bug.")
        counts.base_square, counts.present = piece.base_square, piece.present
        return out, counts


def _remove_all_but(kept: list[str], staging: Path) -> None:
    """What an interrupted run put beside the weights is put there anew: its inputs may have changed since."""
    for path in staging.iterdir():
        if path.name in kept:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _hashed(work: Work, writer: SafetensorsWriter, offset: int) -> tuple[Tensor, Counts]:
    out, counts = work()
    writer.hash(offset, out)
    return out, counts


def _blame(name: str, pieces: list[tuple[Checkpoint, Tensor]]) -> CorruptInput | UnsafeResult:
    for checkpoint, piece in pieces:
        if not _finite(piece):
            return CorruptInput(f"tensor {name!r} of {checkpoint} holds NaN or Inf. Repair or re-export it.")
    return UnsafeResult(f"tensor {name!r} overflows the output's dtype; use --out-dtype fp32.")


def _finite(piece: Tensor) -> bool:
    """Also for the small floats, which torch can store but not sum, and for integers."""
    return not piece.dtype.is_floating_point or all_finite(piece.float() if piece.itemsize == 1 else piece)


def _silent(_: int) -> None:
    """Progress for nobody."""
