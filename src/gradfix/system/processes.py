"""Several processes that do one job: started here or by torchrun, joined in one group, failing as one.

An error of any process becomes one error of the whole job, with its own exit code: the others are ended,
nobody waits for a message that will not come."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, pairwise
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from gradfix import errors
from gradfix.errors import GradfixError
from gradfix.system.meter import telling_more

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STARTED_HERE = "GRADFIX_GROUP_FILE"
GRACE_SECONDS = 5.0
KILL_SECONDS = 0.2  # until the death of a killed process is known
START = "spawn"  # how processes begin: anew, because a card cannot be taken along

Step = Callable[[int], None]
S = TypeVar("S")
T = TypeVar("T")


class LostProcess(GradfixError, RuntimeError):
    """A process of the group ended without a word, usually because memory ran out."""

    exit_code = 8


@dataclass(frozen=True)
class Group:
    """This process's place among those that share the job."""

    rank: int
    size: int
    local_rank: int
    in_step: bool = False  # a model is split over them: what one of them asks of it, all must ask

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def device(self, asked: str | None) -> str:
        """One device per process: the local rank picks the card where the user named only its kind."""
        import torch

        if asked not in (None, "cuda"):
            return str(asked)
        if not torch.cuda.is_available():
            return asked or "cpu"
        return f"cuda:{self.local_rank % torch.cuda.device_count()}"

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in the order of the ranks, on every process."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def agree(self, wish: bool) -> bool:
        """What the first process wishes, where all go in step; else each has its own way."""
        return bool(self.gather(wish)[0]) if self.in_step else wish

    def pieces(self, items: Sequence[T]) -> list[Sequence[T]]:
        """The items cut into one consecutive piece for every process, where there are enough of them."""
        cuts = [len(items) * rank // self.size for rank in range(self.size + 1)]
        return [items[first:last] for first, last in pairwise(cuts) if last > first]

    def each(self, work: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """The work done on every item, each by one of the processes, on all of them and in the items' order.

        Processes that go in step do all of it together."""
        if self.in_step:
            return [work(item) for item in items]
        own = [(place, work(item)) for place, item in enumerate(items) if place % self.size == self.rank]
        return [found for _, found in sorted(chain(*self.gather(own)), key=itemgetter(0))]


ALONE = Group(0, 1, 0)
_SHARED: ContextVar[Group] = ContextVar("group", default=ALONE)


def current() -> Group:
    """The processes that share what is scored and trained here; a group of one unless `sharing` says otherwise."""
    return _SHARED.get()


@contextlib.contextmanager
def sharing(group: Group) -> Iterator[None]:
    """Share scores, votes and steps with the group. All its processes must do the same things in the same order."""
    token = _SHARED.set(group)
    try:
        yield
    finally:
        _SHARED.reset(token)


def launched() -> bool:
    """Did torchrun (or a scheduler that speaks its variables) start this process as one of several?"""
    return STARTED_HERE not in os.environ and all(name in os.environ for name in ENVIRONMENT)


def leads() -> bool:
    """False in the processes that work for rank 0 and have nothing to say."""
    return not launched() or os.environ["RANK"] == "0"


@contextlib.contextmanager
def joined() -> Iterator[Group]:
    """Join the group this process was started for; gloo on processors, NCCL between cards."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    elif "OMP_NUM_THREADS" not in os.environ or STARTED_HERE in os.environ:
        torch.set_num_threads(1)
    group = Group(rank, size, int(os.environ.get("LOCAL_RANK", rank)))
    if dist.is_initialized():  # a launcher such as Ray has done it, and will undo it
        yield group
        return
    file = os.environ.get(STARTED_HERE)
    dist.init_process_group(backend, init_method=f"file://{file}" if file else "env://", rank=rank, world_size=size)
    try:
        yield group
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def together(group: Group) -> Iterator[None]:
    """A step that succeeds on all processes or fails on all, before any of them waits for another.

    Rank 0 raises the first error there was; the others leave quietly with its exit code."""
    found: BaseException | None = None
    try:
        yield
    except Exception as error:
        found = error
    told = [text for text in group.gather(_told(found)) if text is not None]
    if not told:
        return
    if not group.leads:
        raise SystemExit(_rebuilt(*told[0]).exit_code) from found
    if found is not None:
        raise found
    raise _rebuilt(*told[0])


def in_processes(
    work: Callable[[Any], Any], argument: Any, count: int, progress: Callable[..., None] | None = None
) -> Any:
    """Run `work(argument)` in `count` processes of one group and return what rank 0 returned.

    `work` must be importable by name. It joins the group itself with `joined()`, and may call `report` or a `Relay`."""
    context: Any = multiprocessing.get_context(START)
    with tempfile.TemporaryDirectory(prefix="gradfix-group-") as folder:
        pipes: dict[Connection, int] = {}
        processes = []
        with _environment(Path(folder) / "group", count) as set_rank:
            for rank in range(count):
                here, there = context.Pipe(duplex=False)
                place = set_rank(rank)
                process = context.Process(target=_child, args=(work, argument, there, place), daemon=True)
                process.start()
                there.close()
                pipes[here] = rank
                processes.append(process)
        try:
            return _listen(pipes, processes, progress)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
            for process in processes:
                process.join(GRACE_SECONDS)
                if process.is_alive():
                    process.kill()
                    process.join()


_parents: list[Connection] = []


def report(amount: int) -> None:
    """Tell the process that started the group how far this one got."""
    for parent in _parents:
        parent.send(("progress", amount))


class Relay:
    """Stands where someone is told on the way: what the first process says is said in the one that started the group."""

    def __call__(self, *said: Any) -> None:
        self._send("said", said)

    def update(self, text: str) -> None:
        self._send("more", (text,))

    def _send(self, kind: str, said: tuple[Any, ...]) -> None:
        if os.environ.get("RANK") == "0":
            for parent in _parents:
                parent.send((kind, said))


def _child(work: Callable[[Any], Any], argument: Any, pipe: Connection, place: Mapping[str, str]) -> None:
    os.environ |= place
    _parents.append(pipe)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts all at once; the parent decides
    try:
        result = work(argument)
        pipe.send(("done", result if os.environ["RANK"] == "0" else None))
    except SystemExit:
        pipe.send(("left", None))
    except BaseException as error:
        if os.environ.get("GRADFIX_DEBUG"):
            traceback.print_exc(file=sys.stderr)
        pipe.send(("error", _told(error)))


def _listen(pipes: dict[Connection, int], processes: list[Any], progress: Callable[..., None] | None) -> Any:
    """Until all are done; the first error ends the job."""
    result = None
    open_pipes = dict(pipes)
    while open_pipes:
        for pipe in wait(list(open_pipes)):
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):  # it closed the pipe, or was killed in the middle of a message
                processes[rank].join(GRACE_SECONDS)
                raise _lost(rank, processes) from None
            if kind == "error":
                killed = _killed(processes)
                raise _rebuilt(*value) if killed is None else _lost(killed, processes)
            if kind == "progress" and progress is not None:
                progress(value)
            if kind in ("said", "more") and progress is not None:
                (progress if kind == "said" else telling_more(progress))(*value)
            if kind in ("done", "left"):
                result = value if rank == 0 else result
                del open_pipes[pipe]
    return result


def _killed(processes: list[Any]) -> int | None:
    """The process whose death the others complain about, if there is one."""
    for rank, process in enumerate(processes):
        process.join(KILL_SECONDS)
        if process.exitcode is not None and process.exitcode < 0:
            return rank
    return None


def _lost(rank: int, processes: list[Any]) -> LostProcess:
    return LostProcess(
        f"process {rank} of {len(processes)} ended without a word (exit {processes[rank].exitcode}; -9 is usually "
        "memory). Fewer --processes or a smaller --batch-size need less."
    )


def _told(error: BaseException | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, " ".join(str(error).split()))


def _rebuilt(name: str, text: str) -> GradfixError:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, GradfixError):
        return kind(text)
    if name in ("MemoryError", "OutOfMemoryError"):
        return LostProcess(f"out of memory: {text} A smaller --batch-size or --dtype bf16 needs less.")
    return GradfixError(f"internal error in one of the processes: {name}: {text}")


@contextlib.contextmanager
def _environment(file: Path, count: int) -> Iterator[Callable[[int], Mapping[str, str]]]:
    """What a started process inherits: its place, and one thread (more would fight over the same cores)."""
    changed = (STARTED_HERE, "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    before = {name: os.environ.get(name) for name in changed}
    os.environ |= {STARTED_HERE: str(file), "WORLD_SIZE": str(count), "OMP_WAIT_POLICY": "PASSIVE"}
    os.environ["OMP_NUM_THREADS"] = "1"

    def set_rank(rank: int) -> Mapping[str, str]:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        return {name: os.environ[name] for name in changed}

    try:
        yield set_rank
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
