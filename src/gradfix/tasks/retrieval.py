"""How well vectors find what they should: searches over a corpus, and the measures of their rankings.

A `Searches` says which texts are searched for, which are found, and which of them are right. It knows no model: the
caller brings one vector per text. A text never finds itself: a query that stands in the corpus word for word is left
out of its own ranking."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from gradfix.data.rows import where
from gradfix.errors import DataError

Text = tuple[str, str]  # its role ("query", "document" or "text") and its words
QUERY, DOCUMENT, PLAIN = "query", "document", "text"
DEPTH = 10
MAIN, RECALL, RECIPROCAL, SPEARMAN = f"nDCG@{DEPTH}", f"recall@{DEPTH}", "MRR", "Spearman"
ROWS = 1 << 22  # similarities that are held at a time


@dataclass(frozen=True)
class Searches:
    """Texts to embed, and who should find whom: places in `texts`.

    `wanted[i]` are the texts that query i should find among `corpus`; `grades` are pairs with a person's grade
    instead, and then nothing is searched. `labels` are those of the texts, where texts have labels."""

    texts: list[Text]
    queries: list[int]
    corpus: list[int]
    wanted: list[set[int]]
    grades: list[tuple[int, int, float]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.grades) or len(self.queries)


class _Shelf:
    """Each text once."""

    def __init__(self) -> None:
        self.texts: list[Text] = []
        self._places: dict[Text, int] = {}

    def put(self, role: str, text: str) -> int:
        place = self._places.setdefault((role, text), len(self.texts))
        if place == len(self.texts):
            self.texts.append((role, text))
        return place


def searches(examples: Sequence[Mapping[str, object]], corpus: Sequence[Mapping[str, object]] = ()) -> Searches:
    """One search per example, over the texts of all of them and of `corpus`.

    Texts with a label should find those with the same label; a pair's query its positive, and not its negatives; a text
    with others `near` it, those."""
    if any("near" in example for example in examples):
        return _neighbours(examples)
    if any("grade" in example for example in examples):
        return _graded(examples)
    if any(example.get("text_pair") is not None for example in examples):
        return _paired(examples, corpus)
    return _labelled(examples, corpus)


def _neighbours(examples: Sequence[Mapping[str, object]]) -> Searches:
    """What another model finds, to be found again; every text is near others of the same set."""
    shelf = _Shelf()
    queries = [shelf.put(PLAIN, str(example["text"])) for example in examples]
    wanted = [{shelf.put(PLAIN, text) for text in _listed(example, "near")} for example in examples]
    return Searches(shelf.texts, queries, list(range(len(shelf.texts))), wanted)


def _labelled(examples: Sequence[Mapping[str, object]], corpus: Sequence[Mapping[str, object]]) -> Searches:
    shelf, by_label = _Shelf(), dict[str, set[int]]()
    for index, example in enumerate([*examples, *corpus]):
        if example.get("label") is None:
            raise DataError(
                f"{where(example, index)}: a text without a label or a positive is no search. Give such texts as "
                "--unlabelled; --shots 0 learns from them alone."
            )
        by_label.setdefault(str(example["label"]), set()).add(shelf.put(PLAIN, str(example["text"])))
    queries = [shelf.put(PLAIN, str(example["text"])) for example in examples]
    wanted = [by_label[str(e["label"])] - {q} for e, q in zip(examples, queries, strict=True)]
    labels = [""] * len(shelf.texts)
    for label, places in by_label.items():
        for place in places:
            labels[place] = label
    made = Searches(shelf.texts, queries, list(range(len(shelf.texts))), wanted, labels=labels)
    return _checked(made, examples)


def _paired(examples: Sequence[Mapping[str, object]], corpus: Sequence[Mapping[str, object]]) -> Searches:
    shelf = _Shelf()
    found: dict[int, set[int]] = {}
    documents: set[int] = set()
    queries = []
    for index, example in enumerate([*examples, *corpus]):
        if example.get("text_pair") is None:
            raise DataError(f"{where(example, index)}: there is no positive for this query. Give every row one.")
        refuse_itself(example, index)
        place, right = shelf.put(QUERY, str(example["text"])), shelf.put(DOCUMENT, str(example["text_pair"]))
        found.setdefault(place, set()).add(right)
        documents |= {right, *(shelf.put(DOCUMENT, one) for one in _listed(example, "negatives"))}
        if index < len(examples):
            queries.append(place)
    made = Searches(shelf.texts, queries, sorted(documents), [found[query] for query in queries])
    return _checked(made, examples)


def _listed(example: Mapping[str, object], name: str) -> list[str]:
    listed = example.get(name) or []
    return [str(one) for one in listed] if isinstance(listed, (list, tuple)) else []


def _graded(examples: Sequence[Mapping[str, object]]) -> Searches:
    shelf = _Shelf()
    grades = []
    for index, example in enumerate(examples):
        if example.get("text_pair") is None or "grade" not in example:
            raise DataError(f"{where(example, index)}: a graded pair has two texts and a grade; one is missing here.")
        first, second = (shelf.put(PLAIN, str(example[name])) for name in ("text", "text_pair"))
        grades.append((first, second, float(str(example["grade"]))))
    if len({grade for *_, grade in grades}) < 2:
        raise DataError("all pairs have the same grade: there is no order to compare with. Add pairs of other grades.")
    return Searches(shelf.texts, [], [], [], grades)


def _checked(made: Searches, examples: Sequence[Mapping[str, object]]) -> Searches:
    refuse_equal([text for _, text in made.texts])
    if not any(made.wanted):
        raise DataError(
            f"{where(examples[0], 0)}: no text has a partner with its label, so no search can succeed. Give at least "
            "two texts per label."
        )
    words = {made.texts[place][1] for place in made.corpus}
    known = [made.texts[place][1] for place in dict.fromkeys(made.queries) if made.texts[place][0] == QUERY]
    inside = sum(text in words for text in known)
    lonely = sum(not wanted for wanted in made.wanted)
    notes = []
    if inside:
        notes.append(
            f"{inside} of {len(known)} queries are in the corpus word for word; each is left out of its own ranking"
        )
    if lonely:
        notes.append(
            f"{lonely} of {len(made.wanted)} texts have no partner with their label; they are not searched for"
        )
    return replace(made, notes=tuple(notes))


def refuse_itself(example: Mapping[str, object], index: int) -> None:
    if str(example["text"]) == str(example["text_pair"]):
        raise DataError(
            f"{where(example, index)}: the query and its positive are the same text word for word; a search that "
            "finds itself says nothing. Remove the row."
        )


def refuse_equal(texts: Sequence[str], what: str = "to tell apart") -> None:
    """One text, or one text many times, has no neighbours."""
    different = len({" ".join(text.split()) for text in texts})
    if different < 2:
        count = "one text" if len(texts) == 1 else f"{len(texts)} times the same text"
        raise DataError(f"there is only {count}, and nothing {what}: give texts that differ.")


@dataclass(frozen=True)
class Found:
    """Per query: the measures (0 to 1), the loss and the first hit's place, -1 where it has nothing to find."""

    measures: dict[str, Tensor]
    losses: Tensor
    first: list[int]


def search(known: Searches, vectors: Tensor, temperature: float, others: Tensor | None = None) -> Found:
    """Rank the corpus for every query by cosine; `others` are the corpus's vectors in an index of another model.

    A query without partners is not counted: its measures are NaN."""
    index = functional.normalize((vectors if others is None else others)[known.corpus].double(), dim=-1)
    queries = functional.normalize(vectors[known.queries].double(), dim=-1)
    words = [known.texts[place][1] for place in known.corpus]
    same = _itself(known, words)
    column = {place: column for column, place in enumerate(known.corpus)}
    wanted = [[column[place] for place in places] for places in known.wanted]
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in torch.arange(len(queries)).split(max(1, ROWS // max(1, len(words)))):
        near = queries[rows.to(queries.device)] @ index.T
        right, own = (
            _marked(near.shape, [columns[row] for row in rows.tolist()]).to(near.device) for columns in (wanted, same)
        )
        near = near.masked_fill(own & ~right, -math.inf)
        parts.append(_ranked(near, right, temperature))
    gains, losses, first = (torch.cat(part) for part in zip(*parts, strict=True))
    names = (MAIN, RECALL, RECIPROCAL)
    measures = {name: gains[:, place] for place, name in enumerate(names)}
    found = [known.corpus[c] if known.wanted[row] else -1 for row, c in enumerate(first.tolist())]
    return Found(measures, losses, found)


def neighbours(words: Sequence[str], vectors: Tensor) -> Iterator[dict[str, object]]:
    """Every text with the others nearest to it by its vector, as an example that `searches` understands."""
    vectors, depth = vectors.double(), min(DEPTH, len(words) - 1)
    for rows in torch.arange(len(words)).split(max(1, ROWS // len(words))):
        near = vectors[rows.to(vectors.device)] @ vectors.T
        near[torch.arange(len(rows)), rows] = -math.inf
        for row, top in zip(rows.tolist(), near.topk(depth).indices.tolist(), strict=True):
            yield {"text": words[row], "near": [words[place] for place in top]}


def _marked(shape: torch.Size, columns: Sequence[Sequence[int]]) -> Tensor:
    found = torch.zeros(shape, dtype=torch.bool)
    lines = torch.tensor([line for line, places in enumerate(columns) for _ in places], dtype=torch.long)
    found[lines, torch.tensor([place for places in columns for place in places], dtype=torch.long)] = True
    return found


def _itself(known: Searches, words: Sequence[str]) -> list[list[int]]:
    """Where each query stands in the corpus."""
    places: dict[str, list[int]] = {}
    for column, text in enumerate(words):
        places.setdefault(text, []).append(column)
    return [places.get(known.texts[query][1], []) for query in known.queries]


def _ranked(near: Tensor, right: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    depth = min(DEPTH, near.shape[1])
    top = near.topk(depth).indices
    hits = right.gather(1, top).double()
    count = right.sum(1)
    discount = 1 / torch.log2(torch.arange(2, depth + 2, device=near.device).double())
    ideal = torch.cat([discount.new_zeros(1), discount.cumsum(0)])[count.clamp(max=depth)]
    best = near.masked_fill(~right, -math.inf).max(1).values
    rank = (near > best[:, None]).sum(1) + 1
    gains = torch.stack(
        [(hits * discount).sum(1) / ideal, hits.sum(1) / count.clamp(min=1), 1 / rank.double()], 1
    ).masked_fill((count == 0)[:, None], math.nan)
    logits = near / temperature
    reached = torch.logsumexp(logits.masked_fill(~right, -math.inf), 1) - count.clamp(min=1).log()
    losses = (torch.logsumexp(logits, 1) - reached).masked_fill(count == 0, math.nan)
    return gains, losses, top[:, 0]


def spearman(known: Searches, vectors: Tensor) -> tuple[float, Tensor]:
    """The rank correlation of cosines and grades, and the cosines."""
    from scipy.stats import spearmanr

    unit = functional.normalize(vectors.double(), dim=-1)
    first, second = (torch.tensor([pair[side] for pair in known.grades]) for side in (0, 1))
    near = (unit[first.to(unit.device)] * unit[second.to(unit.device)]).sum(1).cpu()
    found = float(spearmanr(near.numpy(), [grade for *_, grade in known.grades]).statistic)
    return (0.0 if math.isnan(found) else found), near
