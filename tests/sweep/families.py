"""What single families need to be small: sizes that their names do not tell, and inputs of another kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Latent attention has as many heads for keys as for queries.
_ALL_HEADS = {"num_key_value_heads": 4}
_END = {"eos_token_id": 2, "decoder_start_token_id": 0}
# Room for more than one token behind the last reduction.
_REDUCED = {"num_attention_heads": [1, 2, 2, 2], "mlp_ratios": [2, 2, 2, 2], "image_size": 64}
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 24], "embed_dims": [8, 16, 16, 24]}
_TURNS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_INDEXED = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
_NO_LAYER_INPUT = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_SOME_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
_LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}

CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"], _ALL_HEADS),
    **dict.fromkeys(["hy_v4", "minicpm3", "youtu"], _ALL_HEADS),
    **dict.fromkeys(["bart", "bigbird_pegasus", "mbart", "mt5", "mvp", "plbart", "umt5"], _END),
    **dict.fromkeys(["qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"], _LINEAR_THEN_FULL),
    "bailing_hybrid": {**_ALL_HEADS, "num_expert_group": 2, "topk_group": 1, "linear_head_dim": 8, "linear_num_heads": 4, "qk_head_dim": 16},
    "bamba": {"mamba_n_heads": 8},
    "bit": {**_STAGES, "embedding_size": 8, "num_groups": 4},
    "blt": {"encoder_hash_byte_group_vocab": 50, "hidden_size_global": 32, "encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": {"__config__": {"rope_parameters": {"full_attention": _TURNS}}},
    "convnext": _STAGES,
    "convnextv2": _STAGES,
    "cvt": {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 3], "depth": [1, 2, 3]},
    "dbrx": {"__config__": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}}},
    "deberta": {"pooler_hidden_size": 32},
    "deberta-v2": {"pooler_hidden_size": 32},
    "donut-swin": {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "deepseek_v2": {**_ALL_HEADS, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "efficientnet": {"hidden_dim": 320, "width_coefficient": 0.25, "depth_coefficient": 0.3},
    "ernie4_5_moe": {"moe_k": 2},
    "esm": {"__config__": {"vocab_size": 60, "pad_token_id": 0, "mask_token_id": 5}},
    "esmc": _ALL_HEADS,
    "falcon_h1": {"mamba_d_ssm": 32},
    "flint": {"mlp_only_layers": [0]},
    "focalnet": {"embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16], "focal_levels": [2, 2], "focal_windows": [3, 3]},
    **dict.fromkeys(["gemma4", "gemma4_text"], _SOME_EXPERTS),
    "gemma4_assistant": {"__config__": {"text_config": _NO_LAYER_INPUT}, "num_kv_shared_layers": 0},
    "gemma4_unified_assistant": {"num_kv_shared_layers": 0},
    "gemma3n": {"architecture": "test_resnet", "num_kv_shared_layers": 0, "laurel_rank": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 4},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "hgnet_v2": {"stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 24], "stage_mid_channels": [8, 8, 8, 8],
                 "stage_out_channels": [16, 16, 24, 24], "stage_num_blocks": [1, 1, 1, 1], "hidden_sizes": [16, 16, 24, 24]},
    "hiera": {"embed_dim": 8, "depths": [1, 1, 1, 1]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling_text": {"num_key_value_heads": 4, "swa_num_key_value_heads": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_ALL_HEADS, "linear_head_dim": 8, "linear_num_heads": 4, "qk_head_dim": 16},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "input_size": 32, "visual_embed": False},
    "levit": {"hidden_sizes": [16, 16, 24], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [4, 4, 4],
              "patch_size": 16, "image_size": 64, "down_ops": [["Subsample", 4, 4, 4, 2, 2], ["Subsample", 4, 4, 4, 2, 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "longcat_flash": {"qk_head_dim": 16, "num_key_value_heads": 4},
    "luke": {"entity_vocab_size": 10},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "mistral4": {"num_key_value_heads": 4, "head_dim": 16, "qk_head_dim": 16},
    "mobilenet_v1": {"depth_multiplier": 0.25, "min_depth": 4},
    "mobilevit": {"hidden_sizes": [16, 16, 24], "neck_hidden_sizes": [8, 8, 8, 16, 16, 24, 32], "image_size": 64, "patch_size": 2},
    "mobilevitv2": {"image_size": 64, "patch_size": 2, "width_multiplier": 0.25},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "nemo_speechlm": {"n_groups": 1},
    "neomme": {"head_dim": 16, "embedding_rank": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 16},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "perceiver": {"num_latents": 4, "d_latents": 16, "d_model": 16, "num_blocks": 1, "num_self_attends_per_block": 1,
                  "num_self_attention_heads": 2, "num_cross_attention_heads": 1, "image_size": 16, "train_size": [8, 8],
                  "max_position_embeddings": 7},
    "poolformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 24]},
    "pvt": {**_STAGES, **_REDUCED},
    "pvt_v2": {**_STAGES, **_REDUCED},
    **dict.fromkeys(["qwen4_exp", "qwen4_exp_text"], _INDEXED),
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "regnet": {**_STAGES, "embedding_size": 8, "groups_width": 4},
    "resnet": {**_STAGES, "embedding_size": 8},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "segformer": {**_STAGES, **_REDUCED, "decoder_hidden_size": 16},
    "shieldgemma2": {"mm_tokens_per_image": 4, "image_token_index": 6, "boi_token_index": 7, "eoi_token_index": 8,
                     "__config__": {"yes_token_index": 9, "no_token_index": 10}},
    "swiftformer": {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 24]},
    "swin": {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "swinv2": {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "textnet": {"image_size": [64, 64]},
    "t5": {"__config__": {"decoder_start_token_id": 0}, "eos_token_id": 2},
    "t5gemma": {"cross_attention_hidden_size": 32},
    "timm_wrapper": {"__config__": {"architecture": "test_resnet"}},
    "vibevoice_asr": {"num_filters": 2, "depths": (1, 1, 1, 1, 1, 1, 1)},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 2, "num_hidden_layers": 3,
              "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "attention_hidden_size": 64,
               "attention_head_dim": 16, "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
}  # fmt: skip


def _pixels_as_tokens(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randint(8, 60, (samples, 16)), "y": torch.arange(samples) % 3}


def _patches(samples: int) -> dict[str, Tensor]:
    shapes = torch.tensor([[4, 4], [2, 8], [4, 2]])[torch.arange(samples) % 3]
    mask = (torch.arange(16) < shapes.prod(1)[:, None]).long()
    x = torch.randn(samples, 16, 48)
    return {"x": x, "pixel_attention_mask": mask, "spatial_shapes": shapes, "y": torch.arange(samples) % 3}


def _large(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 3, 64, 64), "y": torch.arange(samples) % 3}


def _asked_about(samples: int) -> dict[str, Tensor]:
    """A text that holds an image, for a language model that says yes or no."""
    ids = torch.randint(8, 60, (samples, 9))
    ids[:, 1:5] = 6
    pixels = torch.randn(samples, 3, 32, 32)
    return {"x": ids, "pixel_values": pixels, "token_type_ids": (ids == 6).long(), "y": torch.arange(samples) % 2}


INPUTS: dict[str, Any] = {
    "imagegpt": _pixels_as_tokens,
    "segformer": _large,
    "shieldgemma2": _asked_about,
    "siglip2": _patches,
}
_VIT = {"embed_dim": 24, "depth": 2, "num_heads": 3, "img_size": 32, "patch_size": 8, "side": 32}
_FOUR = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 24)}

TIMM: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": _VIT,
    "cait_xxs24_224": {**_VIT, "depth_token_only": 1},
    "coat_tiny": {"embed_dims": (16, 16, 16, 16), "serial_depths": (1, 1, 1, 1), "parallel_depth": 1, "img_size": 64},
    "convit_tiny": {**_VIT, "local_up_to_layer": 1},
    "convnext_atto": _FOUR,
    "crossvit_tiny_240": {"embed_dim": (12, 24), "num_heads": (2, 2), "side": 240},
    "cs3darknet_focus_s": {},
    "davit_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 24), "num_heads": (1, 2, 2, 3), "window_size": 2},
    "deit_tiny_distilled_patch16_224": _VIT,
    "densenet121": {"growth_rate": 4, "block_config": (1, 1, 1, 1)},
    "edgenext_xx_small": {**_FOUR, "dims": (8, 16, 16, 32), "heads": (2, 2, 2, 2)},
    "efficientformer_l1": {"embed_dims": (8, 16, 16, 24), "depths": (1, 1, 1, 2), "side": 224},
    "efficientformerv2_s0": {"embed_dims": (8, 16, 16, 24), "depths": (1, 1, 1, 2), "img_size": 64},
    "efficientvit_b0": {},
    "efficientvit_m0": {"embed_dim": (16, 16, 24), "depth": (1, 1, 1), "num_heads": (2, 2, 2), "img_size": 64},
    "eva02_tiny_patch14_224": {**_VIT, "num_heads": 3},
    "fasternet_t0": {},
    "fastvit_t8": {},
    "ghostnet_050": {},
    "gmlp_ti16_224": {"img_size": 32, "side": 32},
    "hardcorenas_a": {},
    "hgnetv2_b0": {},
    "hiera_tiny_224": {"embed_dim": 8, "stages": (1, 1, 1, 1), "img_size": (64, 64)},
    "inception_next_atto": {"depths": (1, 1, 1, 1), "dims": (16, 16, 16, 24)},
    "lcnetv2_small": {},
    "levit_128s": {"embed_dim": (16, 24, 32), "depth": (1, 1, 1), "num_heads": (2, 2, 2), "key_dim": 4, "img_size": 64},
    "mobilenetv3_small_050": {},
    "mobilevit_xxs": {"side": 64},
    "mobilevitv2_050": {"side": 64},
    "pit_ti_224": {"base_dims": [4, 4, 4], "depth": [1, 1, 1], "heads": [2, 2, 2], "side": 224},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 24), "num_heads": (1, 2, 2, 2)},
    "regnetx_002": {},
    "repghostnet_050": {},
    "repvit_m1": {"embed_dim": (8, 16, 16, 24), "depth": (1, 1, 1, 1)},
    "resnest14d": {"stem_width": 8, "base_width": 8},
    "resnetv2_18": {"channels": (8, 16, 16, 24), "layers": (1, 1, 1, 1)},
    "rexnet_100": {"width_mult": 0.25},
    "sequencer2d_s": {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 24), "hidden_sizes": (4, 8, 8, 8), "img_size": 56, "side": 56},
    "starnet_s050": {},
    "swin_tiny_patch4_window7_224": {"embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4, "img_size": 32, "side": 32},
    "swinv2_tiny_window8_256": {"embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4, "img_size": 32, "side": 32},
    "test_byobnet": {},
    "test_convnext": {},
    "test_efficientnet": {},
    "test_mambaout": {},
    "test_nfnet": {},
    "test_resnet": {},
    "test_vit": {"img_size": 64},
    "tiny_vit_5m_224": {"embed_dims": (8, 16, 16, 24), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2), "side": 224},
    "tnt_s_legacy_patch16_224": {"embed_dim": 24, "inner_dim": 8, "depth": 2, "num_heads_outer": 3, "img_size": 32, "side": 32},
    "twins_svt_small": {"embed_dims": (8, 16, 16, 24), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2), "img_size": 64},
    "visformer_tiny": {"init_channels": 8, "embed_dim": 24, "depth": (1, 1, 1), "num_heads": 2, "img_size": 64},
    "vit_relpos_small_patch16_224": _VIT,
    "vit_so150m_patch16_reg4_map_256": _VIT,
    "vit_srelpos_small_patch16_224": _VIT,
    "vovnet39a": {"stage_conv_chs": [4, 4, 8, 8], "stage_out_chs": [8, 16, 16, 24]},
    "ese_vovnet19b_slim_dw": {},
    "xcit_nano_12_p8_224": {"embed_dim": 16, "depth": 2, "num_heads": 2, "cls_attn_layers": 1},
}  # fmt: skip

_TOWER = {"width": 32, "layers": 2, "head_width": 8, "patch_size": 8, "image_size": 16}
_RESNET = {"width": 8, "layers": [1, 1, 1, 1], "head_width": 16, "image_size": 64}
_TIMM = {"timm_model_name": "test_vit", "image_size": 160}

OPEN_CLIP: dict[str, dict[str, Any]] = {
    "RN50": {"vision": _RESNET},
    "RN50-quickgelu": {"vision": _RESNET},
    "ViT-B-16": {"vision": _TOWER},
    "ViT-B-16-quickgelu": {"vision": _TOWER},
    "ViT-B-16-SigLIP": {"vision": {**_TIMM, "timm_model_name": "test_vit4", "timm_pool": "avg", "timm_proj": "linear"}},
    "ViT-B-32-256": {"vision": _TOWER},
    "ViT-H-14-CLIPA": {"vision": _TOWER},
    "ViT-L-14-336": {"vision": _TOWER},
    "ViT-bigG-14": {"vision": _TOWER},
    "EVA02-B-16": {"vision": {**_TIMM, "timm_pool": "token"}},
    "convnext_base": {"vision": {**_TIMM, "timm_model_name": "test_convnext", "image_size": 64}},
    "coca_ViT-B-32": {"vision": {**_TOWER, "attentional_pool": True, "attn_pooler_heads": 4}},
}
