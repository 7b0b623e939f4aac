"""How a user scores a folder: transformers, peft and timm alone, no line of gradfix.

Each scorer is a function of a model folder (full weights, or an adapter with its config), the data folder and
the base to put an adapter on where its config names none that exists. It gives the test accuracy in percent."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.journeys.toys import IMAGE_LABELS, TEXT_LABELS, read_rows

Scorer = Callable[[Path, Path, Path | None], float]


def share(right: Sequence[bool]) -> float:
    return 100 * sum(map(bool, right)) / len(right)


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def loaded(auto: str, folder: Path, base: Path | None = None, classes: int | None = None) -> Any:
    """The model as its own library loads it; weights that the files lack are an error."""
    import peft
    import transformers

    options: dict[str, Any] = {"num_labels": classes, "ignore_mismatched_sizes": True} if classes else {}
    whole = getattr(transformers, auto)
    if not is_adapter(folder):
        model, info = whole.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        lost = [name for name in info["missing_keys"] if not name.startswith("pooler.")]
        assert not lost, f"{folder.name} lacks {sorted(lost)[:3]}"
        assert not info["mismatched_keys"], f"{folder.name}: {info['mismatched_keys']}"
        return model.eval()
    together = getattr(peft, auto.replace("AutoModel", "AutoPeftModel"), None)
    if base is None and together is not None:
        return together.from_pretrained(folder, dtype=torch.float32, **options).eval()
    named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = whole.from_pretrained(base or named, dtype=torch.float32, **options)
    return peft.PeftModel.from_pretrained(model, folder).eval()


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer_config.json")
    assert all((folder / file).is_file() for file in files), f"{folder.name} has no tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def named(model: Any, answers: Tensor, rows: Sequence[dict[str, Any]]) -> list[bool]:
    """Numbers are compared with numbered labels, names with named ones; adapters keep no names, only the order."""
    names = model.config.id2label
    if names[0] == "LABEL_0":
        names = TEXT_LABELS
    return [
        answer == row["label"] if isinstance(row["label"], int) else names[answer] == row["label"]
        for answer, row in zip(answers.tolist(), rows)
    ]


@torch.no_grad()
def text_classes(folder: Path, data: Path, base: Path | None = None) -> float:
    model, tokenizer = (
        loaded("AutoModelForSequenceClassification", folder, base, len(TEXT_LABELS)),
        tokenizer_of(folder),
    )
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    rows = read_rows(data, "test")
    tokens = tokenizer([row["text"] for row in rows], padding=True, truncation=True, return_tensors="pt")
    return share(named(model, model(**tokens).logits.argmax(-1), rows))


@torch.no_grad()
def image_classes(folder: Path, data: Path, base: Path | None = None) -> float:
    from transformers import AutoImageProcessor

    model = loaded("AutoModelForImageClassification", folder, base, len(IMAGE_LABELS))
    home = folder if (folder / "preprocessor_config.json").is_file() else base
    assert home is not None, f"{folder.name} has no image processor"
    rows = read_rows(data, "test")
    pixels = AutoImageProcessor.from_pretrained(home)([row["image"] for row in rows], return_tensors="pt")
    answers = model(pixel_values=pixels["pixel_values"]).logits.argmax(-1)
    if is_adapter(folder):  # the adapter format has no place for class names
        return share([IMAGE_LABELS[answer] == row["label"] for answer, row in zip(answers.tolist(), rows)])
    return share(named(model, answers, rows))


@torch.no_grad()
def timm_classes(folder: Path, data: Path, base: Path | None = None) -> float:
    import peft
    import timm
    from timm.data import create_transform, resolve_model_data_config

    options: dict[str, Any] = {"num_classes": len(IMAGE_LABELS)} if is_adapter(folder) else {}
    model = timm.create_model(f"local-dir:{base if is_adapter(folder) else folder}", pretrained=True, **options)
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    names = model.pretrained_cfg.get("label_names") or IMAGE_LABELS
    if is_adapter(folder):  # the adapter format has no place for class names
        names = IMAGE_LABELS
        model = peft.PeftModel.from_pretrained(model, folder)
    rows = read_rows(data, "test")
    answers = model.eval()(torch.stack([transform(row["image"]) for row in rows])).argmax(-1)
    return share([names[answer] == row["label"] for answer, row in zip(answers.tolist(), rows)])


def two_towers(full_length: bool) -> Scorer:
    """CLIP's and SigLIP's ordinary zero-shot: the folder's own text tower reads the prompts."""

    @torch.no_grad()
    def score(folder: Path, data: Path, base: Path | None = None) -> float:
        from transformers import AutoImageProcessor

        home = base if base is not None and is_adapter(folder) else folder
        model, tokenizer = loaded("AutoModel", folder, base), tokenizer_of(home)
        prompts = json.loads((data / "task.json").read_text())["labels"]
        padding: Any = "max_length" if full_length else True
        tokens = tokenizer(list(prompts.values()), padding=padding, max_length=24, truncation=True, return_tensors="pt")
        if full_length:
            tokens.pop("attention_mask")
        rows = read_rows(data, "test")
        pixels = AutoImageProcessor.from_pretrained(home)([row["image"] for row in rows], return_tensors="pt")
        output = model(**{k: v for k, v in tokens.items() if k != "token_type_ids"}, **pixels)
        answers = output.logits_per_image.argmax(-1).tolist()
        return share([list(prompts)[answer] == row["label"] for answer, row in zip(answers, rows)])

    return score


@torch.no_grad()
def embed(model: Any, tokenizer: Any, lines: Sequence[str], pooling: str, longest: int) -> Tensor:
    tokens = tokenizer(list(lines), padding=True, truncation=True, max_length=longest, return_tensors="pt")
    hidden = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    pooled = hidden[:, 0] if pooling == "cls" else (hidden * mask).sum(1) / mask.sum(1)
    return functional.normalize(pooled, dim=-1)


def text_encoder(pooling: str = "mean", sentence_folder: bool = False, longest: int = 64) -> Scorer:
    """Cosine to the prompts as the untuned encoder `base` embeds them (the frozen head of that side).

    A sentence-transformers folder must still be one: its modules and its pooling are read from the files."""

    def score(folder: Path, data: Path, base: Path | None = None) -> float:
        assert base is not None
        way, most = pooling, longest
        if sentence_folder:
            home = base if is_adapter(folder) else folder  # an adapter is put on the sentence model it is for
            kinds = [module["type"].rsplit(".", 1)[-1] for module in json.loads((home / "modules.json").read_text())]
            assert kinds[:2] == ["Transformer", "Pooling"]
            config = json.loads((home / "1_Pooling" / "config.json").read_text())
            way = "cls" if config["pooling_mode_cls_token"] else "mean"
            most = json.loads((home / "sentence_bert_config.json").read_text())["max_seq_length"]
        labels = json.loads((data / "task.json").read_text())["labels"]
        head = embed(loaded("AutoModel", base), tokenizer_of(base), list(labels.values()), way, most)
        rows = read_rows(data, "test")
        on = base if is_adapter(folder) else None
        vectors = embed(
            loaded("AutoModel", folder, on), tokenizer_of(on or folder), [row["text"] for row in rows], way, most
        )
        answers = (vectors @ head.T).argmax(-1).tolist()
        return share([list(labels)[answer] == row["label"] for answer, row in zip(answers, rows)])

    return score


@torch.no_grad()
def seq2seq_labels(folder: Path, data: Path, base: Path | None = None) -> float:
    """The likeliest of the label texts, by the sum over its tokens, end included."""
    model, tokenizer = loaded("AutoModelForSeq2SeqLM", folder, base), tokenizer_of(folder)
    rows = read_rows(data, "test")
    tokens = tokenizer([row["text"] for row in rows], padding=True, truncation=True, return_tensors="pt")
    tokens.pop("token_type_ids", None)
    columns = []
    for label in TEXT_LABELS:
        spelled = torch.tensor(tokenizer(text_target=label)["input_ids"]).repeat(len(rows), 1)
        logits = model(**tokens, labels=spelled).logits
        columns.append(-functional.cross_entropy(logits.transpose(1, 2), spelled, reduction="none").sum(1))
    answers = torch.stack(columns, 1).argmax(-1).tolist()
    return share([TEXT_LABELS[answer] == row["label"] for answer, row in zip(answers, rows)])


@torch.no_grad()
def causal_labels(folder: Path, data: Path, base: Path | None = None) -> float:
    """The likeliest of the label texts after a space, end token included."""
    model, tokenizer = loaded("AutoModelForCausalLM", folder, base), tokenizer_of(folder)
    rows = read_rows(data, "test")
    right = []
    for row in rows:
        asked = tokenizer(row["text"])["input_ids"]
        likely = []
        for label in TEXT_LABELS:
            said = [*tokenizer(f" {label}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            logits = model(input_ids=torch.tensor([asked + said])).logits[0, len(asked) - 1 : -1]
            likely.append(-float(functional.cross_entropy(logits, torch.tensor(said), reduction="sum")))
        right.append(TEXT_LABELS[likely.index(max(likely))] == row["label"])
    return share(right)


@torch.no_grad()
def causal_exact(folder: Path, data: Path, base: Path | None = None) -> float:
    """Greedy answers of a chat that equal the reference word for word."""
    model, tokenizer = loaded("AutoModelForCausalLM", folder, base), tokenizer_of(folder)
    right = []
    for row in read_rows(data, "test"):
        *question, answer = row["messages"]
        asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        tokens = tokenizer(asked, add_special_tokens=False, return_tensors="pt")
        tokens.pop("token_type_ids", None)
        said = model.generate(**tokens, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        text = tokenizer.decode(said[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
        right.append(text.strip() == answer["content"])
    return share(right)
