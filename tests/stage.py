"""The folders that docs and README talk about: tiny models and data under the names the pages use.

`setup(name, folder)` fills a folder; what was made once is copied, so every page starts fresh. Processes that
`share` a folder make each of them once between them. `names_of` gives the Python names a page takes for granted."""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradfix.cli import run
from tests.tiny import (
    VOCAB,
    rewrite_tokenizer,
    save_tiny,
    save_tokenizer,
    toy_images,
    toy_texts,
    toy_topics,
    write_rows,
)

SPLITS = (("train", 48, 1), ("validation", 12, 2), ("test", 12, 3))
Build = Callable[[Path], None]
SETUPS: dict[str, Build] = {}
_own = tempfile.TemporaryDirectory(prefix="gradfix-stage-")
_homes = [Path(_own.name)]


def share(home: Path) -> None:
    """From now on in this folder, which other processes use as well."""
    home.mkdir(parents=True, exist_ok=True)
    _homes.append(home)


def setup(name: str, folder: Path) -> None:
    """Fill `folder` with what pages of this set-up may name."""
    home = _homes[-1] / name
    made = home.with_suffix(".made")
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(home, ignore_errors=True)  # of one that failed
            home.mkdir()
            SETUPS[name](home)
            made.touch()
    shutil.copytree(home, folder, dirs_exist_ok=True)


def names_of(name: str) -> dict[str, Any]:
    """What the Python blocks of a page use without making it; call it inside the page's folder."""
    import torch

    import gradfix

    names: dict[str, Any] = {"torch": torch, "gradfix": gradfix}
    if name == "readme":
        from gradfix.data import load_data
        from gradfix.tasks.scoring import evaluate
        from gradfix.tasks.zero_shot import ZeroShot

        dataset = load_data("my-data")
        bound = ZeroShot(dataset.labels).open("new-base")
        few, held = dataset.splits["train"][:8], dataset.splits["validation"]
        score = lambda model: evaluate(model, bound, bound.batches(held))["accuracy"]  # noqa: E731
        names |= {"model": bound.model, "loss": bound.loss, "batches": list(bound.batches(few)), "score": score}
    if name == "merging":
        taus = [gradfix.TaskVector.between("old-base", tuned) for tuned in ("tuned-a", "tuned-b", "tuned-b")]
        votes = [gradfix.SignVotes.load(f"votes-{x}.safetensors") for x in "ab"]
        names |= {f"tau_{i + 1}": tau for i, tau in enumerate(taus)}
        names |= {"votes": votes[0], "votes_1": votes[0], "votes_2": votes[1]}
    return names


def _setup(name: str) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        SETUPS[name] = build
        return build

    return add


def cli(*words: object) -> None:
    code = run([*map(str, words), "--quiet"])
    assert code == 0, f"{words} ended with {code}"


def texts(folder: Path) -> Path:
    for split, count, seed in SPLITS:
        write_rows(folder, split, toy_texts(count, seed))
    return folder


def tune(base: Path, out: Path, data: Path, task: str, *more: object) -> None:
    cli("finetune", "--model", base, "--out", out, "--data", data, "--task", task, "--steps", 25,
        "--train-batch", 12, "--lr", 3e-3, *more)  # fmt: skip


@_setup("nothing")
def _nothing(home: Path) -> None:
    pass


def _pair(family: str, home: Path, name: str) -> tuple[Path, Path]:
    return save_tiny(family, home / f"{name}-old", seed=0), save_tiny(family, home / f"{name}-new", seed=1)


@_setup("bert")
def _bert(home: Path) -> None:
    base, _ = _pair("bert", home, "bert")
    data = texts(home / "reviews")
    tune(base, home / "bert-old-reviews", data, "classification", "--new-head")
    rows = [f"{row['text']},{row['label']}" for row in toy_texts(40, 5)]
    (home / "reviews.csv").write_text("review,stars\n" + "\n".join(rows) + "\n", encoding="utf-8")


@_setup("bert-zero-shot")
def _bert_zero_shot(home: Path) -> None:
    base, _ = _pair("bert", home, "bert")
    tune(base, home / "bert-old-reviews", texts(home / "reviews"), "zero-shot")


@_setup("retrieval")
def _retrieval(home: Path) -> None:
    base = save_tiny("bert", home / "minilm", seed=0)
    save_tiny("bert", home / "new-base", seed=1)
    for split, count, seed in (("train", 60, 1), ("test", 40, 3)):
        write_rows(home / "questions", split, without(toy_topics(2 * count, seed), home / "questions")[:count])
    tune(base, home / "minilm-support", home / "questions", "embedding")
    rows = without(toy_topics(120, 7), home / "questions")[:60]
    (home / "texts.jsonl").write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in rows))
    pairs = [{"query": a["text"], "positive": b["text"]} for a, b in zip(rows[:-4], rows[4:], strict=True)]
    (home / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs[:30]))


def without(rows: list[dict[str, str]], folder: Path) -> list[dict[str, str]]:
    """The rows whose texts no file of the folder has."""
    known = "".join(path.read_text() for path in folder.glob("*.jsonl")) if folder.is_dir() else ""
    return [row for row in rows if json.dumps(row["text"]) not in known]


@_setup("any-base")
def _any_base(home: Path) -> None:
    """A BERT and a fine-tune of it with and without a head; a new base of another family, wider and deeper."""
    import torch
    from transformers import ModernBertConfig, ModernBertModel

    _bert_zero_shot(home)
    tune(home / "bert-old", home / "bert-old-classifier", home / "reviews", "classification", "--new-head")
    torch.manual_seed(1)
    config = ModernBertConfig(
        vocab_size=len(VOCAB), hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        pad_token_id=0, cls_token_id=4, sep_token_id=5, bos_token_id=2, eos_token_id=3, initializer_range=0.1,
    )  # fmt: skip
    ModernBertModel(config).save_pretrained(home / "modern")
    save_tokenizer(home / "modern", "[CLS]", "[SEP]", model_max_length=32)
    write_rows(home, "more", [{"text": row["text"]} for row in toy_texts(40, 9)])


@_setup("merge")
def _merge(home: Path) -> None:
    _bert_zero_shot(home)
    older = save_tiny("bert", home / "bert-older", seed=2)
    tune(older, home / "bert-older-reviews", home / "reviews", "zero-shot")
    models = [{"model": "bert-old-reviews", "parameters": {"weight": 0.5}}]
    old = {"merge_method": "task_arithmetic", "base_model": "bert-old", "models": models}
    (home / "old.yml").write_text(json.dumps(old), encoding="utf-8")  # JSON is YAML


@_setup("readme")
def _readme(home: Path) -> None:
    base = save_tiny("bert", home / "old-base", seed=0)
    save_tiny("bert", home / "new-base", seed=1)
    tune(base, home / "my-fine-tune", texts(home / "my-data"), "zero-shot")


@_setup("merging")
def _merging(home: Path) -> None:
    base, older = save_tiny("bert", home / "old-base", seed=0), save_tiny("bert", home / "older-base", seed=2)
    target, data = save_tiny("bert", home / "new-base", seed=1), texts(home / "data")
    for name, source, seed in (("a", base, 0), ("b", older, 1)):
        tune(source, home / f"tuned-{name}", data, "zero-shot", "--seed", seed)
        cli("vote", "--target", target, "--data", data, "--task", "zero-shot", "--shots", 2, "--seed", seed,
            "--out", home / f"votes-{name}.safetensors")  # fmt: skip


@_setup("mergekit")
def _mergekit(home: Path) -> None:
    base = save_tiny("bert", home / "old-base", seed=0)
    tune(base, home / "tuned-a", texts(home / "data"), "zero-shot")
    models = [{"model": "tuned-a", "parameters": {"weight": 0.5, "density": [1, 0.5]}}]
    content = {"merge_method": "ties", "base_model": "old-base", "models": models}
    (home / "merge.yml").write_text(json.dumps(content), encoding="utf-8")


@_setup("clip")
def _clip(home: Path) -> None:
    base, _ = _pair("clip", home, "clip")
    for split, count, seed in SPLITS:
        write_rows(home / "photos", split, toy_images(count, seed))
    tune(base, home / "clip-old-colours", home / "photos", "zero-shot", "--templates", "a photo of a {}.")


@_setup("t5")
def _t5(home: Path) -> None:
    base, _ = _pair("t5", home, "t5")
    tune(base, home / "t5-old-nli", texts(home / "nli"), "seq2seq")
    rows = [{"premise": r["text"], "hypothesis": "good", "label": r["label"]} for r in toy_texts(24, 4)]
    (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _chats(home: Path) -> Path:
    for split, count, seed in SPLITS:
        rows = [
            {"messages": [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": row["label"]}]}
            for row in toy_texts(count, seed)
        ]
        write_rows(home, split, rows)
    return home


@_setup("llm")
def _llm(home: Path) -> None:
    base, _ = _pair("llama", home, "llm")
    tune(base, home / "llm-old-support", _chats(home / "tickets"), "causal")


@_setup("lora")
def _lora(home: Path) -> None:
    base, _ = _pair("llama", home, "llm")
    _adapter(base, home / "llm-old-lora", _chats(home / "tickets"))


@_setup("families")
def _families(home: Path) -> None:
    """A LoRA of one family, and a base of another with its own tokenizer."""
    base, other = save_tiny("llama", home / "llm-old", seed=0), save_tiny("gpt2", home / "other-base", seed=1)
    rewrite_tokenizer(other)
    for split, count, seed in SPLITS:
        rows = [{"prompt": row["text"], "completion": f"{row['label']} film"} for row in toy_texts(count, seed)]
        write_rows(home / "reports", split, rows)
    (home / "prompts.jsonl").write_text("".join(json.dumps({"prompt": r["text"]}) + "\n" for r in toy_texts(30, 8)))
    _adapter(base, home / "reports-lora", home / "reports")


def _adapter(base: Path, out: Path, data: Path) -> None:
    """A real adapter, trained for a few steps so that it beats its base."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from gradfix.data import load_data
    from gradfix.tasks.causal import Causal

    dataset = load_data(data)
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    bound = Causal(dataset.labels).open(base)
    steps = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    batches = list(bound.batches(dataset.splits["train"], 12))
    for _ in range(5):
        for batch in batches:
            bound.loss(model, batch).mean().backward()
            steps.step()
            steps.zero_grad()
    model.save_pretrained(out)
