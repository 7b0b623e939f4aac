"""mergekit's own merges: every example file of mergekit 0.1.5 and every text-model configuration of its tests.

Models are named by letters; `written` puts the folders of tiny models in their place. The example files name hub
models, so theirs are stand-ins of another size with the same structure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

A, B, C = "model_a", "model_b", "model_c"


@dataclass(frozen=True)
class Case:
    """One file: where it comes from, what it says, and whether chance takes part in it."""

    label: str
    origin: str
    content: dict[str, Any]
    random: bool = False
    refused: str | None = None  # by both; words of our refusal
    tolerance: float = 1e-5


def pair(method: str, base: str | None = None, models: tuple[str, str] = (A, B), **parameters: Any) -> dict[str, Any]:
    """What mergekit's tests call a two-model config."""
    content: dict[str, Any] = {
        "merge_method": method, "dtype": "bfloat16",
        "models": [{"model": model, "parameters": {"weight": w}} for model, w in zip(models, (0.6, 0.4), strict=True)],
    }  # fmt: skip
    return {**content, **({"base_model": base} if base else {}), **({"parameters": parameters} if parameters else {})}


def tokens(models: list[str], method: str = "linear", **more: Any) -> dict[str, Any]:
    listed = [{"model": model, "parameters": {"weight": 1.0}} for model in models]
    return {"merge_method": method, "base_model": models[0], "models": listed, "dtype": "float32", **more}


def _with_t(content: dict[str, Any], t: float) -> dict[str, Any]:
    return {**content, "parameters": {"t": t}}


def _weights_cancel() -> dict[str, Any]:
    content = pair("nuslerp", C, nuslerp_row_wise=False, nuslerp_flatten=False)
    for model, weight in zip(content["models"], (-0.5, 0.5), strict=True):
        model["parameters"] = {"weight": weight}
    return content


def _one(model: str, **parameters: Any) -> dict[str, Any]:
    return {"model": model, **({"parameters": parameters} if parameters else {})}


BASIC = "test_basic_merges.py"
TOKEN = "test_tokenizer.py"
EXAMPLES = [
    Case("arcee_fusion", "examples/arcee_fusion.yml", {
        "models": [{"model": A}, {"model": B}], "merge_method": "arcee_fusion", "base_model": A, "dtype": "bfloat16"}),
    Case("ties, no normalize", "examples/bio-merge.yml", {
        "models": [_one(A, density=0.5, weight=0.5), _one(B, density=0.5, weight=0.5)], "merge_method": "ties",
        "base_model": C, "parameters": {"normalize": False, "int8_mask": True}, "dtype": "float16"}),
    Case("slerp, gradient and filters", "examples/gradient-slerp.yml", {
        "slices": [{"sources": [{"model": A, "layer_range": [0, 4]}, {"model": B, "layer_range": [0, 4]}]}],
        "merge_method": "slerp", "base_model": A, "dtype": "float16",
        "parameters": {"t": [{"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
                             {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]}, {"value": 0.5}]}}),
    Case("linear", "examples/linear.yml", {
        "models": [_one(A, weight=1.0), _one(B, weight=0.3), _one(C, weight=0.5)], "merge_method": "linear",
        "dtype": "float16"}),
    Case("passthrough, slices", "examples/orcamini-platy-44layer.yml", {
        "slices": [{"sources": [{"model": A, "layer_range": [0, 3]}]}, {"sources": [{"model": B, "layer_range": [2, 4]}]}],
        "merge_method": "passthrough", "dtype": "float16"}),
    Case("ties, gradients", "examples/ties.yml", {
        "models": [_one(A, density=[1, 0.7, 0.1], weight=1.0), _one(B, density=0.5, weight=[0, 0.3, 0.7, 1]),
                   _one("model_d", density=0.33, weight=[{"filter": "mlp", "value": 0.5}, {"value": 0}])],
        "merge_method": "ties", "base_model": C, "parameters": {"normalize": True, "int8_mask": True},
        "dtype": "float16"}),
]  # fmt: skip
TESTS = [
    Case("passthrough, granite", f"{BASIC} granite copy", {
        "merge_method": "passthrough", "models": [_one("granite_a")], "dtype": "bfloat16"}),
    Case("linear, granite", f"{BASIC} granite linear", {
        "merge_method": "linear", "models": [_one("granite_a", weight=0.6), _one("granite_b", weight=0.4)],
        "dtype": "bfloat16"}),
    Case("slerp, granite", f"{BASIC} granite slerp", {
        "merge_method": "slerp", "base_model": "granite_a", "models": [_one("granite_a"), _one("granite_b")],
        "parameters": {"t": 0.5}, "dtype": "bfloat16"}),
    Case("passthrough, gpt2", f"{BASIC} gpt2 copy", {
        "merge_method": "passthrough", "models": [_one("gpt2")], "dtype": "bfloat16"}),
    Case("passthrough, gpt2 stacked", f"{BASIC} gpt2 stack", {
        "merge_method": "passthrough", "dtype": "bfloat16",
        "slices": [{"sources": [{"model": "gpt2", "layer_range": [0, 3]}]}] * 2}),
    Case("passthrough, scale", f"{BASIC} passthrough scale", {
        "merge_method": "passthrough",
        "models": [_one(A, scale=[{"filter": "o_proj", "value": 0}, {"value": 1}])]}),
    Case("linear, two", f"{BASIC} linear", pair("linear")),
    Case("slerp", f"{BASIC} slerp", _with_t(pair("slerp", A), 0.35)),
    *(Case(f"nuslerp, {'base' if base else 'no base'}, row_wise {rows}, flatten {flat}", f"{BASIC} nuslerp",
           pair("nuslerp", base, nuslerp_row_wise=rows, nuslerp_flatten=flat))
      for base in (None, C) for rows in (False, True) for flat in (False, True)),
    Case("nuslerp, weights that cancel", f"{BASIC} nuslerp", _weights_cancel()),
    Case("task_arithmetic", f"{BASIC} task arithmetic", pair("task_arithmetic", C)),
    Case("breadcrumbs", f"{BASIC} breadcrumbs", pair("breadcrumbs", C)),
    Case("ties", f"{BASIC} ties", pair("ties", C, density=0.3)),
    Case("sce", f"{BASIC} sce", pair("sce", C, select_topk=0.5)),
    Case("ram", f"{BASIC} ram", pair("ram", C)),
    Case("ramplus_tl", f"{BASIC} ramplus_tl", pair("ramplus_tl", C, r=0.05, alpha=1.0)),
    Case("multislerp", f"{BASIC} multislerp", pair("multislerp", C)),
    Case("dare_ties", f"{BASIC} dare_ties", pair("dare_ties", C, density=0.66), random=True),
    Case("model_stock", f"{BASIC} model_stock", pair("model_stock", A, (B, C))),
    Case("model_stock, filter_wise", f"{BASIC} model_stock filter-wise", pair("model_stock", A, (B, C), filter_wise=True)),
    Case("arcee_fusion, two", f"{BASIC} arcee_fusion", pair("arcee_fusion", A)),
    Case("nearswap", f"{BASIC} nearswap", pair("nearswap", A, t=0.0001)),
    Case("della", f"{BASIC} della", pair("della", C, **{"density": 0.66, "epsilon": 0.05, "lambda": 0.5}), random=True),
    Case("della, wrong epsilon", f"{BASIC} della, invalid epsilon",
         pair("della", C, **{"density": 0.66, "epsilon": 1.35, "lambda": 0.5}), random=True, refused="epsilon"),
    Case("karcher", f"{BASIC} karcher", pair("karcher", C, max_iter=5, tol=1e-5)),
    Case("linear, other vocabularies", f"{TOKEN} mismatched vocabulary", tokens(["tok_base", "tok_padded", "tok_chatml"]),
         refused="tokenizer"),
    Case("linear, tokenizer base", f"{TOKEN} source base",
         tokens(["tok_base", "tok_padded", "tok_chatml"], tokenizer_source="base")),
    Case("linear, tokenizer union", f"{TOKEN} source union",
         tokens(["tok_base", "tok_padded", "tok_chatml"], tokenizer_source="union")),
    Case("linear, tokenizer of a model", f"{TOKEN} source model",
         tokens(["tok_base", "tok_padded", "tok_chatml"], tokenizer_source="tok_chatml")),
    *(Case(f"task_arithmetic, tokenizer {source}", f"{TOKEN} task arithmetic aligns",
           tokens(["tok_base", "tok_chatml"], "task_arithmetic", tokenizer={"source": source}))
      for source in ("base", "union")),
    Case("slerp, tokenizer union", f"{TOKEN} slerp union",
         tokens(["tok_base", "tok_chatml"], "slerp", tokenizer_source="union", parameters={"t": 0.5})),
    Case("linear, forced tokens", f"{TOKEN} force token", tokens(["tok_base", "tok_chatml"], tokenizer={
        "source": "union", "tokens": {"_tok_10": {"source": "tok_chatml", "force": True},
                                      "_tok_11": {"source": "tok_base", "force": True}}})),
    Case("linear, rows of other tokens", f"{TOKEN} model token id", tokens(["tok_base", "tok_chatml"], tokenizer={
        "source": "base", "tokens": {
            "_tok_20": {"source": {"kind": "model_token", "model": "tok_chatml", "token_id": 64}, "force": True},
            "_tok_21": {"source": {"kind": "model_token", "model": "tok_base", "token": "<s>"}, "force": True}}})),
    *(Case(f"linear, configured tokens, {label}", f"{TOKEN} configured tokens", tokens(["tok_special"], tokenizer={
        "source": source, "tokens": {"<|special|>": {"source": "tok_special", "force": True}, **more}}))
      for label, source, more in (
          ("of a model", "tok_special", {"<|new|>": {"source": {
              "kind": "model_token", "model": "tok_special", "token": "_tok_10"}, "force": True}}),
          ("base", "base", {}), ("union", "union", {}))),
    *(Case(f"linear, phi, {source} {other}", "test_vocabulary_axis.py phi", {
        "merge_method": "linear", "base_model": "phi_8", "models": [_one("phi_8"), _one(f"phi_{other}_swapped")],
        "parameters": {"weight": 0.5}, "tokenizer_source": source})
      for source, other in (("base", 8), ("base", 10), ("union", 10))),
    *(Case(f"{method}, rows cut off", "test_embedding_truncation.py", {
        "merge_method": method, "base_model": "tok_chatml", "models": [_one("tok_chatml"), _one("tok_base")],
        "parameters": {"weight": 0.5, "t": 0.5}}, refused="tokenizer")
      for method in ("linear", "slerp", "task_arithmetic")),
    Case("linear, padded table", f"{TOKEN} pad to multiple", tokens(["tok_chatml"], tokenizer={
        "source": "base", "pad_to_multiple_of": 16})),
    Case("linear, chat template by name", "test_chat_template.py chatml", {
        "merge_method": "linear", "base_model": "tok_base", "dtype": "bfloat16", "chat_template": "chatml",
        "models": [_one("tok_base", weight=0.5), _one("tok_plain", weight=0.5)]}),
    Case("linear, chat template as text", "test_chat_template.py jinja", {
        "merge_method": "linear", "base_model": "tok_base", "dtype": "bfloat16",
        "chat_template": "{{messages[0]['content']}}",
        "models": [_one("tok_base", weight=0.5), _one("tok_plain", weight=0.5)]}),
    Case("linear, long chat template", "test_chat_template.py long jinja", {
        "merge_method": "linear", "base_model": "tok_base", "dtype": "bfloat16",
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{# " + "x" * 300 + " #}",
        "models": [_one("tok_base", weight=0.5), _one("tok_plain", weight=0.5)]}),
]  # fmt: skip
MORE = [
    Case("ties, rescale", "documented", pair("ties", C, density=0.3, rescale=True)),
    Case("ties, quoted flag", "documented", pair("ties", C, density=0.3, normalize="false")),
    Case("ties, negative lambda", "documented", pair("ties", C, **{"density": 0.3, "lambda": -1})),
    Case("breadcrumbs_ties", "documented", pair("breadcrumbs_ties", C, density=0.6, gamma=0.05)),
    Case("breadcrumbs, gamma", "documented", pair("breadcrumbs", C, density=0.7, gamma=0.1)),
    Case("della_linear", "documented", pair("della_linear", C, density=0.5, epsilon=0.2), random=True),
    Case("dare_linear", "documented", pair("dare_linear", C, density=0.5), random=True),
    Case("linear, out_dtype", "documented", {**pair("linear"), "out_dtype": "float32"}),
    Case("multislerp, no base", "documented", pair("multislerp")),
    Case("karcher, three", "documented", {"merge_method": "karcher", "models": [_one(m) for m in (A, B, C)]}),
    Case("task_arithmetic, slices and filters", "documented", {
        "merge_method": "task_arithmetic", "base_model": C, "dtype": "float32", "parameters": {"weight": 0.5},
        "slices": [
            {"sources": [{"model": A, "layer_range": [0, 2], "parameters": {"weight": [0, 1]}}, {"model": C, "layer_range": [0, 2]}]},
            {"sources": [{"model": B, "layer_range": [1, 4], "parameters": {"weight": {"filter": "mlp", "value": [0.2, 0.6]}}},
                         {"model": C, "layer_range": [0, 3]}]}]}),
    Case("linear, modules", "documented", {
        "merge_method": "linear", "dtype": "float32",
        "modules": {"default": {"models": [_one(A, weight=0.25), _one(B, weight=0.75)]}}}),
    Case("linear, model as a mapping", "documented", {
        "merge_method": "linear", "models": [{"model": {"model": {"path": A}}, "parameters": {"weight": 1}}, _one(B, weight="1e0")]}),
    Case("linear, adapter", "documented", {
        "merge_method": "linear", "dtype": "float32",
        "models": [_one(f"{A}+lora_a", weight=0.5), _one(B, weight=0.5)]}),
]  # fmt: skip
CASES = [*EXAMPLES, *TESTS, *MORE]


def written(content: Any, home: Path) -> Any:
    """The content with folders in the place of letters."""
    if isinstance(content, dict):
        return {key: written(value, home) for key, value in content.items()}
    if isinstance(content, list):
        return [written(value, home) for value in content]
    if isinstance(content, str) and content.partition("+")[0] in FOLDERS:
        return "+".join(str(home / part) for part in content.split("+"))
    return content


def save(case: Case, home: Path, exact: bool) -> Path:
    """The case as a file; `exact` computes and writes in float32, to compare bits and not roundings."""
    content = written(case.content, home)
    if exact:
        content = {**content, "dtype": "float32"}
    path = home / f"{case.label.replace(' ', '_').replace(',', '')}{'-fp32' if exact else ''}.yml"
    path.write_text(yaml.safe_dump(content))
    return path


def _llama(folder: Path, seed: int, vocabulary: int = 64) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_attention_heads=16, num_hidden_layers=4,
    )).save_pretrained(folder)  # fmt: skip


def _granite(folder: Path, seed: int) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(seed)
    GraniteForCausalLM(GraniteConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2,
        num_hidden_layers=2,
    )).save_pretrained(folder)  # fmt: skip


def _gpt2(folder: Path, seed: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=3, n_positions=32, vocab_size=99)).save_pretrained(folder)


def _tokenizer(folder: Path, size: int, added: list[str], special: list[str], swapped: bool = False) -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = ["<unk>", "<s>", "</s>", *(f"_tok_{n}" for n in range(3, size))]
    if swapped:
        plain[3], plain[4] = plain[4], plain[3]
    body = {"type": "BPE", "vocab": {token: n for n, token in enumerate(plain)}, "merges": []}
    inner = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "model": body, "added_tokens": []}))
    outer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    outer.add_tokens(added)
    outer.add_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    outer.save_pretrained(folder)


def _with_tokens(added: list[str], vocabulary: int, special: tuple[str, ...] = ()) -> Callable[[Path, int], None]:
    def make(folder: Path, seed: int) -> None:
        _llama(folder, seed, vocabulary)
        _tokenizer(folder, 64, added, list(special))

    return make


def _phi(size: int, swapped: bool) -> Callable[[Path, int], None]:
    """A head with a bias: as many entries as tokens, and no matrix."""

    def make(folder: Path, seed: int) -> None:
        from transformers import PhiConfig, PhiForCausalLM

        torch.manual_seed(seed)
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = PhiForCausalLM(PhiConfig(vocab_size=size, **shape))
        torch.nn.init.normal_(model.lm_head.bias)
        model.save_pretrained(folder)
        _tokenizer(folder, size, [], [], swapped)

    return make


def _lora(folder: Path, seed: int) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder.parent / A), LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


FOLDERS: dict[str, Callable[[Path, int], None]] = {
    A: _llama, B: _llama, C: _llama, "model_d": _llama, "granite_a": _granite, "granite_b": _granite, "gpt2": _gpt2,
    "tok_base": _with_tokens([], 64), "tok_chatml": _with_tokens(["<|im_start|>", "<|im_end|>"], 66),
    "tok_padded": _with_tokens([f"<UNUSED_{n}>" for n in range(4)], 64), "tok_plain": _llama, "lora_a": _lora,
    "tok_special": _with_tokens([], 65, ("<|special|>",)),
    "phi_8": _phi(8, False), "phi_8_swapped": _phi(8, True), "phi_10_swapped": _phi(10, True),
}  # fmt: skip


def make_models(home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    for seed, (name, make) in enumerate(FOLDERS.items()):
        make(home / name, seed)
