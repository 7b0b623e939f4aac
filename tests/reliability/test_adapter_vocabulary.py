"""A LoRA fine-tune and a target with another vocabulary: the fine-tune itself stays in its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.adapters import load, train_adapter
from tests.reliability.world import World, rewrite, say, write_json
from tests.tiny import SPECIAL, VOCAB, save_tiny, toy_texts, write_rows

WORDS = VOCAB[len(SPECIAL) :]
SEED = 2  # of an adapter that is worse than its base on the data, so that the check says both losses
ORDERS = {"extended": [*VOCAB, "brand", "new"], "reordered": [*SPECIAL, *reversed(WORDS)]}


def in_order(folder: Path, tokens: list[str]) -> None:
    """Give row i of the token table to tokens[i]; rows of new tokens repeat the first one."""
    table = "embeddings.word_embeddings.weight"
    old = load_file(folder / "model.safetensors")[table]
    rows = [VOCAB.index(token) if token in VOCAB else 0 for token in tokens]
    rewrite(folder, {table: old[torch.tensor(rows)]})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {token: row for row, token in enumerate(tokens)}
    write_json(folder / "tokenizer.json", tokenizer)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"vocab_size": len(tokens)})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> World:
    """An adapter that moves token rows (`tuned`), the same fine-tune in full (`merged`), two targets."""
    home = tmp_path_factory.mktemp("adapter-vocabulary")
    base, _ = (save_tiny("bert", home / name, seed=0) for name in ("base", "merged"))
    moved = {"target_modules": ["word_embeddings", "query"], "lora_alpha": 40}
    torch.manual_seed(SEED)
    train_adapter(load(base, ""), home / "tuned", **moved).save_pretrained(home / "merged")
    for order, tokens in ORDERS.items():
        in_order(save_tiny("bert", home / order, seed=2), tokens)
    write_rows(home / "data", "train", toy_texts(12))
    return World(home)


@pytest.mark.parametrize("order", ORDERS)
def test_the_check_scores_an_adapter_like_its_merged_model(home: World, order: str) -> None:
    losses = []
    for tuned in (home.merged, home.tuned):
        said = say(home.arguments(tuned=tuned, target=home.home / order, no_check=False))
        assert said.code == 4, said
        losses.append(re.findall(r"\(loss ([\d.]+)\)", said.err))
    assert losses[0] == losses[1] and len(losses[0]) == 2, said


@pytest.mark.parametrize("order", ORDERS)
def test_an_adapter_teaches_like_its_merged_model(home: World, order: str) -> None:
    losses = []
    for tuned in (home.merged, home.tuned):
        options = {"method": "best", "alpha": None, "force": True, "dry_run": True}
        said = say(home.arguments(tuned=tuned, target=home.home / order, **options))
        assert said.code == 0, said
        losses.append(re.findall(r"few-shot loss +(.*\d)", said.out + said.err))
    assert losses[0] == losses[1] and len(losses[0]) == 1
