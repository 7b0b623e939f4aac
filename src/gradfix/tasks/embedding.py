"""Embedding: retrievers, models whose vectors find each other.

An example is a text with a label (texts of one label should be close), a pair (`query`, `positive`, perhaps
`negatives`), or two texts with a `grade`. The loss of one example is its own: a query, its positive and a few
negatives of the set it belongs to, so votes do not depend on how examples are batched. Training steps contrast all
texts of a batch. The score of a set is that of its searches: nDCG@10, and recall and MRR beside it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradfix.checkpoints.open import resolve
from gradfix.data.rows import Row, where
from gradfix.errors import DataError
from gradfix.system.modules import at_work
from gradfix.system.processes import current
from gradfix.tasks.base import TASKS, Batch, Bound, Example, Marks, Prompts, Task, by_length, settings_of
from gradfix.tasks.encoders import TEXT_SCALE, TextEncoder
from gradfix.tasks.loading import freeze_all_but, locate
from gradfix.tasks.retrieval import (
    DOCUMENT,
    MAIN,
    PLAIN,
    QUERY,
    SPEARMAN,
    Searches,
    Text,
    neighbours,
    refuse_equal,
    refuse_itself,
    search,
    searches,
    spearman,
)
from gradfix.tasks.sentences import write_sentences

NEGATIVES = 4  # texts of other examples that a vote contrasts a pair with


class Circle:
    """The examples of one set, and what they are to each other."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples
        self.by_label: dict[str, list[str]] = {}
        self.positives: dict[str, set[str]] = {}
        self.grades = [float(e["grade"]) for e in examples if "grade" in e]
        for index, example in enumerate(examples):
            text, pair, label = (example.get(name) for name in ("text", "text_pair", "label"))
            if pair is not None:
                if "grade" not in example:
                    refuse_itself(example, index)
                self.positives.setdefault(str(text), set()).add(str(pair))
            elif label is not None:
                self.by_label.setdefault(str(label), []).append(str(text))
            else:
                raise DataError(
                    f"{where(example, index)}: a text without a label or a positive says nothing about its "
                    "neighbours. Give such texts as --unlabelled; --shots 0 learns from them alone."
                )
        refuse_equal([text for example in examples for _, text in texts_of(example)])
        if self.by_label and max(map(len, self.by_label.values())) < 2:
            raise DataError("one text per label makes no pairs. Give two or more (--shots 2), or --shots 0 for none.")
        self.documents = [(label, text) for label, texts in self.by_label.items() for text in texts]
        self.documents += [(query, text) for query, texts in self.positives.items() for text in sorted(texts)]

    def positive(self, example: Example, draw: torch.Generator) -> str:
        """What the example should be close to; a text that is alone with its label answers with itself."""
        if example.get("text_pair") is not None:
            return str(example["text_pair"])
        others = [text for text in self.by_label[str(example["label"])] if text != example["text"]]
        return others[_drawn(len(others), draw)] if others else str(example["text"])

    def right(self, example: Example) -> set[str]:
        """Every text that is no negative of the example: its own and all that it should find."""
        own = {str(example["text"])}
        if example.get("text_pair") is not None:
            return own | self.positives[str(example["text"])]
        return own | set(self.by_label[str(example["label"])])

    def negatives(self, example: Example, count: int, draw: torch.Generator) -> list[str]:
        """The example's own negatives, then others of the set."""
        found = [str(text) for text in example.get("negatives") or ()][:count]
        taken = self.right(example) | set(found)
        order = torch.randperm(len(self.documents), generator=draw).tolist() if len(found) < count else []
        for place in order:
            text = self.documents[place][1]
            if text not in taken:
                taken.add(text)
                found.append(text)
            if len(found) == count:
                break
        if not found:
            raise DataError(
                f"{where(example, 0)}: nothing in the examples is a negative of it: all have one label, or it is the "
                "only pair. Give examples of other labels, other pairs, or `negatives`."
            )
        return found

    def scaled(self, grade: float) -> float:
        low, high = min(self.grades), max(self.grades)
        return (grade - low) / (high - low) if high > low else 1.0


class Member(Row):
    """A row that knows the set it was drawn with."""

    def __init__(self, example: Example, place: str, circle: Circle) -> None:
        super().__init__(dict(example), place)
        self.circle = circle


def texts_of(example: Example) -> list[Text]:
    """The texts of one example with their roles."""
    if example.get("text_pair") is None:
        return [(PLAIN, str(example["text"]))]
    if "grade" in example:
        return [(PLAIN, str(example["text"])), (PLAIN, str(example["text_pair"]))]
    documents = [str(example["text_pair"]), *map(str, example.get("negatives") or ())]
    return [(QUERY, str(example["text"])), *((DOCUMENT, text) for text in documents)]


class Read(dict[str, Tensor]):
    """A batch of texts to be embedded for searches."""

    def __init__(self, tokens: Batch, known: Searches) -> None:
        super().__init__(tokens)
        self.searches = known


class EmbeddingBound(Bound):
    """A text encoder whose vectors are compared by their cosines."""

    measure = MAIN

    def __init__(self, encoder: TextEncoder, labels: Sequence[str]) -> None:
        self.encoder, self.model, self.notes = encoder, encoder.model, encoder.notes
        self.labels, self.scale = list(labels), TEXT_SCALE
        self._said: dict[str, None] = {}
        freeze_all_but(self.model, encoder.trainable())

    def linked(self, examples: Sequence[Example], anew: bool = False) -> Sequence[Example]:
        if not examples or (not anew and all(isinstance(example, Member) for example in examples)):
            return examples
        circle = Circle(examples)
        return [Member(example, where(example, index), circle) for index, example in enumerate(examples)]

    def batches(self, examples: Sequence[Example], size: int = 16) -> Iterator[Batch]:
        return super().batches(self.linked(examples), size)

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Tokens as (examples, candidates, length): query, positive, negatives. Missing ones are hidden by `there`."""
        rows, there = [], []
        for example in self.linked(examples):
            assert isinstance(example, Member)
            texts = _contrasted(example)
            there.append([True] * len(texts) + [False] * (NEGATIVES + 2 - len(texts)))
            rows += [*texts, *[texts[0]] * (NEGATIVES + 2 - len(texts))]
        tokens = self.encoder.read(rows)
        shape = (len(examples), NEGATIVES + 2)
        batch = {name: tensor.unflatten(0, shape) for name, tensor in tokens.items()}
        device = batch["input_ids"].device
        graded = [e.circle.scaled(e["grade"]) if "grade" in e else -1.0 for e in self.linked(examples)]  # type: ignore[attr-defined]
        return {
            **batch,
            "there": torch.tensor(there, device=device),
            "grades": torch.tensor(graded, device=device),
            "labels": torch.zeros(len(examples), dtype=torch.long, device=device),
        }

    def embed(self, model: nn.Module, batch: Batch) -> Tensor:
        """One vector of length 1 per text."""
        vectors = self.encoder.embed(model, batch)
        return functional.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)

    def vectors(self, model: nn.Module, texts: Sequence[Text], size: int = 128) -> Tensor:
        """The vectors of texts of any role, in order."""
        order = sorted(range(len(texts)), key=lambda place: len(texts[place][1]))
        parts = []
        for first in range(0, len(order), size):
            places = order[first : first + size]
            parts.append(self.embed(model, self.encoder.read([texts[place] for place in places])))
        back = torch.tensor(order).argsort()
        found = torch.cat(parts)
        return found[back.to(found.device)]

    def nearest(self, texts: Sequence[str]) -> list[Example]:
        """Each different text with those that this model finds `near` it: its answers, to be found again by another."""
        words = list(dict.fromkeys(texts))
        refuse_equal(words)
        with torch.no_grad(), at_work(self.model):
            return list(neighbours(words, self.vectors(self.model, [(PLAIN, text) for text in words])))

    def _near(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cosines of each query with its candidates; hidden ones are minus infinity."""
        shape = batch["there"].shape
        flat = {name: t.flatten(0, 1) for name, t in batch.items() if name not in ("there", "grades", "labels")}
        vectors = self.embed(model, flat).unflatten(0, shape)
        near = (vectors[:, :1] * vectors[:, 1:]).sum(-1)
        return near.masked_fill(~batch["there"][:, 1:], -1e4)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._losses(self._near(model, batch), batch)

    def _losses(self, near: Tensor, batch: Batch) -> Tensor:
        grades = batch["grades"]
        contrast = functional.cross_entropy(self.scale * near, batch["labels"], reduction="none")
        return torch.where(grades < 0, contrast, (near[:, 0] - grades) ** 2)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._near(model, batch).argmax(-1)

    def judge(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        near = self._near(model, batch)
        return near.argmax(-1), self._losses(near, batch)

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        first = {name: t[:, 0] for name, t in batch.items() if name not in ("there", "grades", "labels")}
        return self.embed(model, first)

    def training_loss(self, model: nn.Module, examples: Sequence[Example]) -> Tensor:
        """Every document of the step is a negative of every query it does not belong to."""
        members = self.linked(examples)
        if any("grade" in example for example in members):
            return self.loss(model, self.collate(members))
        texts, hidden = _contrast(members)
        return self._contrasts(self.embed(model, self.encoder.read(texts)), hidden)

    def stretches(self, examples: Sequence[Example]) -> list[list[Example]]:
        return [list(examples)]

    def step_losses(self, model: nn.Module, examples: Sequence[Example]) -> list[Callable[[], Tensor]]:
        """Processes that share a step read some of its texts each, and contrast all of them as one process does."""
        members, processes = self.linked(examples), current().size
        if processes == 1 or any("grade" in example for example in members):
            return super().step_losses(model, members)
        return [lambda: self._shared_contrast(model, *_contrast(members))] * processes

    def _shared_contrast(self, model: nn.Module, texts: Sequence[Text], hidden: Tensor) -> Tensor:
        group = current()
        first, last = (len(texts) * rank // group.size for rank in (group.rank, group.rank + 1))
        own = self.embed(model, self.encoder.read(texts[first:last] or texts[:1]))[: last - first]
        others = [found.to(own) for found in group.gather(own.detach().cpu())]
        vectors = torch.cat([*others[: group.rank], own, *others[group.rank + 1 :]])
        whole = self._contrasts(vectors, hidden).sum()
        # All make the same sum, and each sends it back through its own texts: the gradient is whole, the value shared.
        return whole - (1 - 1 / group.size) * whole.detach()

    def _contrasts(self, vectors: Tensor, hidden: Tensor) -> Tensor:
        count = len(hidden)
        near = self.scale * vectors[:count] @ vectors[count:].T
        near = near.masked_fill(hidden.to(near.device), -1e4)
        return functional.cross_entropy(near, torch.arange(count, device=near.device), reduction="none")

    def scoring_batches(self, examples: Sequence[Example], size: int = 16) -> Iterator[Batch]:
        """The texts of the searches, short ones first; queries of a fold search the whole set it was cut from."""
        ordered = [examples[place] for place in by_length(examples)]
        first = ordered[0] if ordered else None
        known = searches(ordered, first.circle.examples if isinstance(first, Member) else ())
        self._said |= dict.fromkeys(known.notes)
        self.measure = SPEARMAN if known.grades else MAIN
        order = sorted(range(len(known.texts)), key=lambda place: len(known.texts[place][1]))
        for begin in range(0, len(order), size):
            places = order[begin : begin + size]
            tokens = self.encoder.read([known.texts[place] for place in places])
            yield Read({**tokens, "places": torch.tensor(places)}, known)

    def mark(self, model: nn.Module, batches: Iterable[Batch]) -> Marks:
        listed = iter(batches)
        first = next(listed, None)
        if not isinstance(first, Read):
            return super().mark(model, chain([first] if first is not None else [], listed))
        vectors: Tensor | None = None
        for batch in chain([first], listed):
            found = self.embed(model, {name: t for name, t in batch.items() if name != "places"})
            if vectors is None:
                vectors = found.new_zeros(len(first.searches.texts), found.shape[-1])
            vectors[batch["places"].to(found.device)] = found
        assert vectors is not None
        return self.marks(first.searches, vectors)

    def marks(self, known: Searches, vectors: Tensor, index: Tensor | None = None) -> Marks:
        """The score of searches by these vectors, in their own index or in that of another model."""
        if known.grades:
            rank, near = spearman(known, vectors)
            return Marks(rank * len(near), float((1 - near).sum()), len(near), [-1] * len(near), [False] * len(near))
        found = search(known, vectors, 1 / self.scale, index)
        sums = {name: float(values.nansum()) for name, values in found.measures.items()}
        count = int(found.losses.isfinite().sum())
        answers = [self._answer(known, query, first) for query, first in enumerate(found.first)]
        hits = [first in wanted for first, wanted in zip(found.first, known.wanted, strict=True)]
        return Marks(sums.pop(MAIN), float(found.losses.nansum()), count, answers, hits, sums)

    def _answer(self, known: Searches, query: int, first: int) -> int:
        """The label of the first hit; without labels 0 where it is right."""
        if self.labels and known.labels:
            return self.labels.index(known.labels[first]) if first >= 0 and known.labels[first] in self.labels else -1
        return 0 if first in known.wanted[query] else -1

    def trainable(self) -> list[str]:
        return self.encoder.trainable()

    def cuts(self) -> tuple[str, ...]:
        return (*self._said, *(note for limit in self.encoder.limits for note in limit.notes()))

    def asked(self) -> str:
        return settings_of(self, self.encoder)

    def save_extras(self, folder: Path) -> None:
        width = int(self.encoder.model.config.hidden_size)
        write_sentences(folder, self.encoder.own, width, self.encoder.max_length, self.encoder.asked_pooling)


def _contrast(members: Sequence[Example]) -> tuple[list[Text], Tensor]:
    """The queries and then the documents of a step, and which of these are hidden from each query: others it should find."""
    draw = _seeded("".join(str(example["text"]) for example in members))
    documents, right = list[str](), list[set[str]]()
    for example in members:
        assert isinstance(example, Member)
        documents.append(example.circle.positive(example, draw))
        right.append(example.circle.right(example))
    documents += [str(text) for example in members for text in example.get("negatives") or ()]
    paired = members[0].get("text_pair") is not None
    sides = (QUERY, DOCUMENT) if paired else (PLAIN, PLAIN)
    hidden = torch.tensor([[text in known for text in documents] for known in right])
    hidden[torch.arange(len(members)), torch.arange(len(members))] = False
    return [(sides[0], str(e["text"])) for e in members] + [(sides[1], text) for text in documents], hidden


def _contrasted(example: Member) -> list[Text]:
    """Query, positive and negatives of a vote; drawn by the example's own words, so the batch does not matter."""
    if "grade" in example:
        return texts_of(example)
    draw = _seeded(str(example["text"]))
    roles = (QUERY, DOCUMENT) if example.get("text_pair") is not None else (PLAIN, PLAIN)
    documents = [example.circle.positive(example, draw), *example.circle.negatives(example, NEGATIVES, draw)]
    return [(roles[0], str(example["text"])), *((roles[1], text) for text in documents)]


def _seeded(words: str) -> torch.Generator:
    digest = hashlib.sha256(words.encode("utf-8", "surrogatepass")).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _drawn(count: int, draw: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=draw))


@TASKS.register("embedding")
class EmbeddingTask(Task):
    """Sentence encoders and retrievers: any `AutoModel` with a tokenizer, or a sentence-transformers folder.

    Pooling, prompts and length are the folder's own unless `pooling` and `max_length` say otherwise."""

    takes_bare: ClassVar[bool] = True

    def __init__(
        self,
        labels: Mapping[str, Prompts],
        *,
        pooling: str | None = None,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.labels = dict(labels)
        self.pooling, self.max_length, self.trust_remote_code = pooling, max_length, trust_remote_code

    def open(
        self,
        source: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        head_from: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> EmbeddingBound:
        """Load an encoder. It has no head; `head_from` is only another name for `base`."""
        under = head_from if base is None else base
        home = locate(source, under, dtype=dtype, device=device, trust_remote_code=self.trust_remote_code)
        before = resolve(under) if under is not None else None
        encoder = TextEncoder(home, pooling=self.pooling, max_length=self.max_length, base=before)
        bound = EmbeddingBound(encoder, list(self.labels))
        bound.source = home.source
        return bound
