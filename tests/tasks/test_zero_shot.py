"""Heads belong to a side: built from its frozen encoder, saved beside the weights, read back in label order."""

from __future__ import annotations

from pathlib import Path

import open_clip
import pytest
import torch
from torch.nn.functional import normalize

from gradfix.checkpoints.folder import save_like
from gradfix.checkpoints.open import open_checkpoint
from gradfix.errors import CorruptInput, IncompatibleCheckpoints, UsageError
from gradfix.tasks import TASKS
from gradfix.tasks.scoring import evaluate
from gradfix.tasks.zero_shot import HEAD_FILE
from gradfix.training.finetuning import finetune
from tests.tasks.families import IMAGE_PROMPTS, TEXT_PROMPTS
from tiny import OPEN_CLIP_CONFIG, save_tiny, toy_images, toy_texts


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("bert", tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_logits_are_scaled_cosines_of_pooled_states(bert: Path, pooling: str) -> None:
    from transformers import AutoModel, AutoTokenizer

    bound = TASKS["zero-shot"](TEXT_PROMPTS, pooling=pooling).open(bert, dtype=torch.float64)
    model = AutoModel.from_pretrained(bert, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(bert)

    def naive(text: str) -> torch.Tensor:
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        return normalize(states.mean(0) if pooling == "mean" else states[0], dim=0)

    rows = toy_texts(5)
    with torch.no_grad():
        expected = torch.stack(
            [torch.stack([20 * naive(row["text"]) @ naive(p) for p in TEXT_PROMPTS.values()]) for row in rows]
        )
        found = bound.logits(bound.model, bound.collate(rows))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_an_ensemble_is_the_renormalised_mean(bert: Path) -> None:
    single = [
        TASKS["zero-shot"]({"a": prompt, "b": "bad"}).open(bert, dtype=torch.float64).head[0]
        for prompt in ("good", "fine")
    ]
    both = TASKS["zero-shot"]({"a": ["good", "fine"], "b": "bad"}).open(bert, dtype=torch.float64).head
    torch.testing.assert_close(both[0], normalize((single[0] + single[1]) / 2, dim=0), rtol=0, atol=1e-12)
    wrapped = TASKS["zero-shot"]({"a": "good", "b": "bad"}, templates=["a {} film"]).open(bert)
    spelled = TASKS["zero-shot"]({"a": "a good film", "b": "a bad film"}).open(bert)
    assert torch.equal(wrapped.head, spelled.head)


def test_a_tuned_model_keeps_the_head_of_its_base(bert: Path, tmp_path: Path) -> None:
    task = TASKS["zero-shot"](TEXT_PROMPTS)
    bound = task.open(bert)
    head = bound.head.clone()
    finetune(bound, toy_texts(32), steps=5, batch_size=8, lr=1e-3)
    save_like(open_checkpoint(bert), bound.model, tmp_path / "tuned", extras=bound.save_extras)
    again = task.open(tmp_path / "tuned")
    assert torch.equal(again.head, head)
    (tmp_path / "tuned" / HEAD_FILE).unlink()
    assert torch.equal(task.open(tmp_path / "tuned", head_from=bert).head, head)
    drifted = task.open(tmp_path / "tuned").head
    assert not torch.equal(drifted, head)


def test_a_saved_head_follows_the_label_order_and_refuses_other_labels(bert: Path, tmp_path: Path) -> None:
    folder = save_tiny("bert", tmp_path)
    bound = TASKS["zero-shot"](TEXT_PROMPTS, scale=7.0).open(bert)
    bound.save_extras(folder)
    swapped = dict(reversed(TEXT_PROMPTS.items()))
    again = TASKS["zero-shot"](swapped).open(folder)
    assert again.labels == list(swapped) and again.scale == 7.0
    assert torch.equal(again.head, bound.head.flip(0))
    bare = TASKS["zero-shot"]({label: label for label in TEXT_PROMPTS}).open(folder)
    assert torch.equal(bare.head, bound.head)
    with pytest.raises(IncompatibleCheckpoints, match="other labels"):
        TASKS["zero-shot"]({"x": "x", "y": "y"}).open(folder)
    with pytest.raises(IncompatibleCheckpoints, match="other prompts"):
        TASKS["zero-shot"]({label: "something else" + label for label in TEXT_PROMPTS}).open(folder)
    (folder / HEAD_FILE).write_bytes(b"\x08" + bytes(40))
    with pytest.raises(CorruptInput, match="no zero-shot head"):
        TASKS["zero-shot"](TEXT_PROMPTS).open(folder)


def test_only_the_image_side_is_trained(tmp_path: Path) -> None:
    for family in ("clip", "siglip", "open_clip"):
        bound = TASKS["zero-shot"](IMAGE_PROMPTS).open(save_tiny(family, tmp_path / family))
        text = {"clip": "text_model", "siglip": "text_model", "open_clip": "transformer"}[family]
        names = [name for name, p in bound.model.named_parameters() if p.requires_grad]
        assert names == bound.trainable() and names
        assert not any(name.startswith((text, "logit_scale")) for name in names)


def test_clip_agrees_with_transformers_own_forward(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = save_tiny("clip", tmp_path)
    bound = TASKS["zero-shot"](IMAGE_PROMPTS).open(folder, dtype=torch.float64)
    batch = bound.collate(toy_images(4))
    tokens = AutoTokenizer.from_pretrained(folder)(
        list(IMAGE_PROMPTS.values()), padding=True, return_tensors="pt"
    )
    model = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        expected = model(pixel_values=batch["pixel_values"], **tokens).logits_per_image
        torch.testing.assert_close(bound.logits(bound.model, batch), expected, rtol=0, atol=1e-9)


def test_siglip_agrees_with_transformers_up_to_its_bias(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = save_tiny("siglip", tmp_path)
    bound = TASKS["zero-shot"](IMAGE_PROMPTS).open(folder, dtype=torch.float64)
    batch = bound.collate(toy_images(4))
    tokens = AutoTokenizer.from_pretrained(folder)(
        list(IMAGE_PROMPTS.values()), padding="max_length", max_length=24, return_tensors="pt"
    )
    model = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        output = model(pixel_values=batch["pixel_values"], input_ids=tokens["input_ids"])
        expected = output.logits_per_image - model.logit_bias
        torch.testing.assert_close(bound.logits(bound.model, batch), expected, rtol=0, atol=1e-9)


@pytest.fixture
def tiny_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A weights file, its architecture known to open_clip as "tiny-clip" and published under the tag "toy"."""
    folder = save_tiny("open_clip", tmp_path / "clip")
    config = {
        **OPEN_CLIP_CONFIG,
        "text_cfg": {**OPEN_CLIP_CONFIG["text_cfg"], "hf_tokenizer_name": str(folder)},
    }
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny-clip", config)
    file = folder / "open_clip_model.safetensors"
    published = {"toy": {"file": str(file), "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "tiny-clip", published)
    return file


def test_open_clip_file_tag_and_folder_are_the_same_model(tiny_architecture: Path) -> None:
    folder = TASKS["zero-shot"](IMAGE_PROMPTS).open(tiny_architecture.parent)
    file = TASKS["zero-shot"](IMAGE_PROMPTS, architecture="tiny-clip").open(tiny_architecture)
    tag = TASKS["zero-shot"](IMAGE_PROMPTS).open("open_clip:tiny-clip/toy")
    assert torch.equal(folder.head, file.head) and torch.equal(file.head, tag.head)
    assert (
        open_checkpoint("open_clip:tiny-clip/toy").fingerprint()
        == open_checkpoint(tiny_architecture).fingerprint()
    )
    assert tag.encoder.config["preprocess_cfg"]["std"] == (0.25, 0.25, 0.25)
    with pytest.raises(UsageError, match="a bare weights file of open_clip needs its --architecture"):
        TASKS["zero-shot"](IMAGE_PROMPTS).open(tiny_architecture)
    with pytest.raises(UsageError, match="Did you mean 'tiny-clip'"):
        TASKS["zero-shot"](IMAGE_PROMPTS, architecture="tiny-clp").open(tiny_architecture)
    with pytest.raises(UsageError, match="no pretrained tag of tiny-clip called 'tox'"):
        TASKS["zero-shot"](IMAGE_PROMPTS).open("open_clip:tiny-clip/tox")
    with pytest.raises(UsageError, match="ARCHITECTURE/TAG"):
        TASKS["zero-shot"](IMAGE_PROMPTS).open("open_clip:tiny-clip")


def test_a_bare_file_becomes_a_folder_that_open_clip_can_build(
    tiny_architecture: Path, tmp_path: Path
) -> None:
    bound = TASKS["zero-shot"](IMAGE_PROMPTS, architecture="tiny-clip").open(tiny_architecture)
    save_like(open_checkpoint(tiny_architecture), bound.model, tmp_path / "out", extras=bound.save_extras)
    again = TASKS["zero-shot"](IMAGE_PROMPTS).open(tmp_path / "out")
    batch = bound.collate(toy_images(3))
    assert torch.equal(again.logits(again.model, batch), bound.logits(bound.model, batch))
    theirs, _ = open_clip.create_model_from_pretrained(f"local-dir:{tmp_path / 'out'}")
    ours = dict(bound.model.named_parameters())
    assert all(torch.equal(p, ours[name]) for name, p in theirs.named_parameters())
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")(["a photo of red"])
    assert torch.equal(tokens, bound.encoder.tokenizer(["a photo of red"]))


def test_what_open_clip_gets_back_it_can_read(tmp_path: Path) -> None:
    folder = save_tiny("open_clip", tmp_path / "base")
    task = TASKS["zero-shot"](IMAGE_PROMPTS)
    bound = task.open(folder)
    finetune(bound, toy_images(48), steps=30, batch_size=24, lr=3e-3)
    out = tmp_path / "tuned"
    save_like(open_checkpoint(folder), bound.model, out, extras=bound.save_extras)
    theirs = open_clip.create_model(f"local-dir:{out}", load_weights=False)
    open_clip.load_checkpoint(theirs, str(out / "open_clip_model.safetensors"))
    ours = dict(bound.model.named_parameters())
    assert all(torch.equal(p, ours[name]) for name, p in theirs.named_parameters())
    _, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{out}")
    row = toy_images(1)[0]
    assert torch.equal(preprocess(row["image"]), bound.collate([row])["pixel_values"][0])
    again = task.open(out)
    held = toy_images(30, seed=4)
    first = evaluate(bound.model, bound, bound.batches(held))
    assert first == evaluate(again.model, again, again.batches(held)) and first["accuracy"] > 90


def test_options_that_make_no_sense_are_refused(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean 'mean'"):
        TASKS["zero-shot"](TEXT_PROMPTS, pooling="men").open(bert)
    with pytest.raises(UsageError, match="at least two labels"):
        TASKS["zero-shot"]({"a": "b"})
    with pytest.raises(UsageError, match="has no {}"):
        TASKS["zero-shot"](TEXT_PROMPTS, templates=["a film"])
    with pytest.raises(UsageError, match="encoder-decoder; use --task seq2seq"):
        TASKS["zero-shot"](TEXT_PROMPTS).open(save_tiny("t5", tmp_path))
