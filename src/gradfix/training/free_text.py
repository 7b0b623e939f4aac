"""The best recipe for open answers: the old fine-tune speaks, and the new base learns to speak like it.

The lessons start where the task vector leads (as it is, in the target's coordinates, or not at all), judged by
how well the target there follows answers that no lesson shows. All weights are trained, or a LoRA beside them:
then the old fine-tune and the target need never be in memory together, and what was trained is an adapter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.align.coordinates import Side, move
from gradfix.errors import DataError, UsageError
from gradfix.system.modules import device_room, offloaded, restored
from gradfix.tasks.base import Batch, Bound, Example
from gradfix.tasks.reading import AnswerBound, speaks
from gradfix.tasks.scoring import spoken
from gradfix.training.asking import REFERENCE, Asking, Transcript, ask, prompts_of
from gradfix.training.costs import Work
from gradfix.training.distil import GENTLER, typical_size
from gradfix.training.imitating import (
    Course,
    Imitation,
    Verse,
    batched,
    followed,
    given_lines,
    imitate,
    lines_of,
    own_lines,
)
from gradfix.training.lowrank import LowRank, adapted, as_adapter, moved_by
from gradfix.training.starts import ALPHAS, COORDINATES, NONE, PATIENCE, PLAIN, Old, Start, step_unit
from gradfix.training.steps import change, trainable_weights
from gradfix.vectors.scale import dialled
from gradfix.vectors.taskvector import TaskVector

FULL, LORA, AUTO = "full", "lora", "auto"
TRAINS = (AUTO, LORA, FULL)
USUAL = 0.02  # what a fine-tune changes of a weight, where there is no vector to measure
WATCHED = 2**31  # bytes of activations that are kept while the units of two models are compared
LARGE = 2**32  # bytes of weights from which on two models are not held side by side for coordinates


@dataclass(frozen=True, kw_only=True)
class Speech:
    """How free text is learned: what is asked, what is trained (`lora`, `full`, or `auto`: all weights where they fit),
    whether the result must be an adapter of rank `adapter`, and where interrupted work is kept. The teacher answers
    `shown` as well, for people to read."""

    asking: Asking = field(default_factory=Asking)
    imitation: Imitation = field(default_factory=Imitation)
    train: str = AUTO
    adapter: int | None = None
    kept: Path | None = None
    shown: tuple[Example, ...] = ()

    def trains(self, bound: Bound) -> str:
        if self.train != AUTO:
            return self.train
        return LORA if self.adapter is not None or offloaded(bound.model) or not _fits(bound) else FULL

    def at(self, stage: str) -> Path | None:
        return None if self.kept is None else self.kept.with_name(f"{self.kept.name}.{stage}")


def _fits(bound: Bound) -> bool:
    """Whether gradients, moments and a copy of all weights fit beside them, in half of what is free."""
    weight = next(bound.model.parameters())
    if weight.device.type != "cuda":
        return True
    count = sum(p.numel() for p in bound.model.parameters())
    need = count * (weight.dtype.itemsize * 2 + 8 + (4 if weight.dtype.itemsize < 4 else 0))
    return need < 0.5 * device_room(weight.device)


@dataclass(frozen=True)
class Taught:
    """What the lessons came to; `adapter` is the trained one where it is all there is to the update."""

    update: TaskVector
    start: Start
    tried: list[Start]
    parts: dict[str, Any]
    work: Work
    adapter: Any = None
    seconds: float = 0.0


def asked_of(
    teacher: Bound | None,
    bound: AnswerBound,
    examples: Sequence[Example],
    unlabelled: Sequence[Example],
    *,
    speech: Speech | None = None,
    seed: int = 0,
    meanwhile: Callable[[], object] = lambda: None,
) -> Transcript | None:
    """The teacher's answers; on a device that does not hold both models, the target makes room meanwhile."""
    speech = speech or Speech()
    if not speaks(teacher):
        if not examples:
            raise DataError("there is no fine-tune to ask and no labelled answer to learn from; give --shots.")
        return None
    prompts = prompts_of(bound, examples, unlabelled, asking=speech.asking, seed=seed)
    with alone(teacher, bound):
        meanwhile()
        said = ask(teacher, prompts, asking=speech.asking, seed=seed, partial=speech.at("said"))
        if not speech.shown:
            return said
        return replace(said, shown=tuple(spoken(teacher, teacher.model, speech.shown, said.longest)))


@contextmanager
def alone(teacher: Bound, bound: Bound) -> Iterator[None]:
    """The teacher on the target's device; where it was opened elsewhere the two change places, once for all inside."""
    there, here = (next(side.model.parameters()).device for side in (bound, teacher))
    if there == here or here.type == "cuda":
        yield
        return
    bound.model.to(here)
    teacher.model.to(there)
    try:
        yield
    finally:
        teacher.model.to(here)
        if there.type == "cuda":
            torch.cuda.empty_cache()
        bound.model.to(there)


def learn(
    bound: AnswerBound,
    tau: TaskVector | None,
    examples: Sequence[Example],
    said: Transcript | None,
    *,
    teacher: Bound | None = None,
    old: Old | None = None,
    speech: Speech | None = None,
    seed: int = 0,
) -> Taught:
    """One update for `bound.model`, which is left as it was; without a teacher the labelled answers alone teach."""
    speech, began = speech or Speech(), time.perf_counter()
    recipe = speech.imitation
    held, course = _course(bound, examples, said, recipe, seed)
    vectors, work, told = _vectors(bound, tau, teacher, old, said, speech)
    mode = speech.trains(bound)
    start, tried = _choose(bound, vectors, held)
    rate, unit = _rate(bound, tau, teacher, old, mode, recipe), 0
    work += Work(forward=len(held) * sum(len(one.curve) for one in tried))

    for number, size in enumerate((rate, rate / GENTLER)):
        one = replace(speech, kept=speech.at(f"try{number}"))
        found = (_by_lora if mode == LORA else _in_full)(bound, start, course, held, size, one, seed)
        unit += found.passes
        if not found.value > start.value:
            break
    work += Work(forward=unit + len(held), backward=unit, steps=recipe.steps, vectors=len(tried))
    parts = {
        **told, **found.told, "start": start.name, "start_alpha": start.alpha, "start_curve": start.as_json()["curve"],
        "starts": {one.name: one.as_json() for one in tried}, "rate": size, "steps": recipe.steps, "train": mode,
        "asked": 0 if said is None else said.asked, "divergence": found.value,
        **({"shown": list(said.shown)} if said is not None and said.shown else {}),
    }  # fmt: skip
    return Taught(found.update, start, tried, parts, work, found.adapter, time.perf_counter() - began)


def _course(
    bound: AnswerBound, examples: Sequence[Example], said: Transcript | None, recipe: Imitation, seed: int
) -> tuple[list[Verse], Course]:
    """Lines that judge and lines that teach: no answer is in both."""
    given = given_lines(bound, examples)
    if said is None:
        return given, Course([], given, _keepsakes(bound, recipe, seed))
    lines = lines_of(bound, said)
    drawn = [n for n, reply in enumerate(r for r in said.replies if r.says) if reply.source != REFERENCE]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(drawn), generator=generator).tolist()
    probes = {drawn[place] for place in order[: min(recipe.probes, len(drawn) // 4)]}
    told = [line for n, line in enumerate(lines) if n not in probes]
    return [lines[n] for n in sorted(probes)] or given, Course(told, given, _keepsakes(bound, recipe, seed))


def _keepsakes(bound: AnswerBound, recipe: Imitation, seed: int) -> list[Verse]:
    return own_lines(bound, recipe.keepsakes, recipe.keepsake_tokens, seed) if recipe.kept else []


def _rate(
    bound: Bound, tau: TaskVector | None, teacher: Bound | None, old: Old | None, mode: str, recipe: Imitation
) -> float:
    if mode == LORA:
        config = getattr(bound.model, "config", None)
        width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 1024
        return recipe.lora_rate * math.sqrt(1024 / int(width))
    unit = step_unit(bound, tau, teacher, old)
    if not unit and (tau is not None or old is not None):
        raise UsageError("the task vector is zero in every trainable tensor: there is nothing to transport.")
    return recipe.rate * (unit or USUAL * _typical_weight(bound))


def _typical_weight(bound: Bound) -> float:
    weights = {name: p.detach() for name, p in bound.model.named_parameters() if p.dim() > 1}
    return typical_size(weights, list(weights))


def _vectors(
    bound: AnswerBound,
    tau: TaskVector | None,
    teacher: Bound | None,
    old: Old | None,
    said: Transcript | None,
    speech: Speech,
) -> tuple[dict[str, TaskVector], Work, dict[str, Any]]:
    vectors: dict[str, TaskVector] = {} if tau is None else {PLAIN: tau}
    told: dict[str, Any] = {} if old is None else {"correspondence": old.as_json()}
    if old is None or not isinstance(teacher, AnswerBound) or said is None or not old.correspondence.linear:
        return vectors, Work(), told
    if sum(p.numel() * p.element_size() for p in bound.model.parameters()) > LARGE or apart(teacher, bound):
        return vectors, Work(), {**told, "no_coordinates": "both models do not fit side by side"}
    try:
        moved = _in_coordinates(bound, teacher, old, said, speech.imitation)
    except (DataError, UsageError) as error:
        return vectors, Work(), {**told, "no_coordinates": str(error)}
    vectors[COORDINATES] = moved.vector
    return vectors, Work(forward=moved.passes, backward=moved.passes, vectors=1), told


def apart(teacher: Bound, bound: Bound) -> bool:
    """Whether the two are on different devices, because there is no room for both."""
    return next(teacher.model.parameters()).device != next(bound.model.parameters()).device


def _in_coordinates(bound: AnswerBound, teacher: AnswerBound, old: Old, said: Transcript, recipe: Imitation) -> Any:
    """The old vector in the target's units: both bases read the teacher's answers."""
    rows = [_answered(reply.prompt, reply.text) for reply in said.replies if reply.text.strip()]
    rows = rows[-recipe.mapped :]
    need = max(_watched_bytes(side.model, side.collate(rows)) for side in (teacher, bound))
    parts = batched(rows, min(recipe.map_batch, recipe.micro, WATCHED * len(rows) // max(need, 1)))
    batches = [(teacher.collate(part), bound.collate(part)) for part in parts]
    with dialled(teacher.model, old.tau) as dial:
        dial.turn(-1.0)
        return move(
            old.tau, old.correspondence, Side(teacher.model, teacher.loss), Side(bound.model, bound.loss), batches,
            rows=old.rows,
        )  # fmt: skip


def _watched_bytes(model: nn.Module, batch: Batch) -> int:
    """What is kept of a batch while units are compared: what goes into every map and comes out of it, and its gradients."""
    maps = [p for p in model.parameters() if p.dim() > 1]
    places = max(tensor.numel() for tensor in batch.values())
    return places * sum(2 * sum(weight.shape) * weight.element_size() for weight in maps)


def _answered(prompt: Example, text: str) -> dict[str, Any]:
    if "messages" in prompt:
        return {"messages": [*prompt["messages"], {"role": "assistant", "content": text}]}
    return {**prompt, "completion": text}


def _choose(bound: AnswerBound, vectors: Mapping[str, TaskVector], held: Sequence[Verse]) -> tuple[Start, list[Start]]:
    """The start that follows the held-out answers best; the target itself is one."""
    if not vectors:
        return Start(NONE, None, 0.0, ((0.0, followed(bound, held)),)), []
    tried = []
    for name, vector in vectors.items():
        curve: list[tuple[float, float]] = []
        for alpha in ALPHAS:
            with moved_by(bound.model, vector, alpha):
                value = followed(bound, held)
            curve.append((alpha, math.inf if math.isnan(value) else value))
            lowest = min(range(len(curve)), key=lambda place: curve[place][1])
            if len(curve) - 1 - lowest >= PATIENCE:
                break
        alpha = min(curve, key=lambda point: point[1])[0]
        tried.append(Start(name, vector, alpha, tuple(curve), len(curve) * len(held)))
    best = min(tried, key=lambda start: start.value)
    return (best if best.alpha else Start(NONE, None, 0.0, best.curve)), tried


@dataclass(frozen=True)
class _Trained:
    update: TaskVector
    value: float
    passes: int
    adapter: Any = None
    told: dict[str, Any] = field(default_factory=dict)


def _in_full(
    bound: AnswerBound, start: Start, course: Course, held: Sequence[Verse], rate: float, speech: Speech, seed: int
) -> _Trained:
    with restored(bound.model) as before, dialled(bound.model, start.vector or {}) as dial:
        dial.turn(start.alpha)
        passes = imitate(bound, course, trainable_weights(bound), rate, speech.imitation, seed, speech.at("steps"))
        value = followed(bound, held)
        return _Trained(change(bound.model, before), value, passes)


def _by_lora(
    bound: AnswerBound, start: Start, course: Course, held: Sequence[Verse], rate: float, speech: Speech, seed: int
) -> _Trained:
    """Where an adapter is wanted, or given, the start goes into its factors; else it stays in the weights beside them."""
    recipe = replace(speech.imitation, recompute=True)
    low = start.vector.rank if isinstance(start.vector, LowRank) else None
    inside = start.vector is not None and (speech.adapter is not None or low is not None)
    rank = speech.adapter or max(recipe.rank, low or 0)
    told: dict[str, Any] = {"rank": rank}
    with ExitStack() as stack:
        if start.vector is not None and not inside:
            stack.enter_context(moved_by(bound.model, start.vector, start.alpha))
        with adapted(bound.model, rank) as lora:
            if inside and start.vector is not None:
                told["start_held"] = round(lora.begin(start.vector, start.alpha), 4)
            passes = imitate(bound, course, lora.parameters, rate, recipe, seed, speech.at("steps"))
            value = followed(bound, held)
            factors = lora.factors()
    alone = inside or start.vector is None
    update: TaskVector = LowRank(factors) if alone else _sum(start, factors)
    return _Trained(update, value, passes, as_adapter(factors, rank) if alone else None, told)


def _sum(start: Start, factors: Mapping[str, tuple[Tensor, Tensor]]) -> TaskVector:
    assert start.vector is not None
    found = {name: start.alpha * tensor for name, tensor in start.vector.items()}
    for name, (left, right) in factors.items():
        delta = left @ right
        found[name] = found[name] + delta.to(found[name]) if name in found else delta
    return TaskVector(found)
