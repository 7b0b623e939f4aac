"""Damaged and hostile files: each must give a typed error, or what an independent reader gives.

"Wrong" is a file that our reader takes and the reference reader refuses or reads differently; "execution" is
a canary file that code inside an input wrote."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import gradfix
from gradfix.data import load_data
from gradfix.methods.results import Results
from tests.reliability.world import World, say
from tests.tiny import toy_images, toy_texts
from tests.torture.children import CODES, Outcome, Series, run_cases
from tests.torture.mutations import mutated, mutated_json, safetensors_header

STATE = {
    "layer.weight": torch.linspace(-1, 1, 60).view(6, 10),
    "layer.bias": torch.linspace(0.5, 1, 6),
    "norm.weight": torch.full((6,), 2.0, dtype=torch.bfloat16),
    "scale": torch.tensor(0.25),
    "steps": torch.tensor([3, 4]),
}
CLI_EVERY = 25
Judge = Callable[[], tuple[str, str]]


def small_folder(folder: Path, seed: int = 0, shards: int = 1) -> Path:
    """The toy weights, moved a little by the seed, in one file or several with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "none"}')
    draw = torch.Generator().manual_seed(seed)
    state = {
        n: (t + 0.01 * torch.randn(t.shape, generator=draw)).to(t.dtype) if t.is_floating_point() else t
        for n, t in STATE.items()
    }
    names = [list(state)[i::shards] for i in range(shards)]
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    files = files if shards > 1 else ["model.safetensors"]
    for file, some in zip(files, names):
        save_file({n: state[n] for n in some}, folder / file, {"format": "pt"})
    if shards > 1:
        weight_map = {name: file for file, some in zip(files, names) for name in some}
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def through_the_cli(words: list[str]) -> tuple[str, str]:
    """One line and a documented code, or success."""
    said = say(words)
    errors = [line for line in said.err.splitlines() if not line.startswith("note:")]
    if "Traceback" in said.err or "internal error" in said.err or said.code == 1:
        return "traceback", said.err[-300:]
    if said.code == 0:
        return "same", ""
    if said.code not in CODES or len(errors) != 1 or not errors[0].startswith("gradfix: "):
        return "wrong", f"code {said.code}: {said.err[-300:]}"
    return "refused", f"{said.code} {errors[0][:200]}"


def transported(world: Path, tuned: Path, reference: Callable[[Path], dict[str, torch.Tensor]]) -> tuple[str, str]:
    """Transport a damaged fine-tune; what comes out must be what the reference reader's weights give."""
    out = world / "out"
    shutil.rmtree(out, ignore_errors=True)
    gradfix.transport_checkpoint(
        base=world / "base", tuned=tuned, target=world / "target", mask="none", alpha=0.5, out=out, force=True
    )
    gradfix.verify(out)
    try:
        tuned_state = reference(tuned)
    except Exception as error:
        return "wrong", f"read what {type(error).__name__} refuses"
    base, target = (load_file(world / role / "model.safetensors") for role in ("base", "target"))
    for name, value in load_file(out / "model.safetensors").items():
        expected = target[name]
        if expected.is_floating_point():
            moved = expected.float() + 0.5 * (tuned_state[name].float() - base[name].float())
            expected = moved.to(expected.dtype)
        if not torch.equal(value, expected):
            return "wrong", f"{name} differs from the reference reader's"
    return "same", ""


def merge_recipe(world: Path, tuned: Path) -> list[str]:
    recipe = world / "recipe.yaml"
    recipe.write_text(
        json.dumps({
            "target": str(world / "target"), "method": "task_arithmetic", "force": True,
            "vectors": [{"base": str(world / "base"), "tuned": str(tuned)}],
        })
    )  # fmt: skip
    shutil.rmtree(world / "merged", ignore_errors=True)
    return ["merge", str(recipe), "--out", str(world / "merged")]


def safetensors_series(home: Path, count: int) -> Series:
    began = time.time()
    world = home / "safetensors"
    for role, seed in (("base", 0), ("tuned", 1), ("target", 2)):
        small_folder(world / role, seed)
    whole = (world / "tuned" / "model.safetensors").read_bytes()
    path = world / "damaged.safetensors"

    def case(number: int) -> tuple[str, str]:
        draw = random.Random(f"safetensors:{number}")
        path.write_bytes(draw.choice((mutated, safetensors_header))(whole, draw))
        if number % CLI_EVERY == 0:
            return through_the_cli(merge_recipe(world, path))
        return transported(world, path, load_file)

    return Series.of("safetensors", run_cases([partial(case, i) for i in range(count)]), began)


# Ways to name a function that a harmless checkpoint never names.
CALLS = (
    ("builtins", "open"), ("io", "open"), ("_io", "open"), ("io", "FileIO"), ("os", "mkdir"), ("posix", "mkdir"),
    ("pathlib", "Path.touch"), ("os", "system"), ("posix", "system"), ("subprocess", "getoutput"),
    ("builtins", "eval"), ("builtins", "exec"), ("torch", "load"), ("torch.serialization", "load"),
    ("torch.hub", "load"), ("numpy", "load"), ("runpy", "run_path"), ("importlib", "import_module"),
    ("torch._inductor.codecache", "caching_device_properties"), ("operator", "methodcaller"),
    ("torch", "storage.open"), ("torch._utils", "_rebuild_parameter"), ("collections", "OrderedDict.__init__"),
)  # fmt: skip


def _text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def hostile_pickle(canary: Path, draw: random.Random) -> bytes:
    """A pickle that would leave the canary, by one of pickle's several ways to call something."""
    module, name = draw.choice(CALLS)
    argument = {
        "system": f"touch {canary}", "getoutput": f"touch {canary}",
        "eval": f"open({str(canary)!r}, 'w')", "exec": f"open({str(canary)!r}, 'w')",
    }.get(name, str(canary))  # fmt: skip
    arguments = _text(argument) + (_text("w") if name in ("open", "FileIO") else b"")
    how = draw.randrange(6)
    if how == 0:
        call = f"c{module}\n{name}\n".encode() + b"(" + arguments + b"tR"
    elif how == 1:
        call = b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode()
        call += b"\x93(" + arguments + b"tR"
    elif how == 2:
        call = b"(" + arguments + f"i{module}\n{name}\n".encode()
    elif how == 3:
        call = b"(" + f"c{module}\n{name}\n".encode() + arguments + b"o"
    elif how == 4:
        call = f"c{module}\n{name}\n".encode() + b"(" + arguments + b"t\x81"
    else:
        call = b"(dc__builtin__\nsetattr\n" + f"(c{module}\n{name}\n".encode() + arguments + b"tRb"
    body = draw.choice((call, b"}" + _text("w") + call + b"s", b"(" + _text("w") + call + b"d"))
    return draw.choice((b"\x80\x02", b"\x80\x04", b"")) + body + b"."


def in_zip(whole: bytes, pickled: bytes) -> bytes:
    """A torch file whose pickle has been exchanged."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as before, zipfile.ZipFile(out, "w") as after:
        for record in before.infolist():
            data = pickled if record.filename.endswith("data.pkl") else before.read(record)
            after.writestr(record.filename, data)
    return out.getvalue()


def pickle_series(home: Path, count: int) -> Series:
    began = time.time()
    world = home / "pickles"
    for role, seed in (("base", 0), ("tuned", 1), ("target", 2)):
        small_folder(world / role, seed)
    state = load_file(world / "tuned" / "model.safetensors")
    path, canary = world / "damaged.pt", world / "canary"
    torch.save(state, path)
    zipped = path.read_bytes()
    torch.save(state, path, _use_new_zipfile_serialization=False)
    old = path.read_bytes()
    inner = zipfile.ZipFile(io.BytesIO(zipped))
    core = inner.read(next(name for name in inner.namelist() if name.endswith("data.pkl")))

    def content(draw: random.Random) -> bytes:
        how = draw.random()
        if how < 0.2:
            return hostile_pickle(canary, draw)
        if how < 0.4:
            return in_zip(zipped, hostile_pickle(canary, draw))
        if how < 0.6:
            return in_zip(zipped, mutated(core, draw))
        return mutated(draw.choice((zipped, old)), draw)

    def case(number: int) -> tuple[str, str]:
        draw = random.Random(f"pickles:{number}")
        path.write_bytes(content(draw))
        try:
            if number % CLI_EVERY == 0:
                return through_the_cli(merge_recipe(world, path))
            return transported(world, path, _plain_torch)
        finally:
            if canary.exists():
                canary.rmdir() if canary.is_dir() else canary.unlink()
                (world / "executed").touch()

    outcomes = run_cases([partial(case, i) for i in range(count)])
    if (world / "executed").exists():
        outcomes.append(Outcome("execution", "the canary was written"))
    return Series.of("pickles", outcomes, began)


def _plain_torch(path: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(path, map_location="cpu", weights_only=True))


def json_series(home: Path, count: int, world: World) -> Series:
    """Indexes, configs, adapters, manifests, results and task files, in turn."""
    began = time.time()
    here = home / "json"
    kinds: list[Callable[[Path, random.Random], tuple[str, str]]] = [
        _index, _manifest, _results, _task_file, _adapter, partial(_config, world, "config.json"), _index,
        partial(_config, world, "tokenizer_config.json"),
    ]  # fmt: skip

    def case(number: int) -> tuple[str, str]:
        draw = random.Random(f"json:{number}")
        folder = here / "case"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return kinds[number % len(kinds)](folder, draw)

    return Series.of("json", run_cases([partial(case, i) for i in range(count)]), began)


def _index(folder: Path, draw: random.Random) -> tuple[str, str]:
    small_folder(folder / "m", shards=2)
    index = folder / "m" / "model.safetensors.index.json"
    index.write_bytes(mutated_json(index.read_text(), draw))
    found = gradfix.open_checkpoint(folder / "m").state()
    small_folder(folder / "whole")
    wanted = load_file(folder / "whole" / "model.safetensors")
    same = set(found) == set(wanted) and all(torch.equal(found[n], wanted[n]) for n in found)
    return ("same", "") if same else ("wrong", "read other tensors than the shards hold")


def _manifest(folder: Path, draw: random.Random) -> tuple[str, str]:
    for role, seed in (("base", 0), ("tuned", 1), ("target", 2)):
        small_folder(folder / role, seed)
    three = {role: folder / role for role in ("base", "tuned", "target")}
    gradfix.transport_checkpoint(**three, mask="none", out=folder / "out")
    path = folder / "out" / "gradfix.json"
    path.write_bytes(mutated_json(path.read_text(), draw))
    content = gradfix.verify(folder / "out")
    listed = all((folder / "out" / name).is_file() for name in content["outputs"])
    return ("same", "") if listed else ("wrong", "verified a file that is not there")


def _results(folder: Path, draw: random.Random) -> tuple[str, str]:
    row = {"method": "zero_shot", "shots": 5, "seed": 0, "accuracy": 50.0, "recovered": None, "alpha": 1.0,
           "seconds": 1.0, "regime": "validation", "validation_accuracy": 50.0, "validation_score": 0.5,
           "test_samples": 10, "notes": []}  # fmt: skip
    results = Results.build([row, {**row, "method": "veto", "accuracy": 60.0}], versions={"gradfix": "0"})
    path = folder / "results.json"
    path.write_bytes(mutated_json(results.to_json(), draw))
    return through_the_cli(["report", str(path), "--out", str(folder / "page.html")])


def _task_file(folder: Path, draw: random.Random) -> tuple[str, str]:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in toy_texts(6)))
    task = {"labels": {"positive": ["good", "fine"], "negative": "bad"}, "templates": ["a {} film"],
            "text_template": "{text}!", "label_column": "label"}  # fmt: skip
    (folder / "task.json").write_bytes(mutated_json(json.dumps(task), draw))
    load_data(folder)
    return "same", ""


def _adapter(folder: Path, draw: random.Random) -> tuple[str, str]:
    base = small_folder(folder / "base")
    adapter = folder / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["layer"], "bias": "none",
              "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None,
              "rank_pattern": {}, "alpha_pattern": {}, "base_model_name_or_path": str(base)}  # fmt: skip
    factors = {"lora_A.weight": torch.ones(2, 10), "lora_B.weight": torch.ones(6, 2)}
    save_file({f"base_model.model.layer.{n}": t for n, t in factors.items()}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_bytes(mutated_json(json.dumps(config), draw))
    opened = gradfix.open_checkpoint(adapter, base=base)
    for name in opened.names():
        opened.read(name)
    return "same", ""


def _config(world: World, file: str, folder: Path, draw: random.Random) -> tuple[str, str]:
    """A model under a damaged config: refused, or loaded with exactly the weights of the file."""
    from gradfix.tasks.zero_shot import ZeroShot

    shutil.copytree(world.base, folder / "m")
    path = folder / "m" / file
    path.write_bytes(mutated_json(path.read_text(), draw))
    bound = ZeroShot({"positive": "good", "negative": "bad"}).open(folder / "m")
    wanted = load_file(folder / "m" / "model.safetensors")
    for name, parameter in bound.model.named_parameters():
        if name not in wanted or not torch.equal(parameter, wanted[name].to(parameter.dtype)):
            return "wrong", f"{name} is not the file's"
    return "same", ""


def text_series(home: Path, count: int) -> Series:
    began = time.time()
    rows = toy_texts(8)
    jsonl = "".join(json.dumps(row) + "\n" for row in rows).encode()
    files = {
        ".jsonl": jsonl,
        ".csv": b"text,label\r\n" + b"".join(f'"{r["text"]}",{r["label"]}\r\n'.encode() for r in rows),
        ".tsv": b"text\tlabel\n" + b"".join(f"{r['text']}\t{r['label']}\n".encode() for r in rows),
    }
    return _data_series("text data", home / "text", files, count, began)


def parquet_series(home: Path, count: int) -> Series:
    began = time.time()
    import pyarrow
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(toy_texts(8)), sink)
    return _data_series("parquet", home / "parquet", {".parquet": sink.getvalue()}, count, began)


def _data_series(name: str, folder: Path, files: dict[str, bytes], count: int, began: float) -> Series:
    folder.mkdir(parents=True)

    def case(number: int) -> tuple[str, str]:
        draw = random.Random(f"{name}:{number}")
        suffix = draw.choice(list(files))
        path = folder / f"train{suffix}"
        path.write_bytes(mutated(files[suffix], draw))
        if number % CLI_EVERY == 0:
            out = folder / "ids.json"
            words = ["select", "--data", str(path), "--task", "zero-shot", "--shots", "1", "--out", str(out)]
            return through_the_cli(words)
        for row in load_data(path).pick("train"):
            if not isinstance(row["label"], str) or not isinstance(row["text"], str):
                return "wrong", f"{row.where} is no text with a label"
        return "same", ""

    return Series.of(name, run_cases([partial(case, i) for i in range(count)]), began)


def image_series(home: Path, count: int) -> Series:
    began = time.time()
    picture = toy_images(1)[0]["image"]
    encoded = {}
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        sink = io.BytesIO()
        picture.save(sink, kind)
        encoded[kind] = sink.getvalue()
    folder = home / "images"
    for label in ("a", "b"):
        (folder / "train" / label).mkdir(parents=True)
        picture.save(folder / "train" / label / "whole.png")

    def case(number: int) -> tuple[str, str]:
        draw = random.Random(f"images:{number}")
        damaged = mutated(encoded[draw.choice(list(encoded))], draw)
        (folder / "train" / "a" / "damaged.png").write_bytes(damaged)
        load_data(folder)
        return "same", ""

    return Series.of("images", run_cases([partial(case, i) for i in range(count)]), began)


HOSTILE_YAML = (
    "!!python/object/apply:os.mkdir [{canary}]\n", "data: !!python/name:os.system\n", "a: &a [*a]\n",
    "shots: 3\nshots: 4\n", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "? [complex]\n: key\n", "{{{{{{", "- list\n",
    "data: !!binary notbase64\n", "shots: 1e400\n", "seed: 0o777777777777777777777777\n", "when: 2001-99-99\n", "\x00",
)  # fmt: skip


def yaml_series(home: Path, count: int) -> Series:
    began = time.time()
    folder = home / "yaml"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in toy_texts(6)))
    canary = folder / "canary"
    # Names without a folder: a damaged name must not write outside this one.
    plain = "data: train.jsonl\ntask: zero-shot\nshots: 1\nseed: 3\nout: ids.json\n"
    path = folder / "config.yaml"

    def case(number: int) -> tuple[str, str]:
        draw = random.Random(f"yaml:{number}")
        if draw.random() < 0.5:
            text = draw.choice(HOSTILE_YAML).replace("{canary}", str(canary)).encode()
            text = text if draw.random() < 0.5 else plain.encode() + text
        else:
            text = mutated(plain.encode(), draw)
        path.write_bytes(text)
        os.chdir(folder)
        outcome = through_the_cli(["select", "--config", str(path)])
        return ("execution", "the canary was written") if canary.exists() else outcome

    return Series.of("yaml", run_cases([partial(case, i) for i in range(count)]), began)
