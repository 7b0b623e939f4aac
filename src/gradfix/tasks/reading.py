"""What examples give to a model: texts, images and tokens, with errors that name the example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradfix.errors import CorruptInput, DataError
from gradfix.tasks.base import Batch, Example

LONGEST = 512  # tokens, where neither the user nor the model says otherwise


def where(example: Example, index: int) -> str:
    return getattr(example, "where", None) or f"example {index}"


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


def refuse_foreign_tokens(ids: torch.Tensor, tokenizer: Any, model: Any) -> None:
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


def pad(sequences: Sequence[Sequence[int]], value: int, left: bool = False) -> torch.Tensor:
    width = max(map(len, sequences))
    rows = [
        [value] * (width - len(s)) + list(s) if left else list(s) + [value] * (width - len(s))
        for s in sequences
    ]
    return torch.tensor(rows, dtype=torch.long)
