"""The measurements behind the tables: questions about a suite, how each is answered, and where answers are kept.

A question is a measure's name and its arguments, all plain data, and so is its answer: a small file that is whole
or absent, so a killed run loses the question it was in and experiments share answers. Every choice is made on the
validation split; test examples are scored once, with what was chosen."""

from __future__ import annotations

import json
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradfix.checkpoints.write import write_text
from gradfix.errors import CorruptInput, IncompatibleCheckpoints
from gradfix.experiments.suite import Scene, Suite
from gradfix.merging.memory import mask_then_merge, merge, merge_then_mask
from gradfix.methods.method import NotHere
from gradfix.methods.methods import METHODS
from gradfix.methods.search import Score, Setting
from gradfix.methods.support import Support
from gradfix.methods.trial import Trial
from gradfix.methods.workfolder import digest
from gradfix.registry import Registry
from gradfix.system.modules import at_work
from gradfix.tasks.scoring import evaluate
from gradfix.vectors.diagnostics import sign_agreement
from gradfix.vectors.scale import dialled
from gradfix.vectors.selection import select
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import transport
from gradfix.votes.collect import collect_votes

Answer = dict[str, Any]


class Question(NamedTuple):
    """What is asked: a measure and its arguments as sorted pairs."""

    measure: str
    arguments: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, measure: str, arguments: Mapping[str, Any]) -> Question:
        return cls(measure, tuple(sorted(arguments.items())))

    def get(self, name: str) -> Any:
        return dict(self.arguments).get(name)

    @property
    def place(self) -> tuple[str, str, int, int]:
        """Questions of one place share a model and its votes."""
        return (str(self.get("pair") or ""), str(self.get("task") or ""), self.get("shots") or 0, self.get("seed") or 0)

    def __str__(self) -> str:
        shown = ", ".join(str(value) for _, value in self.arguments if value is not None)
        return f"{self.measure} ({shown})"


Measure = Callable[..., Answer]
MEASURES: Registry[Measure] = Registry("measure")


class OpenSuite:
    """A suite as one process sees it: its opened scenes, and the answers stored so far."""

    def __init__(self, suite: Suite, store: Path) -> None:
        self.suite, self.store = suite, store
        self._identity = digest(suite.identity())
        self._scenes: OrderedDict[tuple[str, str], Scene] = OrderedDict()

    def scene(self, pair: str, task: str) -> Scene:
        key = (pair, task)
        if key not in self._scenes:
            while len(self._scenes) >= self.suite.scenes_kept:
                self._scenes.popitem(last=False)
            self._scenes[key] = self.suite.open(pair, task)
        self._scenes.move_to_end(key)
        return self._scenes[key]

    def known(self, question: Question) -> Answer | None:
        path = self._path(question)
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return content["answer"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise CorruptInput(f"{path} is not a finished unit of work; remove it and run again.") from None

    def answer(self, question: Question) -> Answer:
        known = self.known(question)
        if known is not None:
            return known
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*tensors abstained")
            found = MEASURES[question.measure](self, **dict(question.arguments))
        found = {**found, "took": round(time.perf_counter() - start, 3)}
        content = {"question": [question.measure, dict(question.arguments)], "answer": found}
        write_text(self._path(question), json.dumps(content, allow_nan=False) + "\n")
        return found

    def _path(self, question: Question) -> Path:
        name = digest([self._identity, question.measure, question.arguments])
        return self.store / "units" / f"{question.measure}-{name}.json"


@MEASURES.register("method")
def run_method(opened: OpenSuite, *, pair: str, task: str, method: str, shots: int, seed: int) -> Answer:
    """One method of `compare` on one few-shot set."""
    scene = opened.scene(pair, task)
    trial = scene.trial
    support = trial.support(shots, seed)
    trial.open_bill()
    start = time.perf_counter()
    try:
        outcome = METHODS[method].run(trial, support)
    except (NotHere, IncompatibleCheckpoints) as error:
        return {"accuracy": None, "alpha": None, "curve": [], "why": str(error)}
    work = trial.bill.total(time.perf_counter() - start)
    return {
        "accuracy": _test(trial, outcome.update, outcome.alpha),
        "alpha": outcome.alpha,
        "validation": outcome.score.accuracy if outcome.score else None,
        "curve": [list(point) for point in outcome.parts.get("curve", [])],
        "kept": outcome.parts.get("kept_share"),
        "rate": outcome.parts.get("rate"),
        "steps": outcome.parts.get("steps"),
        "samples": len(support.examples),
        "flops": work.flops(scene.parameters, scene.tokens),
        "seconds": round(work.seconds, 3),
    }


@MEASURES.register("oracle_mask")
def run_oracle_mask(opened: OpenSuite, *, pair: str, task: str, mask: str) -> Answer:
    """A mask made from the target's own task vector instead of its votes."""
    trial = opened.scene(pair, task).trial
    known = trial.tuned_target()
    if known is None:
        return {"accuracy": None, "alpha": None, "curve": []}
    support = trial.support(opened.suite.grid.main[0], opened.suite.grid.seeds[0])
    return _chosen(trial, support, transport(trial.tau, known, mask).update)


@MEASURES.register("selected")
def run_selected(opened: OpenSuite, *, pair: str, task: str, selector: str, shots: int, seed: int) -> Answer:
    """GradFix on examples chosen by a selector, from the features of base A's frozen encoder."""
    scene = opened.scene(pair, task)
    trial = scene.trial
    labels = [str(example["label"]) for example in trial.splits.train]
    picked = select(_features(scene), labels, shots, selector, seed, allow_fewer=trial.passes.allow_fewer)
    batches = trial.bound.batches([trial.splits.train[index] for index in picked], trial.passes.batch_size)
    votes = collect_votes(trial.model, trial.bound.loss, batches, engine=trial.passes.engine)
    return _chosen(trial, trial.support(shots, seed), transport(trial.tau, votes).update)


@MEASURES.register("agreement")
def run_agreement(opened: OpenSuite, *, pair: str, task: str, shots: int, seed: int) -> Answer:
    """Per block, how often the votes and the target's own task vector have the same sign."""
    trial = opened.scene(pair, task).trial
    support = trial.support(shots, seed)
    votes = support.votes(support.whole)
    known = trial.tuned_target()
    if known is None:
        return {"blocks": {}, "ties": votes.tie_rate()}
    moved = [name for name in trial.tau if bool(known[name].any())]
    shown = {name: votes[name] for name in moved if name in votes}
    return {"blocks": sign_agreement(shown, known), "all": _agreement(shown, known), "ties": votes.tie_rate()}


@MEASURES.register("merged")
def run_merged(
    opened: OpenSuite, *, pair: str, setting: str, task: str | None, combiner: str, pipeline: str, shots: int, seed: int
) -> Answer:
    """One merged model: several tasks of one source, or several sources of one task; one alpha for all tasks."""
    tasks = list(opened.suite.tasks(pair)) if task is None else [task]
    trials = {name: opened.scene(pair, name).trial for name in tasks}
    if setting == "tasks":
        vectors = [trial.tau for trial in trials.values()]
    else:
        vectors = [trials[tasks[0]].by_module(vector) for vector in opened.suite.sources(tasks[0])]
    if pipeline == "baseline":
        update = merge(vectors, combiner)
    else:
        votes = []
        for trial in trials.values():
            support = trial.support(shots, seed)
            votes.append(support.votes(support.whole))
        order = {"mask_then_merge": mask_then_merge, "merge_then_mask": merge_then_mask}[pipeline]
        update = order(vectors, votes if setting == "tasks" else votes[0], combiner).update
    return _chosen_for_all(trials, update)


@MEASURES.register("support")
def run_support(opened: OpenSuite, *, pair: str, task: str, who: str, shots: int, seed: int) -> Answer:
    """Task and support accuracy of the old base, its fine-tune, the target and the transported target."""
    scene = opened.scene(pair, task)
    trial = scene.trial
    old = who in ("base", "base_tuned")
    side = opened.suite.support(pair, task, "base" if old else "target")
    if side is None:
        return {"accuracy": None, "support": None}
    bound = scene.base() if old else trial.bound
    update, alpha = None, 0.0
    if who == "base_tuned":
        update, alpha = trial.tau, 1.0
    elif who == "gradfix":
        asked = {"pair": pair, "task": task, "method": "gradfix", "shots": shots, "seed": seed}
        alpha = opened.answer(Question.of("method", asked))["alpha"]
        few = trial.support(shots, seed)
        update = transport(trial.tau, few.votes(few.whole)).update
    accuracies = []
    for one, examples in ((bound, trial.splits.test), (side.bound, side.examples)):
        with dialled(one.model, update if update is not None else {}) as dial:
            dial.turn(alpha)
            batches = one.batches(examples, trial.passes.batch_size)
            accuracies.append(evaluate(one.model, one, batches)["accuracy"])
    return {"accuracy": accuracies[0], "support": accuracies[1], "alpha": alpha}


@MEASURES.register("counts")
def run_counts(opened: OpenSuite, *, pair: str, task: str) -> Answer:
    """Sizes, counted from the data and the opened model."""
    scene = opened.scene(pair, task)
    return {"samples": scene.samples, "classes": scene.classes, "parameters": scene.parameters, "tokens": scene.tokens}


def _chosen(trial: Trial, support: Support, update: TaskVector) -> Answer:
    """Choose alpha on validation, score on test; with a validation split the few-shot set has no say in it."""
    choice = trial.choose(support, [Setting({}, lambda view: update)])
    return {
        "accuracy": _test(trial, update, choice.alpha),
        "alpha": choice.alpha,
        "curve": [list(point) for point in choice.accuracies()],
    }


def _chosen_for_all(trials: Mapping[str, Trial], update: TaskVector) -> Answer:
    """One alpha by the mean validation accuracy over the tasks."""
    first = next(iter(trials.values()))
    alphas = [0.0, *first.search.alphas]
    curves = {name: _scores(trial, update, alphas) for name, trial in trials.items()}
    means = [sum(scores[i].value for scores in curves.values()) / len(curves) for i in range(len(alphas))]
    best = max(range(len(alphas)), key=lambda i: (means[i], -i))
    accuracies = [[scores[i].accuracy for scores in curves.values()] for i in range(len(alphas))]
    return {
        "accuracies": {name: _test(trial, update, alphas[best]) for name, trial in trials.items()},
        "alpha": alphas[best],
        "curve": [[alpha, sum(row) / len(row)] for alpha, row in zip(alphas, accuracies, strict=True)],
    }


def _scores(trial: Trial, update: TaskVector, alphas: Sequence[float]) -> list[Score]:
    with dialled(trial.model, update) as dial:
        found = []
        for alpha in alphas:
            dial.turn(alpha)
            found.append(trial.score("validation"))
        return found


def _test(trial: Trial, update: TaskVector | None, alpha: float) -> float:
    with dialled(trial.model, update if update is not None else {}) as dial:
        dial.turn(alpha)
        return trial.score("test").accuracy


def _features(scene: Scene) -> Tensor:
    """The old base's features of the whole train split, computed once per scene."""
    key = "features-base"
    return scene.trial.shared(key, lambda: _extract(scene))


def _extract(scene: Scene) -> Tensor:
    bound = scene.base()
    with at_work(bound.model), torch.no_grad():
        parts = [
            bound.features(bound.model, batch).float().cpu()
            for batch in bound.batches(scene.trial.splits.train, scene.trial.passes.batch_size)
        ]
    return torch.cat(parts)


def _agreement(votes: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> float:
    """Over all weights together."""
    same = both = 0
    for name, counted in votes.items():
        left, right = counted.sign(), known[name].sign().to(counted)
        decided = (left != 0) & (right != 0)
        same += int(((left == right) & decided).sum())
        both += int(decided.sum())
    return same / both if both else 0.0
