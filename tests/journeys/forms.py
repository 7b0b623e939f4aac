"""Forms that checkpoints come in: shards, half precision, pickles, single files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from tests.journeys.encoders import headed
from tests.journeys.kinds import Kind, add
from tests.journeys.scorers import causal_labels, text_classes
from tests.journeys.speakers import speaker

ROLES = ("base", "tuned", "target")


def sharded(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    headed(folder)
    for role in ROLES:
        model = AutoModelForSequenceClassification.from_pretrained(folder / role)
        (folder / role / "model.safetensors").unlink()
        model.save_pretrained(folder / role, max_shard_size="20KB")
        assert (folder / role / "model.safetensors.index.json").is_file()


def pickled(folder: Path) -> None:
    """pytorch_model.bin, as older releases wrote it."""
    from safetensors.torch import load_file

    headed(folder)
    for role in ROLES:
        torch.save(load_file(folder / role / "model.safetensors"), folder / role / "pytorch_model.bin")
        (folder / role / "model.safetensors").unlink()


def single_file(folder: Path) -> None:
    """A fine-tune saved with torch.save(model.state_dict())."""
    from transformers import AutoModelForSequenceClassification

    headed(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "tuned")
    torch.save(model.state_dict(), folder / "tuned.pt")


add(Kind("sharded", "BertForSequenceClassification in shards", "classification", sharded, text_classes))
add(Kind("pickled", "BertForSequenceClassification as pytorch_model.bin", "classification", pickled, text_classes))
add(
    Kind(
        "single-file",
        "the fine-tune a .pt file, its base a folder",
        "classification",
        single_file,
        text_classes,
        tuned="tuned.pt",
    )
)
add(
    Kind(
        "bf16",
        "LlamaForCausalLM in bfloat16",
        "causal",
        partial(speaker, model_type="llama", dtype=torch.bfloat16),
        causal_labels,
    )
)
