"""What a teacher is asked about where there are no real inputs: pieces of texts, of natural sentences, and of images."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from gradfix.training.remix import bank, beside_sentences, in_the_language_of_the_bank, remix, splice_words


def sentences() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[101, 7, 8, 9, 102, 0], [101, 5, 6, 102, 0, 0], [101, 11, 12, 13, 14, 102]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.zeros(3).long()}


@given(st.integers(0, 50))
def test_spliced_texts_keep_their_frame(seed: int) -> None:
    made = remix(sentences(), 8, seed, vocabulary=torch.ones(200))
    assert "labels" not in made
    for ids, mask in zip(made["input_ids"], made["attention_mask"], strict=True):
        text = ids[mask.bool()].tolist()
        assert (text[0], text[-1]) == (101, 102)
        assert not {0, 101, 102} & set(text[1:-1])
        assert 3 <= len(text) <= 6
        assert not ids[~mask.bool()].any()


def test_every_second_text_draws_the_tokens_the_fine_tune_has_met() -> None:
    weights = torch.zeros(200)
    weights[[150, 151]] = 1.0
    made = remix(sentences(), 200, 0, vocabulary=weights)["input_ids"]
    given = set(sentences()["input_ids"].flatten().tolist())
    assert set(made[1::2].flatten().tolist()) - given == {150, 151}
    assert len(set(made[::2].flatten().tolist()) - given) > 50


def test_words_are_spliced_for_two_tokenizers() -> None:
    texts = ["one two three", "four five", " "]
    made = splice_words(texts, 40, 1)
    assert made == splice_words(texts, 40, 1) != splice_words(texts, 40, 2)
    assert {word for text in made for word in text.split()} == {"one", "two", "three", "four", "five"}
    assert all(2 <= len(text.split()) <= 6 for text in made)


def test_sentences_stand_beside_english_texts_only() -> None:
    texts = ["I never want to see this film again.", "The best thing I have bought in years!", " "]
    made = beside_sentences(texts, 900, 1)
    assert made == beside_sentences(texts, 900, 1) != beside_sentences(texts, 900, 2)
    assert {place for place, _ in made} == {0, 1}
    sentences = [f" {sentence} " for sentence in bank()]
    for place, text in made[:50]:
        words = text.split()
        cuts = [(" ".join(words[:n]), " ".join(words[n:])) for n in range(1, len(words))]
        pairs = [pair for cut in cuts for pair in (cut, cut[::-1])]
        assert any(ours in texts[place] and any(f" {new} " in s for s in sentences) for ours, new in pairs)
    assert in_the_language_of_the_bank(texts)
    assert not in_the_language_of_the_bank(["Das ist der schlechteste Film, den ich je gesehen habe."])
    assert not in_the_language_of_the_bank(["", "123"])
    assert beside_sentences([" "], 5, 0) == []


def test_the_bank_is_short_plain_and_varied() -> None:
    assert len(set(bank())) == len(bank()) == 640
    assert all(sentence.isascii() and 1 <= len(sentence.split()) <= 45 for sentence in bank())


def test_without_a_vocabulary_tokens_come_from_the_texts() -> None:
    made = remix(sentences(), 30, 0)["input_ids"]
    assert set(made.unique().tolist()) <= set(sentences()["input_ids"].unique().tolist())


@given(st.integers(0, 20))
def test_images_stay_within_the_range_of_the_originals(seed: int) -> None:
    images = torch.rand(4, 3, 8, 6, generator=torch.Generator().manual_seed(seed))
    made = remix({"pixel_values": images, "labels": torch.zeros(4)}, 7, seed)["pixel_values"]
    assert made.shape == (7, 3, 8, 6)
    assert images.min() - 1e-6 <= made.min() and made.max() <= images.max() + 1e-6
    twice = remix({"pixel_values": images * 2 + 1}, 7, seed)["pixel_values"]
    torch.testing.assert_close(twice, made * 2 + 1)  # both sides' normalisations see the same picture


def test_many_texts_leave_less_to_chance() -> None:
    ids = torch.tensor([[101, 3 + n, 4 + n, 5 + n, 102] for n in range(40)])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    weights = torch.zeros(400)
    weights[[350, 351]] = 1.0
    made = set(remix(batch, 300, 0, vocabulary=weights)["input_ids"].flatten().tolist())
    assert made - set(ids.flatten().tolist()) - {0} == {350, 351}  # 0 pads
