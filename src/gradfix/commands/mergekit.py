"""`gradfix merge --from-mergekit FILE`: mergekit's files as they are.

Every document of the file is a merge; one that has a name can be an input of the others. What is only an input of others
is written beside the output and removed at the end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.write import refuse_occupied
from gradfix.commands.configs import MergeConfigOptions
from gradfix.commands.guard import guard_outputs
from gradfix.errors import UsageError
from gradfix.merging.foreign import Job, mergekit_documents, run_document
from gradfix.merging.grammar import Document
from gradfix.stream.checkpoint import StreamReport
from gradfix.system.meter import Meter

Stage = Callable[[str], None]


@dataclass(frozen=True)
class _Written:
    document: Document
    out: Path
    report: StreamReport | None
    notes: tuple[str, ...]


def run_mergekit(options: MergeConfigOptions, stage: Stage = lambda _: None) -> dict[str, Any]:
    """Read and check the whole file, then merge document by document."""
    if options.out is None:
        raise UsageError("a mergekit file names no output folder; give --out.")
    guard_outputs(options)
    documents = mergekit_documents(str(options.from_mergekit))
    out, begin = Path(options.out), time.perf_counter()
    refuse_occupied(out, options.overwrite)
    if options.target is not None and len(documents) > 1:
        raise UsageError(f"{options.from_mergekit} holds {len(documents)} merges; --target goes with one.")
    places = _places(documents, out)
    try:
        done = [_merge(document, places, options, stage) for document in documents]
    finally:
        shutil.rmtree(_parts(out), ignore_errors=True)
    last = done[-1]
    wrote = "would write" if options.dry_run else "wrote"
    return {
        "summary": f"{wrote} {out}: {', '.join(one.document.method for one in done)} by {options.from_mergekit}",
        "out": str(out), "method": last.document.method, "order": "plain", "alpha": 1.0,
        "kept": last.report.kept if last.report else None, "curve": None, "tasks": {},
        "seconds": {"merging": round(time.perf_counter() - begin, 3)},
        "notes": list(dict.fromkeys(note for one in done for note in one.notes)),
    }  # fmt: skip


def _parts(out: Path) -> Path:
    return out.with_name(f".{out.name}.parts")


def _places(documents: list[Document], out: Path) -> dict[str | None, Path]:
    """The unnamed document is the output; named ones are parts of it, or where all are named folders in it."""
    if len(documents) == 1:
        return {documents[0].name: out}
    if any(document.name is None for document in documents):
        return {d.name: out if d.name is None else _parts(out) / d.name for d in documents}
    return {document.name: out / str(document.name) for document in documents}


def _merge(document: Document, places: dict[str | None, Path], options: MergeConfigOptions, stage: Stage) -> _Written:
    out = places[document.name]
    named = [model for model in document.models() if model.path in places and model.path != document.name]
    if named and options.dry_run:
        return _Written(document, out, None, (f"{document.where}: made of other documents; looked at when they exist",))
    opened = {}
    for model in named:
        whole = open_checkpoint(places[model.path])
        opened[model] = whole if model.lora is None else open_checkpoint(model.lora, base=whole)
    stage("checking")
    job = Job(document, options.target, opened=opened)
    if options.dry_run:
        return _Written(document, out, None, tuple(job.notes))
    stage("writing")
    written = Meter(job.canvas().nbytes, stage)
    report = run_document(
        job, out, counting=Meter(None, stage, "counting,"), progress=written, overwrite=options.overwrite,
        force=options.force,
    )  # fmt: skip
    return _Written(document, out, report, report.notes)
