"""What the old fine-tune is asked about, and what it answers: the lesson that a student learns from.

The inputs are real ones without labels, where there are enough, and else made from the few examples there are. Both
sides read them with their own transforms, and the same draws make the same inputs of both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from gradfix.tasks.base import Bound, Example
from gradfix.tasks.encoders import TextEncoder
from gradfix.tasks.reading import same_tokenizer_files
from gradfix.training.distil import ENOUGH, Batch, Lesson, Teaching, answers, can_teach, join, take, tokens_of
from gradfix.training.remix import FEW, beside_sentences, in_the_language_of_the_bank, remix, splice_words
from gradfix.training.starts import Old
from gradfix.vectors.taskvector import TaskVector

SOME = 64  # texts that tell how long texts are
LARGER = 1.5  # how many times the teacher's weights make a target of another class


def lesson_for(
    bound: Bound,
    teacher: Bound | None,
    examples: Sequence[Example],
    unlabelled: Sequence[Example],
    vocabulary: Tensor | None,
    recipe: Teaching,
    seed: int,
) -> tuple[Lesson, int]:
    """Inputs and the teacher's answers; and how many samples the teacher was asked about, shorter ones as parts of one.

    Each side reads the examples with its own transform, and the same draws make the same remixes of both."""
    if teacher is None or not can_teach(bound):
        return Lesson({}, torch.empty(0)), 0
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(unlabelled), generator=generator).tolist()
    real = [{**unlabelled[i], "label": bound.labels[0]} for i in order[: recipe.pool]]
    known, stretches = [*examples, *real], list[list[Batch]]()
    for turn, (count, longest) in enumerate(recipe.stretches() if len(real) < ENOUGH else [(len(real), 1.0)]):
        own = [] if turn else real
        parts = [_read_by_both(bound, teacher, own)] if own else []
        if len(own) < count:
            parts += _new_inputs(bound, teacher, known, count - len(own), longest, vocabulary, recipe, seed + turn)
        stretches.append(_mixed(parts, generator))
    ours, theirs = (reduce(join, sides) for sides in zip(*stretches, strict=True))
    usual = tokens_of(bound.collate(known[:SOME])) if _reads_texts(ours) else 0.0
    lesson = Lesson(ours, answers(teacher, theirs), theirs, usual)
    return lesson, round(len(lesson) * lesson.length())


def heard_of(teacher: Bound, examples: Sequence[Example]) -> Tensor:
    """What the old fine-tune itself answers to these labelled examples, on its own base."""
    return answers(teacher, teacher.collate(examples))


def _mixed(parts: Sequence[list[Batch]], generator: torch.Generator) -> list[Batch]:
    """Inputs of every kind among each other, so that any stretch of them is typical."""
    sides = [_unanswered(reduce(join, side)) for side in zip(*parts, strict=True)]
    if len(parts) < 2:
        return sides
    order = torch.randperm(len(sides[0]["labels"]), generator=generator)
    return [take(side, order) for side in sides]


def _new_inputs(
    bound: Bound,
    teacher: Bound,
    known: Sequence[Example],
    count: int,
    longest: float,
    vocabulary: Tensor | None,
    recipe: Teaching,
    seed: int,
) -> list[list[Batch]]:
    """Made-up inputs, kind by kind, as each side reads them."""
    natural = _beside_sentences(bound, teacher, known, int(recipe.natural * count), longest, seed)
    count -= len(natural[0]["labels"]) if natural else 0
    return [*([natural] if natural else []), _made_up(bound, teacher, known, count, vocabulary, longest, seed)]


def teaching_for(
    bound: Bound, teacher: Bound | None, examples: Sequence[Example], unlabelled: Sequence[Example]
) -> Teaching:
    """The recipe for these inputs. Made-up texts are cut shorter, and more of them are made; many labels are seen as often as few.

    Not shorter where the target has outgrown the teacher: it ends above it, and is held back by being taught more."""
    known = [*examples, *unlabelled]
    usual = Teaching()
    if teacher is None or not can_teach(bound) or not known:
        return usual
    shorter = len(unlabelled) < FEW and _body(bound) <= LARGER * _body(teacher)
    if shorter and _reads_texts(bound.collate([{"label": bound.labels[0], **known[0]}])):
        usual = usual.of_texts()
    return usual.for_labels(len(examples))


def _body(bound: Bound) -> int:
    """How many weights a sample meets: all but those of the token table, which holds other tokens' as well."""
    table = _table(bound)
    return sum(p.numel() for p in bound.model.parameters() if table is None or p is not table.weight)


def _reads_texts(batch: Batch) -> bool:
    return "input_ids" in batch and "pixel_values" not in batch


def _beside_sentences(
    bound: Bound, teacher: Bound, known: Sequence[Example], count: int, longest: float, seed: int
) -> list[Batch]:
    """Pieces of the known texts beside pieces of natural sentences, as each side reads them.

    None where the task does not read English texts."""
    read = bound.collate(known[:1])
    if not count or not _reads_texts(read):
        return []
    column = _text_column(known[0], read["input_ids"].dim() > 2)
    texts = [text for example in known if isinstance(text := example.get(column), str)]
    if len(texts) < len(known) or not in_the_language_of_the_bank(texts):
        return []
    made = [{**known[place], column: text} for place, text in beside_sentences(texts, count, seed, longest)]
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
    devices = {next(side.model.parameters()).device for side in (bound, teacher)}
    alike = _settings(first) == _settings(second) and len(devices) == 1
    return alike and same_tokenizer_files(first.tokenizer, second.tokenizer)


def _settings(encoder: TextEncoder) -> tuple[object, ...]:
    """What decides, beside the tokenizer's files, which tokens are made of a text."""
    prompts = (encoder.prompt, encoder.own.prompts, encoder.own.include_prompt)
    return *prompts, encoder.lower, encoder.max_length, encoder.tokenizer.model_input_names


def _made_up(
    bound: Bound,
    teacher: Bound,
    known: Sequence[Example],
    count: int,
    vocabulary: Tensor | None,
    longest: float,
    seed: int,
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
        mixed = [_unanswered(remix(ours, count, seed, vocabulary, longest))]
        again = [] if reads_alike(bound, teacher) else [_unanswered(remix(theirs, count, seed, vocabulary, longest))]
        return [*mixed, *(again or mixed)]
    column = _text_column(known[0], per_label)
    if not all(isinstance(example.get(column), str) for example in known):
        return [ours, theirs]
    texts = splice_words([example[column] for example in known], count, seed, longest)
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
