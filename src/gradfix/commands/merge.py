"""`gradfix merge`: several fine-tunes, each with its own base, into one model on the target.

The target is asked once per task, one alpha is chosen on all tasks' validation data together, and the one
merged model is scored on every task's test data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.trio import Trio
from gradfix.checkpoints.weights import MemoryCheckpoint
from gradfix.checkpoints.write import refuse_occupied, torch_dtype
from gradfix.commands.across import as_vector, rewritten
from gradfix.commands.configs import MergeConfigOptions, ShotOptions
from gradfix.commands.guard import guard_outputs
from gradfix.commands.mergekit import run_mergekit
from gradfix.commands.setting import Shots, device_of, draw, setting
from gradfix.commands.vote import on_disk
from gradfix.errors import DataError, IncompatibleCheckpoints, UsageError
from gradfix.merging.folders import Vector, merge_checkpoints, merged_update
from gradfix.merging.recipes import MergeRecipe, VectorRecipe, load_recipe
from gradfix.methods.headed import fill, open_target
from gradfix.methods.opening import refuse_itself, rounds, unmoved_on_disk
from gradfix.stream.checkpoint import StreamReport
from gradfix.system.meter import Meter
from gradfix.tasks.base import Bound
from gradfix.tasks.scoring import evaluate
from gradfix.vectors.scale import ScaleCurve, dialled, search_scale
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector
from gradfix.votes.collect import collect_votes

Stage = Callable[[str], None]
LOSS_WEIGHT = 1e-3  # breaks ties between equal accuracies in favour of the lower loss


@dataclass(frozen=True)
class MergeResult:
    """What was written, the one alpha, and every task's score before and after."""

    out: Path
    method: str
    order: str
    alpha: float
    report: StreamReport | None
    curve: ScaleCurve | None
    tasks: dict[str, dict[str, Any]]
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        text = f"{'would write' if self.report is None else 'wrote'} {self.out}: {self.method}, {self.order}"
        text += f", alpha {self.alpha:g}"
        scored = [task for task in self.tasks.values() if task.get("test_after")]
        measures = " / ".join(dict.fromkeys(task.get("measure", "accuracy") for task in scored))
        for when, label in (("test_before", f", mean test {measures}"), ("test_after", " ->")):
            if scored:
                text += f"{label} {sum(task[when]['accuracy'] for task in scored) / len(scored):.2f}"
        return text

    def as_json(self) -> dict[str, Any]:
        return {
            "summary": self.summary,
            "out": str(self.out),
            "method": self.method,
            "order": self.order,
            "alpha": self.alpha,
            "kept": self.report.kept if self.report else None,
            "curve": self.curve.points if self.curve else None,
            "tasks": self.tasks,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


def run_merge_command(options: MergeConfigOptions, stage: Stage = lambda _: None) -> dict[str, Any]:
    """The recipe named on the command line, completed by its options, merged."""
    if (options.config is None) == (options.from_mergekit is None):
        raise UsageError("give one recipe: a YAML file of ours, or --from-mergekit FILE.")
    if options.from_mergekit is not None:
        return run_mergekit(options, stage)
    forced = True if options.force else None
    recipe = load_recipe(str(options.config), target=options.target, out=options.out, force=forced)
    guard_outputs(recipe, parts=[options])
    return run_merge(recipe, overwrite=options.overwrite, dry_run=options.dry_run, stage=stage).as_json()


def run_merge(
    recipe: MergeRecipe, *, overwrite: bool = False, dry_run: bool = False, stage: Stage = lambda _: None
) -> MergeResult:
    """Check, vote once per task, choose one alpha, write one model, score it on every task."""
    if recipe.out is None:
        raise UsageError("the recipe names no output folder; add `out` or give --out.")
    guard_outputs(recipe, parts=recipe.vectors)
    refuse_occupied(Path(recipe.out), overwrite)
    return _Run(recipe, overwrite, dry_run, stage).run()


@dataclass
class _TaskOnTarget:
    """One task's examples and the target bound to it."""

    name: str
    bound: Bound
    shots: Shots
    votes: SignVotes | None = None


class _Run:
    def __init__(self, recipe: MergeRecipe, overwrite: bool, dry_run: bool, stage: Stage) -> None:
        self.recipe, self.overwrite, self.dry_run, self.stage = recipe, overwrite, dry_run, stage
        self.order = recipe.settled_order()
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []

    def run(self) -> MergeResult:
        self.trios = [self._trio(vector) for vector in self.recipe.vectors]
        self.tasks = self._timed("reading examples", self._open_tasks)
        self.across = self._timed("matching units", self._rewrite)
        if self.order != "plain":
            self._timed("votes", self._vote)
        settings = self._settings()
        needs_update = bool(self.tasks) or self.dry_run
        update = (
            self._timed("merging", lambda: merged_update(**settings, counting=self._counting()))
            if needs_update
            else None
        )
        alpha, curve = self._timed("scale", lambda: self._choose(update))
        scores = self._timed("scoring", lambda: self._scores(update, alpha)) if self.tasks else {}
        self.notes += [note for task in self.tasks.values() for note in task.bound.cuts()]
        out = Path(str(self.recipe.out))
        report = None
        if not self.dry_run:
            report = self._timed("writing", lambda: self._write(settings, out, alpha, scores))
            self.notes += report.notes
        notes = tuple(dict.fromkeys(self.notes))
        method = self.recipe.method
        return MergeResult(out, method, self.order, alpha, report, curve, scores, self.seconds, notes)

    def _timed(self, name: str, work: Callable[[], Any]) -> Any:
        self.stage(name)
        begin = time.perf_counter()
        result = work()
        self.seconds[name] = round(time.perf_counter() - begin, 3)
        return result

    def _trio(self, vector: VectorRecipe) -> Trio:
        """What does not go together is said before anything is computed."""
        trio = Trio.open(vector.base, vector.tuned, self.recipe.target, head=self.recipe.head, across=True)
        if trio.apart is not None and vector.data is None:
            raise IncompatibleCheckpoints(
                f"{trio.target} has another shape than {trio.base}: {trio.apart}. Give this vector `data` and a task: its "
                "units are matched on examples that both bases read."
            )
        self.notes += refuse_itself(trio, force=True)
        return trio

    def _rewrite(self) -> dict[int, tuple[MemoryCheckpoint, dict[str, Any]]]:
        """Vectors of another shape in the target's names and shapes, by their number."""
        found = {}
        for number, (vector, trio) in enumerate(zip(self.recipe.vectors, self.trios, strict=True)):
            if trio.apart is not None:
                task, start = self.tasks[_task_key(vector)], setting(self._shot_options(vector))
                how = self.recipe.coordinates
                found[number] = rewritten(trio, start.task, task.bound, task.shots, how, self.recipe.seed)
                self.notes.append(f"{vector.tuned} has another shape ({trio.apart}): rewritten by {how}")
        return found

    def _vector(self, number: int, vector: VectorRecipe) -> Vector:
        votes = self._votes_of(vector)
        if number in self.across:
            return as_vector(self.across[number][0], votes, vector.weight)
        return Vector(vector.base, vector.tuned, votes, vector.weight)

    def _open_tasks(self) -> dict[tuple[Any, ...], _TaskOnTarget]:
        """Each distinct task once, however many vectors serve it."""
        tasks: dict[tuple[Any, ...], _TaskOnTarget] = {}
        for vector, trio in zip(self.recipe.vectors, self.trios, strict=True):
            if vector.data is None or _task_key(vector) in tasks:
                continue
            start = setting(self._shot_options(vector))
            shots = draw(start, self._shot_options(vector), vector.validation, vector.base)
            options = start.options
            bound = open_target(trio, start.task, torch_dtype(options.dtype), device_of(options.device))
            name = vector.data if len({v.task for v in self.recipe.vectors}) == 1 else f"{vector.data} ({vector.task})"
            self.notes += [*shots.notes, *bound.notes]
            tasks[_task_key(vector)] = _TaskOnTarget(name, bound, shots)
        blind = [task.name for task in tasks.values() if not task.shots.validation]
        if blind and self.recipe.settled_alpha() == "auto":
            raise DataError(
                f"{blind[0]} has no validation data to choose alpha on. Add a validation split or `validation`, "
                "or give alpha as a number."
            )
        kinds = {type(task.bound.model) for task in tasks.values()}
        if len(kinds) > 1:
            raise UsageError("the tasks load the target as different models: one merged model cannot serve them all.")
        return tasks

    def _shot_options(self, vector: VectorRecipe) -> ShotOptions:
        recipe = self.recipe
        columns = ("label_column", "text_column", "text_template", "image_column", "pooling", "max_length")
        return ShotOptions(
            data=str(vector.data), task=str(vector.task or recipe.task), shots=recipe.shots, seed=recipe.seed,
            select=recipe.select, allow_fewer=recipe.allow_fewer, engine=recipe.engine,
            batch_size=recipe.batch_size, device=recipe.device,
            **{name: getattr(vector, name) for name in columns},
        )  # fmt: skip

    def _vote(self) -> None:
        for key, task in self.tasks.items():
            wanted = any(v.votes is None and _task_key(v) == key for v in self.recipe.vectors if v.data)
            if wanted:
                batches = task.bound.batches(task.shots.fewshot, self.recipe.batch_size)
                votes = collect_votes(task.bound.model, task.bound.loss, batches, engine=self.recipe.engine)
                task.votes = on_disk(votes, task.bound, self.recipe.target)
                self.notes += task.votes.notes

    def _settings(self) -> dict[str, Any]:
        recipe = self.recipe
        vectors = [self._vector(number, vector) for number, vector in enumerate(recipe.vectors)]
        return {
            "target": recipe.target, "vectors": vectors, "method": recipe.method, "order": self.order,
            "mask": recipe.mask, "density": recipe.densities(), "margin": recipe.margin, "seed": recipe.seed,
            "head": recipe.head, "leave": self._unmoved(), **recipe.options,
        }  # fmt: skip

    def _unmoved(self) -> frozenset[str]:
        """What is no part of any of the tasks stays as the target has it."""
        target = open_checkpoint(self.recipe.target)
        still = [unmoved_on_disk(task.bound, target) for task in self.tasks.values()]
        return frozenset.intersection(*still) if still else frozenset()

    def _votes_of(self, vector: VectorRecipe) -> SignVotes | str | None:
        if self.order == "plain" or vector.votes is not None or vector.data is None:
            return vector.votes
        return self.tasks[_task_key(vector)].votes

    def _choose(self, update: TaskVector | None) -> tuple[float, ScaleCurve | None]:
        alpha = self.recipe.settled_alpha()
        if alpha != "auto":
            return float(alpha), None
        assert update is not None
        tasks = list(self.tasks.values())
        batches = [list(task.bound.scoring_batches(task.shots.validation or [], 32)) for task in tasks]

        def score(model: nn.Module) -> float:
            found = [_ranking(evaluate(model, task.bound, part)) for task, part in zip(tasks, batches, strict=True)]
            return sum(found) / len(found)

        curve = search_scale(tasks[0].bound.model, self._on_module(update), score)
        self.notes += curve.notes
        return curve.best, curve

    def _on_module(self, update: TaskVector) -> TaskVector:
        """The update under the module's names; what is no parameter of it (a buffer on disk) stays out."""
        model = next(iter(self.tasks.values())).bound.model
        names = name_map(model, open_checkpoint(self.recipe.target).names())
        parameters = dict(model.named_parameters())
        return TaskVector({n: t for n, t in names.to_module(update).items() if n in parameters})

    def _scores(self, update: TaskVector | None, alpha: float) -> dict[str, dict[str, Any]]:
        assert update is not None
        tasks = list(self.tasks.values())
        model = tasks[0].bound.model
        with dialled(model, self._on_module(update)) as dial:
            before = [_test(model, task) for task in tasks]
            dial.turn(alpha)
            after = [_test(model, task) for task in tasks]
        return {
            name: {
                "labelled_examples": len(task.shots.fewshot), "measure": task.bound.measure,
                "test_before": old, "test_after": new,
            }
            for name, task, old, new in zip(_told_apart(self.tasks), tasks, before, after, strict=True)
        }  # fmt: skip

    def _write(
        self, settings: dict[str, Any], out: Path, alpha: float, scores: dict[str, dict[str, Any]]
    ) -> StreamReport:
        details: dict[str, Any] = {"recipe": self.recipe.model_dump(mode="json"), "tasks": scores}
        if self.across:
            details["across"] = [facts for _, facts in self.across.values()]
        written = Meter(open_checkpoint(self.recipe.target).nbytes, self.stage)
        return merge_checkpoints(
            **settings, out=out, alpha=alpha, dtype=self.recipe.dtype, overwrite=self.overwrite,
            force=self.recipe.force, details=details, extras=self._extras(scores),
            progress=written, counting=self._counting(), notes=tuple(dict.fromkeys(self.notes)),
        )  # fmt: skip

    def _counting(self) -> Meter:
        """Some methods read everything once or twice before they write."""
        return Meter(None, self.stage, "counting,")

    def _extras(self, scores: dict[str, dict[str, Any]]) -> Callable[[Path], None]:
        """A head that belongs to one task goes along; heads of several tasks do not fit into one folder.

        Where writing rounds, the scores become those of the written files."""
        tasks = list(self.tasks.values())
        target = open_checkpoint(self.recipe.target)
        if len(tasks) > 1:
            self.notes.append("score single tasks with the target's own head: --head-from the target")

        def look(folder: Path) -> None:
            if len(tasks) == 1:
                tasks[0].bound.save_extras(folder)
            model = tasks[0].bound.model if tasks else None
            if model is not None and rounds(target, self.recipe.dtype, next(model.parameters()).dtype):
                stored = open_checkpoint(folder)
                fill(model, stored, stored, stored.names())
                for found, task in zip(scores.values(), tasks, strict=True):
                    found["test_after"] = _test(model, task)

        return look


def _task_key(vector: VectorRecipe) -> tuple[Any, ...]:
    """What must be equal for two vectors to share one task's examples and votes."""
    own = vector.model_dump(exclude={"base", "tuned", "weight", "density", "votes"})
    return tuple(sorted((name, str(value)) for name, value in own.items()))


def _told_apart(tasks: Mapping[tuple[Any, ...], _TaskOnTarget]) -> list[str]:
    """A name of its own for every task; those on the same data are told apart by the options they differ in."""
    names = []
    for key, task in tasks.items():
        twins = [dict(other) for other, one in tasks.items() if one.name == task.name]
        apart = [(option, value) for option, value in key if any(twin[option] != value for twin in twins)]
        own = [f"{option} {value}" for option, value in apart if value != str(None)]
        names.append(f"{task.name} ({', '.join(own)})" if own else task.name)
    return names


def _test(model: nn.Module, task: _TaskOnTarget) -> dict[str, float] | None:
    if not task.shots.test:
        return None
    return evaluate(model, task.bound, task.bound.scoring_batches(task.shots.test, 32))


def _ranking(metrics: dict[str, float]) -> float:
    """Accuracy first; equal accuracies are told apart by the loss."""
    return metrics["accuracy"] - LOSS_WEIGHT * min(metrics["loss"], 1e3)
