"""Models that are unlike each other: what is moved, what stays the target's own, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gradfix
from tests.reliability.world import World, rewrite, say
from tests.tiny import save_tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*tensors abstained")


def test_tied_weights_vote_once_and_stay_tied(tmp_path: Path) -> None:
    """One tensor on disk, one vote with the gradients of both uses, one tensor when loaded again."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=12, tie_word_embeddings=True)
    for seed, role in enumerate(("base", "tuned", "target")):
        torch.manual_seed(seed if role == "target" else 0)
        model = LlamaForCausalLM(config)
        if role == "tuned":
            with torch.no_grad():
                model.model.embed_tokens.weight += 0.01
        model.save_pretrained(tmp_path / role)
    ids = torch.randint(0, 12, (3, 5), generator=torch.Generator().manual_seed(0))

    def loss(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits = m(batch).logits[:, :-1]
        each = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        return each.view(len(batch), -1).mean(1)

    votes = gradfix.collect_votes(model, loss, [ids], engine="loop")
    assert "lm_head.weight" not in votes and votes["model.embed_tokens.weight"].any()
    roles = {role: tmp_path / role for role in ("base", "tuned", "target")}
    gradfix.transport_checkpoint(**roles, votes=votes, out=tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_buffers_come_from_the_target_whatever_the_mask(tmp_path: Path) -> None:
    """Running statistics are floating tensors on disk, so a mask that needs no votes would move them."""
    from safetensors.torch import save_file

    state = {"bn.running_mean": torch.ones(4), "bn.running_var": torch.ones(4), "w": torch.ones(4, 4),
             "bn.num_batches_tracked": torch.tensor(3)}  # fmt: skip
    for scale, role in ((1.0, "base"), (1.1, "tuned"), (5.0, "target")):
        (tmp_path / role).mkdir()
        moved = {n: (t * scale).to(t.dtype) for n, t in state.items()}
        save_file(moved, tmp_path / role / "model.safetensors")
    roles = {role: tmp_path / role for role in ("base", "tuned", "target")}
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    out, target = (load_file(tmp_path / f / "model.safetensors") for f in ("out", "target"))
    assert all(torch.equal(out[n], target[n]) for n in state if n.startswith("bn."))
    assert not torch.equal(out["w"], target["w"])
    told = gradfix.verify(tmp_path / "out")["tensors"]
    assert told["bn.running_mean"] == {"fate": "copied", "reason": "running statistics of the target"}


def test_unused_parameters_abstain_and_are_reported(world: World) -> None:
    """The pooler takes no part in a mean-pooled encoder."""
    said = say(world.arguments())
    assert said.code == 0 and "2 tensors have no votes (frozen or unused)" in said.err
    told = gradfix.verify(world.out)["tensors"]
    assert told["pooler.dense.weight"] == {"fate": "copied", "reason": "no votes"}
    out, target = (load_file(folder / "model.safetensors") for folder in (world.out, world.target))
    assert torch.equal(out["pooler.dense.weight"], target["pooler.dense.weight"])


def test_an_extra_head_is_listed(world: World) -> None:
    rewrite(world.target, {"extra.weight": torch.ones(2, 32)})
    recipe = world.home / "recipe.yaml"
    vectors = [{"base": str(world.base), "tuned": str(world.tuned)}]
    recipe.write_text(json.dumps({"target": str(world.target), "vectors": vectors, "method": "task_arithmetic"}))
    assert say(["merge", str(recipe), "--out", str(world.out)]).code == 0
    told = gradfix.verify(world.out)
    assert told["tensors"]["extra.weight"] == {"fate": "copied", "reason": "only in the target"}
    counts = told["counts"]
    assert counts["transported"] + counts["copied"] + counts["skipped"] == counts["total"] == len(told["tensors"])


def test_a_stranger_goes_through_when_forced(world: World) -> None:
    save_tiny("bert", world.home / "stranger", seed=9)
    assert say(world.arguments(tuned=world.home / "stranger", force=True)).code == 0


def test_base_and_fine_tune_the_wrong_way_round(world: World) -> None:
    """Of the two orders exactly one is refused: the fine-tune must beat its base on its own examples."""
    orders = [(world.base, world.tuned), (world.tuned, world.base)]
    said = [
        say(world.arguments(base=a, tuned=b, out=world.home / f"out{i}", no_check=None))
        for i, (a, b) in enumerate(orders)
    ]
    assert sorted(answer.code for answer in said) == [0, 4]
    refused = next(answer for answer in said if answer.code == 4)
    assert "Were --base and --tuned swapped" in refused.err and "--force" in refused.err
