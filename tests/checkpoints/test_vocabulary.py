"""Token tables of different heights or orders: rows follow their tokens, or the move is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from adapters import load, train_adapter
from gradfix.checkpoints.matched import MatchedRows, match_rows, match_vocabulary, read_vocabulary
from gradfix.checkpoints.open import open_checkpoint
from gradfix.errors import CorruptInput, IncompatibleCheckpoints
from gradfix.stream.checkpoint import transport_checkpoint
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector
from tiny import VOCAB, save_tiny

TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def reorder(folder: Path, tokens: list[str | None]) -> Path:
    """Rewrite a folder so that row i holds tokens[i] (None: a padding row without a token)."""
    state = open_checkpoint(folder).state()
    old = read_vocabulary(folder)
    assert old is not None
    draw = torch.Generator().manual_seed(7)
    for name in TABLES:
        fresh = torch.randn(len(tokens), state[name].shape[1], generator=draw)
        for row, token in enumerate(tokens):
            if token in old:
                fresh[row] = state[name][old[token]]
        state[name] = fresh
    save_file({name: t.clone() for name, t in state.items()}, folder / "model.safetensors")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = {token: row for row, token in enumerate(tokens) if token is not None}
    tokenizer["model"]["vocab"] = ids
    for entry in tokenizer["added_tokens"]:
        entry["id"] = ids[entry["content"]]
    post = json.dumps(tokenizer.get("post_processor"))
    if '"ids"' in post:
        for entry in tokenizer["post_processor"]["special_tokens"].values():
            entry["ids"] = [ids[token] for token in entry["tokens"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(tokens)}))
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    base = save_tiny("llama", tmp_path / "base", seed=0)
    tuned = save_tiny("llama", tmp_path / "tuned", seed=0)
    state = open_checkpoint(tuned).state()
    draw = torch.Generator().manual_seed(1)
    moved = {n: t + 0.01 * torch.randn(t.shape, generator=draw) for n, t in state.items()}
    save_file(moved, tuned / "model.safetensors")
    return base, tuned


ORDERS = {
    "extended": [*VOCAB, "<new>", "<newer>"],
    "reordered": [*VOCAB[:7], *reversed(VOCAB[7:])],
    "padded": [*VOCAB, None, None, None],
    "swapped tokens": [*VOCAB[:20], "brand", "new", *VOCAB[22:]],
    "shorter": VOCAB[:-4],
}


@pytest.mark.parametrize("order", ORDERS)
def test_rows_follow_their_tokens(pair: tuple[Path, Path], tmp_path: Path, order: str) -> None:
    base, tuned = pair
    tokens = ORDERS[order]
    target = reorder(save_tiny("llama", tmp_path / "target", seed=2), tokens)
    goal = open_checkpoint(target)
    votes = SignVotes({n: torch.ones(goal.info(n).shape, dtype=torch.int8) for n in goal.names()}, 1)
    report = transport_checkpoint(
        base=base, tuned=tuned, target=target, votes=votes, mask="force", alpha=0.5, out=tmp_path / "out"
    )
    out, tau = open_checkpoint(tmp_path / "out"), TaskVector.between(base, tuned)
    known = {token: row for row, token in enumerate(VOCAB)}
    for name in TABLES:
        expected = goal.read(name).clone()
        for row, token in enumerate(tokens):
            if token in known:
                expected[row] += 0.5 * tau[name][known[token]].abs()
        assert torch.equal(out.read(name), expected)
    matched = sum(token in known for token in tokens)
    manifest = json.loads((tmp_path / "out" / "gradfix.json").read_text())
    counts = manifest["details"]["vocabulary"]["lm_head.weight"]
    assert (counts["matched"], counts["untouched"]) == (matched, len(tokens) - matched)
    assert any(f"{matched} of {len(tokens)} found in the base" in note for note in report.notes)


def test_equal_tokenizers_change_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = (open_checkpoint(folder) for folder in pair)
    target = open_checkpoint(save_tiny("llama", tmp_path / "target", seed=2))
    assert match_vocabulary(base, tuned, target) == (base, tuned, {})


def test_matching_twice_is_matching_once(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = (open_checkpoint(folder) for folder in pair)
    target = open_checkpoint(reorder(save_tiny("llama", tmp_path / "target", seed=2), ORDERS["reordered"]))
    once = match_vocabulary(base, tuned, target)
    assert isinstance(once[0], MatchedRows)
    assert match_vocabulary(once[0], once[1], target) == once


def test_without_tokenizers_other_heights_are_an_error(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    target = reorder(save_tiny("llama", tmp_path / "target", seed=2), ORDERS["extended"])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (target / file).unlink()
    with pytest.raises(
        IncompatibleCheckpoints, match="the vocabularies differ. Give checkpoints with tokenizers"
    ):
        transport_checkpoint(
            base=base, tuned=tuned, target=target, mask="random", seed=0, out=tmp_path / "out"
        )


def test_foreign_vocabularies_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    foreign: list[str | None] = [*VOCAB[:7], *(f"other{i}" for i in range(len(VOCAB) - 7))]
    target = reorder(save_tiny("llama", tmp_path / "target", seed=2), foreign)
    with pytest.raises(
        IncompatibleCheckpoints, match=r"share 7 of \d+ and \d+ tokens: these are different vocab"
    ):
        transport_checkpoint(
            base=base, tuned=tuned, target=target, mask="random", seed=0, out=tmp_path / "out"
        )


def test_a_damaged_tokenizer_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    target = save_tiny("llama", tmp_path / "target", seed=2)
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(
        CorruptInput, match=r"tokenizer.json is not a readable tokenizer .* Download it again"
    ):
        transport_checkpoint(
            base=base, tuned=tuned, target=target, mask="random", seed=0, out=tmp_path / "out"
        )


def test_an_old_tokenizer_is_read_by_transformers(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"])
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    vocabulary = read_vocabulary(tmp_path)
    assert vocabulary is not None and vocabulary["world"] == 6
    assert read_vocabulary(tmp_path / "nowhere.safetensors") == vocabulary
    assert read_vocabulary(None) is None


def test_a_broken_old_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"junk")
    with pytest.raises(CorruptInput, match="the tokenizer in .* cannot be read"):
        read_vocabulary(tmp_path)


def test_a_fine_tune_with_tokens_of_its_own(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    reorder(tuned, [*VOCAB[:7], "<own>", *VOCAB[7:]])
    target = save_tiny("llama", tmp_path / "target", seed=2)
    before, after, _ = match_vocabulary(*(open_checkpoint(p) for p in (base, tuned, target)))
    tau = TaskVector.between(before, after)
    assert tau["lm_head.weight"].shape[0] == len(VOCAB)
    assert float(tau["lm_head.weight"].abs().max()) < 0.1  # rows are compared with their own token's row


def test_a_fine_tune_in_another_order(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    expected = TaskVector.between(base, tuned)
    reorder(tuned, ORDERS["reordered"])
    target = save_tiny("llama", tmp_path / "target", seed=2)
    before, after, _ = match_vocabulary(*(open_checkpoint(p) for p in (base, tuned, target)))
    tau = TaskVector.between(before, after)
    for name in TABLES:
        assert torch.equal(tau[name], expected[name])


def test_an_adapter_on_a_reordered_table(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = pair
    train_adapter(load(base, "CausalLM"), tmp_path / "lora", target_modules=["embed_tokens", "lm_head"])
    target = open_checkpoint(reorder(save_tiny("llama", tmp_path / "target", seed=2), ORDERS["reordered"]))
    whole = TaskVector.between(base, tmp_path / "lora")
    before = open_checkpoint(base)
    tau = TaskVector.between(
        *match_vocabulary(before, open_checkpoint(tmp_path / "lora", base=before), target)[:2]
    )
    rows = [VOCAB.index(token) for token in ORDERS["reordered"]]
    for name in TABLES:
        torch.testing.assert_close(tau[name], whole[name][rows], rtol=0, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    base=st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1),
    target=st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1),
    width=st.integers(1, 5),
    elements=st.integers(1, 17),
    padding=st.integers(0, 3),
)
def test_any_order_any_piece(
    base: list[str], target: list[str], width: int, elements: int, padding: int
) -> None:
    table = torch.arange(1.0, len(base) * width + 1).view(len(base), width)
    ids = {token: row for row, token in enumerate(base)}
    goal = {token: row for row, token in enumerate(target)}
    heights = (len(base), len(base), len(target) + padding)
    match = match_rows(ids, ids, goal, heights)
    shown = MatchedRows(open_checkpoint({"t": table}), {"t": match.base})
    expected = torch.zeros(heights[2], width)
    for token in set(base) & set(target):
        expected[goal[token]] = table[ids[token]]
    assert torch.equal(shown.read("t"), expected)
    assert torch.equal(torch.cat(list(shown.chunks("t", elements))), expected.reshape(-1))
    assert match.matched == len(set(base) & set(target)) and match.matched + match.untouched == heights[2]
