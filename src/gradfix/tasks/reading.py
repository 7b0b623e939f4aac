"""What examples give to a model (texts, images, tokens), and the tasks that answer in words."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradfix.data.rows import where
from gradfix.errors import CorruptInput, DataError, UsageError
from gradfix.registry import unknown
from gradfix.tasks.base import Batch, Bound, Example, Prompts, Task
from gradfix.tasks.loading import freeze_all_but, load_pretrained, load_tokenizer, locate, quiet_transformers

LONGEST = 512  # tokens, where neither the user nor the model says otherwise
LOSSES = ("mean", "sum")


def column(examples: Sequence[Example], name: str) -> list[Any]:
    """One column of all examples; a missing value is an error."""
    for index, example in enumerate(examples):
        if example.get(name) is None:
            raise DataError(
                f"{where(example, index)}: this task needs the column {name!r}. If the data has one, name it "
                "(--text-column, --image-column)."
            )
    return [example[name] for example in examples]


def tokenise(tokenizer: Any, examples: Sequence[Example], max_length: int, model: Any) -> Batch:
    """Texts, or pairs of texts, padded to the longest of the batch on the right; the mask hides the padding."""
    pairs = [example.get("text_pair") for example in examples]
    tokens = tokenizer(
        column(examples, "text"),
        column(examples, "text_pair") if any(pairs) else None,
        padding=True,
        truncation=True,
        max_length=max_length,
        return_tensors="pt",
    )
    refuse_foreign_tokens(tokens["input_ids"], tokenizer, model)
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in tokens.items()}


def processed(processor: Any, examples: Sequence[Example], model: Any) -> Batch:
    """Pictures through transformers' own image processor, as the model's weights are."""
    with quiet_transformers():
        pixels = processor(images=column(examples, "image"), return_tensors="pt")["pixel_values"]
    reference = next(model.parameters())
    return {"pixel_values": pixels.to(device=reference.device, dtype=reference.dtype)}


def masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean vector of each text over the tokens that the mask shows."""
    mask = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


def refuse_foreign_tokens(ids: Tensor, tokenizer: Any, model: Any) -> None:
    """A token without an embedding ends a process on some devices; here it is an error that names the folder."""
    rows = model.get_input_embeddings().weight.shape[0]
    if ids.numel() and int(ids.max()) >= rows:
        raise CorruptInput(
            f"the tokenizer of {tokenizer.name_or_path} knows token {int(ids.max())}, but the model has {rows} rows "
            "of embeddings: it belongs to another model. Put the model's own tokenizer files there."
        )


def longest(asked: int | None, tokenizer: Any, config: Any) -> int:
    """How many tokens a text may have: the asked-for number, within what the model can hold."""
    held = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    limits = [limit for limit in (tokenizer.model_max_length, held) if limit and limit < 10**6]
    return min([asked or LONGEST, *limits])


def pad(sequences: Sequence[Sequence[int]], value: int, left: bool = False) -> Tensor:
    width = max(map(len, sequences))
    rows = [[value] * (width - len(s)) + list(s) if left else list(s) + [value] * (width - len(s)) for s in sequences]
    return torch.tensor(rows, dtype=torch.long)


class AnswerBound(Bound):
    """A generating model, its tokenizer and the texts of its labels."""

    model: Any

    def __init__(
        self, model: Any, tokenizer: Any, labels: Mapping[str, str], loss: str, scoring: str, max_length: int
    ) -> None:
        self.model, self.tokenizer, self.max_length = model, tokenizer, max_length
        self.labels, self.texts = list(labels), list(labels.values())
        self.reduction, self.scoring = loss, scoring
        self._index = {label: index for index, label in enumerate(self.labels)}
        freeze_all_but(model, self.trainable())


class AnswerTask(Task):
    """A generating model and the texts of its labels; subclasses name the loader and what it is bound to."""

    loader: ClassVar[str]
    bound: ClassVar[type[AnswerBound]]
    scorings: ClassVar[tuple[str, ...]]

    def __init__(
        self, labels: Mapping[str, Prompts], loss: str, scoring: str, max_length: int | None, trust_remote_code: bool
    ) -> None:
        if loss not in LOSSES:
            raise UsageError(unknown("loss", loss, list(LOSSES)))
        if scoring not in self.scorings:
            raise UsageError(unknown("scoring", scoring, list(self.scorings)))
        self.labels = dict(labels)
        self.texts = spelled_labels(labels)
        self.loss, self.scoring = loss, scoring
        self.max_length, self.trust_remote_code = max_length, trust_remote_code

    def open(
        self,
        source: str | os.PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        head_from: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Load a model. Its answers are its own words; `head_from` is only the base of a LoRA adapter."""
        import transformers

        trust = self.trust_remote_code
        home = locate(source, head_from, dtype=dtype, device=device, trust_remote_code=trust)
        tokenizer = load_tokenizer(home)
        loaded = load_pretrained(getattr(transformers, self.loader), home)
        length = longest(self.max_length, tokenizer, loaded.model.config)
        bound = type(self).bound(loaded.model, tokenizer, self.texts, self.loss, self.scoring, length)
        bound.source, bound.notes = home.adapter or home.folder, loaded.notes
        return bound


def spelled_labels(labels: Mapping[str, Prompts]) -> dict[str, str]:
    """One text per label, all different."""
    texts: dict[str, str] = {}
    for label, text in labels.items():
        if not isinstance(text, str):
            raise UsageError(f"the label {label!r} has several texts; an answer needs exactly one.")
        if text in texts.values():
            raise UsageError(f"two labels share the text {text!r}; the answers could not be told apart.")
        texts[label] = text
    return texts
