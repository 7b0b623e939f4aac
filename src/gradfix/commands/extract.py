"""`gradfix extract`: a fine-tune as a LoRA adapter for its own base, and how much of it the adapter holds.

The change is read and factored tensor by tensor; a whole model is never held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradfix.checkpoints.adapter import empty_model
from gradfix.checkpoints.matched import match_prefix
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import Checkpoint, open_checkpoint
from gradfix.checkpoints.trio import check_pair
from gradfix.checkpoints.write import refuse_occupied
from gradfix.commands.configs import ExtractConfig
from gradfix.commands.guard import guard_outputs
from gradfix.errors import CorruptInput, UnsafeResult, UsageError
from gradfix.stream.lora_out import adapter_for, check_lora, save_lora, whole_tensors
from gradfix.vectors.taskvector import MAX_NORM_RATIO, not_a_fine_tune

Stage = Callable[[str], None]


class _Change(Mapping[str, Tensor]):
    """Fine-tune minus base, read when asked for; the squares are known once every tensor has been."""

    def __init__(self, base: Checkpoint, tuned: Checkpoint, stage: Stage) -> None:
        self.base, self.tuned, self.stage = base, tuned, stage
        self.names = check_pair(base, tuned)
        self.before, self.moved = 0.0, 0.0

    def __getitem__(self, name: str) -> Tensor:
        self.stage(f"factoring {name}")
        base = self.base.read(name).float()
        change = self.tuned.read(name).float() - base
        if not bool(torch.isfinite(change).all()):
            guilty = self.base if not bool(torch.isfinite(base).all()) else self.tuned
            raise CorruptInput(f"tensor {name!r} of {guilty} holds NaN or Inf. Repair or re-export it.")
        self.before += float(base.double().square().sum())
        self.moved += float(change.double().square().sum())
        return change

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def ratio(self) -> float:
        return (self.moved / self.before) ** 0.5 if self.before else 0.0


def run_extract(config: ExtractConfig, stage: Stage = lambda _: None) -> dict[str, Any]:
    """Factor the change, refuse what keeps too little, write the adapter."""
    guard_outputs(config)
    refuse_occupied(Path(config.out), config.overwrite)
    base = open_checkpoint(config.base)
    tuned = match_prefix(open_checkpoint(config.tuned, base=base), base)
    model = empty_model(base)
    if model is None:
        raise UsageError(f"{base} has no config.json of a transformers model: which of its layers take an adapter?")
    change = _Change(base, tuned, stage)
    _fill_small(model, base)
    result = adapter_for(change, config.rank, model=model, target=base, keep_small=config.keep_small)
    if change.ratio > MAX_NORM_RATIO and not config.force:
        raise not_a_fine_tune(
            base, tuned, change.ratio, advice="Check --base and --tuned; --force goes on all the same."
        )
    if not result.factors:
        raise UnsafeResult(f"{tuned} differs from {base} in no tensor that an adapter can hold.")
    notes = check_lora(result, force=config.force)
    told = {"rank": config.rank, "retained_energy": result.retained, "layers": len(result.factors), "notes": notes}
    if not config.dry_run:
        save_lora(
            result, config.out, model=model, target=base, base_name=config.base, inputs={"tuned": tuned}, notes=notes,
            overwrite=config.overwrite, facts={"norm_ratio": change.ratio}, config={"alpha": 1.0, "mask": "none"},
        )  # fmt: skip
    verb = "would write" if config.dry_run else "wrote"
    what = f"rank {config.rank} keeps {result.retained:.1%} of the change in {len(result.factors)} layers"
    return {"summary": f"{verb} {config.out}: {what}", "out": config.out, **told}


def _fill_small(model: nn.Module, base: Checkpoint) -> None:
    """Norms and biases of the base, which an adapter folder may hold in full; the rest stays without memory."""
    disk = name_map(model, base.names()).renamed
    for name in whole_tensors(model):
        there = disk.get(name, name)
        if there in base:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(base.read(there), requires_grad=False))
