"""Permutation specs of the supported architectures, as tables (read `spec.py` for the words).

Patterns accept on-disk names and the module names of current transformers, which differ."""

from __future__ import annotations

from gradfix.align.spec import Fallback, Family, Tower

VIT = Family(
    "vit",
    (
        Tower(
            """
            tensor  embeddings.(cls|distillation|mask)_token                       - - residual@0
            tensor  embeddings.position_embeddings                                 - - residual@0
            linear  embeddings.patch_embeddings.projection                         residual@0 - - -
            linear  (encoder.layer|layers).{i}.layernorm_before                    residual@a
            linear  (encoder.layer|layers).{i}.attention.(attention.query|q_proj)  q residual@a
            linear  (encoder.layer|layers).{i}.attention.(attention.key|k_proj)    k residual@a
            linear  (encoder.layer|layers).{i}.attention.(attention.value|v_proj)  v residual@a
            linear  (encoder.layer|layers).{i}.attention.(output.dense|o_proj)     residual@b o
            linear  (encoder.layer|layers).{i}.layernorm_after                     residual@b
            linear  (encoder.layer|layers).{i}.(intermediate.dense|mlp.fc1)        mlp residual@b
            linear  (encoder.layer|layers).{i}.(output.dense|mlp.fc2)              residual@c mlp
            linear  layernorm                                                      residual@end
            linear  pooler.dense                                                   pooler residual@end
            linear  classifier                                                     - residual@end
            """,
            prefix="(vit.)?",
        ),
    ),
)

TIMM_VIT = Family(
    "timm_vit",
    (
        Tower(
            """
            tensor  (cls_token|dist_token|reg_token|pos_embed)  - - residual@0
            linear  patch_embed.proj                            residual@0 - - -
            linear  norm_pre                                    residual@0
            linear  blocks.{i}.norm1                            residual@a
            linear  blocks.{i}.attn.qkv                         qkv residual@a
            linear  blocks.{i}.attn.proj                        residual@b o
            tensor  blocks.{i}.ls1.gamma                        residual@b
            linear  blocks.{i}.norm2                            residual@b
            linear  blocks.{i}.mlp.fc1                          mlp residual@b
            linear  blocks.{i}.mlp.fc2                          residual@c mlp
            tensor  blocks.{i}.ls2.gamma                        residual@c
            linear  (norm|fc_norm)                              residual@end
            linear  (head|head_dist)                            - residual@end
            """
        ),
    ),
)

BERT = Family(
    "bert",
    (
        Tower(
            """
            tensor  embeddings.position_ids                       *
            tensor  embeddings.token_type_ids                     *
            tensor  embeddings.word_embeddings.weight             - residual@0
            tensor  embeddings.position_embeddings.weight         - residual@0
            tensor  embeddings.token_type_embeddings.weight       - residual@0
            linear  embeddings.LayerNorm                          residual@0
            linear  encoder.layer.{i}.attention.self.query        q residual@a
            linear  encoder.layer.{i}.attention.self.key          k residual@a
            linear  encoder.layer.{i}.attention.self.value        v residual@a
            linear  encoder.layer.{i}.attention.output.dense      residual@b o
            linear  encoder.layer.{i}.attention.output.LayerNorm  residual@b
            linear  encoder.layer.{i}.intermediate.dense          mlp residual@b
            linear  encoder.layer.{i}.output.dense                residual@c mlp
            linear  encoder.layer.{i}.output.LayerNorm            residual@c
            linear  pooler.dense                                  pooler residual@end
            """,
            prefix="(bert.|roberta.)?",
        ),
        # The vocabulary head reads the tied word embeddings, so its own units keep the residual order.
        Tower(
            """
            linear  cls.predictions.transform.dense      residual@end residual@end
            linear  cls.predictions.transform.LayerNorm  residual@end
            linear  cls.predictions.decoder              - residual@end
            tensor  cls.predictions.bias                 -
            linear  cls.seq_relationship                 - pooler
            linear  lm_head.dense                        residual@end residual@end
            linear  lm_head.layer_norm                   residual@end
            linear  lm_head.decoder                      - residual@end
            tensor  lm_head.bias                         -
            linear  classifier                           - pooler
            linear  classifier.dense                     classifier residual@end
            linear  classifier.out_proj                  - classifier
            linear  qa_outputs                           - residual@end
            """
        ),
    ),
    fallback=Fallback("pooler", unless="pooler.dense.weight", instead="residual@end"),
)

T5_ENCODER = """
    tensor  embed_tokens.weight                                             - residual@0
    linear  block.{i}.layer.0.SelfAttention.q                               q residual@a
    linear  block.{i}.layer.0.SelfAttention.k                               k residual@a
    linear  block.{i}.layer.0.SelfAttention.v                               v residual@a
    linear  block.{i}.layer.0.SelfAttention.o                               residual@b o
    tensor  block.{i}.layer.0.SelfAttention.relative_attention_bias.weight  - order
    linear  block.{i}.layer.0.layer_norm                                    residual@a
    linear  final_layer_norm                                                residual@end
"""

T5 = Family(
    "t5",
    (
        # Embeddings feed both stacks, so encoder and decoder share one residual permutation.
        Tower(
            """
            tensor  (transformer.)?shared.weight  - residual@0
            linear  classification_head.dense     classifier residual@decoder.end
            linear  classification_head.out_proj  - classifier
            """
        ),
        Tower(
            T5_ENCODER
            + """
            linear  block.{i}.layer.1.layer_norm                 residual@b
            linear  block.{i}.layer.1.DenseReluDense.wi(_0|_1)?  mlp residual@b
            linear  block.{i}.layer.1.DenseReluDense.wo          residual@c mlp
            """,
            name="encoder",
            prefix="(transformer.)?encoder.",
            tied_heads=True,
        ),
        Tower(
            T5_ENCODER
            + """
            linear  block.{i}.layer.1.EncDecAttention.q             q:cross residual@b
            linear  block.{i}.layer.1.EncDecAttention.k             k:cross residual@encoder.end
            linear  block.{i}.layer.1.EncDecAttention.v             v:cross residual@encoder.end
            linear  block.{i}.layer.1.EncDecAttention.o             residual@c o:cross
            tensor  block.{i}.layer.1.EncDecAttention.relative_attention_bias.weight  - order:cross
            linear  block.{i}.layer.1.layer_norm                    residual@b
            linear  block.{i}.layer.2.layer_norm                    residual@c
            linear  block.{i}.layer.2.DenseReluDense.wi(_0|_1)?     mlp residual@c
            linear  block.{i}.layer.2.DenseReluDense.wo             residual@d mlp
            """,
            name="decoder",
            prefix="(transformer.)?decoder.",
            parts_per_layer=3,
            tied_heads=True,
        ),
        Tower("tensor  lm_head.weight   - residual@decoder.end"),
    ),
)

LLAMA = Family(
    "llama",
    (
        Tower(
            """
            tensor  embed_tokens.weight                       - residual@0
            linear  layers.{i}.input_layernorm                residual@a
            linear  layers.{i}.self_attn.q_proj               q residual@a
            linear  layers.{i}.self_attn.k_proj               k residual@a
            linear  layers.{i}.self_attn.v_proj               v residual@a
            linear  layers.{i}.self_attn.o_proj               residual@b o
            tensor  layers.{i}.self_attn.q_norm.weight        q_norm
            tensor  layers.{i}.self_attn.k_norm.weight        k_norm
            tensor  layers.{i}.self_attn.rotary_emb.inv_freq  *
            tensor  rotary_emb.inv_freq                       *
            linear  layers.{i}.post_attention_layernorm       residual@b
            linear  layers.{i}.pre_feedforward_layernorm      residual@b
            linear  layers.{i}.mlp.(gate|up)_proj             mlp residual@b
            linear  layers.{i}.mlp.down_proj                  residual@c mlp
            linear  layers.{i}.post_feedforward_layernorm     residual@c
            linear  norm                                      residual@end
            linear  (lm_head|score|classifier|qa_outputs)     - residual@end
            """,
            prefix="(model.)?",
        ),
    ),
    rope=True,
)

GPT2 = Family(
    "gpt2",
    (
        Tower(
            """
            tensor  (wte|wpe).weight                       - residual@0
            linear  h.{i}.ln_1                             residual@a
            conv1d  h.{i}.attn.c_attn                      residual@a qkv
            conv1d  h.{i}.attn.c_proj                      o residual@b
            tensor  h.{i}.attn.(masked_)?bias              *
            linear  h.{i}.ln_2                             residual@b
            conv1d  h.{i}.mlp.c_fc                         residual@b mlp
            conv1d  h.{i}.mlp.c_proj                       mlp residual@c
            linear  ln_f                                   residual@end
            linear  (lm_head|score|classifier|qa_outputs)  - residual@end
            """,
            prefix="(transformer.)?",
        ),
    ),
)

CLIP_LAYERS = """
    tensor  embeddings.position_ids                *
    linear  encoder.layers.{i}.layer_norm1         residual@a
    linear  encoder.layers.{i}.self_attn.q_proj    q residual@a
    linear  encoder.layers.{i}.self_attn.k_proj    k residual@a
    linear  encoder.layers.{i}.self_attn.v_proj    v residual@a
    linear  encoder.layers.{i}.self_attn.out_proj  residual@b o
    linear  encoder.layers.{i}.layer_norm2         residual@b
    linear  encoder.layers.{i}.mlp.fc1             mlp residual@b
    linear  encoder.layers.{i}.mlp.fc2             residual@c mlp
"""
CLIP_TEXT = (
    CLIP_LAYERS
    + """
    tensor  embeddings.(token|position)_embedding.weight  - residual@0
    linear  final_layer_norm                              residual@end
"""
)
CLIP_VISION = (
    CLIP_LAYERS
    + """
    tensor  embeddings.class_embedding            residual@0
    linear  embeddings.patch_embedding            residual@0 - - -
    tensor  embeddings.position_embedding.weight  - residual@0
    linear  pre_layrnorm                          residual@0
    linear  post_layernorm                        residual@end
"""
)
# Images and texts meet in one space: its axes may be permuted, for both towers at once.
CLIP = Family(
    "clip",
    (
        Tower(CLIP_TEXT, name="text", prefix="text_model.", stream="text.residual"),
        Tower(CLIP_VISION, name="vision", prefix="vision_model.", stream="vision.residual"),
        Tower("linear  text_projection   embedding residual@end", name="text", stream="text.residual"),
        Tower(
            """
            linear  visual_projection  embedding residual@end
            linear  classifier         - residual@end
            """,
            name="vision",
            stream="vision.residual",
        ),
        Tower("tensor  logit_scale   *"),
    ),
)

SIGLIP_TEXT = CLIP_TEXT + "linear  head   embedding residual@end"
# Attention pooling: a learned probe asks, and what it gets lives in the joint space.
SIGLIP_VISION = (
    CLIP_VISION
    + """
    tensor  head.probe                     - - residual@end
    tensor  head.attention.in_proj_weight  qkv:pool residual@end
    tensor  head.attention.in_proj_bias    qkv:pool
    linear  head.attention.out_proj        embedding o:pool
    linear  head.layernorm                 embedding
    linear  head.mlp.fc1                   pool.mlp embedding
    linear  head.mlp.fc2                   embedding pool.mlp
"""
)
SIGLIP = Family(
    "siglip",
    (
        Tower(SIGLIP_TEXT, name="text", prefix="text_model.", stream="text.residual"),
        Tower(SIGLIP_VISION, name="vision", prefix="vision_model.", stream="vision.residual"),
        Tower("tensor  (logit_scale|logit_bias)   *"),
    ),
)
# One tower saved on its own has no prefix, so its names do not say which tower it is; their set does.
VISION_TOWER = Family("vision_tower", (Tower(SIGLIP_VISION),))
TEXT_TOWER = Family("text_tower", (Tower(SIGLIP_TEXT),))

OPEN_CLIP_LAYERS = """
    linear  transformer.resblocks.{i}.ln_1                 residual@a
    tensor  transformer.resblocks.{i}.attn.in_proj_weight  qkv residual@a
    tensor  transformer.resblocks.{i}.attn.in_proj_bias    qkv
    linear  transformer.resblocks.{i}.attn.out_proj        residual@b o
    tensor  transformer.resblocks.{i}.ls_1.gamma           residual@b
    linear  transformer.resblocks.{i}.ln_2                 residual@b
    linear  transformer.resblocks.{i}.mlp.c_fc             mlp residual@b
    linear  transformer.resblocks.{i}.mlp.c_proj           residual@c mlp
    tensor  transformer.resblocks.{i}.ls_2.gamma           residual@c
"""
OPEN_CLIP = Family(
    "open_clip",
    (
        Tower(
            OPEN_CLIP_LAYERS
            + """
            linear  token_embedding       - residual@0
            tensor  positional_embedding  - residual@0
            tensor  attn_mask             *
            linear  ln_final              residual@end
            tensor  text_projection       residual@end embedding
            linear  text_projection       embedding residual@end
            """,
            name="text",
            prefix="(text.)?",
            stream="text.residual",
        ),
        Tower(
            OPEN_CLIP_LAYERS
            + """
            linear  conv1                 residual@0 - - -
            tensor  class_embedding       residual@0
            tensor  positional_embedding  - residual@0
            linear  ln_pre                residual@0
            linear  ln_post               residual@end
            tensor  proj                  residual@end embedding
            """,
            name="vision",
            prefix="visual.",
            stream="vision.residual",
        ),
        Tower("tensor  (logit_scale|logit_bias)   *"),
    ),
)

FAMILIES = {
    family.name: family
    for family in (
        VIT, TIMM_VIT, BERT, T5, LLAMA, GPT2, CLIP, SIGLIP, OPEN_CLIP, VISION_TOWER, TEXT_TOWER,
    )
}  # fmt: skip
