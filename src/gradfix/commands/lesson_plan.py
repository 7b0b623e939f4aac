"""What lessons in free text will need: a step on the teacher's answers, walked through without weights.

The model is the one of its config, on no device; a LoRA is put beside it as the training does, activations are
recomputed as the training does, and every allocation of one forward and backward pass is seen. What stays alive around it
(weights, moments, copies to come back to) is added up."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.write import torch_dtype
from gradfix.commands.configs import PlanConfig
from gradfix.commands.plan import Allocations, Rehearsal, silent, with_shapes
from gradfix.commands.setting import device_of
from gradfix.errors import UsageError
from gradfix.registry import unknown
from gradfix.tasks.reading import writing_bytes
from gradfix.training.free_text import FULL, LORA, TRAINS
from gradfix.training.imitating import Imitation, divergences, recomputing, texts_at_once
from gradfix.training.lowrank import adapted
from gradfix.votes.needs import GIB, Shape, shape_of

SIZES = ("weights", "trained", "passes", "asking", "writing")
READS = 2  # of every weight for a pass forward and back: layers are computed again


@dataclass(frozen=True)
class LessonPlan:
    """Bytes on the device: weights, what is trained with its moments, the passes of one step, the teacher's answers, and
    the texts that the student writes of itself."""

    train: str
    weights: int
    trained: int
    passes: int
    asking: int
    writing: int
    brought: int  # weights on the device at one time where --offload leaves them on disk
    reads: int  # how often one step goes through all weights then
    told: int  # and how often asking and writing do, a token at a time: all texts side by side

    @property
    def offloaded(self) -> int:
        """With --offload, where no weight stays in memory; any room beyond holds weights, and saves reading them."""
        return self.brought + max(self.trained + self.passes, self.asking)

    @property
    def memory(self) -> int:
        """The largest of learning, asking and writing: with a LoRA the two models take turns."""
        return self.weights + max(self.trained + self.passes, self.asking, self.writing)

    def as_json(self) -> dict[str, Any]:
        sizes = {name: round(getattr(self, name) / GIB, 3) for name in SIZES}
        found = {"train": self.train, "memory_gib": round(self.memory / GIB, 3)} | {
            f"{n}_gib": s for n, s in sizes.items()
        }
        if self.train == LORA:
            found["offload"] = {
                "memory_gib": round(self.offloaded / GIB, 3),
                "read_per_step_gib": round(self.reads * self.weights / GIB, 3),
                "read_to_write_gib": round(self.told * self.weights / GIB, 3),
            }
        return found

    def rows(self) -> list[tuple[str, str]]:
        said = {
            "weights": self.weights, "trained weights and moments": self.trained, "passes of a step": self.passes,
            "asking, beside the weights": self.asking, "texts of its own, likewise": self.writing, f"memory with --train {self.train}": self.memory,
        }  # fmt: skip
        if self.train == LORA:
            said["memory with --offload, at least"] = self.offloaded
            said["read from disk in a step then"] = self.reads * self.weights
            said["and to ask and write, at least"] = self.told * self.weights
        return [(name, f"{size / GIB:.2f} GiB") for name, size in said.items()]


def lessons_of(config: PlanConfig) -> LessonPlan:
    """For prompts of `config.tokens`, `config.batch_size` at a time, and answers of `config.answer_tokens`."""
    checkpoint = open_checkpoint(config.target)
    assert checkpoint.path is not None  # the plan of the vote has seen its config.json
    return _plan(
        checkpoint.path,
        config,
        torch_dtype(config.dtype),
        device_of(config.device),
        shape_of(checkpoint, config.tokens),
    )


def _plan(folder: Path, config: PlanConfig, dtype: torch.dtype, device: str, shape: Shape) -> LessonPlan:
    tokens, recipe = shape.tokens, Imitation()
    train = LORA if config.train == "auto" else config.train
    if train not in TRAINS:
        raise UsageError(unknown("--train", str(config.train), list(TRAINS)))
    model = Rehearsal.of_folder(folder, tokens, dtype, device).model
    if not hasattr(model, "generate"):
        raise UsageError(f"{folder} does not answer in words; --train is for language models.")
    counts = sum(p.numel() for p in model.parameters())
    weights = counts * dtype.itemsize
    said = config.answer_tokens
    with silent(), ExitStack() as stack:
        lora = stack.enter_context(adapted(model, config.rank or recipe.rank)) if train == LORA else None
        texts = (min(config.batch_size, recipe.kept), 1, recipe.keepsake_tokens)
        passes = max(_walked(model, device, sizes, train) for sizes in ((config.batch_size, tokens, said), texts))
        if lora is not None:
            held = sum(p.numel() for p in lora.parameters.values())
            trained = held * 4 * 3  # float32: themselves and two moments; gradients are in the passes
        else:
            masters = 4 if dtype.itemsize < 4 else 0
            trained = counts * (2 * max(4, dtype.itemsize) + masters + dtype.itemsize)  # and a copy to come back to
    asking = config.batch_size * writing_bytes(model.config, dtype, tokens, said)
    length = recipe.keepsake_tokens
    at_once = min(recipe.keepsakes, texts_at_once(model.config, dtype, length))
    writing = at_once * writing_bytes(model.config, dtype, 1, length)
    brought = min(2 * max(shape.block, shape.largest) * dtype.itemsize, weights)
    batches = sum(-(-count // config.batch_size) for count in (recipe.batch + recipe.labelled, recipe.kept))
    return LessonPlan(train, weights, trained, passes, asking, writing, brought, READS * batches, said + length)


def _walked(model: Any, device: str, sizes: tuple[int, int, int], train: str) -> int:
    """The peak of one forward and backward pass of a batch, beyond the model's own tensors."""
    samples, asked, said = sizes
    with FakeTensorMode(), torch.device(device), with_shapes(model) as shaped, recomputing(shaped, train != FULL):
        with Allocations(shaped) as seen:
            logits = _scores(shaped, samples, asked, said)
            top = torch.zeros(len(logits), 64, dtype=torch.int64)
            divergences(logits.log_softmax(-1).gather(1, top), torch.zeros(len(logits), 64)).mean().backward()
        return seen.peak


def _scores(model: Any, samples: int, asked: int, said: int) -> Tensor:
    if model.config.is_encoder_decoder:
        ids = torch.zeros(samples, asked, dtype=torch.int64)
        answers = torch.zeros(samples, said, dtype=torch.int64)
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=answers).logits
    else:
        ids = torch.zeros(samples, asked + said, dtype=torch.int64)
        places = torch.arange(asked + said).expand(samples, -1)
        found = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=places, logits_to_keep=said + 1
        ).logits[:, :-1]  # fmt: skip
    scores: Tensor = found.float().flatten(0, 1)
    return scores
