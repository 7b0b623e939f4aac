"""A language model larger than memory teaches and learns from disk as it does in memory."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gradfix.cli import run
from gradfix.methods import speaking
from gradfix.training.asking import _Book
from gradfix.training.imitating import Imitation
from gradfix.training.steps import Training
from tiny import save_tiny, toy_texts, write_rows

LIMIT = {"llama": "140KB", "t5": "170KB"}  # for two models: each has room for its embeddings beside a layer


def _rows(count: int, seed: int) -> list[dict[str, str]]:
    return [{"prompt": f"{row['text']} {seed}", "completion": f"{row['label']} film"} for row in toy_texts(count, seed)]


def _moved(folder: Path, out: Path, size: float, seed: int) -> None:
    """A copy with other weights: a fine-tune, or a later release."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    weights, draw = load_file(out / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name, tensor in weights.items():
        if tensor.ndim > 1:
            weights[name] = tensor + size * tensor.std() * torch.randn(tensor.shape, generator=draw)
    save_file(weights, out / "model.safetensors", {"format": "pt"})


def _adapter(folder: Path, out: Path) -> None:
    from peft import LoraConfig

    out.mkdir()
    LoraConfig(r=2, target_modules=["q_proj", "up_proj"], base_model_name_or_path=str(folder)).save_pretrained(out)
    weights, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    factors = {}
    for name in [name for name in weights if "q_proj" in name or "up_proj" in name]:
        path, (rows, columns) = f"base_model.model.{name.removesuffix('.weight')}", weights[name].shape
        factors[f"{path}.lora_A.weight"] = 0.1 * torch.randn(2, columns, generator=draw)
        factors[f"{path}.lora_B.weight"] = 0.1 * torch.randn(rows, 2, generator=draw)
    save_file(factors, out / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("large")
    for family in ("llama", "t5"):
        save_tiny(family, home / family, 1)
        _moved(home / family, home / f"{family}-tuned", 0.3, 2)
        _moved(home / family, home / f"{family}-next", 0.02, 3)
    _adapter(home / "llama", home / "llama-lora")
    for split, count, seed in (("train", 4, 3), ("test", 2, 9)):
        write_rows(home / "data", split, _rows(count, seed))
    return home


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speaking, "LARGE", 0)  # what is too large for one device has no coordinates to start from
    monkeypatch.setattr("gradfix.commands.telling.Imitation", partial(Imitation, keepsakes=2, keepsake_tokens=3))
    monkeypatch.setattr("gradfix.training.retained.TOKENS", 4)


def _command(home: Path, family: str, tuned: str, out: Path, *more: str) -> list[str]:
    return [
        "transport", "--base", str(home / family), "--tuned", str(home / f"{family}-{tuned}"),
        "--target", str(home / f"{family}-next"), "--data", str(home / "data"), "--out", str(out),
        "--task", "causal" if family == "llama" else "seq2seq", "--shots", "3", "--train", "lora", "--lessons", "2",
        "--prompts", "6", "--answer-tokens", "3", "--force", "--no-check", "--quiet", *more,
    ]  # fmt: skip


def _told(out: Path) -> dict[str, Any]:
    details = json.loads((out / "gradfix.json").read_text())["details"]
    return {name: details[name] for name in ("start", "starts", "measured")}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


class Brought:
    """Bytes of weights that were brought in and are still alive, at their most; the graph of a pass holds some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import accelerate.hooks

        place = accelerate.hooks.set_module_tensor_to_device
        self.most, self.count, self.alive = 0, 0, list[tuple[Any, int]]()

        def watched(module: Any, name: str, device: Any, value: Any = None, **options: Any) -> None:
            if value is not None and str(device) != "meta":
                value = value.clone()  # with memory of its own
            place(module, name, device, value=value, **options)
            if value is None or str(device) == "meta":
                return
            from torch.multiprocessing.reductions import StorageWeakRef

            storage = module._parameters[name].untyped_storage()
            self.alive = [(ref, size) for ref, size in self.alive if not ref.expired()]
            self.alive.append((StorageWeakRef(storage), storage.nbytes()))
            self.most, self.count = max(self.most, sum(size for _, size in self.alive)), self.count + 1

        monkeypatch.setattr("accelerate.hooks.set_module_tensor_to_device", watched)


def _largest_block(folder: Path) -> int:
    """Bytes of the largest layer, or of what stands alone."""
    sizes: dict[str, int] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        block = re.sub(r"(layers|block)\.(\d+)\..*", r"\1.\2", name)
        sizes[block] = sizes.get(block, 0) + tensor.nbytes
    return max(sizes.values())


@pytest.mark.parametrize(
    ("family", "tuned", "more"),
    [("llama", "tuned", ["--out-lora", "4"]), ("llama", "lora", ["--out-lora", "4"]), ("t5", "tuned", [])],
)
def test_disk_and_memory_agree(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, tuned: str, more: list[str]
) -> None:
    one, two, off = tmp_path / "one", tmp_path / "two", tmp_path / "off"
    assert run(_command(home, family, tuned, one, *more)) == 0
    brought = Brought(monkeypatch)
    disk = _command(home, family, tuned, two, *more, "--offload", str(off), "--max-memory", LIMIT[family])
    if tuned == "lora":
        _killed_in_the_second_step(disk, monkeypatch)
    assert run(disk) == 0
    assert brought.count > 100 and brought.most <= _largest_block(home / f"{family}-next")
    assert not list(off.iterdir())
    assert _told(two) == _rounded(_told(one))
    file = "adapter_model.safetensors" if more else "model.safetensors"
    torch.testing.assert_close(load_file(two / file), load_file(one / file), rtol=0, atol=1e-6)
    if tuned == "lora":
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(home / "llama-next"), two)


def _killed_in_the_second_step(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that follow must go on from there; that the answers of the old fine-tune are not asked again, as well."""
    monkeypatch.setattr("gradfix.training.imitating.SAVE_EVERY_SECONDS", 0.0)
    steps, step = list[int](), Training.step

    def dying(self: Training, number: int, losses: Any) -> float:
        steps.append(number)
        if len(steps) == 2:
            raise KeyboardInterrupt
        assert len(steps) < 2 or steps[2] == 1
        return step(self, number, losses)

    monkeypatch.setattr(Training, "step", dying)
    assert run(command) == 130
    monkeypatch.setattr(_Book, "_answer", None)


def test_a_validation_set_may_refuse_the_result_and_the_target_stays(home: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for split, seed in (("train", 3), ("validation", 5)):
        write_rows(data, split, [{**row, "completion": row["prompt"]} for row in _rows(3, seed)])
    more = ["--data", str(data), "--offload", str(tmp_path / "off"), "--max-memory", LIMIT["llama"]]
    assert run(_command(home, "llama", "tuned", tmp_path / "out", *more)) == 0
    found, target = (load_file(path / "model.safetensors") for path in (tmp_path / "out", home / "llama-next"))
    assert all(torch.equal(found[name], target[name]) for name in target)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--train", "full"], "give --train lora"),
        (["--method", "gradfix"], "--offload is for --method best"),
        (["--task", "embedding"], "--offload is for --task causal and seq2seq"),
        (["--processes", "2"], "split the model with --sharded"),
        (["--max-memory", "much"], "--max-memory must be a size such as 20GiB"),
        (["--max-memory", "1KB"], "--max-memory has no room for 'model.embed_tokens'"),
    ],
)
def test_what_cannot_be_offloaded_is_said_at_once(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], more: list[str], says: str
) -> None:
    assert run(_command(home, "llama", "lora", tmp_path / "out", "--offload", str(tmp_path / "off"), *more)) == 2
    said = capfd.readouterr().err
    assert says in said and said.count("\n") == 1


def test_closed_label_sets_and_memory_without_a_folder_are_refused(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "data", "train", toy_texts(6))
    closed = ["--data", str(tmp_path / "data"), "--offload", str(tmp_path / "off")]
    assert run(_command(home, "llama", "lora", tmp_path / "out", *closed)) == 2
    assert "this data has a closed label set" in capfd.readouterr().err
    assert run(_command(home, "llama", "lora", tmp_path / "out", "--max-memory", "1GB")) == 2
    assert "give --offload FOLDER" in capfd.readouterr().err
