"""The recipe that `--method best` runs: find where to start and how far to go, then learn the rest from the teacher.

The tuned old model comes with every transport and is an excellent judge of the task's inputs. It answers inputs
made from the few-shot examples (or real unlabelled ones), and the target is brought to the same answers in a few
dozen steps. They start where the task vector leads, as it is or in the target's coordinates, or at the target itself:
where no weight answers to another, the teacher alone is handed on. Nothing is chosen by labels, so no validation
set is needed; with one, its inputs are asked about too, and its labels veto a result that is worse than none."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.errors import DataError, GradfixError, UsageError
from gradfix.system.modules import left_as_it_was, restored
from gradfix.tasks.base import Bound, Example
from gradfix.tasks.embedding import EmbeddingBound
from gradfix.tasks.encoders import TextEncoder
from gradfix.tasks.reading import same_tokenizer_files, speaks
from gradfix.training.bank import beside_sentences, in_the_language_of_the_bank
from gradfix.training.costs import Work
from gradfix.training.distil import ENOUGH, GENTLER, Batch, Lesson, Teaching, answers, can_teach, distil, join, take
from gradfix.training.free_text import Taught, asked_of, learn
from gradfix.training.relations import learn_relations
from gradfix.training.remix import remix, splice_words
from gradfix.training.starts import (
    COORDINATES,
    NONE,
    PERMUTED,
    PLAIN,
    Old,
    Start,
    choose_start,
    in_coordinates,
    probe_of,
    step_unit,
)
from gradfix.training.steps import change
from gradfix.vectors.scale import dialled
from gradfix.vectors.taskvector import TaskVector


@dataclass(frozen=True)
class Best:
    """`target + update` is the result; the polish began at `alpha` along the vector that `start` names.

    `start`: "plain" (the task vector as it is), "permuted" (its units in the target's order), "coordinates" (turned
    to the target's units) or "none".
    `verdict`: "transported", or "taught" where no vector helped and the steps began at the target. `adapter`: the LoRA
    that was trained, where it is all of the update."""

    update: TaskVector
    verdict: str
    alpha: float
    start: str = PLAIN
    parts: dict[str, Any] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    seconds: float = 0.0
    adapter: Any = None

    def notes(self) -> tuple[str, ...]:
        """What a user should know about how the update came about."""
        said = [_reason(self.start, self.parts.get("starts", {}))]
        if not self.parts.get("asked"):
            said.append("the old fine-tune could not be asked: learned from the few-shot labels alone")
        return tuple(filter(None, said))


def _reason(start: str, tried: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Which start was taken and why; nothing where the task vector was the only one and helped."""
    if start == NONE:
        why = "the task vector did not help" if tried else "no weight of the target answers to one of the base"
        return f"{why}: taught from the target's own weights"
    if len(tried) < 2 and start == COORDINATES:
        found = tried[start]
        before = _shown({"divergence": found["curve"][0][1]})
        return (
            f"started from the task vector in the target's coordinates, at alpha {found['alpha']:g}: divergence from the old "
            f"fine-tune's answers {before} -> {_shown(found)}"
        )
    if len(tried) < 2:
        return None
    listed = ", ".join(f"{name} {_shown(found)} at alpha {found['alpha']:g}" for name, found in tried.items())
    return f"started from {start}: it follows the old fine-tune's answers best (divergence: {listed})"


def _shown(found: Mapping[str, Any]) -> str:
    return "unknown" if found["divergence"] is None else f"{found['divergence']:.3f}"


def best(
    bound: Bound,
    tau: TaskVector | None,
    examples: Sequence[Example],
    *,
    teacher: Bound | None = None,
    unlabelled: Sequence[Example] | None = None,
    old: Old | None = None,
    recipe: Teaching | None = None,
    seed: int = 0,
) -> Best:
    """One update for `bound.model`, which is left as it was. Open answers have a recipe of their own (`free_text`).

    `tau` speaks the module's names; None where the target has another shape. `teacher` is the tuned old model with its
    own head; without one (or where the task has no closed label set) alpha and polish look at the few-shot labels
    alone, which is weaker. `old` lets the vector be turned to the target's units. `unlabelled` examples may carry
    labels: they are not read; with them `examples` may be empty, and the teacher alone is learned from."""
    if speaks(bound):
        said = asked_of(teacher, bound, examples, unlabelled or (), seed=seed)
        return spoken(learn(bound, tau, examples, said, teacher=teacher, old=old, seed=seed))
    recipe, began = recipe or Teaching(), time.perf_counter()
    if not examples and not (unlabelled and teacher is not None and can_teach(bound)):
        raise DataError(
            "the best recipe needs labelled examples, or unlabelled ones and a fine-tune that can be asked; "
            "check the data, --shots and --unlabelled."
        )
    if isinstance(bound, EmbeddingBound):
        return _by_relations(bound, tau, examples, teacher, unlabelled or (), old, recipe, seed)
    labelled = bound.collate(examples) if examples else None
    lent = old.lent if old is not None else None
    if lent is None:
        words = vocabulary(bound, tau, teacher, old)
        lesson, asked = lesson_for(bound, teacher, examples, unlabelled or (), words, recipe, seed)
    else:
        lesson, asked = lent.lesson, 0
    rate = recipe.rate * step_unit(bound, tau, teacher, old)
    if not rate:
        raise UsageError("the task vector is zero in every trainable tensor: there is nothing to transport.")
    vectors, work, found = _vectors(bound, tau, teacher, old, lesson, recipe)
    start, tried = choose_start(bound, vectors, labelled, lesson, recipe)
    if len(unlabelled or ()) >= ENOUGH and len(lesson):
        recipe = recipe.real()
    follows, probes = probe_of(bound, labelled, lesson, recipe)
    passes = looked = 0
    for size in (rate, rate / GENTLER):  # the second only where the first led away from the teacher
        with restored(bound.model) as before, dialled(bound.model, start.vector or {}) as dial:
            dial.turn(start.alpha)
            passes += distil(bound, labelled, lesson, size, recipe, seed)
            with left_as_it_was(bound.model):
                left_behind = len(lesson) > 0 and not follows() <= start.value
            update = change(bound.model, before)
        looked += probes if len(lesson) else 0
        if not left_behind:
            break
    probed = sum(one.passes for one in tried)
    walked = sum(len(one.curve) for one in tried)
    work += Work(forward=passes + asked + probed + looked, backward=passes, steps=recipe.steps, vectors=walked)
    parts = {
        **_told(start, tried), **found, "rate": size, "steps": recipe.steps, "asked": len(lesson),
    }  # fmt: skip
    verdict = "taught" if start.name == NONE else "transported"
    return Best(update, verdict, start.alpha, start.name, parts, work, time.perf_counter() - began)


def _by_relations(
    bound: EmbeddingBound,
    tau: TaskVector | None,
    examples: Sequence[Example],
    teacher: Bound | None,
    unlabelled: Sequence[Example],
    old: Old | None,
    recipe: Teaching,
    seed: int,
) -> Best:
    """Retrievers have no answers to hand on; they hand on how texts relate."""
    if not isinstance(teacher, EmbeddingBound):
        raise UsageError("the old base and its fine-tune must be embedding models that can be opened.")
    began = time.perf_counter()
    found = learn_relations(bound, tau, examples, teacher, unlabelled=unlabelled, old=old, recipe=recipe, seed=seed)
    parts = {**_told(found.start, found.tried), **found.parts}
    verdict = "taught" if found.start.name == NONE else "transported"
    seconds = time.perf_counter() - began
    return Best(found.update, verdict, found.start.alpha, found.start.name, parts, found.work, seconds)


def spoken(found: Taught) -> Best:
    """What was learned of free text, told as the recipe tells it."""
    start = found.start
    verdict = "taught" if start.name == NONE else "transported"
    return Best(found.update, verdict, start.alpha, start.name, found.parts, found.work, found.seconds, found.adapter)


def _vectors(
    bound: Bound, tau: TaskVector | None, teacher: Bound | None, old: Old | None, lesson: Lesson, recipe: Teaching
) -> tuple[dict[str, TaskVector], Work, dict[str, Any]]:
    """The vectors a start may lie on, what they cost, and what is to be told of them."""
    vectors, work = ({} if tau is None else {PLAIN: tau}), Work()
    told: dict[str, Any] = {}
    if old is not None:
        told["correspondence"] = old.as_json()
    if old is not None and old.lent is not None:
        vectors[COORDINATES], work = old.lent.vector, Work(vectors=1)
    elif old is not None and teacher is not None and len(lesson) and old.correspondence.linear:
        try:
            moved = in_coordinates(bound, teacher, old, lesson, recipe)["bico"]
        except (DataError, UsageError) as error:  # the other starts, and the lessons, need no coordinates
            told["no_coordinates"] = str(error)
        else:
            vectors[COORDINATES] = moved.vector
            work = Work(forward=moved.passes, backward=moved.passes, vectors=1)
    if tau is not None and old is not None and old.permuted is not None and COORDINATES not in vectors:
        try:  # maps say more than permutations and take less time; where there are none, an order is better than nothing
            vectors[PERMUTED] = old.permuted()
        except GradfixError as error:
            told["no_permutation"] = str(error)
    return vectors, work, told


def _told(start: Start, tried: Sequence[Start]) -> dict[str, Any]:
    return {
        "start": start.name,
        "start_alpha": start.alpha,
        "start_curve": start.as_json()["curve"],
        "starts": {one.name: one.as_json() for one in tried},
    }


def lesson_for(
    bound: Bound,
    teacher: Bound | None,
    examples: Sequence[Example],
    unlabelled: Sequence[Example],
    vocabulary: Tensor | None,
    recipe: Teaching,
    seed: int,
) -> tuple[Lesson, int]:
    """Inputs and the teacher's answers; and how many samples the teacher was asked about.

    Each side reads the examples with its own transform, and the same draws make the same remixes of both."""
    if teacher is None or not can_teach(bound):
        return Lesson({}, torch.empty(0)), 0
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(unlabelled), generator=generator).tolist()
    real = [{**unlabelled[i], "label": bound.labels[0]} for i in order[: recipe.pool]]
    parts: list[list[Batch]] = [_read_by_both(bound, teacher, real)] if real else []
    if len(real) < min(ENOUGH, recipe.pool):
        known, count = [*examples, *real], recipe.pool - len(real)
        natural = _beside_sentences(bound, teacher, known, int(recipe.natural * count), seed)
        parts += [natural] if natural else []
        count -= len(natural[0]["labels"]) if natural else 0
        parts.append(_made_up(bound, teacher, known, count, vocabulary, seed))
    ours, theirs = (_unanswered(reduce(join, sides)) for sides in zip(*parts, strict=True))
    if len(parts) > 1:  # inputs of every kind mixed, so that any stretch of them is typical
        mixed = torch.randperm(len(ours["labels"]), generator=generator)
        ours, theirs = take(ours, mixed), take(theirs, mixed)
    return Lesson(ours, answers(teacher, theirs), theirs), len(theirs["labels"])


def _beside_sentences(bound: Bound, teacher: Bound, known: Sequence[Example], count: int, seed: int) -> list[Batch]:
    """Pieces of the known texts beside pieces of natural sentences, as each side reads them.

    None where the task does not read English texts."""
    read = bound.collate(known[:1])
    if not count or "input_ids" not in read or "pixel_values" in read:
        return []
    column = _text_column(known[0], read["input_ids"].dim() > 2)
    texts = [text for example in known if isinstance(text := example.get(column), str)]
    if len(texts) < len(known) or not in_the_language_of_the_bank(texts):
        return []
    made = [{**known[place], column: text} for place, text in beside_sentences(texts, count, seed)]
    return [_unanswered(side) for side in _read_by_both(bound, teacher, made)]


def _read_by_both(bound: Bound, teacher: Bound, examples: Sequence[Example]) -> list[Batch]:
    """The examples as each side reads them; where both read alike, once."""
    ours = bound.collate(examples)
    return [ours, ours if reads_alike(bound, teacher) else teacher.collate(examples)]


def reads_alike(bound: Bound, teacher: Bound) -> bool:
    """Whether two text encoders make the same tokens of a text: by their settings and the files of their tokenizers."""
    first, second = (getattr(side, "encoder", None) for side in (bound, teacher))
    if not isinstance(first, TextEncoder) or not isinstance(second, TextEncoder):
        return False
    settings = [(one.prompt, one.lower, one.max_length, one.tokenizer.model_input_names) for one in (first, second)]
    devices = {next(side.model.parameters()).device for side in (bound, teacher)}
    return settings[0] == settings[1] and len(devices) == 1 and same_tokenizer_files(first.tokenizer, second.tokenizer)


def _made_up(
    bound: Bound, teacher: Bound, known: Sequence[Example], count: int, vocabulary: Tensor | None, seed: int
) -> list[Batch]:
    """The same made-up inputs as each side reads them: by tokens, or by words where the tokens cannot be cut.

    They cannot where the tokenizers differ, and where a sample holds one sequence per label (causal tasks).
    Without a plain text to cut (chats) the known inputs themselves are the lesson."""
    ours, theirs = (_unanswered(side) for side in _read_by_both(bound, teacher, known))
    tokens = [batch.get("input_ids") for batch in (ours, theirs)]
    per_label = tokens[0] is not None and tokens[0].dim() > 2
    same = tokens[0] is None or tokens[1] is None or torch.equal(tokens[0].cpu(), tokens[1].cpu())
    if same and not per_label:
        for table in (_table(teacher), _table(bound)):  # tokens that only one base has say nothing to the other
            if vocabulary is not None and table is not None:
                vocabulary = vocabulary[: table.num_embeddings]
        mixed = _unanswered(remix(ours, count, seed, vocabulary))
        return [mixed, mixed if reads_alike(bound, teacher) else _unanswered(remix(theirs, count, seed, vocabulary))]
    column = _text_column(known[0], per_label)
    if not all(isinstance(example.get(column), str) for example in known):
        return [ours, theirs]
    texts = splice_words([example[column] for example in known], count, seed)
    made = [{**known[0], column: text} for text in texts]
    return [side.collate(made) for side in (bound, teacher)]


def _text_column(example: Example, per_label: bool) -> str:
    """The column a task reads its text from; causal ones look at messages first, then at the prompt."""
    order = ("messages", "prompt", "text") if per_label else ("text", "prompt")
    return next((name for name in order if name in example), "prompt")


def _unanswered(batch: Batch) -> Batch:
    """The batch with a placeholder for every label: tasks may count on the entry, nobody reads its values."""
    first = next(iter(batch.values()))
    return {**batch, "labels": torch.zeros(len(first), dtype=torch.long, device=first.device)}


def vocabulary(bound: Bound, tau: TaskVector | None, teacher: Bound | None, old: Old | None) -> Tensor | None:
    """What a lesson's made-up texts draw words from; None where nobody knows what the fine-tune has read."""
    if tau is not None:
        return remembered(bound, tau)
    return remembered(teacher, old.tau) if teacher is not None and old is not None else None


def remembered(bound: Bound, tau: TaskVector) -> Tensor | None:
    """How much the fine-tune has to do with each token: the squared length of its row in the task vector.

    A row moves only when its token is in a training text, so the vector knows the task's vocabulary. All zeros where
    the embedding was not trained; None for models that do not read tokens."""
    table = _table(bound)
    if table is None:
        return None
    name = next((name for name, p in bound.model.named_parameters() if p is table.weight), None)
    if name is None or name not in tau:
        return torch.zeros(table.num_embeddings)
    return tau[name].float().square().sum(1)


def _table(bound: Bound) -> nn.Embedding | None:
    try:
        table = getattr(bound.model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # models of two towers (CLIP) have no one table
        return None
    return table if isinstance(table, nn.Embedding) else None
