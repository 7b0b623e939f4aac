"""A LoRA folder as the fine-tune: the same weights as peft's own merge, or a refusal with a reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import load, train_adapter
from gradfix.checkpoints.lora import flat_product, open_adapter
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.trio import Trio
from gradfix.errors import CorruptInput, GradfixError, IncompatibleCheckpoints, UnsafeResult, UsageError
from gradfix.stream.checkpoint import transport_checkpoint
from gradfix.tasks.loading import load_pretrained, locate
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector
from tiny import _llama_shape, save_tiny

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("llama", "CausalLM", {"target_modules": ["q_proj", "v_proj"]}),
    "all layers": ("llama", "CausalLM", {"target_modules": "all-linear"}),
    "rslora": ("llama", "CausalLM", {"target_modules": ["q_proj"], "use_rslora": True, "lora_alpha": 32}),
    "patterns": (
        "llama",
        "CausalLM",
        {
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 3},
        },
    ),
    "some layers": (
        "llama",
        "CausalLM",
        {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    ),
    "saved modules": ("llama", "CausalLM", {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]}),
    "embedding": ("llama", "CausalLM", {"target_modules": ["embed_tokens", "o_proj"]}),
    "head": ("llama", "CausalLM", {"target_modules": ["lm_head"]}),
    "conv1d": ("gpt2", "CausalLM", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "conv1d, flag unset": ("gpt2", "CausalLM", {"target_modules": ["c_proj"]}),
    "bert": ("bert", "", {"target_modules": ["query", "dense"]}),
    "bert head": ("bert_classifier", "SequenceClassification", {"target_modules": ["value"], "task_type": "SEQ_CLS"}),
    "bert biases": ("bert", "", {"target_modules": ["query"], "bias": "all"}),
    "bert own biases": ("bert", "", {"target_modules": ["query"], "bias": "lora_only"}),
    "trained bias": ("bert", "", {"target_modules": ["query", "value"], "lora_bias": True}),
    "renamed": ("vit", "ImageClassification", {"target_modules": ["q_proj", "fc1"], "modules_to_save": ["classifier"]}),
    "convolution": ("vit", "ImageClassification", {"target_modules": ["projection"]}),
    "t5": ("t5", "Seq2SeqLM", {"target_modules": ["q", "wi_0"]}),
    "clip": ("clip", "", {"target_modules": ["q_proj", "visual_projection"]}),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("bases")

    def get(family: str) -> Path:
        if not (root / family).exists():
            save_tiny(family, root / family)
        return root / family

    return get


@pytest.fixture
def adapter(bases: Callable[[str], Path], tmp_path: Path) -> Path:
    train_adapter(load(bases("llama"), "CausalLM"), tmp_path / "lora", target_modules=["q_proj"])
    return tmp_path / "lora"


@pytest.mark.parametrize("case", CASES)
def test_equals_the_merge_of_peft(bases: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    family, kind, options = CASES[case]
    folder = bases(family)
    merged = train_adapter(load(folder, kind), tmp_path / "lora", **options)
    base = open_checkpoint(folder)
    names = name_map(merged, base.names())
    expected = names.to_disk({name: p.detach() for name, p in merged.named_parameters()})
    seen = open_checkpoint(tmp_path / "lora", base=base)
    assert set(seen.names()) == set(base.names())
    moved = 0
    for name, tensor in expected.items():
        torch.testing.assert_close(seen.read(name), tensor, rtol=0, atol=1e-6)
        assert seen.info(name).shape == tuple(tensor.shape)
        moved += not torch.equal(tensor, base.read(name))
    assert moved
    tau = TaskVector.between(folder, tmp_path / "lora")
    assert set(tau) == set(base.names())
    for name, tensor in expected.items():
        torch.testing.assert_close(tau[name], tensor - base.read(name), rtol=0, atol=1e-6)


def test_bf16_updates_are_not_rounded_to_the_base(bases: Callable[[str], Path], tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "base", dtype=torch.bfloat16)
    train_adapter(load(folder, "CausalLM", torch.bfloat16), tmp_path / "lora", target_modules=["q_proj"])
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj."
    delta = 2 * stored[key + "lora_B.weight"].float() @ stored[key + "lora_A.weight"].float()
    seen = open_checkpoint(tmp_path / "lora", base=folder)
    assert seen.info(name).dtype is torch.float32
    torch.testing.assert_close(seen.read(name) - open_checkpoint(folder).read(name).float(), delta, rtol=0, atol=1e-6)
    assert seen.info("model.norm.weight").dtype is torch.bfloat16


@pytest.mark.parametrize("elements", [1, 7, 64, 10_000])
def test_pieces_join_to_the_whole(bases: Callable[[str], Path], adapter: Path, elements: int) -> None:
    seen = open_checkpoint(adapter, base=bases("llama"))
    name = "model.layers.1.self_attn.q_proj.weight"
    joined = torch.cat(list(seen.chunks(name, elements)))
    torch.testing.assert_close(joined.view(32, 32), seen.read(name), rtol=0, atol=1e-7)
    assert max(piece.numel() for piece in seen.chunks(name, elements)) <= elements


def test_a_slice_of_a_product_is_the_product_sliced() -> None:
    left, right = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    whole = (left @ right).reshape(-1)
    for first in range(35):
        for count in (1, 2, 9, 35 - first):
            piece = flat_product(left, right, first, min(count, 35 - first))
            torch.testing.assert_close(piece, whole[first : first + count], rtol=0, atol=1e-12)


def test_a_pickled_adapter_is_read(bases: Callable[[str], Path], adapter: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    before = open_checkpoint(adapter, base=bases("llama")).read(name)
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    assert torch.equal(open_checkpoint(adapter, base=bases("llama")).read(name), before)


def test_an_adapter_over_a_headless_model_finds_its_layers(bases: Callable[[str], Path], tmp_path: Path) -> None:
    train_adapter(load(bases("llama"), ""), tmp_path / "lora", target_modules=["q_proj"])
    seen = open_checkpoint(tmp_path / "lora", base=bases("llama"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(seen.read(name), open_checkpoint(bases("llama")).read(name))


def test_a_new_head_is_an_extra_tensor(bases: Callable[[str], Path], tmp_path: Path) -> None:
    from gradfix.checkpoints.trio import Trio

    model = load(bases("bert"), "SequenceClassification")
    train_adapter(model, tmp_path / "lora", target_modules=["query"], task_type="SEQ_CLS")
    base = open_checkpoint(bases("bert"))
    seen = open_checkpoint(tmp_path / "lora", base=base)
    assert set(seen.names()) - set(base.names()) == {"classifier.weight", "classifier.bias"}
    with pytest.raises(IncompatibleCheckpoints, match="--head copy"):
        Trio.open(base, seen, base)
    assert set(Trio.open(base, seen, base, head="copy").heads) == {"classifier.weight", "classifier.bias"}


def rewrite(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        kind: ({"peft_type": kind}, f"is a {kind} adapter; gradfix reads plain LoRA. Merge it in peft")
        for kind in ("LOHA", "LOKR", "IA3", "ADALORA", "PROMPT_TUNING", "PREFIX_TUNING", "OFT", "VERA", "BOFT")
    },
    "dora": ({"use_dora": True}, "uses DoRA, which is more than base"),
    "qalora": ({"use_qalora": True}, "uses QALoRA"),
    "alora": ({"alora_invocation_tokens": [1]}, "uses activated LoRA"),
    "experts": ({"target_parameters": ["experts.down_proj"]}, "uses target_parameters"),
    "tokens": ({"trainable_token_indices": [3]}, "uses trainable tokens"),
    "replication": ({"layer_replication": [[0, 2]]}, "uses layer replication"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', which changes the base's own weights"),
    "olora": ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_other_adapters_are_refused_by_name(bases: Callable[[str], Path], adapter: Path, case: str) -> None:
    changes, message = REFUSALS[case]
    rewrite(adapter, **changes)
    with pytest.raises(UsageError, match=message):
        open_checkpoint(adapter, base=bases("llama"))


def test_dora_is_refused_by_its_tensors_too(bases: Callable[[str], Path], tmp_path: Path) -> None:
    train_adapter(load(bases("llama"), "CausalLM"), tmp_path, target_modules=["q_proj"], use_dora=True)
    rewrite(tmp_path, use_dora=False)
    with pytest.raises(UsageError, match=r"lora_magnitude_vector.*: DoRA"):
        open_checkpoint(tmp_path, base=bases("llama"))


def edit(adapter: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, adapter / "adapter_model.safetensors")


KEY = "base_model.model.model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop(KEY + "lora_B.weight"), CorruptInput, "half of a pair"),
        (
            lambda t: t.update({KEY + "lora_C.weight": torch.ones(2)}),
            CorruptInput,
            "'base_model.*lora_C.weight' is of no",
        ),
        (lambda t: t.update({KEY + "hada_w1_a": torch.ones(2)}), CorruptInput, "it would be lost"),
        (lambda t: t.update({"stray": torch.ones(2)}), CorruptInput, "'stray' is of no kind that gradfix knows"),
        (lambda t: t.update({KEY + "lora_A.bias": torch.ones(2)}), CorruptInput, "cannot make sense of .*lora_A.bias"),
        (lambda t: t.update({KEY + "lora_B.bias": torch.ones(32)}), IncompatibleCheckpoints, "trains a bias for"),
        (lambda t: t.update({KEY + "lora_B.weight": torch.ones(32, 3)}), CorruptInput, "do not fit each other"),
        (
            lambda t: t.update({KEY + "lora_B.weight": torch.ones(32, 3), KEY + "lora_A.weight": torch.ones(3, 32)}),
            CorruptInput,
            "has rank 3, its config says 4",
        ),
        (
            lambda t: t.update({KEY + "lora_B.weight": torch.ones(48, 4)}),
            IncompatibleCheckpoints,
            "adapts a 48 x 32 matrix, but 'model.layers.0.self_attn.q_proj.weight' .* Is --base the model",
        ),
        (
            lambda t: t.update({k.replace("q_proj", "zz"): t.pop(k) for k in list(t)}),
            IncompatibleCheckpoints,
            "adapts layer 'model.layers.0.self_attn.zz', which .* does not have",
        ),
        (lambda t: t.clear(), CorruptInput, "no tensors"),
    ],
)
def test_every_key_is_used_or_named(
    bases: Callable[[str], Path], adapter: Path, change: Any, error: type[GradfixError], message: str
) -> None:
    edit(adapter, change)
    with pytest.raises(error, match=message):
        open_checkpoint(adapter, base=bases("llama"))


def test_damaged_configs_are_named(bases: Callable[[str], Path], adapter: Path) -> None:
    for text in ("{", "[]", '{"peft_type": "LORA", "r": "x", "lora_alpha": 1}', '{"r": 4}'):
        (adapter / "adapter_config.json").write_text(text)
        with pytest.raises(CorruptInput, match="is not a readable adapter config"):
            open_checkpoint(adapter, base=bases("llama"))


@pytest.mark.parametrize("pattern", [{"(": 3}, {"(a+)+": 3}, {"q_proj": "many"}, {"q_proj": None}])
def test_a_bad_pattern_is_named(bases: Callable[[str], Path], adapter: Path, pattern: dict[str, Any]) -> None:
    rewrite(adapter, alpha_pattern=pattern)
    with pytest.raises(CorruptInput, match="alpha_pattern of the adapter config holds '"):
        open_checkpoint(adapter, base=bases("llama"))


def test_missing_weights_and_base_are_named(bases: Callable[[str], Path], adapter: Path) -> None:
    with pytest.raises(UsageError, match="is a LoRA adapter: it needs the base"):
        open_checkpoint(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CorruptInput, match="no weights: expected adapter_model.safetensors"):
        open_checkpoint(adapter, base=bases("llama"))


def test_an_untrained_adapter_is_a_zero_task_vector(bases: Callable[[str], Path], adapter: Path) -> None:
    edit(adapter, lambda t: t.update({k: torch.zeros_like(v) for k, v in t.items()}))
    with pytest.raises(UnsafeResult, match="the task vector is zero"):
        TaskVector.between(bases("llama"), adapter)


def test_the_wrong_base_is_found_by_its_values(bases: Callable[[str], Path], adapter: Path, tmp_path: Path) -> None:
    other = save_tiny("llama", tmp_path / "other", seed=5)
    with pytest.raises(IncompatibleCheckpoints, match=r"was trained on .*llama, and tensor .* holds other values"):
        open_checkpoint(adapter, base=other)
    copy = shutil.copytree(bases("llama"), tmp_path / "copy")
    assert open_checkpoint(adapter, base=copy).notes == ()


def test_a_base_that_cannot_be_checked_is_noted(bases: Callable[[str], Path], adapter: Path) -> None:
    rewrite(adapter, base_model_name_or_path="someone/some-model")
    (note,) = open_checkpoint(adapter, base=bases("llama")).notes
    assert "was trained on 'someone/some-model'; that" in note
    rewrite(adapter, base_model_name_or_path=None)
    (note,) = open_checkpoint(adapter, base=bases("llama")).notes
    assert "does not say which base" in note


def test_a_name_that_fits_two_layers_is_an_error(tmp_path: Path, adapter: Path) -> None:
    weights = {f"{tower}.layers.0.self_attn.q_proj.weight": torch.ones(32, 32) for tower in ("a", "b")}
    edit(adapter, lambda t: [t.pop(k) for k in list(t) if "layers.1" in k])
    edit(adapter, lambda t: t.update({k.replace("model.model.model.", "model.model."): t.pop(k) for k in list(t)}))
    with pytest.raises(IncompatibleCheckpoints, match=r"could be 'a\.layers.* or 'b\.layers"):
        open_adapter(adapter, open_checkpoint(weights), open_checkpoint)


TABLES: dict[str, tuple[bool, dict[str, Any]]] = {
    "output factors": (True, {"target_modules": ["lm_head"]}),
    "input factors": (True, {"target_modules": ["embed_tokens", "q_proj"]}),
    "output saved": (True, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "both saved": (True, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied factors": (False, {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}),
    "tied saved": (
        False, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # it, too, warns of trained tied tables
@pytest.mark.parametrize("case", TABLES)
def test_tables_that_the_base_ties_answer_as_in_peft(tmp_path: Path, case: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    apart, options = TABLES[case]
    base, lora = tmp_path / "base", tmp_path / "lora"
    model = LlamaForCausalLM(LlamaConfig(**_llama_shape(), tie_word_embeddings=True))
    model.save_pretrained(base)
    train_adapter(model, lora, **options)
    tokens = torch.arange(3, 11)[None]
    with torch.no_grad():
        wanted = PeftModel.from_pretrained(load(base, "CausalLM"), lora)(tokens).logits
        found = load_pretrained(AutoModelForCausalLM, locate(lora, base)).model(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    for policy in ("error", "copy"):  # no head: the target has no place for a second table
        fate = Trio.open(base, lora, base, head=policy).fates.get("lm_head.weight")
        assert (fate is not None and fate.kind == "skipped") == apart
    if options["target_modules"] == ["lm_head"]:
        with pytest.raises(UnsafeResult, match=r"trained nothing but 'lm_head\.weight', apart .*ensure_weight_tying"):
            TaskVector.of(Trio.open(base, lora, base))


def test_a_mixtral_adapter_of_attention_is_read(bases: Callable[[str], Path], tmp_path: Path) -> None:
    train_adapter(load(bases("mixtral"), "CausalLM"), tmp_path / "lora", target_modules=["k_proj"])
    tau = TaskVector.between(bases("mixtral"), tmp_path / "lora")
    assert {name.split(".")[-2] for name, t in tau.items() if t.any()} == {"k_proj"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stream_moves_what_the_adapter_says(tmp_path: Path, dtype: torch.dtype) -> None:
    """Written weights against B + alpha * mask(tau), tau from peft's own merge."""
    base = save_tiny("llama", tmp_path / "base", seed=0, dtype=dtype)
    target = save_tiny("llama", tmp_path / "target", seed=1, dtype=dtype)
    merged = train_adapter(load(base, "CausalLM"), tmp_path / "lora", target_modules=["q_proj", "gate_proj"])
    before, goal = open_checkpoint(base), open_checkpoint(target)
    draw = torch.Generator().manual_seed(0)
    votes = SignVotes(
        {n: torch.randint(-3, 4, goal.info(n).shape, generator=draw, dtype=torch.int8) for n in goal.names()}, 3
    )
    transport_checkpoint(
        base=base, tuned=tmp_path / "lora", target=target, votes=votes, alpha=0.7, out=tmp_path / "out"
    )
    out = open_checkpoint(tmp_path / "out")
    for name, parameter in merged.named_parameters():
        tau = parameter.detach() - before.read(name).float()
        tau[tau.abs() < 1e-6] = 0  # what rounding leaves of layers the adapter does not touch
        masked = torch.where(tau.sign() == votes[name].sign(), tau, 0.0)
        expected = (goal.read(name).float() + 0.7 * masked).to(dtype)
        step = 1e-6 if dtype is torch.float32 else 0.01
        torch.testing.assert_close(out.read(name), expected, rtol=step, atol=2e-6)
    LlamaForCausalLM = type(merged)
    assert set(LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()) == set(merged.state_dict())
