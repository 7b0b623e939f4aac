"""mergekit's files, run: read, checked, and written as every other merge is (streamed, resumable, with a manifest).

The file's base model is the target unless another is given: then what the merge changes in its base is added to that
target. Arithmetic is float32, each tensor rounded once; `dtype` rounds the inputs first, as in mergekit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradfix.checkpoints.hashes import InputHashes
from gradfix.checkpoints.matched import TOKEN_TABLE, folder_of
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.safetensors_file import TensorInfo
from gradfix.checkpoints.trio import Fate, Fates, TensorFate, Trio
from gradfix.checkpoints.weights import Checkpoint, Renamed, Source
from gradfix.checkpoints.write import refuse_inside, torch_dtype
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.merging import averages, blends
from gradfix.merging.bundles import Rule
from gradfix.merging.canvas import Canvas, Shifted, amend_config, chat_template, set_chat_template
from gradfix.merging.dialect import METHODS, Dialect, check_document, given_for
from gradfix.merging.differences import Combined, Differences, Input
from gradfix.merging.formulas import Blueprint, Formula, draw_up
from gradfix.merging.grammar import Document, ModelRef, read_document
from gradfix.merging.vocabularies import Tokens, settle_tokens
from gradfix.stream.ballot import Ballot
from gradfix.stream.checkpoint import Output, Stream, StreamReport, write_stream
from gradfix.stream.updates import Counts, total
from gradfix.system.processor import PieceWorkers, one_thread
from gradfix.system.yamlfile import load_documents

__all__ = ["Job", "averages", "blends", "mergekit_documents", "run_document"]

CHEAP = ("linear", "passthrough", "task_arithmetic", "slerp", "nearswap", "multislerp", "karcher")


def mergekit_documents(path: str | os.PathLike[str]) -> list[Document]:
    """The merges of a file, each after those it is made of."""
    contents = load_documents(path)
    several = len(contents) > 1
    found = [read_document(c, f"{path}, document {n}" if several else str(path)) for n, c in enumerate(contents, 1)]
    names = [document.name for document in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"{path}: {'two documents have no name' if name is None else f'two documents are {name!r}'}."
            )
    return _in_order(found, str(path))


def _in_order(documents: list[Document], where: str) -> list[Document]:
    waiting, done = {document.name: document for document in documents}, []
    while waiting:
        ready = [
            document for document in waiting.values()
            if not {model.path for model in document.models()} & (waiting.keys() - {document.name})
        ]  # fmt: skip
        if not ready:
            raise UsageError(f"{where}: the documents {', '.join(map(str, waiting))} are made of each other.")
        for document in ready:
            done.append(waiting.pop(document.name))
    return done


@dataclass
class InputWeights:
    """One input of a tensor: its weights, and the base they are a change of, if any."""

    tuned: Checkpoint
    base: Checkpoint | None = None
    ballot: Ballot | None = None


class Formulas(Combined):
    """The tensors of the output, each by its own rule, planned when its turn comes."""

    def __init__(self, job: Job, hashes: InputHashes, counting: Callable[[int], None] | None) -> None:
        self.job, self.hashes, self.counting, self.pool = job, hashes, counting, PieceWorkers()
        super().__init__(Differences([], [], pool=self.pool), job.method.merge(), _unplanned, hashes, [])
        self.cheap = job.document.method in CHEAP

    def rule_size(self, name: str) -> int:
        return self.method.piece_size(self.job.infos[name].shape)

    def planned(self, name: str) -> tuple[Differences, Rule]:
        job = self.job
        bundle = Differences(job.sides(name), [name], self.counting, self.pool, job.rounded)
        return bundle, job.method.plan(bundle, job.given(name))

    def identity(self) -> Any:
        parts = {str(model): view.identity() for model, view in self.job.views.items()}
        return None if None in parts.values() else [parts, _as_json(self.job.document), self.job.seed]

    def judge(self, whole: Counts, target: Checkpoint, force: bool) -> dict[str, Any]:
        sizes: dict[str, list[Counts]] = {}
        for name, counts in self._counts.items():
            for model, count in zip(self.job.models_of(name), counts, strict=True):
                sizes.setdefault(str(model), []).append(count)
        return {"inputs": [{"model": m, "norm_ratio": total(counts).norm_ratio()} for m, counts in sizes.items()]}


def _unplanned(place: Any, pieces: Any) -> Any:
    raise AssertionError("every tensor has a rule of its own")


class Job:
    """The opened and checked inputs of one document."""

    def __init__(
        self, document: Document, target: Source | Checkpoint | None = None, seed: int = 0,
        opened: Mapping[ModelRef, Checkpoint] | None = None,
    ) -> None:  # fmt: skip
        self.notes = list(check_document(document))
        self.document, self.seed = document, seed
        self.method: Dialect = METHODS[document.method]
        self.models = {model: (opened or {}).get(model) or _open(model) for model in document.models()}
        self.blueprint: Blueprint = draw_up(document, self.models)
        self.rounded = None if document.dtype is None else torch_dtype(document.dtype)
        self.tokens: Tokens | None = settle_tokens(document, self.models)
        self.template = self._template()
        self.views = {model: self._view(model) for model in self.models}
        self._order = {model: number for number, model in enumerate(self.models)}
        self._positions = {m: {name: i for i, name in enumerate(c.names())} for m, c in self.models.items()}
        self.reference = self.models[document.base or document.models()[0]]
        self.bases: dict[ModelRef, Checkpoint] = {}
        self.target = None if target is None else self._onto(open_checkpoint(target))
        if self.tokens is not None:
            self._match_tokens(self.tokens)
        self.infos = {name: self._info(formula) for name, formula in self.formulas.items()}
        self._givens = {name: self._given(formula) for name, formula in self.formulas.items() if not formula.copied}
        self.taken = set() if self.target is not None else {name for name in self.formulas if self._as_it_is(name)}

    def _as_it_is(self, name: str) -> bool:
        """Does the rule leave the tensor alone? Then it is copied, which is less work."""
        if name not in self._givens:
            return True
        return self.document.method == "passthrough" and self._givens[name].each("scale") == [1.0]

    @property
    def formulas(self) -> dict[str, Formula]:
        return self.blueprint.formulas

    def _view(self, model: ModelRef) -> Checkpoint:
        """A model under the output's names."""
        renamed = {name: f.tensors[model] for name, f in self.formulas.items() if model in f.tensors}
        whole = self.models[model]
        same = list(renamed) == list(renamed.values()) and set(renamed) == set(whole.names())
        return whole if same else Renamed(whole, renamed)

    def _onto(self, target: Checkpoint) -> Checkpoint:
        """The base and the models as the target has them; what the merge changes in the base goes onto the target."""
        base = self.document.base
        if base is None:
            raise UsageError(
                f"{self.document.where}: without a base_model there is no change to add to another target."
            )
        stacked = any(source.layers for _, part in self.document.slices() for source in part.sources)
        if stacked or self.tokens is not None:
            raise UsageError(
                f"{self.document.where}: slices and tokenizers make a model of their own; leave out --target."
            )
        moved = set(self.formulas)
        for model in self.models:
            if model != base:
                trio = Trio.open(self.models[base], self.models[model], target, head="skip")
                self.views[model], self.bases[model], self.views[base] = trio.tuned, trio.base, trio.base
                self.notes += [note for note in trio.base.notes if note not in self.notes]
                moved &= set(trio.moved)
        kept = {name: formula for name, formula in self.formulas.items() if name in moved and not formula.copied}
        self.blueprint = Blueprint(kept)
        self.reference = target
        return target

    def _match_tokens(self, tokens: Tokens) -> None:
        tables = [name for name, formula in self.formulas.items() if TOKEN_TABLE.search(name) and not formula.copied]
        for name in tables:
            formula = self.formulas[name]
            inputs = {model: self.views[model] for model in formula.tensors}
            self.views |= tokens.shown(inputs, name)
        self.notes.append(f"token rows matched by token: {len(tokens.vocabulary)} tokens in {len(tables)} tables")

    def _info(self, formula: Formula) -> TensorInfo:
        infos = {model: self.views[model].info(formula.name) for model in formula.tensors}
        first = infos[formula.first]
        for model, info in infos.items():
            if info.shape != first.shape:
                advice = (
                    "tokenizer: {source: union} (or base) matches them." if TOKEN_TABLE.search(formula.name) else ""
                )
                raise IncompatibleCheckpoints(
                    f"{self.document.where}: tensor {formula.name!r} is {list(first.shape)} in {formula.first} and "
                    f"{list(info.shape)} in {model}. {advice}".rstrip()
                )
        if self.target is not None:
            return self.target.info(formula.name)
        if formula.copied:
            return first
        dtype = first.dtype
        for info in infos.values():
            dtype = torch.promote_types(dtype, info.dtype)
        return TensorInfo(first.shape, self.rounded or dtype)

    def based(self, formula: Formula) -> bool:
        return self.method.base != "ignored" and formula.part.base in formula.tensors

    def models_of(self, name: str) -> list[ModelRef]:
        """The inputs of a tensor in the order of its rule: the base first where it is one of them."""
        formula = self.formulas[name]
        models = list(formula.tensors)
        if not self.based(formula):
            return models
        rest = [model for model in models if model != formula.part.base]
        return rest if self.method.changes(True) else [formula.part.base, *rest]  # type: ignore[list-item]

    def sides(self, name: str) -> Sequence[Input]:
        formula, models = self.formulas[name], self.models_of(name)
        if not (self.method.changes(self.based(formula))):
            return [InputWeights(self.views[model]) for model in models]
        base = formula.part.base
        assert base is not None
        return [InputWeights(self.views[model], self.bases.get(model, self.views[base])) for model in models]

    def _given(self, formula: Formula) -> Any:
        based = self.based(formula)
        asked = {m: t for m, t in formula.tensors.items() if not (based and m == formula.part.base)}
        return given_for(self.document, formula, asked, self.seed)

    def given(self, name: str) -> Any:
        return self._givens[name]

    def canvas(self) -> Checkpoint:
        """What the output is written onto."""
        if self.target is not None:
            base = self.document.base
            assert base is not None
            return self.target if self.method.changes(True) else Shifted(self.target, self.views[base])
        under: dict[str, Checkpoint] = {}
        for name, formula in self.formulas.items():
            if name in self.taken:
                under[name] = self.views[formula.first]
            elif self.method.changes(self.based(formula)) and formula.part.base is not None:
                under[name] = self.views[formula.part.base]
        order = sorted(self.infos, key=self._place)
        return Canvas({name: self.infos[name] for name in order}, under, self.reference, self.rounded)

    def _place(self, name: str) -> tuple[int, int]:
        """Where the first input has the tensor: files are read from front to back."""
        formula = self.formulas[name]
        return self._order[formula.first], self._positions[formula.first][formula.tensors[formula.first]]

    def fates(self, canvas: Checkpoint) -> Fates:
        fates = Fates()
        for name in canvas.names():
            if name in self.taken:
                fates[name] = TensorFate(Fate.TAKEN, str(self.formulas[name].first))
            else:
                fates[name] = TensorFate(Fate.TRANSPORTED if name in self.formulas else Fate.ONLY_IN_TARGET)
        return fates

    def amend(self, staging: Path) -> None:
        """Config, tokenizer and chat template of the result."""
        document = self.document
        stacks = list(self.blueprint.stacks.values())
        stacked = any(part.depth is not None for _, part in document.slices())
        layers = [layer for _, layer in stacks[0]] if stacked and stacks and self.target is None else None
        height = self.tokens.height if self.tokens is not None else None
        amend_config(staging, layers, height, document.out_dtype or document.dtype)
        if self.tokens is not None:
            self.tokens.save(staging)
        if self.template is not None:
            set_chat_template(staging, self.template)

    def _template(self) -> str | None:
        if self.document.chat_template is None:
            return None
        folders = [folder_of(model.path) for model in self.models.values() if model.path is not None]
        return chat_template(self.document.chat_template, folders, self.document.where)


def _open(model: ModelRef) -> Checkpoint:
    whole = open_checkpoint(model.path)
    return whole if model.lora is None else open_checkpoint(model.lora, base=whole)


def _as_json(document: Document) -> Any:
    return json.loads(json.dumps(asdict(replace(document, where="")), default=str))


@one_thread()
def run_document(
    job: Job, out: str | os.PathLike[str], counting: Callable[[int], None] | None = None, **output: Any
) -> StreamReport:
    """Write what the document asks for; `output` are the options of the output, as in `merge_checkpoints`."""
    inputs = {f"model {n}": job.models[model] for n, model in enumerate(job.document.models(), 1)}
    inputs = {"target": job.reference, **inputs}
    refuse_inside(Path(out), [checkpoint.path for checkpoint in inputs.values()])
    canvas = job.canvas()
    hashes = InputHashes(list(inputs.values()))
    fates = job.fates(canvas)
    stream = Stream(
        canvas, fates, Formulas(job, hashes, counting), Ballot(None, "none", None, None, fates, canvas), 1.0, hashes,
        inputs, notes=(*job.notes, *job.reference.notes), kind="merge",
        details={"merge": {"method": job.document.method, "mergekit": _as_json(job.document)}},
    )  # fmt: skip
    dtype = job.document.out_dtype or job.document.dtype
    return write_stream(stream, Output(out, dtype=dtype, extras=job.amend, **output))
