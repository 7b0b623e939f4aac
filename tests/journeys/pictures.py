"""Image classifiers of transformers and timm, and the two-tower models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tests.journeys.kinds import Kind, Maker, add, class_names, copy_files, freeze, save_pair, seeded, tower
from tests.journeys.scorers import image_classes, timm_classes, two_towers
from tests.journeys.toys import class_numbers, fit, next_release, read_rows, write_images
from tests.tiny import IMAGE_LABELS, IMAGE_SIZE, VOCAB, save_tokenizer

OTHER_LABELS = tuple(f"thing {index}" for index in range(5))
PATCHES: dict[str, Any] = {**tower(), "image_size": IMAGE_SIZE, "patch_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "vit": PATCHES,
    "deit": PATCHES,
    "swin": {"image_size": IMAGE_SIZE, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2,
             "initializer_range": 0.1, "drop_path_rate": 0.0},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
}  # fmt: skip


def processor(folder: Path) -> None:
    from transformers import ViTImageProcessor

    ViTImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}).save_pretrained(folder)


def base_model(class_name: str, model_type: str, labels: tuple[str, ...] = ()) -> Any:
    import transformers

    seeded()
    config = transformers.AutoConfig.for_model(
        model_type, **CONFIGS[model_type], **(class_names(labels) if labels else {})
    )
    return getattr(transformers, class_name)(config)


@torch.no_grad()
def settle(model: Any, pixels: torch.Tensor) -> None:
    """Running statistics as a trained model has them, none of them fresh."""
    model.train()
    for _ in range(30):
        model(pixels)
    model.eval()


def pictures(folder: Path, class_name: str, model_type: str, labels: tuple[str, ...] = ()) -> None:
    """AutoModelForImageClassification on the base; a head of another size is replaced, as the tutorials do."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    write_images(folder / "data")
    model = base_model(class_name, model_type, labels)
    settle(model, torch.rand(36, 3, IMAGE_SIZE, IMAGE_SIZE))
    save_pair(folder, model, processor)
    seeded(1)
    model = AutoModelForImageClassification.from_pretrained(
        folder / "base", **class_names(IMAGE_LABELS), ignore_mismatched_sizes=True
    )
    rows = read_rows(folder / "data", "train")
    pixels = AutoImageProcessor.from_pretrained(folder / "base")(
        [row["image"] for row in rows], return_tensors="pt"
    )
    answers = class_numbers(rows, IMAGE_LABELS)
    fit(
        model,
        lambda: model(pixel_values=pixels["pixel_values"], labels=answers).loss,
        steps=25,
        lr=3e-3 if model_type in ("resnet", "deit") else 5e-3,
        settled="resnet" in model_type,
    )
    model.save_pretrained(folder / "tuned")
    processor(folder / "tuned")


TIMM_SIZE = {
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "mlp_ratio": 1.5,
    "img_size": IMAGE_SIZE,
    "patch_size": 8,
}


def timm_pictures(folder: Path, architecture: str, size: dict[str, Any], labels: tuple[str, ...]) -> None:
    """timm's own way: create_model, reset_classifier where the classes differ, save_for_hf."""
    import timm
    from timm.data import create_transform, resolve_model_data_config
    from timm.models import save_for_hf

    write_images(folder / "data")
    overlay = {
        "input_size": (3, IMAGE_SIZE, IMAGE_SIZE),
        "crop_pct": 1.0,
        "custom_load": False,
        "tag": "tiny",
    }
    seeded()
    model = timm.create_model(architecture, num_classes=len(labels), pretrained_cfg_overlay=overlay, **size)

    settle(model, torch.rand(36, 3, IMAGE_SIZE, IMAGE_SIZE))

    def save(role: str, names: tuple[str, ...]) -> None:
        config = {"label_names": list(names)}
        save_for_hf(
            model, str(folder / role), model_config=config, model_args=size or None, safe_serialization=True
        )

    save("base", labels)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    next_release(model)
    save("target", labels)
    model.load_state_dict(before)
    seeded(1)
    if labels != IMAGE_LABELS:
        model.reset_classifier(len(IMAGE_LABELS))
    rows = read_rows(folder / "data", "train")
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    pixels, answers = (
        torch.stack([transform(row["image"]) for row in rows]),
        class_numbers(rows, IMAGE_LABELS),
    )
    fit(
        model,
        lambda: functional.cross_entropy(model(pixels), answers),
        steps=25,
        lr=3e-3 if "resnet" in architecture else 5e-3,
        settled="resnet" in architecture,
    )
    save("tuned", IMAGE_LABELS)


def towers(folder: Path, model_type: str, whole: bool) -> None:
    """A zero-shot fine-tune of the image tower, and of both towers for the last few steps of the `whole`."""
    import transformers

    write_images(folder / "data")
    text = {
        **tower(),
        "vocab_size": len(VOCAB),
        "max_position_embeddings": 24,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    vision = {**tower(), "image_size": IMAGE_SIZE, "patch_size": 8}
    siglip = model_type == "siglip"
    more = {} if siglip else {"projection_dim": 16, "initializer_factor": 4.0}
    text |= {"projection_size": 32} if siglip else {}
    seeded()
    config = transformers.AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **more)
    model = transformers.AutoModel.from_config(config)

    def extras(place: Path) -> None:
        save_tokenizer(place, "" if siglip else "<s>", "</s>", model_max_length=24)
        if siglip:
            transformers.SiglipImageProcessor(
                size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
            ).save_pretrained(place)
        else:
            transformers.CLIPImageProcessor(
                size={"shortest_edge": IMAGE_SIZE}, crop_size=IMAGE_SIZE
            ).save_pretrained(place)

    save_pair(folder, model, extras)
    model = transformers.AutoModel.from_pretrained(folder / "base")
    freeze(model, "vision_model.", "visual_projection.")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    prompts = [f"a {label} photo" for label in IMAGE_LABELS]
    tokens = tokenizer(prompts, padding="max_length" if siglip else True, max_length=24, return_tensors="pt")
    inputs = {"input_ids": tokens["input_ids"]} | (
        {} if siglip else {"attention_mask": tokens["attention_mask"]}
    )
    rows = read_rows(folder / "data", "train")
    pixels = transformers.AutoImageProcessor.from_pretrained(folder / "base")(
        [row["image"] for row in rows], return_tensors="pt"
    )
    answers = class_numbers(rows, IMAGE_LABELS)

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(**inputs, **pixels).logits_per_image, answers)

    fit(model, loss, steps=25, lr=2e-3)
    if whole:
        freeze(model, "")
        fit(model, loss, steps=5, lr=2e-3)
    model.save_pretrained(folder / "tuned")
    copy_files(
        folder / "base", folder / "tuned", "tokenizer*", "special_tokens*", "preprocessor*", "processor*"
    )


def classes(name: str, says: str, make: Maker, head: bool, score: Any = image_classes) -> None:
    add(Kind(name, says, "classification", make, score, head=head))


classes("vit-headed", "ViTForImageClassification on all sides",
        partial(pictures, class_name="ViTForImageClassification", model_type="vit", labels=IMAGE_LABELS), False)  # fmt: skip
classes("vit-other-head", "ViTForImageClassification, base with other classes",
        partial(pictures, class_name="ViTForImageClassification", model_type="vit", labels=OTHER_LABELS), True)  # fmt: skip
classes("vit-bare", "ViTModel with pooler", partial(pictures, class_name="ViTModel", model_type="vit"), True)
classes(
    "deit", "DeiTModel; image classifier", partial(pictures, class_name="DeiTModel", model_type="deit"), True
)
classes("swin-other-head", "SwinForImageClassification, base with other classes",
        partial(pictures, class_name="SwinForImageClassification", model_type="swin", labels=OTHER_LABELS), True)  # fmt: skip
classes("resnet", "ResNetForImageClassification on all sides",
        partial(pictures, class_name="ResNetForImageClassification", model_type="resnet", labels=IMAGE_LABELS), False)  # fmt: skip
classes("resnet-other-head", "ResNetForImageClassification, base with other classes",
        partial(pictures, class_name="ResNetForImageClassification", model_type="resnet", labels=OTHER_LABELS), True)  # fmt: skip
classes("timm-vit", "timm ViT on all sides",
        partial(timm_pictures, architecture="vit_tiny_patch16_224", size=TIMM_SIZE, labels=IMAGE_LABELS), False, timm_classes)  # fmt: skip
classes("timm-other-head", "timm ViT, base with other classes",
        partial(timm_pictures, architecture="vit_tiny_patch16_224", size=TIMM_SIZE, labels=OTHER_LABELS), True, timm_classes)  # fmt: skip
classes("timm-resnet", "timm ResNet on all sides",
        partial(timm_pictures, architecture="test_resnet", size={}, labels=IMAGE_LABELS), False, timm_classes)  # fmt: skip
add(
    Kind(
        "clip",
        "CLIPModel, image tower tuned",
        "zero-shot",
        partial(towers, model_type="clip", whole=False),
        two_towers(False),
    )
)
add(
    Kind(
        "clip-both",
        "CLIPModel, both towers tuned",
        "zero-shot",
        partial(towers, model_type="clip", whole=True),
        two_towers(False),
    )
)
add(
    Kind(
        "siglip",
        "SiglipModel, image tower tuned",
        "zero-shot",
        partial(towers, model_type="siglip", whole=False),
        two_towers(True),
    )
)
