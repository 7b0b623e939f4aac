"""Model cards: readable by the hub, complete, the same every time, and safe whatever the names are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from gradfix.methods.methods import METHODS
from gradfix.stream.card import card, hub_id, safe

HOSTILE = [
    "<script>alert(1)</script>",
    "![x](http://evil/x.png)",
    "a\n---\nlicense: mit\n---\n# owned",
    "x | y | z",
    "```\nrm -rf /\n```",
    "'; rm -rf / #",
    "$(touch canary)",
    '"quoted": [yaml, {a: b}]',
    "<img src=x onerror=alert(1)>",
    "[link](javascript:alert(1))",
    "\u202egnp.exe",
    "\x00\x1b[31m",
]


def manifest(name: str = "my-model", **changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "kind": "transport",
        "inputs": {
            "base": {"path": "/models/base", "hashes": {"model.safetensors": "a" * 64}},
            "tuned": {"path": f"/models/{name}", "hashes": {"model.safetensors": "b" * 64}},
            "target": {"path": "acme/next-release", "hashes": {"model.safetensors": "c" * 64}},
        },
        "config": {"mask": "veto", "alpha": 0.8, "margin": 0.4, "seed": 3},
        "votes": {"count": 10},
        "counts": {"transported": 20, "copied": 2, "skipped": 1, "total": 23},
        "kept": 0.61,
        "survived_rounding": 0.97,
        "notes": [f"something about {name}"],
        "details": {
            "measured": {
                "labelled_examples": 10,
                "labels_per_class": 5,
                "chosen_by": "few_shot",
                "fewshot_loss_before": 0.9,
                "fewshot_loss_after": 0.5,
                "test_before": {"accuracy": 70.9},
                "test_after": {"accuracy": 92.1},
            },
            "command": {"base": "/models/base", "tuned": f"/models/{name}", "shots": 5, "check": False},
        },
    }
    return content | changes


def front_matter(text: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert match
    return dict(yaml.safe_load(match.group(1)))


def test_the_card_says_what_was_done() -> None:
    text = card(manifest())
    for part in ("veto", "0.8", "0.4", "61.0%", "97.0%", "20 / 2 / 1", "a" * 64, "b" * 64, "c" * 64, "70.9", "92.1",
                 "labelled examples per class | 5", "few-shot loss | 0.9 | 0.5", "something about my", "--shots 5", "--no-check"):  # fmt: skip
        assert part in text, part
    about = front_matter(text)
    assert about["base_model"] == "acme/next-release" and about["base_model_relation"] == "finetune"
    assert about["library_name"] == "transformers" and "gradfix" in about["tags"]


@pytest.mark.parametrize(
    ("mask", "words"), [("veto", "masked by the signs"), ("none", "was scaled and added"), ("random", "a random part")]
)
def test_the_card_says_how_the_update_was_made(mask: str, words: str) -> None:
    content = manifest(config={"mask": mask, "alpha": 1.0})
    content["details"]["command"]["mask"] = mask
    text = card(content)
    assert words in text
    assert "without training" in text


def test_the_card_of_the_best_recipe_does_not_deny_its_training() -> None:
    content = manifest(config={"mask": "none", "alpha": 1.0})
    content["details"]["command"]["method"] = "best"
    content["details"]["method"] = {"name": "best", "transports": True, "way": METHODS["best"].traits.way}
    text = card(content)
    assert "trained for a few dozen steps" in text
    assert "without training" not in text
    assert "| method | best |" in text
    assert "| mask |" not in text


def test_a_mask_that_was_applied_beforehand_is_named() -> None:
    content = manifest(config={"mask": "none", "alpha": 1.0})
    content["details"]["command"]["mask"] = "magnitude"
    text = card(content)
    assert "| mask | magnitude |" in text
    assert "weighed by its agreement with the gradient" in text
    del content["details"]["command"]["mask"]  # an aligned transport with the default mask
    assert "| mask | agree |" in card(content)


def test_a_target_that_was_kept_is_called_so() -> None:
    content = manifest(config={"mask": "none", "alpha": 0.0})
    content["details"]["command"]["method"] = "few_shot"
    content["details"]["method"] = {"name": "few_shot", "transports": False, "way": None}
    text = card(content)
    assert "was kept as it is" in text
    assert "fine-tuned on" not in text


def test_votes_from_a_file_count_their_own_examples() -> None:
    text = card(manifest(votes={"count": 16}))
    assert "| labelled examples | 16 |" in text
    assert "per class" not in text


def test_the_command_keeps_every_space() -> None:
    content = manifest()
    content["details"]["command"] = {"text_template": "a  {x}\n b", "templates": ["one  {}", "two"]}
    line = card(content).split("```")[1].replace("\\\n", "")
    assert "'a  {x}'$'\\x0a'' b'" in line
    assert "--templates 'one  {}'" in line and "--templates two" in line


def test_the_hub_reads_the_front_matter(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    (tmp_path / "README.md").write_text(card(manifest()))
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.base_model == "acme/next-release" and data.library_name == "transformers"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(name: str) -> None:
    text = card(manifest(name))
    assert front_matter(text) == front_matter(card(manifest()))
    body = text.split("\n---\n", 1)[1]
    outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", body, flags=re.DOTALL | re.MULTILINE)
    assert outside.count("\n## ") == card(manifest()).count("\n## ")
    assert not re.search(r"(?<!\\)<[a-zA-Z/!]", outside)
    assert not re.search(r"(?<!\\)\]\(", outside)
    assert "\x1b" not in text and "\x00" not in text and "\u202e" not in text
    assert not re.search(r"^# owned|^license:", text, re.MULTILINE)


@pytest.mark.parametrize("name", HOSTILE)
def test_the_command_survives_the_shell(name: str) -> None:
    text = card(manifest(name))
    fence, command = re.findall(r"^(`{3,})sh\n(.*?)\n\1$", text, re.DOTALL | re.MULTILINE)[0]
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["gradfix", "transport"]
    assert words[words.index("--tuned") + 1].startswith("/models/")
    assert len(words) == 9 and fence not in command


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_any_name_gives_a_card(name: str) -> None:
    text = card(manifest(name))
    assert text == card(manifest(name))
    assert front_matter(text) == front_matter(card(manifest()))
    assert "\n" not in safe(name)


def test_an_adapter_says_what_it_keeps() -> None:
    text = card(manifest(kind="lora", lora={"rank": 8, "retained_energy": 0.731}))
    assert "LoRA adapter of rank 8; it holds 73.1% of the update's energy" in text
    assert front_matter(text)["library_name"] == "peft" and front_matter(text)["base_model_relation"] == "adapter"


def test_nothing_measured_is_said() -> None:
    text = card(manifest(details={}))
    assert "Nothing was measured" in text
    assert "gradfix.transport_checkpoint(" in text


def test_a_bare_manifest_has_a_card() -> None:
    assert front_matter(card({}))["tags"][0] == "gradfix"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("owner/name", "owner/name"),
        ("owner/name@v2", "owner/name"),
        ("/home/x/hub/models--owner--name/snapshots/abc", "owner/name"),
        ("/models/local", None),
        ("./local/folder", None),
        ("~/local/x", None),
        ("a/b/c", None),
        ("plain", None),
        ("", None),
    ],
)
def test_only_hub_models_are_named_to_the_hub(path: str, expected: str | None) -> None:
    assert hub_id(path) == expected


def test_a_transported_folder_has_its_card(tmp_path: Path) -> None:
    import gradfix
    from tiny import save_tiny

    base, target = save_tiny("bert", tmp_path / "base"), save_tiny("bert", tmp_path / "target", seed=1)
    tuned = {name: tensor + 0.01 for name, tensor in gradfix.open_checkpoint(base).state().items()}
    for out in ("one", "two"):
        gradfix.transport_checkpoint(base=base, tuned=tuned, target=target, mask="random", seed=0, out=tmp_path / out)
    text = (tmp_path / "one" / "README.md").read_text()
    assert "| mask | random |" in text and text == (tmp_path / "two" / "README.md").read_text()
    assert "README.md" in gradfix.verify(tmp_path / "one")["outputs"]
