"""Tiny random models of every architecture in the registries of transformers, timm and open_clip.

A config is shrunk by the names of its fields, whatever the architecture; what a family needs besides stands in one table."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfix._compat import heal_torchvision

heal_torchvision()

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
TOKENS, ANSWERS, CLASSES, VOCAB, SIDE = 7, 4, 3, 60, 32
END = 2  # the token that some classifiers look for


@dataclass(frozen=True)
class Entry:
    """One architecture under one task; `build` gives the model and a batch of so many samples."""

    library: str
    name: str
    task: str
    build: Callable[[], tuple[nn.Module, Loss, Callable[[int], Batch]]]

    @property
    def key(self) -> str:
        return f"{self.library}/{self.task}/{self.name}"


# ---- what samples and losses look like


def texts(samples: int) -> Batch:
    """Padded texts of several lengths."""
    ids = torch.randint(8, VOCAB, (samples, TOKENS))
    mask = torch.ones_like(ids)
    for row in range(samples):
        mask[row, TOKENS - row % 3 :] = 0
        ids[row, TOKENS - row % 3 - 1] = END
    return {"ids": ids.masked_fill(mask == 0, 0), "mask": mask, "y": torch.arange(samples) % CLASSES}


def images(samples: int, side: int = SIDE, channels: int = 3) -> Batch:
    return {"x": torch.randn(samples, channels, side, side), "y": torch.arange(samples) % CLASSES}


def _logits(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return output[0] if found is None else found


def classify(model: nn.Module, batch: Batch) -> Tensor:
    if "x" in batch:
        more = {name: value for name, value in batch.items() if name not in ("x", "y")}
        logits = _logits(model(batch["x"], **more))
    else:
        logits = _logits(model(input_ids=batch["ids"], attention_mask=batch["mask"]))
    return F.cross_entropy(logits[:, :CLASSES], batch["y"], reduction="none")


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    logits = _logits(model(input_ids=batch["ids"], attention_mask=batch["mask"], use_cache=False))
    wanted = batch["mask"][:, 1:]
    each = F.cross_entropy(logits[:, :-1].mT, batch["ids"][:, 1:], reduction="none") * wanted
    return each.sum(-1) / wanted.sum(-1)


def fill_in(model: nn.Module, batch: Batch) -> Tensor:
    logits = _logits(model(input_ids=batch["ids"], attention_mask=batch["mask"]))
    each = F.cross_entropy(logits.mT, batch["ids"], reduction="none") * batch["mask"]
    return each.sum(-1) / batch["mask"].sum(-1)


def answer(model: nn.Module, batch: Batch) -> Tensor:
    output = model(
        input_ids=batch["ids"], attention_mask=batch["mask"], decoder_input_ids=batch["answers"], use_cache=False
    )
    logits = _logits(output)
    if logits.shape[1] == TOKENS:  # a language model that would listen, and has no decoder of its own
        return F.cross_entropy(logits[:, :-1].mT, batch["ids"][:, 1:], reduction="none").mean(-1)
    return F.cross_entropy(logits.mT, batch["answers"].roll(-1, 1), reduction="none").mean(-1)


def asked_texts(samples: int) -> Batch:
    return {**texts(samples), "answers": torch.randint(8, VOCAB, (samples, ANSWERS))}


# ---- transformers

TASKS = {
    "image": ("IMAGE_CLASSIFICATION", classify, images),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM", answer, asked_texts),
    "causal": ("CAUSAL_LM", next_token, texts),
    "fill_in": ("MASKED_LM", fill_in, texts),
    "classify": ("SEQUENCE_CLASSIFICATION", classify, texts),
}
WIDE, HEADS, KEPT = 32, 4, 8
SIZES: list[tuple[int, str]] = [
    (
        WIDE,
        "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim d_embed word_embed_proj_dim model_dim "
        "decoder_hidden_size encoder_hidden_size projection_dim hidden_dim lru_width attention_hidden_size "
        "embedding_dim num_pos_feats entity_emb_size lm_head_hidden decoder_input_dim text_embed_dim bottleneck_size "
        "linear_key_dim rms_dim mamba_expand_dim encoder_embed_dim decoder_embed_dim hidden_size_per_layer_input",
    ),
    (
        48,
        "intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim inner_dim ffn_hidden_size d_inner "
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size dense_intermediate_size "
        "block_ff_dim intermediate_size_mlp moe_shared_expert_intermediate_size shared_intermediate_size "
        "feedforward_dim ffn_intermediate_size mlp_hidden_size",
    ),
    (
        2,
        "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers num_key_value_heads n_head_kv num_kv_heads multi_query_group_num layers depth n_head_kv "
        "num_experts_per_tok num_experts_per_token moe_top_k top_k num_hidden_groups num_global_layers "
        "decoder_num_hidden_layers prelude_num_layers num_dense_layers linear_num_key_heads num_experts_per_tok_list "
        "n_group topk_group moe_topk encoder_num_hidden_layers attn_num_kv_heads num_selected_experts num_blocks",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "encoder_num_attention_heads decoder_num_attention_heads num_decoder_attention_heads attn_num_heads "
        "num_query_heads linear_num_value_heads num_local_experts num_experts n_routed_experts moe_num_experts "
        "num_experts_total mamba_n_heads mamba_num_heads num_mem_heads index_n_heads swa_num_attention_heads",
    ),
    (
        KEPT,
        "head_dim d_kv d_head attention_head_dim kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim rotary_dim attention_head_size mamba_d_head d_kv_head linear_key_head_dim linear_value_head_dim "
        "ssm_state_size state_size mamba_d_state time_step_rank index_head_dim mamba_head_dim global_head_dim "
        "swa_head_dim gate_rank q_rank kv_rank",
    ),
    (
        VOCAB,
        "vocab_size text_vocab_size decoder_vocab_size encoder_vocab_size type_vocab_size_ src_vocab_size "
        "tgt_vocab_size vocab_size_per_layer_input padded_vocab_size n_words",
    ),
    (
        64,
        "max_position_embeddings n_positions max_seq_len seq_length max_length_ max_source_positions "
        "max_target_positions original_max_position_embeddings max_sequence_length n_ctx max_seq_length "
        "max_2d_position_embeddings",
    ),
    (SIDE, "image_size img_size"),
    (KEPT - 4, "patch_size"),
    (16, "conv_dim attention_window local_attention attention_chunk_size"),
    (1, "n_shared_experts num_shared_experts first_k_dense_replace num_nextn_predict_layers n_group_ moe_layer_freq_"),
]
SMALL = {name: value for value, names in SIZES for name in names.split()}
LIBRARY = "transformers"


def _shrink(config: Any, changes: dict[str, Any]) -> None:
    """Every field that has a small value by its name, in parts of the config as well."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrink(value, changes)
        elif name in SMALL and isinstance(value, int) and not isinstance(value, bool) and value:
            _set(config, name, min(SMALL[name], value) if name not in ("num_key_value_heads",) else 2)
        elif name.endswith("token_id") and isinstance(value, int) and value >= 8:
            _set(
                config, name, {"pad": 0, "bos": 1, "eos": 2, "sep": 3, "cls": 4, "mask": 5}.get(name[:3].rstrip("_"), 6)
            )
        elif "drop" in name and isinstance(value, float):
            _set(config, name, 0.0)
        elif name in ("layer_types", "mlp_layer_types") and len(set(value or ())) > 1:
            _set(config, name, list(dict.fromkeys(value))[:2])
    for name, value in changes.items():
        if name in vars(config):
            _set(config, name, value)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a checked config may refuse one field until another has changed
        config.__dict__[name] = value


def _config(kind: Any, name: str, dtype_experts: str) -> Any:
    from tests.sweep.families import CHANGES

    changes = {"num_labels": CLASSES, "pad_token_id": 0, **CHANGES.get(name, {})}
    made = changes.pop("__config__", None)
    config = kind(**made) if made is not None else kind()
    _shrink(config, changes)
    config.num_labels = CLASSES
    experts = {"experts_implementation": dtype_experts}
    try:
        return kind(**{**config.to_dict(), **experts, "num_labels": CLASSES})
    except Exception:  # some fields are made of others, and are not taken back
        config._experts_implementation = dtype_experts
        return config


def _from_transformers(class_name: str, name: str, task: str) -> tuple[nn.Module, Loss, Callable[[int], Batch]]:
    import transformers

    from tests.sweep.families import INPUTS

    kind = getattr(transformers, class_name)
    _, loss, make = TASKS[task]
    config = _config(kind.config_class, name, "eager")
    model = kind(config)
    if task == "image":
        make = INPUTS.get(name, lambda n: images(n, _side(config), getattr(config, "num_channels", 3) or 3))
    return model, loss, make


def _side(config: Any) -> int:
    side = getattr(config, "image_size", None) or SIDE
    return side[0] if isinstance(side, (list, tuple)) else side if isinstance(side, int) else SIDE


def transformers_entries() -> Iterator[Entry]:
    from transformers.models.auto import modeling_auto

    for task, (mapping, _, _) in TASKS.items():
        for name, classes in sorted(getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items()):
            for class_name in classes if isinstance(classes, (tuple, list)) else [classes]:
                label = name if isinstance(classes, str) else f"{name}:{class_name}"

                def build(class_name: str = class_name, name: str = name, task: str = task) -> Any:
                    return _from_transformers(class_name, name, task)

                yield Entry(LIBRARY, label, task, build)


# ---- timm and open_clip


def timm_entries() -> Iterator[Entry]:
    from tests.sweep.families import TIMM

    for name in sorted(TIMM):

        def build(name: str = name) -> Any:
            import timm

            options = dict(TIMM[name])
            side = options.pop("side", 64)
            model = timm.create_model(name, num_classes=CLASSES, **options)
            return model, classify, lambda n: images(n, side)

        yield Entry("timm", name, "image", build)


def open_clip_entries() -> Iterator[Entry]:
    from tests.sweep.families import OPEN_CLIP

    for name, changes in sorted(OPEN_CLIP.items()):

        def build(name: str = name, changes: dict[str, Any] = changes) -> Any:
            return _open_clip(name, changes)

        yield Entry("open_clip", name, "contrast", build)


def _open_clip(name: str, changes: dict[str, Any]) -> tuple[nn.Module, Loss, Callable[[int], Batch]]:
    import open_clip

    config = open_clip.get_model_config(name)
    config["embed_dim"] = 16
    config["vision_cfg"].update(changes["vision"])
    config["text_cfg"].update({"context_length": 8, "vocab_size": VOCAB, "width": WIDE, "heads": HEADS, "layers": 2})
    config["text_cfg"].update(changes.get("text", {}))
    custom = config.pop("custom_text", False) or "timm_model_name" in config["vision_cfg"]
    module = importlib.import_module("open_clip.coca_model" if "multimodal_cfg" in config else "open_clip.model")
    kind = module.CoCa if "multimodal_cfg" in config else module.CustomTextCLIP if custom else module.CLIP
    if "multimodal_cfg" in config:
        config["multimodal_cfg"].update(
            {"context_length": 8, "vocab_size": VOCAB, "width": WIDE, "heads": HEADS, "layers": 2}
        )
    accepted = inspect.signature(kind).parameters
    model = kind(**{key: value for key, value in config.items() if key in accepted})
    side = config["vision_cfg"]["image_size"]

    def contrast(model: nn.Module, batch: Batch) -> Tensor:
        """Every image against fixed prompts, one a class."""
        prompts = torch.arange(8, 8 + 8 * CLASSES, device=batch["x"].device).view(CLASSES, 8)
        shown = F.normalize(model.encode_image(batch["x"]), dim=-1)
        told = F.normalize(model.encode_text(prompts), dim=-1)
        logits = model.logit_scale.exp() * shown @ told.T
        return F.cross_entropy(logits, batch["y"], reduction="none")

    return model, contrast, lambda n: images(n, side)


def entries() -> list[Entry]:
    return [*transformers_entries(), *open_clip_entries(), *timm_entries()]
