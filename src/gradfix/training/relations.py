"""Lessons for retrievers: the student's similarities among texts follow the teacher's, whatever the two widths.

The tuned old model embeds every text once. A text's relations are a softmax over its similarities to all the other
texts; the student learns each text's relations by their divergence, and the labelled pairs among the texts by
contrast. What the others' vectors are is remembered from the last time they were read, so a step costs no more
than the texts it is about. Where to start is chosen as in `starts`, here by the divergence of relations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradfix.align.coordinates import Moved, Side, move
from gradfix.align.pairing import polar
from gradfix.errors import DataError, UsageError
from gradfix.system.modules import at_work, restored, rounded_products
from gradfix.tasks.base import Example
from gradfix.tasks.embedding import EmbeddingBound, texts_of
from gradfix.tasks.retrieval import PLAIN, Text, refuse_equal
from gradfix.training.costs import Work
from gradfix.training.distil import ENOUGH, GENTLER, Batch, Teaching, in_stretches, picked, take
from gradfix.training.lessons import reads_alike
from gradfix.training.remix import splice_words
from gradfix.training.starts import COORDINATES, PLAIN as AS_IT_IS, Old, Start, best_start, learned_ways, step_unit
from gradfix.training.steps import Training, change, draws, take_steps, trainable_weights, warmed
from gradfix.vectors.scale import Coefficients, dialled
from gradfix.vectors.taskvector import TaskVector

SETTING = Teaching(pool=1280, mapped=256)  # the parts of the recipe that texts without answers share with it
SHARPER = tuple(2 ** (step / 2) for step in range(-4, 7))  # what a student's similarities may be multiplied by


@dataclass(frozen=True, kw_only=True)
class Relating:
    """How relations are taught; what is not said here is as in `SETTING`.

    `temperature` makes similarities a distribution; `contrast` is that of labelled pairs. `turned` weighs how far a
    text's vector lies from the teacher's, turned to the student's space. `further` is how far the teacher's vectors go
    on beyond where the fine-tune took them, as a share of that way: a student stops short of its teacher. `along` is as in
    `Teaching`."""

    steps: int = 200
    texts: int = 16
    labelled: int = 5
    rate: float = 0.35
    temperature: float = 0.05
    contrast: float = 0.05
    turned: float = 30.0
    further: float = 0.7
    along: float = 0.4


@dataclass(frozen=True)
class Relations:
    """Texts as each side reads them, and the teacher's vectors of them; the last ones have labels.

    `right` says which of the labelled texts belong together."""

    inputs: Batch
    theirs: Batch
    vectors: Tensor
    right: Tensor

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def labelled(self) -> int:
        return len(self.right)


@dataclass(frozen=True)
class Related:
    """The update, where it started and what it took; `best` makes its result of it."""

    update: TaskVector
    start: Start
    tried: list[Start]
    work: Work
    parts: dict[str, Any]


def relations(near: Tensor, itself: Tensor, temperature: float) -> Tensor:
    """Log-probabilities over the other texts; `itself` is the column of each row's own text."""
    own = functional.one_hot(itself.to(near.device), near.shape[1]).bool()
    return functional.log_softmax((near / temperature).masked_fill(own, -1e4), -1)


def divergences(student: Tensor, teacher: Tensor, rows: Tensor, temperature: float, sharper: float = 1.0) -> Tensor:
    """KL(teacher || student) of the relations of each of these rows' texts to all others.

    Both are vectors of length 1 in spaces of their own; `sharper` multiplies the student's similarities."""
    places = rows.to(teacher.device)
    wanted = relations(teacher[places] @ teacher.T, places, temperature)
    places = rows.to(student.device)
    found = relations(sharper * student[places] @ student.T, places, temperature)
    wanted = wanted.to(found)
    return (wanted.exp() * (wanted - found)).sum(-1)


def sharpness(student: Tensor, teacher: Tensor, temperature: float) -> tuple[float, float]:
    """The factor that brings the student's relations closest to the teacher's, and how close that is.

    One factor for all is the first thing any training repairs; what is left says how much the student knows."""
    rows = torch.arange(len(teacher))
    values = [float(divergences(student, teacher, rows, temperature, one).mean()) for one in SHARPER]
    best = min(range(len(values)), key=lambda i: values[i] if math.isfinite(values[i]) else math.inf)
    return SHARPER[best], values[best]


def learn_relations(
    bound: EmbeddingBound,
    tau: TaskVector | None,
    examples: Sequence[Example],
    teacher: EmbeddingBound,
    *,
    unlabelled: Sequence[Example],
    old: Old | None,
    recipe: Teaching,
    seed: int,
) -> Related:
    """The update that makes the target relate texts as the tuned old model does; the model is left as it was."""
    how = Relating()
    lesson = lesson_for(bound, teacher, examples, unlabelled, recipe, seed)
    read = 2 * len(lesson)  # once by the teacher, once by the student before its first step
    if old is not None and how.further:
        lesson, read = gone_on(lesson, teacher, old, how.further), read + len(lesson)
    rate = how.rate * step_unit(bound, tau, teacher, old)
    if not rate:
        raise UsageError("the task vector is zero in every trainable tensor: there is nothing to transport.")
    vectors, work, told = _vectors(bound, tau, teacher, old, lesson, recipe)
    probe = probe_of(bound, lesson, recipe)
    start, tried = best_start(bound, vectors, probe)
    passes = looked = 0
    before_lessons = start.value
    if not start.curve:
        with at_work(bound.model):
            before_lessons, looked = probe[0](), probe[1]
    along = learned_ways(start, how.along / rate, recipe.betas)
    for size in (rate, rate / GENTLER):  # the second only where the first led away from the teacher
        with restored(bound.model) as before, dialled(bound.model, start.vector or {}) as dial:
            dial.turn(start.alpha)
            passes += teach(bound, lesson, size, recipe, how, seed, along)
            with at_work(bound.model):
                left_behind = not probe[0]() <= before_lessons
            update = change(bound.model, before)
        looked += probe[1]
        if not left_behind:
            break
    walked = sum(len(one.curve) for one in tried)
    forward = passes + read + looked + sum(one.passes for one in tried)
    work += Work(forward=forward, backward=passes, steps=how.steps, vectors=walked)
    return Related(update, start, tried, work, {**told, "rate": size, "steps": how.steps, "asked": len(lesson)})


def lesson_for(
    bound: EmbeddingBound,
    teacher: EmbeddingBound,
    examples: Sequence[Example],
    unlabelled: Sequence[Example],
    recipe: Teaching,
    seed: int,
) -> Relations:
    """The texts that are related: unlabelled ones, made-up ones where those are few, and the labelled ones."""
    known = list(dict.fromkeys(text for example in examples for text in texts_of(example)))
    spare = list(dict.fromkeys(text for example in unlabelled for text in texts_of(example)))
    spare = [text for text in spare if text not in set(known)]
    refuse_equal([text for example in (*examples, *unlabelled) for _, text in texts_of(example)], "to relate it to")
    order = torch.randperm(len(spare), generator=torch.Generator().manual_seed(seed)).tolist()
    texts = [spare[place] for place in order[: recipe.pool]]
    if len(texts) + len(known) < ENOUGH:
        words = [text for _, text in (*known, *texts)]
        made = splice_words(words, recipe.pool - len(texts) - len(known), seed)
        texts += [(PLAIN, text) for text in dict.fromkeys(made) if text not in set(words)]
    texts += known
    ours = bound.encoder.read(texts)
    theirs = ours if reads_alike(bound, teacher) else teacher.encoder.read(texts)
    with at_work(teacher.model):
        vectors = _read(teacher, theirs)
    if not bool(torch.isfinite(vectors).all()):
        raise DataError("the old fine-tune's vectors of these texts are not finite.")
    return Relations(ours, theirs, vectors, _right(known, examples))


def gone_on(lesson: Relations, teacher: EmbeddingBound, old: Old, further: float) -> Relations:
    """The lesson with the teacher's vectors gone on in the direction that the fine-tune moved them from its base's."""
    with dialled(teacher.model, old.tau) as dial, at_work(teacher.model):
        dial.turn(-1.0)
        before = _read(teacher, lesson.theirs)
    after = lesson.vectors
    return replace(lesson, vectors=functional.normalize(after + further * (after - before.to(after)), dim=-1))


def _right(known: Sequence[Text], examples: Sequence[Example]) -> Tensor:
    """Which labelled texts belong together: those of one label, and the two of a pair."""
    places = {text: place for place, text in enumerate(known)}
    right = torch.zeros(len(known), len(known), dtype=torch.bool)
    by_label: dict[str, list[int]] = {}
    for example in examples:
        texts = texts_of(example)
        if example.get("text_pair") is None:
            by_label.setdefault(str(example["label"]), []).append(places[texts[0]])
        elif "grade" not in example:
            query, positive = (places[text] for text in texts[:2])
            right[query, positive] = right[positive, query] = True
    for group in by_label.values():
        for place in group:
            right[place, group] = True
    return right.fill_diagonal_(False)


def probe_of(bound: EmbeddingBound, lesson: Relations, recipe: Teaching) -> tuple[Callable[[], float], int]:
    """How far the target's relations are from the teacher's, their sharpness aside, on texts no map was made from."""
    rows = _probes(lesson, recipe)
    held, wanted = take(lesson.inputs, rows), lesson.vectors[rows.to(lesson.vectors.device)]

    @torch.no_grad()
    def measure() -> float:
        return sharpness(_embedded(bound, held), wanted, Relating().temperature)[1]

    return measure, len(rows)


def _probes(lesson: Relations, recipe: Teaching) -> Tensor:
    """The first of the texts: those without a label, which stand there in random order."""
    return torch.arange(min(2 * recipe.probes, len(lesson)))


def _vectors(
    bound: EmbeddingBound,
    tau: TaskVector | None,
    teacher: EmbeddingBound,
    old: Old | None,
    lesson: Relations,
    recipe: Teaching,
) -> tuple[dict[str, TaskVector], Work, dict[str, Any]]:
    """The vectors a start may lie on, what they cost, and what is to be told of them."""
    vectors: dict[str, TaskVector] = {} if tau is None else {AS_IT_IS: tau}
    work, told = Work(), dict[str, Any]()
    if old is not None:
        told["correspondence"] = old.as_json()
    if old is not None and old.correspondence.linear:
        try:
            moved = in_their_relations(bound, teacher, old, lesson, recipe)
        except (DataError, UsageError) as error:  # the other starts, and the lessons, need no coordinates
            return vectors, work, {**told, "no_coordinates": str(error)}
        vectors[COORDINATES] = moved.vector
        work = Work(forward=moved.passes, backward=moved.passes, vectors=1)
    return vectors, work, told


def in_their_relations(
    bound: EmbeddingBound, teacher: EmbeddingBound, old: Old, lesson: Relations, recipe: Teaching, method: str = "bico"
) -> Moved:
    """The old vector in the target's coordinates; the divergence of a text's relations is its loss on both sides.

    The texts that judge a start are kept out of the maps. The teacher stands at its base meanwhile."""
    held = len(_probes(lesson, recipe))
    rows = torch.arange(held, len(lesson)) if len(lesson) >= 2 * held else torch.arange(len(lesson))
    batches = []
    for part in rows[: recipe.mapped].split(recipe.map_batch):
        if len(part) < 2:
            continue
        wanted = lesson.vectors[part.to(lesson.vectors.device)]
        sides = [take(side, part) for side in (lesson.theirs, lesson.inputs)]
        batches.append(({**sides[0], "wanted": wanted}, {**sides[1], "wanted": wanted}))
    with dialled(teacher.model, old.tau) as dial:
        dial.turn(-1.0)
        return move(
            old.tau, old.correspondence, Side(teacher.model, _related(teacher)), Side(bound.model, _related(bound)),
            batches, method=method, rows=old.rows,
        )  # fmt: skip


def _related(bound: EmbeddingBound) -> Callable[[nn.Module, Any], Tensor]:
    temperature = Relating().temperature

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        vectors = bound.embed(model, {name: tensor for name, tensor in batch.items() if name != "wanted"})
        return divergences(vectors, batch["wanted"], torch.arange(len(vectors)), temperature)

    return loss


def rotation(ours: Tensor, theirs: Tensor) -> Tensor:
    """The orthogonal map (a partial one where widths differ) that brings `theirs` closest to `ours`, row by row."""
    return polar(theirs.double().T @ ours.double().to(theirs.device)).to(ours)


def turned_to(ours: Tensor, theirs: Tensor) -> Tensor:
    """The teacher's vectors in the student's space: one rotation for all, around the student's own middle, as wide as it is.

    Some bases keep all their vectors in a narrow cone. A search does not mind, and leaving it would cost most of the steps."""
    middle = ours.mean(0)
    wide, turned = ours - middle, theirs - theirs.mean(0)
    turned = turned @ rotation(wide, turned)
    scale = wide.norm() / turned.norm().clamp(min=torch.finfo(turned.dtype).tiny)
    return functional.normalize(middle + scale * turned.to(ours), dim=-1)


def teach(
    bound: EmbeddingBound,
    lesson: Relations,
    rate: float,
    recipe: Teaching,
    how: Relating,
    seed: int,
    along: Callable[[Mapping[str, nn.Parameter]], Coefficients] | None = None,
) -> int:
    """Train `bound.model` in place; returns how many texts went forward and backward.

    The loss is the divergence from the teacher's relations + w * the contrast of the labelled texts, with
    w = N / (N + prior) for N of them."""

    def diverged(step: int, _: float) -> DataError:
        return DataError(f"the loss is not finite in step {step + 1} of the polish; try a lower rate.")

    weights = trainable_weights(bound)
    training = Training(
        weights, lambda step: warmed(step, rate, how.steps, max(1, how.steps // 10)), diverged,
        steps=how.steps, betas=recipe.betas, along=along and along(weights),
    )  # fmt: skip
    count, known = len(lesson), lesson.labelled
    shares = (min(how.labelled, known), min(how.texts - min(how.labelled, known), count))
    labelled, related = draws(max(known, 1), shares[0], seed + 1), draws(count, shares[1], seed + 2)
    weight = known / (known + recipe.prior)
    with at_work(bound.model):
        memory = _read(bound, lesson.inputs)
        sharper = sharpness(memory, lesson.vectors, how.temperature)[0]
        turned = turned_to(memory, lesson.vectors)
        right = lesson.right.to(memory.device)

        def loss(found: Tensor, rows: Tensor, once: Tensor) -> Tensor:
            """Of texts and their vectors; a text that was drawn twice counts once."""
            found = torch.where(once[:, None], found, found.detach())
            everyone = memory.clone()
            everyone[rows] = found
            memory[rows] = found.detach()
            parts = divergences(everyone, lesson.vectors, rows, how.temperature, sharper)
            if how.turned:
                parts = parts + how.turned * (1 - (found * turned[rows]).sum(-1))
            whole = (parts * once).sum() / once.sum()
            if known:
                whole = whole + weight * _contrast(everyone, rows, once, right, sharper, how)
            return whole

        def ordinary(rows: Tensor, once: Tensor) -> list[Tensor]:
            rows = rows[once]
            found = _embedded(bound, take(lesson.inputs, rows))
            places = rows.to(found.device)
            return [loss(found, places, torch.ones_like(places, dtype=torch.bool))]

        def alike(rows: Tensor, once: Tensor) -> Tensor:
            return loss(bound.embed(bound.model, picked(lesson.inputs, rows)), rows, once)

        steps = zip(range(how.steps), related, labelled)
        drawn = [torch.tensor(sorted([*some, *(count - known + place for place in few)])) for _, some, few in steps]
        with torch.enable_grad():
            take_steps(training, [(rows, _first_of_each(rows)) for rows in drawn], ordinary, alike)
    return how.steps * sum(shares)


def _first_of_each(rows: Tensor) -> Tensor:
    """Which rows have not come before; equal ones stand together."""
    return torch.cat([torch.tensor([True]), rows[1:] != rows[:-1]])


def _embedded(bound: EmbeddingBound, batch: Batch) -> Tensor:
    return in_stretches(bound.model, batch, lambda part: bound.embed(bound.model, part))


def _read(bound: EmbeddingBound, texts: Batch, size: int = 128) -> Tensor:
    count = len(next(iter(texts.values())))
    with torch.no_grad(), rounded_products(next(bound.model.parameters())):
        parts = [_embedded(bound, take(texts, rows)) for rows in torch.arange(count).split(size)]
    return torch.cat(parts)


def _contrast(everyone: Tensor, rows: Tensor, once: Tensor, right: Tensor, sharper: float, how: Relating) -> Tensor:
    """Of the labelled texts of a step: how unlikely a search among all labelled texts finds those that belong.

    Texts without a label, or alone with theirs, have no say."""
    first = len(everyone) - len(right)
    places = (rows - first).clamp(min=0)
    belong = right[places] & (once & (rows >= first))[:, None]
    texts = everyone[first:]
    near = relations(sharper * everyone[rows] @ texts.T, places, how.contrast)
    found = -near.masked_fill(~belong, 0).sum(1) / belong.sum(1).clamp(min=1)
    return found.sum() / belong.any(1).sum().clamp(min=1)
