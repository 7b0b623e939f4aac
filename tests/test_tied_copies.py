"""Tied weights: whoever stores the copies, they come out with the same bits, and are moved once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gradfix
from gradfix.cli import run
from gradfix.errors import IncompatibleCheckpoints
from gradfix.merging.folders import Vector, merge_checkpoints
from gradfix.stream.checkpoint import write_update
from gradfix.vectors.signvotes import SignVotes
from tests.scale.interrupting import content, interrupt
from tests.tiny import _llama_shape, save_tokenizer
from trio import read_folder

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPES = {EMBEDDING: (30, 8), "model.q.weight": (8, 8), "model.q.bias": (8,)}


def save_folder(folder: Path, state: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def tuned_from(base: dict[str, Tensor], seed: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: t + 0.01 * torch.randn(t.shape, generator=generator) for n, t in base.items()}


def tie(state: dict[str, Tensor], wanted: bool = True) -> dict[str, Tensor]:
    """With the copies that some releases store; the head comes first, as in their files."""
    return {HEAD: state[EMBEDDING].clone(), **state} if wanted else state


def votes_on(name: str) -> SignVotes:
    generator = torch.Generator().manual_seed(3)
    named = {name if n == EMBEDDING else n: shape for n, shape in SHAPES.items()}
    return SignVotes({n: torch.randint(-3, 4, s, generator=generator).to(torch.int8) for n, s in named.items()}, 3)


def folders(home: Path, *, base: bool, tuned: bool, target: bool) -> dict[str, Path]:
    """The three checkpoints; each flag says whether the file stores the tied copy."""
    states = {"base": tie(draw(0), base), "tuned": tie(tuned_from(draw(0)), tuned), "target": tie(draw(1), target)}
    return {role: save_folder(home / role, state) for role, state in states.items()}


STORED = {
    "only the target": {"base": False, "tuned": False, "target": True},
    "base and target": {"base": True, "tuned": False, "target": True},
    "tuned and target": {"base": False, "tuned": True, "target": True},
    "all": {"base": True, "tuned": True, "target": True},
}
MASKS = {
    "none": {"mask": "none"},
    "random": {"mask": "random", "seed": 4},
    "votes of the embedding": {"votes": votes_on(EMBEDDING)},
    "votes of the head": {"votes": votes_on(HEAD)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("stored", STORED)
def test_stored_copies_are_moved_alike(tmp_path, stored, mask):
    report = gradfix.transport_checkpoint(**folders(tmp_path, **STORED[stored]), out=tmp_path / "out", **MASKS[mask])
    out = read_folder(tmp_path / "out")
    assert torch.equal(out[HEAD], out[EMBEDDING]) and not torch.equal(out[HEAD], draw(1)[EMBEDDING])
    tied = [entry.get("reason", "") for entry in report.tensors.values()]
    assert sum(reason.startswith("tied to ") for reason in tied) == 1
    assert report.transported == len(SHAPES) + 1 and report.copied == report.skipped == 0
    gradfix.verify(tmp_path / "out")


def test_a_copy_adds_nothing_to_the_figures(tmp_path):
    without = gradfix.transport_checkpoint(
        **folders(tmp_path / "a", base=False, tuned=False, target=False), out=tmp_path / "a" / "out",
        votes=votes_on(EMBEDDING),
    )  # fmt: skip
    copied = gradfix.transport_checkpoint(
        **folders(tmp_path / "b", **STORED["all"]), out=tmp_path / "b" / "out", votes=votes_on(EMBEDDING)
    )
    assert (copied.kept, copied.norm_ratio) == pytest.approx((without.kept, without.norm_ratio))
    one, other = read_folder(tmp_path / "a" / "out"), read_folder(tmp_path / "b" / "out")
    assert all(torch.equal(one[name], other[name]) for name in SHAPES)


@pytest.mark.parametrize("target", [True, False])
@pytest.mark.parametrize("tuned", [True, False])
@pytest.mark.parametrize("base", [True, False])
def test_a_copy_that_some_files_leave_out_is_not_missed(tmp_path, base, tuned, target):
    given = folders(tmp_path, base=base, tuned=tuned, target=target)
    gradfix.transport_checkpoint(**given, out=tmp_path / "out", mask="none")
    assert (HEAD in read_folder(tmp_path / "out")) == target
    tau = gradfix.TaskVector.between(given["base"], given["tuned"])
    assert set(SHAPES) <= set(tau)


def test_an_untied_head_of_the_target_stays(tmp_path):
    given = folders(tmp_path, base=False, tuned=False, target=False)
    own = torch.randn(30, 8)
    given["target"] = save_folder(tmp_path / "untied", {**draw(1), HEAD: own})
    report = gradfix.transport_checkpoint(**given, out=tmp_path / "out", mask="none")
    assert torch.equal(read_folder(tmp_path / "out")[HEAD], own)
    assert report.tensors[HEAD] == {"fate": "copied", "reason": "only in the target"}


def test_a_fine_tune_that_unties_moves_both(tmp_path):
    given = folders(tmp_path, **STORED["all"])
    tuned = tie(tuned_from(draw(0)))
    tuned[HEAD] = tuned[HEAD] + 0.1
    given["tuned"] = save_folder(tmp_path / "untied", tuned)
    gradfix.transport_checkpoint(**given, out=tmp_path / "out", mask="none")
    out = read_folder(tmp_path / "out")
    assert torch.allclose(out[HEAD] - out[EMBEDDING], torch.tensor(0.1), atol=1e-5)


def test_fresh_biases_are_equal_but_not_tied(tmp_path):
    given = folders(tmp_path, base=False, tuned=False, target=False)
    fresh = {**draw(1), "model.q.bias": torch.zeros(8), "pooler.bias": torch.zeros(8)}
    given["target"] = save_folder(tmp_path / "fresh", fresh)
    gradfix.transport_checkpoint(**given, out=tmp_path / "out", mask="none")
    assert not read_folder(tmp_path / "out")["pooler.bias"].any()


def test_an_update_in_memory_reaches_the_copies(tmp_path):
    target = save_folder(tmp_path / "target", tie(draw(1)))
    write_update({EMBEDDING: torch.full((30, 8), 0.5)}, target=target, out=tmp_path / "out", force=True)
    out = read_folder(tmp_path / "out")
    assert torch.equal(out[HEAD], out[EMBEDDING]) and torch.equal(out[EMBEDDING], draw(1)[EMBEDDING] + 0.5)


@pytest.mark.parametrize("limit", [1, 1000, 1500])
def test_an_interrupted_run_gives_the_same_copies(tmp_path, limit):
    given = {**folders(tmp_path, **STORED["only the target"]), "mask": "random", "seed": 4}
    gradfix.transport_checkpoint(**given, out=tmp_path / "whole")
    out = tmp_path / "out"
    interrupt(lambda progress: gradfix.transport_checkpoint(**given, out=out, progress=progress), limit, "SIGINT")
    gradfix.transport_checkpoint(**given, out=out)
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("stored", [(False, False), (True, True), (False, True), (True, False)])
@pytest.mark.parametrize("method", ["mean", "dare_linear"])
def test_a_merge_moves_copies_alike(tmp_path, stored, method):
    options = {"density": 0.5, "seed": 3} if method == "dare_linear" else {}
    vectors = [
        Vector(
            save_folder(tmp_path / f"base{i}", tie(draw(0), copies)),
            save_folder(tmp_path / f"tuned{i}", tie(tuned_from(draw(0), i), copies)),
        )
        for i, copies in enumerate(stored)
    ]
    target = save_folder(tmp_path / "target", tie(draw(1)))
    report = merge_checkpoints(target=target, vectors=vectors, out=tmp_path / "out", method=method, **options)
    out = read_folder(tmp_path / "out")
    assert torch.equal(out[HEAD], out[EMBEDDING]) and not torch.equal(out[HEAD], draw(1)[EMBEDDING])
    assert report.transported == len(SHAPES) + 1


def test_an_interrupted_merge_gives_the_same_copies(tmp_path):
    base = save_folder(tmp_path / "base", draw(0))
    vectors = [Vector(base, save_folder(tmp_path / f"t{i}", tuned_from(draw(0), i))) for i in range(2)]
    given = {"target": save_folder(tmp_path / "target", tie(draw(1))), "vectors": vectors}
    given |= {"method": "dare_linear", "density": 0.5, "seed": 3}
    merge_checkpoints(**given, out=tmp_path / "whole")
    out = tmp_path / "out"
    interrupt(lambda progress: merge_checkpoints(**given, out=out, progress=progress), 1500, "SIGINT")
    merge_checkpoints(**given, out=out)
    assert content(out) == content(tmp_path / "whole")


def _llama(folder: Path, seed: int, shift: float = 0.0, *, copies: bool = False) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**_llama_shape(), tie_word_embeddings=True))
    with torch.no_grad():
        model.model.embed_tokens.weight += shift
    model.save_pretrained(folder)
    save_tokenizer(folder, "<s>", "", chat=True)
    if copies:
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("way", [["--mask", "none"], ["--mask", "none", "--align", "rebasin"]])
def test_the_output_of_the_command_loads_tied(tmp_path, way):
    from transformers import AutoModelForCausalLM

    base, tuned = _llama(tmp_path / "base", 0), _llama(tmp_path / "tuned", 0, 0.01)
    target = _llama(tmp_path / "target", 1, copies=True)
    (tmp_path / "data").mkdir()
    rows = [("good film", "positive"), ("bad film", "negative")]
    text = "\n".join(json.dumps({"text": text, "label": label}) for text, label in rows)
    (tmp_path / "data" / "train.jsonl").write_text(text)
    words = ["transport", "--base", base, "--tuned", tuned, "--target", target, "--data", tmp_path / "data"]
    words += ["--task", "causal", "--shots", 1, "--alpha", 1, "--no-check", "--out", tmp_path / "out", *way]
    assert run([*map(str, words), "--quiet"]) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (target, tmp_path / "out"))
    assert after.lm_head.weight is after.model.embed_tokens.weight
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def moved_by(model: Tied, update: dict[str, Tensor]) -> list[Tensor]:
    """What `apply` and the dial of `search_scale` make of an update."""
    start, seen = model.embed.weight.detach().clone(), []
    gradfix.search_scale(model, update, lambda m: seen.append(m.embed.weight.detach() - start) or 1.0, [1.0])
    gradfix.apply(model, update, 1.0)
    return [seen[-1], model.embed.weight.detach() - start]


@pytest.mark.parametrize("head", ["equal", "zero"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_tied_weight_is_moved_once(head, turned):
    step = torch.full((4, 3), 0.25)
    deltas = {"embed.weight": step, "head.weight": step.clone() if head == "equal" else torch.zeros(4, 3)}
    update = dict(reversed(deltas.items())) if turned else deltas
    model = Tied()
    with torch.no_grad():
        model.embed.weight.zero_()
    assert all(torch.equal(moved, step) for moved in moved_by(model, update))


def test_two_changes_of_one_tied_weight_are_refused():
    update = {"embed.weight": torch.ones(4, 3), "head.weight": 2 * torch.ones(4, 3)}
    for use in (gradfix.apply, lambda model, update: gradfix.search_scale(model, update, lambda _: 1.0)):
        with pytest.raises(IncompatibleCheckpoints, match="one tied weight .* changes them differently"):
            use(Tied(), update)
