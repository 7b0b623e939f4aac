"""Inputs without labels, made from a few real ones: what a teacher can be asked about.

Works on collated batches, so it needs no knowledge of words or pictures. Token sequences are spliced from
two inputs and partly replaced by random tokens, in every second sequence by tokens the fine-tune has met (the more
texts there are to cut, the less is left to chance); real-valued
inputs (images) are blended or patched together and moved a little. The result is not meant to be natural: it
only has to lie near the data, because the teacher, not a person, answers.

Pieces of a handful of texts leave most of the language out. So some stand beside pieces of natural sentences: 640 of them, on
everything, written for this package. That is still near the task and brings new words in natural company. English only:
texts in another language do without."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional

Batch = Mapping[str, Tensor]
Bag = tuple[Tensor, Tensor]

REPLACED = 0.5  # at most this share of a sequence's tokens is random
FEW = 32  # from so many texts on, half as many are, and all of them are tokens that the fine-tune has met
KNOWN = 0.4  # of the words of ten English texts 0.56 to 0.93 are in the bank, of German, French, Spanish and Dutch ones up to 0.27
SHIFT = 0.1  # an image moves by at most this share of its height and width


def remix(
    batch: Batch, count: int, seed: int, vocabulary: Tensor | None = None, longest: float = 1.0
) -> dict[str, Tensor]:
    """`count` new inputs from the inputs of a batch; "labels" are dropped.

    Equal batches and seeds give equal results. `vocabulary` has a weight for every token id that may be drawn: the
    odd sequences draw by weight, the even ones evenly (with `FEW` texts or more all draw by weight). Without it replaced tokens come from the batch itself.
    A piece of a sequence is at most the share `longest` of it. Batches of unknown make-up are resampled."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    if "input_ids" in inputs:
        return _splice(inputs, count, generator, vocabulary, longest)
    rows = len(next(iter(inputs.values())))
    pairs = torch.randint(rows, (2, count), generator=generator)
    return {name: _combine(tensor, pairs, generator) for name, tensor in inputs.items()}


def _splice(
    inputs: dict[str, Tensor], count: int, generator: torch.Generator, vocabulary: Tensor | None, longest: float
) -> dict[str, Tensor]:
    """A piece of one sequence, then a piece of another, between the tokens that all sequences share."""
    device = inputs["input_ids"].device
    ids = inputs["input_ids"].cpu()
    mask = inputs["attention_mask"].cpu().bool() if "attention_mask" in inputs else torch.ones_like(ids).bool()
    texts = [row[seen] for row, seen in zip(ids, mask, strict=True)]
    head, tail = _common(texts), _common([text.flip(0) for text in texts])
    bodies = [text[head : len(text) - tail] for text in texts]
    bodies = [body for body in bodies if len(body)]
    if not bodies:
        bodies, head, tail = texts, 0, 0
    special = torch.cat([texts[0][:head], texts[0][len(texts[0]) - tail :]])
    reserved = torch.cat([special, ids[~mask].unique()])
    bags = _bags(torch.cat(bodies), reserved, vocabulary)
    few = len(texts) < FEW
    top, turns = (REPLACED, (0, 1)) if few else (REPLACED / 2, (1, 1))
    body, lengths = _two_pieces(bodies, count, ids.shape[1] - head - tail, generator, longest)
    share = top * torch.rand(count, 1, generator=generator)
    swapped = torch.rand(body.shape, generator=generator) < share
    chances = torch.rand(body.shape, generator=generator, dtype=torch.double)
    for turn, bag in enumerate(turns):
        own, rows = swapped[turn::2], slice(turn, None, 2)
        body[rows] = torch.where(own, _drawn(bags[bag], chances[rows]), body[rows])
    place = torch.arange(head + body.shape[1] + tail)
    ends = head + lengths[:, None]
    out = functional.pad(body, (head, tail))
    out[:, :head] = texts[0][:head]
    for back in range(tail):
        out[place == ends + back] = texts[0][len(texts[0]) - tail + back]
    seen = place < ends + tail
    out[~seen] = int(ids[~mask][0]) if bool((~mask).any()) else 0
    result = {"input_ids": out.to(device), "attention_mask": seen.long().to(device)}
    if "token_type_ids" in inputs:
        result["token_type_ids"] = torch.zeros_like(result["input_ids"])
    return result


def _two_pieces(
    bodies: Sequence[Tensor], count: int, room: int, generator: torch.Generator, longest: float
) -> tuple[Tensor, Tensor]:
    """A piece of one sequence behind a piece of another, so many times, and how long each pair is; what lies behind is anything."""
    sizes, tokens = torch.tensor([len(body) for body in bodies]), torch.cat(list(bodies))
    rows = torch.randint(len(bodies), (count, 2), generator=generator)
    begins, ends = stretches(sizes[rows], longest, generator)
    lengths = (ends - begins).sum(1).clamp(max=room)
    place, first = torch.arange(int(lengths.max()) if count else 0), (ends - begins)[:, :1]
    begins = begins + (sizes.cumsum(0) - sizes)[rows]
    places = torch.where(place < first, begins[:, :1] + place, begins[:, 1:] + place - first)
    return tokens[places.clamp(max=len(tokens) - 1)], lengths


def splice_words(texts: Sequence[str], count: int, seed: int, longest: float = 1.0) -> list[str]:
    """Some words of one text, then some of another: for models that cut texts into different tokens."""
    generator = torch.Generator().manual_seed(seed)
    words = [text.split() for text in texts if text.split()] or [[""]]
    rows = torch.randint(len(words), (count, 2), generator=generator)
    cuts = stretches(torch.tensor([len(text) for text in words])[rows], longest, generator)
    drawn = zip(rows.flatten().tolist(), *(cut.flatten().tolist() for cut in cuts), strict=True)
    pieces = [" ".join(words[row][begin:end]) for row, begin, end in drawn]
    return [" ".join(two) for two in zip(pieces[::2], pieces[1::2], strict=True)]


@cache
def bank() -> tuple[str, ...]:
    return tuple((files("gradfix.training") / "bank.txt").read_text(encoding="utf-8").splitlines())


@cache
def _words_of_the_bank() -> frozenset[str]:
    return frozenset(word for sentence in bank() for word in _words(sentence))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def in_the_language_of_the_bank(texts: Sequence[str]) -> bool:
    words = [word for text in texts for word in _words(text)]
    return bool(words) and sum(word in _words_of_the_bank() for word in words) >= KNOWN * len(words)


def beside_sentences(texts: Sequence[str], count: int, seed: int, longest: float = 1.0) -> list[tuple[int, str]]:
    """A piece of a text and a piece of a sentence, in either order; and which text it was.

    A piece is at most the share `longest` of what it is taken from; of sentences that are longer than the texts it is as
    much less: inputs that are longer than those to come cost steps."""
    generator = torch.Generator().manual_seed(seed)
    places = [place for place, text in enumerate(texts) if text.split()]
    if not places:
        return []
    words, sentences = [texts[place].split() for place in places], [sentence.split() for sentence in bank()]
    order = torch.randperm(len(sentences), generator=generator).tolist()
    rows = torch.randint(len(places), (count,), generator=generator).tolist()
    both = [(words[row], sentences[order[turn % len(order)]]) for turn, row in enumerate(rows)]
    sizes = torch.tensor([[len(one) for one in two] for two in both]).reshape(-1, 2)
    most = longest * torch.tensor([1.0, min(1.0, fmean(map(len, words)) / fmean(map(len, sentences)))])
    cuts = zip(*(cut.tolist() for cut in stretches(sizes, most, generator)), strict=True)
    turned = torch.randint(2, (count,), generator=generator).tolist()
    made = []
    for row, two, (begins, ends), backwards in zip(rows, both, cuts, turned, strict=True):
        pieces = [one[begin:end] for one, begin, end in zip(two, begins, ends, strict=True)]
        made.append((places[row], " ".join(chain(*(pieces[::-1] if backwards else pieces)))))
    return made


def _bags(present: Tensor, reserved: Tensor, vocabulary: Tensor | None) -> tuple[Bag, Bag]:
    """What the even and the odd sequences draw from: token ids, and running sums of their weights."""
    if vocabulary is None:
        even = odd = (present, torch.arange(1, len(present) + 1).double())
        return even, odd
    tokens = torch.arange(len(vocabulary))
    tokens = tokens[~torch.isin(tokens, reserved)]
    weights = vocabulary.cpu().double()[tokens]
    even = (tokens, torch.arange(1, len(tokens) + 1).double())
    return even, (tokens, weights.cumsum(0)) if bool(weights.sum() > 0) else even


def _drawn(bag: Bag, chances: Tensor) -> Tensor:
    """A token for every number between 0 and 1."""
    tokens, running = bag
    places = torch.searchsorted(running, chances * running[-1], right=True)
    return tokens[places.clamp(max=len(tokens) - 1)]


def _common(texts: list[Tensor]) -> int:
    """How many leading tokens all texts share, leaving at least one token to each."""
    if len(texts) < 2:
        return 0
    shortest = min(map(len, texts))
    for place in range(shortest):
        if len({int(text[place]) for text in texts}) > 1:
            return min(place, max(shortest - 1, 0))
    return max(shortest - 1, 0)


def stretches(sizes: Tensor, longest: float | Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where a random piece of each of so many tokens or words begins and ends; it is at most a share of them long."""
    lengths = 1 + _below((longest * sizes).ceil(), generator)
    begins = _below(sizes - lengths + 1, generator)
    return begins, begins + lengths


def _below(limits: Tensor, generator: torch.Generator) -> Tensor:
    """A whole number from 0 up to, and without, each of these."""
    chances = torch.rand(limits.shape, generator=generator, dtype=torch.double)
    return torch.minimum((chances * limits).long(), limits.long() - 1)


def _combine(tensor: Tensor, pairs: Tensor, generator: torch.Generator) -> Tensor:
    first, second = (tensor[rows.to(tensor.device)] for rows in pairs)
    count = len(first)
    blend = torch.rand(count, generator=generator)
    patched = torch.rand(count, generator=generator) < 0.5
    corner, moves = torch.rand(count, 2, generator=generator), torch.rand(count, 2, generator=generator)
    if not tensor.is_floating_point():
        return first
    if tensor.dim() == 4:
        first, second = _moved(first, moves), _moved(second, 1 - moves)
        patch = _patches(blend, corner, first.shape[-2:]).unsqueeze(1).to(tensor.device)
        weight = torch.where(patched[:, None, None, None].to(tensor.device), patch, _like(blend, first))
    else:
        weight = _like(blend, first)
    return first * weight + second * (1 - weight)


def _like(blend: Tensor, images: Tensor) -> Tensor:
    return blend.reshape(-1, *(1,) * (images.dim() - 1)).to(images)


def _moved(images: Tensor, moves: Tensor) -> Tensor:
    """Each image shifted by its own whole number of pixels; what leaves on one side is repeated on the other's edge."""
    height, width = images.shape[-2:]
    shifts = ((moves * 2 - 1) * SHIFT * torch.tensor([height, width])).round().long().to(images.device)
    rows = (torch.arange(height, device=images.device) - shifts[:, :1]).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) - shifts[:, 1:]).clamp(0, width - 1)
    samples = torch.arange(len(images), device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return images[samples, channels, rows[:, None, :, None], columns[:, None, None, :]]


def _patches(area: Tensor, corner: Tensor, shape: torch.Size) -> Tensor:
    """1 inside a random rectangle that covers the given share of the image, 0 outside."""
    side = area.sqrt()[:, None]
    low = corner * (1 - side)
    grids = [(torch.arange(size) + 0.5) / size for size in shape]
    inside = [(grid >= low[:, i : i + 1]) & (grid < low[:, i : i + 1] + side) for i, grid in enumerate(grids)]
    return (inside[0][:, :, None] & inside[1][:, None, :]).float()
