"""mergekit's files: the whole grammar is read or refused by name, and every method does what it is defined to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradfix.checkpoints.matched import read_vocabulary
from gradfix.commands.configs import MergeConfigOptions
from gradfix.commands.merge import run_merge_command
from gradfix.errors import GradfixError, IncompatibleCheckpoints, UsageError
from gradfix.merging.dialect import METHODS
from gradfix.merging.foreign import Job, mergekit_documents, run_document
from tests.mergekit_cases import CASES, FOLDERS, tokens, written

DEPTH, WIDTH = 3, 6
SHAPES = {
    "model.embed_tokens.weight": (10, WIDTH),
    **{f"model.layers.{i}.self_attn.q_proj.weight": (WIDTH, WIDTH) for i in range(DEPTH)},
    **{f"model.layers.{i}.mlp.up_proj.weight": (8, WIDTH) for i in range(DEPTH)},
    **{f"model.layers.{i}.input_layernorm.weight": (WIDTH,) for i in range(DEPTH)},
    "model.norm.weight": (WIDTH,),
    "lm_head.weight": (10, WIDTH),
}
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    base = _noise(0, 0.3, {})
    for seed, name in enumerate(("base", "a", "b", "c")):
        folder = home / name
        folder.mkdir()
        save_file(base if name == "base" else _noise(seed, 0.05, base), folder / "model.safetensors", {"format": "pt"})
        config = {"num_hidden_layers": DEPTH, "vocab_size": 10, "dtype": "float32", "layer_types": ["x", "y", "z"]}
        (folder / "config.json").write_text(json.dumps(config))
    return home


def _noise(seed: int, size: float, around: Weights) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {n: around.get(n, torch.zeros(())) + size * torch.randn(s, generator=generator) for n, s in SHAPES.items()}


def put(content: Any, home: Path) -> Any:
    if isinstance(content, dict):
        return {key: put(value, home) for key, value in content.items()}
    if isinstance(content, list):
        return [put(value, home) for value in content]
    return str(home / content) if content in ("base", "a", "b", "c") else content


def merged(tmp_path: Path, home: Path, content: dict[str, Any], **options: Any) -> Weights:
    path = tmp_path / "merge.yml"
    path.write_text(yaml.safe_dump(put(content, home)))
    run_merge_command(MergeConfigOptions(from_mergekit=str(path), out=str(tmp_path / "out"), overwrite=True, **options))
    return load_file(tmp_path / "out" / "model.safetensors")


def weights(home: Path, name: str) -> Weights:
    return {n: t.double() for n, t in load_file(home / name / "model.safetensors").items()}


def of(method: str, models: str = "ab", base: str | None = "base", **parameters: Any) -> dict[str, Any]:
    listed = [{"model": model, "parameters": {"weight": w}} for model, w in zip(models, (0.6, 0.4, 0.5), strict=False)]
    return {
        "merge_method": method,
        "models": listed,
        "parameters": parameters,
        **({"base_model": base} if base else {}),
    }


def top(row: Tensor, count: int) -> Tensor:
    kept = torch.zeros_like(row.flatten())
    kept[row.flatten().abs().argsort(descending=True)[:count]] = 1
    return row * kept.view_as(row)


def elect(parts: list[Tensor], shares: list[float], normalize: bool = True) -> Tensor:
    stacked = torch.stack([part * share for part, share in zip(parts, shares, strict=True)])
    sign = torch.where(stacked.sum(0) >= 0, 1.0, -1.0)
    agreeing = stacked.sign() == sign
    by = torch.stack([share * one for share, one in zip(shares, agreeing.double(), strict=True)]).sum(0)
    total = (stacked * agreeing).sum(0)
    return total / torch.where(by == 0, 1.0, by) if normalize else total


def arc(t: float, one: Tensor, other: Tensor) -> Tensor:
    angle = torch.acos(
        (one * other).sum(-1, keepdim=True) / (one.norm(dim=-1, keepdim=True) * other.norm(dim=-1, keepdim=True))
    )
    return (torch.sin((1 - t) * angle) * one + torch.sin(t * angle) * other) / torch.sin(angle)


def stock(parts: list[Tensor]) -> Tensor:
    cosine = torch.nn.functional.cosine_similarity(parts[0], parts[1], dim=-1).unsqueeze(-1)
    return 2 * cosine / (1 + cosine) * (parts[0] + parts[1]) / 2


def fused(base: Tensor, other: Tensor) -> Tensor:
    base, other = base.float(), other.float()
    p, q = other.softmax(-1) + 1e-8, base.softmax(-1) + 1e-8
    score = (other - base).abs() * (p * (p / q).log()).sum(-1, keepdim=True)
    low, mid, high = (score.flatten().sort().values[int(q * (score.numel() - 1))] for q in (0.25, 0.5, 0.75))
    return torch.where(score >= mid + 1.5 * (high - low), other, base).double()


ORACLES: dict[str, tuple[dict[str, Any], Any]] = {
    "linear": (of("linear", base=None), lambda w, a, b: 0.6 * a + 0.4 * b),
    "linear not normalised": (of("linear", base=None, normalize="no"), lambda w, a, b: 0.6 * a + 0.4 * b),
    "task_arithmetic": (of("task_arithmetic", **{"lambda": -2}), lambda w, a, b: w - 2 * (0.6 * (a - w) + 0.4 * (b - w))),
    "ties": (of("ties", density=0.4), lambda w, a, b: w + elect([top(x - w, int(0.4 * w.numel())) for x in (a, b)], [0.6, 0.4])),
    "ties rescaled": (of("ties", density=0.4, rescale=True), lambda w, a, b: w + elect(
        [(k := top(x - w, int(0.4 * w.numel()))) * (x - w).abs().sum() / k.abs().sum() for x in (a, b)], [0.6, 0.4])),
    "ties quoted": (of("ties", density=0.4, normalize="false"), lambda w, a, b: w + elect(
        [top(x - w, int(0.4 * w.numel())) for x in (a, b)], [0.6, 0.4], False)),
    "breadcrumbs": (of("breadcrumbs", density=0.5, gamma=0.2), lambda w, a, b: w + sum(
        s * (top(x - w, int(0.2 * w.numel()) + int(0.5 * w.numel())) - top(x - w, int(0.2 * w.numel())))
        for x, s in ((a, 0.6), (b, 0.4)))),
    "slerp": (of("slerp", base="a", t=0.3), lambda w, a, b: arc(0.3, a.flatten(), b.flatten()).view_as(a)),
    "nuslerp": (of("nuslerp"), lambda w, a, b: w + arc(0.4, (a - w).flatten(), (b - w).flatten()).view_as(a)),
    "nuslerp rows": (of("nuslerp", nuslerp_flatten=False), lambda w, a, b: w + arc(0.4, a - w, b - w)),
    "nuslerp columns": (of("nuslerp", nuslerp_flatten=False, nuslerp_row_wise=True),
                        lambda w, a, b: w + arc(0.4, (a - w).t(), (b - w).t()).t()),
    "model_stock": (of("model_stock"), lambda w, a, b: w + stock([(a - w).flatten(), (b - w).flatten()]).view_as(a)),
    "model_stock filter_wise": (of("model_stock", filter_wise=True), lambda w, a, b: w + stock([a - w, b - w])),
    "nearswap": (of("nearswap", models="ab", base="a", t=0.01),
                 lambda w, a, b: a + (b - a) * (0.01 / (b - a).abs()).clamp(max=1)),
    "arcee_fusion": (of("arcee_fusion", models="ab", base="a"), lambda w, a, b: fused(a, b)),
    "ram": (of("ram", epsilon=0.03), lambda w, a, b: w + sum(
        d * (d.abs() > 0.03) / ((a - w).abs() > 0.03).double().add(((b - w).abs() > 0.03).double()).clamp(min=1)
        for d in (a - w, b - w))),
    "passthrough": (of("passthrough", models="b", base=None, scale={"filter": "up_proj", "value": 2}), None),
}  # fmt: skip


@pytest.mark.parametrize("label", ORACLES)
def test_a_method_does_what_it_is_defined_to_do(label: str, tmp_path: Path, home: Path) -> None:
    content, oracle = ORACLES[label]
    found = merged(tmp_path, home, content)
    base, a, b = (weights(home, name) for name in ("base", "a", "b"))
    assert set(found) == set(SHAPES)
    for name, tensor in found.items():
        if oracle is None:
            expected = b[name] * (2 if "up_proj" in name else 1)
        else:
            expected = oracle(base[name], a[name], b[name])
        assert torch.allclose(tensor.double(), expected, rtol=0, atol=2e-6), name


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_is_exercised(method: str) -> None:
    assert any(case.content["merge_method"] == method for case in CASES)


@pytest.mark.parametrize("method", [m for m in sorted(METHODS) if METHODS[m].random])
def test_chance_keeps_the_density_and_the_l1_norm(method: str, tmp_path: Path, home: Path) -> None:
    content = of(method, models="a", density=0.5, normalize=False, **({"epsilon": 0.2} if "della" in method else {}))
    content["models"][0]["parameters"]["weight"] = 1.0
    found, base, a = merged(tmp_path, home, content), weights(home, "base"), weights(home, "a")
    shares = []
    for name, tensor in found.items():
        before, after = a[name] - base[name], tensor.double() - base[name]
        assert float(after.abs().sum()) == pytest.approx(float(before.abs().sum()), rel=1e-4)
        shares.append((after.abs() > 1e-6).double().mean() * tensor.numel())
    assert float(sum(shares)) / sum(t.numel() for t in found.values()) == pytest.approx(0.5, abs=0.06)
    assert all(torch.equal(t, merged(tmp_path, home, content)[n]) for n, t in found.items())


def test_parameters_vary_by_layer_by_filter_and_by_level(tmp_path: Path, home: Path) -> None:
    content = of("linear", models="ab", base=None, normalize=False)
    content["models"][0]["parameters"]["weight"] = [
        {"filter": "mlp", "value": [0, 1]},
        {"filter": "*", "value": "1e-1"},
    ]
    content["models"][1]["parameters"] = {}
    content["parameters"]["weight"] = {"filter": "self_attn", "value": 3}
    with pytest.raises(UsageError, match="has no weight for"):
        merged(tmp_path, home, content)
    content["parameters"]["weight"] = [content["parameters"]["weight"], {"value": 2}]
    found, a, b = merged(tmp_path, home, content), weights(home, "a"), weights(home, "b")
    for name, tensor in found.items():
        layer = int(name.split(".")[2]) if "layers" in name else 0
        own = layer / (DEPTH - 1) if "mlp" in name else 0.1
        expected = own * a[name] + (3 if "self_attn" in name else 2) * b[name]
        assert torch.allclose(tensor.double(), expected, atol=1e-6), name


def test_slices_stack_layers_and_the_config_follows(tmp_path: Path, home: Path) -> None:
    parts = [("a", [0, 2], 1.0), ("b", [1, 3], 0.5)]
    content = {"merge_method": "passthrough", "dtype": "bfloat16", "slices": [
        {"sources": [{"model": model, "layer_range": layers, "parameters": {"scale": scale}}]}
        for model, layers, scale in parts]}  # fmt: skip
    found, a, b = merged(tmp_path, home, content), weights(home, "a"), weights(home, "b")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["layer_types"]) == (4, ["x", "y", "y", "z"])
    assert config["dtype"] == "bfloat16"
    here = "model.layers.{}.mlp.up_proj.weight".format
    for layer, (source, scale) in enumerate([(a[here(0)], 1), (a[here(1)], 1), (b[here(1)], 0.5), (b[here(2)], 0.5)]):
        assert torch.equal(found[here(layer)], (source.bfloat16() * scale))
    assert torch.equal(found["model.embed_tokens.weight"], a["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(found["lm_head.weight"], (b["lm_head.weight"].bfloat16() * 0.5))


def test_a_scale_of_zero_is_no_fault(tmp_path: Path, home: Path) -> None:
    models = [{"model": "a", "parameters": {"scale": [{"filter": "q_proj", "value": 0}, {"value": 1}]}}]
    found = merged(tmp_path, home, {"merge_method": "passthrough", "models": models})
    assert all(bool(tensor.any()) == ("q_proj" not in name) for name, tensor in found.items())


def test_tensors_that_no_rule_changes_are_copied(tmp_path: Path, home: Path) -> None:
    found = merged(tmp_path, home, {"merge_method": "passthrough", "models": [{"model": "a"}]})
    assert all(torch.equal(tensor, weights(home, "a")[name].float()) for name, tensor in found.items())
    manifest = json.loads((tmp_path / "out" / "gradfix.json").read_text())
    assert {entry["reason"] for entry in manifest["tensors"].values()} == {f"taken as it is from {home / 'a'}"}


def test_several_documents_are_made_of_each_other(tmp_path: Path, home: Path) -> None:
    last = {
        "merge_method": "linear",
        "models": [{"model": name, "parameters": {"weight": 1}} for name in ("half", "base")],
    }
    first = {"name": "half", **of("linear", base=None)}
    path = tmp_path / "several.yml"
    path.write_text(
        "---\n".join(yaml.safe_dump(put(one, home)) for one in (last, first)).replace(str(home / "half"), "half")
    )
    run_merge_command(MergeConfigOptions(from_mergekit=str(path), out=str(tmp_path / "out")))
    found = load_file(tmp_path / "out" / "model.safetensors")
    base, a, b = (weights(home, name) for name in ("base", "a", "b"))
    for name, tensor in found.items():
        assert torch.allclose(tensor.double(), (0.6 * a[name] + 0.4 * b[name] + base[name]) / 2, atol=1e-6)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "several.yml"]


@pytest.mark.parametrize("method", ["ties", "slerp", "linear"])
def test_another_target_takes_what_the_merge_changes_in_its_base(method: str, tmp_path: Path, home: Path) -> None:
    content = {"ties": of("ties", density=0.4), "slerp": of("slerp", base="a", t=0.3)}.get(method)
    content = content or of("linear", models="ab", base="base", weight=0)
    here, there = merged(tmp_path, home, content), merged(tmp_path, home, content, target=str(home / "c"))
    base, target = weights(home, {"slerp": "a"}.get(method, "base")), weights(home, "c")
    for name, tensor in there.items():
        assert torch.allclose(tensor.double(), target[name] + here[name].double() - base[name], atol=1e-6), name


def test_a_target_needs_a_base(tmp_path: Path, home: Path) -> None:
    with pytest.raises(UsageError, match="without a base_model there is no change"):
        merged(tmp_path, home, of("linear", base=None), target=str(home / "c"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": (of("tise"), "no merge_method called 'tise'.*Did you mean 'ties'"),
    "key": ({**of("ties"), "dtpye": "float16"}, "no key called 'dtpye'.*Did you mean 'dtype'"),
    "parameter": (of("ties", densty=0.4), "no parameter called 'densty'.*'density'"),
    "flag": (of("ties", normalize="maybe"), "normalize: expected true or false, got 'maybe'"),
    "number": (of("ties", density="much"), "density: expected a number, got 'much'"),
    "inside a filter": (of("ties", density=[{"filter": "mlp", "value": "much"}]), "density: expected a number"),
    "filter key": (of("ties", density=[{"fliter": "mlp", "value": 1}]), "no key called 'fliter'"),
    "dtype": ({**of("ties"), "dtype": "int8"}, "no dtype called 'int8'"),
    "base": (of("ties", base=None), "ties needs a base_model"),
    "count": (of("slerp", models="abc", base="a", t=0.5), "slerp takes 1 models beside the base_model, got 2"),
    "both": ({**of("ties"), "slices": [1]}, "exactly one of models, slices and modules"),
    "twice": (of("linear", models="aa", base=None), "is an input twice"),
    "range": ({"merge_method": "passthrough", "slices": [{"sources": [{"model": "a", "layer_range": [2, 1]}]}]},
              r"layer_range must be \[first, end\]"),
    "layers": ({"merge_method": "passthrough", "slices": [{"sources": [{"model": "a", "layer_range": [0, 9]}]}]},
               "has no layer 3"),
    "architecture": ({**of("ties"), "base_model": {"model": {"path": "base"}, "override_architecture": "X"}},
                     "override_architecture has no counterpart"),
    "tokenizer": ({**of("ties"), "tokenizer": {"sorce": "union"}}, "no key called 'sorce'"),
    "tokenizers": ({**of("ties"), "tokenizer": {}, "tokenizer_source": "base"}, "not both"),
    "template": ({**of("linear", base=None), "chat_template": "chatlm"}, "no chat_template called 'chatlm'.*'chatml'"),
    "epsilon": (of("della", density=0.9, epsilon=0.3), "epsilon must lie between 0 and 1"),
}  # fmt: skip


@pytest.mark.parametrize("label", REFUSED)
def test_what_is_not_understood_is_refused_by_name(label: str, tmp_path: Path, home: Path) -> None:
    content, words = REFUSED[label]
    with pytest.raises(GradfixError, match=words) as caught:
        merged(tmp_path, home, content)
    assert "\n" not in str(caught.value)


def test_documents_that_need_each_other_are_refused(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "round.yml"
    one = {"name": "one", "merge_method": "passthrough", "models": [{"model": "two"}]}
    path.write_text(yaml.safe_dump_all([one, {**one, "name": "two", "models": [{"model": "one"}]}]))
    with pytest.raises(UsageError, match="one, two are made of each other"):
        mergekit_documents(path)
    path.write_text(yaml.safe_dump_all([one, one]))
    with pytest.raises(UsageError, match="two documents are 'one'"):
        mergekit_documents(path)


def test_what_means_nothing_to_a_method_is_said(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "merge.yml"
    path.write_text(yaml.safe_dump(put(of("sce"), home)))
    (document,) = mergekit_documents(path)
    assert Job(document).notes == ["the parameter weight means nothing to sce (in mergekit neither)"]


def test_tables_of_other_heights_want_a_tokenizer(tmp_path: Path, home: Path) -> None:
    wide = tmp_path / "wide"
    wide.mkdir()
    tensors = load_file(home / "a" / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(12, WIDTH)
    save_file(tensors, wide / "model.safetensors")
    path = tmp_path / "merge.yml"
    path.write_text(yaml.safe_dump(put({"merge_method": "linear", "parameters": {"weight": 1},
                                        "models": [{"model": "b"}, {"model": str(wide)}]}, home)))  # fmt: skip
    with pytest.raises(IncompatibleCheckpoints, match=r"tokenizer: \{source: union\}"):
        Job(*mergekit_documents(path))


def test_an_interrupted_merge_goes_on_with_the_same_bits(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "merge.yml"
    path.write_text(yaml.safe_dump(put(of("dare_ties", density=0.5), home)))
    seen = 0

    def stop(count: int) -> None:
        nonlocal seen
        seen += count
        if seen > 600:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_document(Job(*mergekit_documents(path)), tmp_path / "out", progress=stop)
    heard: list[int] = []
    run_document(Job(*mergekit_documents(path)), tmp_path / "out", progress=heard.append)
    assert heard[0] > 0
    run_document(Job(*mergekit_documents(path)), tmp_path / "whole")
    one, other = (tmp_path / name / "model.safetensors" for name in ("out", "whole"))
    assert one.read_bytes() == other.read_bytes()


def test_a_union_of_tokenizers_matches_rows_by_token(tmp_path: Path) -> None:
    names = ["tok_base", "tok_chatml"]
    for seed, name in enumerate(names):
        FOLDERS[name](tmp_path / name, seed)
    content = tokens(names, tokenizer={"source": "union", "pad_to_multiple_of": 8}, chat_template="chatml")
    path = tmp_path / "merge.yml"
    path.write_text(yaml.safe_dump(written(content, tmp_path)))
    run_document(Job(*mergekit_documents(path)), tmp_path / "out")
    table, own = (
        load_file(tmp_path / n / "model.safetensors")["model.embed_tokens.weight"] for n in ("out", "tok_chatml")
    )
    base = load_file(tmp_path / "tok_base" / "model.safetensors")["model.embed_tokens.weight"]
    rows, old = read_vocabulary(tmp_path / "out"), read_vocabulary(tmp_path / "tok_chatml")
    assert rows is not None and old is not None and len(rows) == 66
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == len(table) == 72
    assert torch.equal(table[rows["<|im_end|>"]], own[old["<|im_end|>"]])  # only one model has it
    assert torch.allclose(table[rows["_tok_9"]], (base[9] + own[9]) / 2)
    assert torch.allclose(table[66:], table[:66].mean(0).expand(6, -1), atol=1e-6)
    assert "<|im_start|>" in (tmp_path / "out" / "chat_template.jinja").read_text()
