"""Updates as adapters: what peft loads is the update that was measured, or nothing is written."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import load, train_adapter
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.write import verify
from gradfix.errors import IncompatibleCheckpoints, OutputError, UnsafeResult, UsageError
from gradfix.stream.lora_out import (
    LEAST_ENERGY,
    LoraResult,
    adapter_for,
    check_lora,
    layer_kinds,
    lora_from_update,
    save_lora,
    truncated,
)
from gradfix.vectors.taskvector import TaskVector
from gradfix.vectors.transported import apply
from tiny import TEXT_LABELS, _llama_shape, save_tiny, toy_texts, write_rows

FAMILIES = {
    "llama": "CausalLM",
    "gpt2": "CausalLM",
    "bert": "",
    "t5": "Seq2SeqLM",
    "vit": "ImageClassification",
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("targets")

    def get(family: str) -> Path:
        if not (root / family).exists():
            save_tiny(family, root / family)
        return root / family

    return get


def write_lora(
    update: Mapping[str, Tensor],
    rank: int,
    *,
    model: nn.Module,
    target: Path,
    out: Path,
    alpha: float = 1.0,
    keep_small: bool = False,
    losses: Callable[[TaskVector], tuple[float, float]] | None = None,
    least_energy: float = LEAST_ENERGY,
    force: bool = False,
    **options: Any,
) -> tuple[LoraResult, list[str]]:
    """Factor, check and save `alpha * update`; `losses(approximated)` are those before and after."""
    result = adapter_for(update, rank, model=model, target=target, keep_small=keep_small).scaled(alpha)
    before, after = losses(result.approximated) if losses is not None else (None, None)
    notes = check_lora(result, loss_before=before, loss_after=after, least_energy=least_energy, force=force)
    save_lora(result, out, model=model, target=target, notes=notes, **options)
    return result, notes


def random_update(model: nn.Module, seed: int = 0, scale: float = 0.02) -> TaskVector:
    draw = torch.Generator().manual_seed(seed)
    return TaskVector({n: scale * torch.randn(p.shape, generator=draw) for n, p in model.named_parameters()})


@pytest.mark.parametrize("keep_small", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_update_that_was_measured(
    targets: Callable[[str], Path], tmp_path: Path, family: str, keep_small: bool
) -> None:
    from peft import PeftModel

    target = targets(family)
    model = load(target, FAMILIES[family])
    out = tmp_path / "lora"
    result, _ = write_lora(
        random_update(model),
        6,
        model=model,
        target=target,
        out=out,
        alpha=0.5,
        keep_small=keep_small,
        least_energy=0,
    )
    expected = copy.deepcopy(model)
    apply(expected, result.approximated)
    loaded = PeftModel.from_pretrained(load(target, FAMILIES[family]), out).merge_and_unload()
    want = dict(expected.named_parameters())
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(
            parameter, want[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    verify(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_written_is_an_adapter_read(
    targets: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    target = targets(family)
    model = load(target, FAMILIES[family])
    result, _ = write_lora(
        random_update(model), 4, model=model, target=target, out=tmp_path / "lora", least_energy=0
    )
    tau = TaskVector.between(target, tmp_path / "lora")
    expected = name_map(model, tau).to_disk(result.approximated)
    for name in tau:
        torch.testing.assert_close(tau[name], expected[name], rtol=0, atol=1e-6)


def test_disk_names_are_understood(targets: Callable[[str], Path], tmp_path: Path) -> None:
    target = targets("vit")
    model = load(target, "ImageClassification")
    update = name_map(model, open_checkpoint(target).names()).to_disk(random_update(model))
    result, _ = write_lora(update, 4, model=model, target=target, out=tmp_path / "lora", least_energy=0)
    assert set(result.approximated) == set(update)
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert "vit.layers.0.attention.q_proj" in config["target_modules"]


def test_the_fingerprint_of_the_target_is_checked(targets: Callable[[str], Path], tmp_path: Path) -> None:
    model = load(targets("llama"), "CausalLM")
    write_lora(
        random_update(model), 4, model=model, target=targets("llama"), out=tmp_path / "lora", least_energy=0
    )
    other = save_tiny("llama", tmp_path / "other", seed=9)
    with pytest.raises(
        IncompatibleCheckpoints, match="was written for other weights than .* fingerprints differ"
    ):
        open_checkpoint(tmp_path / "lora", base=other)
    assert open_checkpoint(tmp_path / "lora", base=targets("llama")).notes == ()


def test_a_full_rank_adapter_keeps_everything(targets: Callable[[str], Path]) -> None:
    update = random_update(load(targets("llama"), "CausalLM"))
    result = lora_from_update(update, 64)
    assert min(result.energy.values()) > 1 - 1e-9
    for name, tensor in result.approximated.items():
        if tensor.ndim == 2:
            torch.testing.assert_close(tensor, update[name], rtol=0, atol=1e-6)
    assert set(result.dropped) == {name for name, tensor in update.items() if tensor.ndim != 2}
    assert result.retained == pytest.approx(1 - sum(result.dropped.values()))


def test_a_low_rank_update_survives_whole() -> None:
    left, right = torch.randn(40, 3), torch.randn(3, 30)
    result = lora_from_update({"w": left @ right}, 3)
    assert result.retained > 1 - 1e-6


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (700, 600)])
def test_energy_is_what_the_best_approximation_keeps(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) @ torch.diag(
        0.9 ** torch.arange(shape[1])
    )
    left, right = truncated(matrix, 5)
    values = torch.linalg.svdvals(matrix.double())
    lost = float((matrix - left @ right).double().square().sum() / values.square().sum())
    assert lost == pytest.approx(float(values[5:].square().sum() / values.square().sum()), rel=1e-3)
    again = truncated(matrix, 5)
    assert torch.equal(left, again[0]) and torch.equal(right, again[1])


def test_the_factors_do_not_touch_the_global_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    truncated(torch.ones(600, 600), 2)
    assert torch.equal(torch.rand(4), expected)


def test_too_little_energy_is_refused() -> None:
    result = lora_from_update({"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}, 1)
    with pytest.raises(
        UnsafeResult, match=r"rank 1 keeps \d.*% of the update's energy .* raise --out-lora"
    ) as caught:
        check_lora(result)
    assert caught.value.exit_code == 6
    assert any("is asked for" in note for note in check_lora(result, force=True))


def test_a_loss_that_does_not_fall_is_refused(targets: Callable[[str], Path], tmp_path: Path) -> None:
    model = load(targets("llama"), "CausalLM")
    for after in (1.1, float("nan")):
        with pytest.raises(UnsafeResult, match=r"few-shot loss goes from 1 to .*, not down"):
            write_lora(
                random_update(model), 4, model=model, target=targets("llama"), out=tmp_path / "lora",
                losses=lambda update, after=after: (1.0, after), least_energy=0,
            )  # fmt: skip
    assert not (tmp_path / "lora").exists()
    _, notes = write_lora(
        random_update(model), 4, model=model, target=targets("llama"), out=tmp_path / "lora",
        losses=lambda update: (1.0, 0.5), least_energy=0,
    )  # fmt: skip
    assert any("fit no adapter and were left out" in note for note in notes)


def test_refusals_have_reasons(targets: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rank of an adapter must be at least 1, got 0"):
        lora_from_update({"w": torch.ones(2, 2)}, 0)
    with pytest.raises(UnsafeResult, match="the update is zero: there is nothing to put into an adapter"):
        lora_from_update({"w": torch.zeros(2, 2)}, 1)
    with pytest.raises(UnsafeResult, match="nothing to put into an adapter"):
        lora_from_update({"w": torch.ones(2, 2)}, 1).scaled(0)
    model = load(targets("llama"), "CausalLM")
    result = lora_from_update({"nowhere.weight": torch.ones(2, 2)}, 1)
    with pytest.raises(IncompatibleCheckpoints, match="'nowhere.weight' belongs to no layer"):
        save_lora(result, tmp_path / "out", model=model, target=targets("llama"))
    good = lora_from_update({"lm_head.weight": torch.ones_like(model.lm_head.weight)}, 1)
    with pytest.raises(OutputError, match="overlaps the input"):
        save_lora(good, targets("llama"), model=model, target=targets("llama"), overwrite=True)


def test_tied_embeddings_are_left_out(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**_llama_shape(), tie_word_embeddings=True))
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & set(layer_kinds(model))


def test_out_and_in_again_moves_between_models(targets: Callable[[str], Path], tmp_path: Path) -> None:
    """A trained adapter, its task vector, and an adapter of the same rank made from it."""
    train_adapter(load(targets("llama"), "CausalLM"), tmp_path / "in", target_modules=["q_proj", "up_proj"])
    tau = TaskVector.between(targets("llama"), tmp_path / "in")
    model = load(targets("llama"), "CausalLM")
    result, _ = write_lora(tau, 4, model=model, target=targets("llama"), out=tmp_path / "out")
    assert result.retained > 1 - 1e-6
    again = TaskVector.between(targets("llama"), tmp_path / "out")
    assert (again - tau).norm() < 1e-4 * tau.norm()


def test_the_folder_says_where_it_comes_from(targets: Callable[[str], Path], tmp_path: Path) -> None:
    model = load(targets("llama"), "CausalLM")
    sources = {"base": open_checkpoint(targets("llama")), "tuned": open_checkpoint(targets("llama"))}
    write_lora(
        random_update(model), 4, model=model, target=targets("llama"), out=tmp_path / "lora", least_energy=0,
        inputs=sources, config={"mask": "veto", "alpha": 0.5}, details={"measured": {"labels_per_class": 5}},
    )  # fmt: skip
    manifest = verify(tmp_path / "lora")
    assert set(manifest["inputs"]) == {"base", "tuned", "target"} and manifest["kind"] == "lora"
    text = (tmp_path / "lora" / "README.md").read_text()
    assert "LoRA adapter of rank 4" in text and "| mask | veto |" in text and 'library_name: "peft"' in text


def test_the_command_writes_an_adapter_for_the_target(targets: Callable[[str], Path], tmp_path: Path) -> None:
    from peft import PeftModel

    from gradfix.commands.configs import TransportConfig
    from gradfix.commands.transport import run_transport

    base, target = targets("bert"), save_tiny("bert", tmp_path / "target", seed=1)
    train_adapter(load(base, ""), tmp_path / "tuned", target_modules=["query", "dense"])
    for split in ("train", "test"):
        write_rows(tmp_path / "data", split, toy_texts(16, seed=len(split)))
    (tmp_path / "data" / "task.json").write_text(
        json.dumps({"labels": {n: f"a {n} film" for n in TEXT_LABELS}})
    )
    result = run_transport(
        TransportConfig(
            base=str(base), tuned=str(tmp_path / "tuned"), target=str(target), data=str(tmp_path / "data"),
            task="zero-shot", shots=4, alpha="0.5", out=str(tmp_path / "out"), out_lora=8, check=False, force=True,
        )
    )  # fmt: skip
    assert any("of the update's energy" in note for note in result.notes)
    merged = PeftModel.from_pretrained(load(target, ""), tmp_path / "out").merge_and_unload()
    tau = TaskVector.between(target, tmp_path / "out")
    moved = dict(merged.named_parameters())
    for name, delta in tau.items():
        torch.testing.assert_close(
            moved[name].detach() - open_checkpoint(target).read(name), delta, rtol=0, atol=1e-6
        )
    assert verify(tmp_path / "out")["details"]["measured"]["fewshot_loss_after"] == result.loss_after
