"""Every fault of the catalogue as a user would meet it: what is wrong, the command, and what it must answer."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.reliability.world import World, rewrite, write_json
from tests.tiny import save_tiny, toy_images, toy_texts, write_rows

DENSE = "encoder.layer.0.output.dense.weight"
WIDE = "encoder.layer.0.intermediate.dense.weight"
WORDS = "embeddings.word_embeddings.weight"
Breaks = Callable[[World], list[str]]


@dataclass(frozen=True)
class Fault:
    """`breaks` damages the world and returns the command; `says` must be in its one line."""

    name: str
    code: int
    says: str
    breaks: Breaks


FAULTS: dict[str, Fault] = {}


def fault(name: str, code: int, says: str) -> Callable[[Breaks], Breaks]:
    def add(breaks: Breaks) -> Breaks:
        assert name not in FAULTS
        FAULTS[name] = Fault(name, code, says, breaks)
        return breaks

    return add


# Models -------------------------------------------------------------------------------------------------------


@fault("missing key, fine-tune", 4, rf"tuned lacks 1 tensors of its base .*'{DENSE}'.* LoRA folder needs")
def _(world: World) -> list[str]:
    rewrite(world.tuned, {DENSE: None})
    return world.arguments()


@fault("missing key, target", 4, rf"target lacks 1 tensors of .*'{DENSE}'.*`gradfix inspect")
def _(world: World) -> list[str]:
    rewrite(world.target, {DENSE: None})
    return world.arguments()


@fault("shape differs", 4, rf"'{WIDE}' is \[48, 32\] in .*base and \[48, 31\] in .*target.*`gradfix inspect")
def _(world: World) -> list[str]:
    rewrite(world.target, {WIDE: torch.zeros(48, 31)})
    return world.arguments()


@fault("resized vocabulary", 4, rf"'{WORDS}' has \d+ rows in .* the vocabularies differ. Give .* tokenizers")
def _(world: World) -> list[str]:
    rewrite(world.target, {WORDS: torch.zeros(170, 32)})
    for role in ("base", "tuned", "target"):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (world.home / role / name).unlink()
    return world.arguments()


@fault(
    "extra head", 4, r"tuned has 1 tensors that .*base lacks, first 'head.weight'.*--head copy .*--head skip"
)
def _(world: World) -> list[str]:
    rewrite(world.tuned, {"head.weight": torch.ones(2, 32)})
    return world.arguments()


@fault("extra tensor, strict", 4, r"--strict: 1 tensors are not shared by all three, first 'extra.weight'")
def _(world: World) -> list[str]:
    rewrite(world.target, {"extra.weight": torch.ones(2, 32)})
    return world.arguments(strict=True)


@fault(
    "quantised weights", 4, rf"'{DENSE}' of .*target is torch.int8: quantised .* Use the unquantised release"
)
def _(world: World) -> list[str]:
    rewrite(world.target, {DENSE: torch.zeros(32, 48, dtype=torch.int8)})
    return world.arguments()


def adapter(world: World, **stray: torch.Tensor) -> Path:
    folder = world.home / "lora"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["dense"]}
    write_json(folder / "adapter_config.json", {**config, "base_model_name_or_path": str(world.base)})
    prefix = "base_model.model.encoder.layer.0.output.dense."
    factors = {prefix + "lora_A.weight": torch.ones(2, 48), prefix + "lora_B.weight": torch.ones(32, 2)}
    save_file({**factors, **stray}, folder / "adapter_model.safetensors")
    return folder


@fault("LoRA with a key nobody knows", 3, r"lora: adapter tensor 'stray' is of no kind that gradfix knows")
def _(world: World) -> list[str]:
    return world.arguments(tuned=adapter(world, stray=torch.ones(2)))


@fault(
    "LoRA of another model",
    4,
    r"adapts a 32 x 48 matrix, but 'encoder.layer.0.output.dense.weight'.*Is --base",
)
def _(world: World) -> list[str]:
    for role in ("base", "target"):
        rewrite(world.home / role, {DENSE: torch.zeros(32, 40)})
    return world.arguments(tuned=adapter(world))


@fault("tuned equals base", 6, r"base equals .*base in every weight: the task vector is zero")
def _(world: World) -> list[str]:
    return world.arguments(tuned=world.base)


@fault(
    "not descended",
    4,
    r"by \d+% of its norm: not a fine-tune.* Cosine of base and fine-tune .*--force goes on",
)
def _(world: World) -> list[str]:
    save_tiny("bert", world.home / "stranger", seed=9)
    return world.arguments(tuned=world.home / "stranger")


def _nan(role: str) -> Breaks:
    def breaks(world: World) -> list[str]:
        state = load_file(world.home / role / "model.safetensors")
        state[DENSE][3, 3] = float("nan")
        rewrite(world.home / role, {DENSE: state[DENSE]})
        return merge(world)

    return breaks


def merge(world: World, **changes: object) -> list[str]:
    """The same move without labels: what is left when no model has to be opened."""
    recipe = {
        "target": str(world.target),
        "method": "task_arithmetic",
        "vectors": [{"base": str(world.base), "tuned": str(world.tuned)}],
        **changes,
    }
    return ["merge", str(write_json(world.home / "recipe.yaml", recipe)), "--out", str(world.out)]


for _role in ("base", "tuned", "target"):
    fault(f"NaN in {_role}", 3, rf"'{DENSE}' of .*{_role} holds NaN or Inf. Repair or re-export")(_nan(_role))


@fault("NaN in a copied tensor", 3, r"'only_here' of .*target holds NaN or Inf. Repair or re-export it")
def _(world: World) -> list[str]:
    rewrite(world.target, {"only_here": torch.tensor([1.0, float("inf")])})
    return merge(world)


@fault("output overflows", 6, rf"'{DENSE}' overflows the output's dtype; use --out-dtype fp32")
def _(world: World) -> list[str]:
    rewrite(world.target, {DENSE: torch.full((32, 48), 1e6)})
    return merge(world, dtype="fp16")


@fault("mask that keeps nothing", 6, r"the mask keeps 0.00% of the task vector.* --mask veto may help")
def _(world: World) -> list[str]:
    from gradfix.checkpoints.identity import target_fingerprint
    from gradfix.checkpoints.open import open_checkpoint
    from gradfix.vectors.signvotes import SignVotes
    from gradfix.vectors.taskvector import TaskVector

    tau = TaskVector.between(world.base, world.tuned)
    against = {name: (-delta.sign()).to(torch.int8) for name, delta in tau.items()}
    votes = SignVotes(against, 1, target_hash=target_fingerprint(open_checkpoint(world.target)))
    votes.save(world.home / "against.safetensors")
    return world.arguments(votes=world.home / "against.safetensors")


@fault("votes of another target", 4, r"the votes were taken on other weights than .*target.*Vote again")
def _(world: World) -> list[str]:
    from gradfix.vectors.signvotes import SignVotes

    votes = {DENSE: torch.ones(32, 48, dtype=torch.int8)}
    SignVotes(votes, 1, target_hash="files:0").save(world.home / "v.safetensors")
    return world.arguments(votes=world.home / "v.safetensors")


# Files --------------------------------------------------------------------------------------------------------


@fault("truncated safetensors", 3, r"model.safetensors is not a .*safetensors file")
def _(world: World) -> list[str]:
    path = world.tuned / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return world.arguments()


@fault(
    "huge header claimed", 3, r"model.safetensors .*header of 1099511627776 bytes.* Download or copy it again"
)
def _(world: World) -> list[str]:
    path = world.tuned / "model.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])
    return world.arguments()


def _sharded(world: World, file: str, **extra: str) -> None:
    path = world.tuned / "model.safetensors"
    names = list(load_file(path))
    path.rename(world.tuned / "model-00001-of-00001.safetensors")
    index = {"weight_map": {**dict.fromkeys(names, file), **extra}}
    write_json(world.tuned / "model.safetensors.index.json", index)


@fault(
    "index outside the folder",
    3,
    r"index.json points outside its folder \('../base/model.safetensors'\); refused",
)
def _(world: World) -> list[str]:
    _sharded(world, "../base/model.safetensors")
    return world.arguments()


@fault(
    "index and shards disagree",
    3,
    r"index.json and shard .* disagree about tensor 'ghost'. Download both again",
)
def _(world: World) -> list[str]:
    _sharded(world, "model-00001-of-00001.safetensors", ghost="model-00001-of-00001.safetensors")
    return world.arguments()


@fault(
    "shard missing",
    3,
    r"index.json names shard gone.safetensors, which is not in the folder. Download it again",
)
def _(world: World) -> list[str]:
    _sharded(world, "gone.safetensors")
    return world.arguments()


class Evil:
    """Unpickled by anything that runs pickles, it leaves a canary."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


@fault(
    "malicious pickle", 3, r"evil.pt cannot be read as plain weights.*never runs code.*save it as safetensors"
)
def _(world: World) -> list[str]:
    with open(world.home / "evil.pt", "wb") as file:
        pickle.dump({"w": Evil(world.home / "canary")}, file)
    return world.arguments(tuned=world.home / "evil.pt")


@fault("code in a config", 3, r"target does not load \(")
def _(world: World) -> list[str]:
    canary = world.home / "canary"
    (world.target / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\n")
    config = json.loads((world.target / "config.json").read_text())
    names = {"AutoConfig": "modeling_evil.Evil", "AutoModel": "modeling_evil.Evil"}
    write_json(world.target / "config.json", {**config, "model_type": "evil", "auto_map": names})
    return world.arguments()


@fault("YAML key twice", 2, r"config.yaml, line 2: key 'shots' is already on line 1. Keep one")
def _(world: World) -> list[str]:
    (world.home / "config.yaml").write_text("shots: 1\nshots: 2\n")
    return world.arguments(config=world.home / "config.yaml")


@fault("YAML typo", 2, r"config.yaml: no option called 'shot'.*Did you mean 'shots'")
def _(world: World) -> list[str]:
    (world.home / "config.yaml").write_text("shot: 1\n")
    return world.arguments(config=world.home / "config.yaml")


@fault("YAML with an object", 2, r"config.yaml is not valid YAML: line 1: could not determine a constructor")
def _(world: World) -> list[str]:
    (world.home / "config.yaml").write_text(
        f"data: !!python/object/apply:os.mkdir [{world.home / 'canary'}]\n"
    )
    return world.arguments(config=world.home / "config.yaml")


@fault(
    "half a vote of other data",
    3,
    r"votes.safetensors.part belongs to another vote.*Delete it, or pass --no-resume",
)
def _(world: World) -> list[str]:
    save_file(
        {"x": torch.zeros(1, dtype=torch.int8)},
        world.home / ".votes.safetensors.part",
        {"format": "gradfix.partial", "count": "1", "batches": "1", "chain": "0", "key": "0", "bad": "[]"},
    )
    return world.arguments("vote", out=world.home / "votes.safetensors")


# Data ---------------------------------------------------------------------------------------------------------


@fault(
    "NaN sample", 5, r"1 of 4 samples give a loss that is not finite, first .*train.jsonl:\d+: loss is nan"
)
def _(world: World) -> list[str]:
    """One word has a broken embedding, and one chosen example uses it."""
    from gradfix.data import few_shot, load_data
    from tests.tiny import VOCAB

    rows = toy_texts(24)
    chosen = few_shot(load_data(world.data).pick("train"), 2)[1]
    rows[chosen] = {**rows[chosen], "text": rows[chosen]["text"] + " ~"}
    write_rows(world.data, "train", rows[:12])
    state = load_file(world.target / "model.safetensors")
    state[WORDS][VOCAB.index("~")] = float("nan")
    rewrite(world.target, {WORDS: state[WORDS]})
    return world.arguments("vote", out=world.home / "votes.safetensors")


def _rows(world: World, *lines: dict[str, object], broken_model: bool = True) -> None:
    """These training rows; the model is broken as well, to show that the data is looked at first."""
    (world.data / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if broken_model:
        (world.target / "config.json").write_text("{")


@fault(
    "label outside the set",
    5,
    r"train.jsonl:3: label 'positiv' is not in the label set.*Did you mean 'positive'",
)
def _(world: World) -> list[str]:
    write_json(world.data / "task.json", {"labels": {"positive": "good", "negative": "bad"}})
    rows = toy_texts(4)
    rows[2]["label"] = "positiv"
    _rows(world, *rows)
    return world.arguments("vote", out=world.home / "votes.safetensors")


@fault(
    "label -100",
    5,
    r"train.jsonl:2: no label in column 'label' \(empty, null or -100\).*\(--drop-unlabelled\)",
)
def _(world: World) -> list[str]:
    _rows(world, {"text": "a", "label": "x"}, {"text": "b", "label": -100})
    return world.arguments("vote", out=world.home / "votes.safetensors")


@fault("empty data", 5, r"data .*is empty: there are no examples in it")
def _(world: World) -> list[str]:
    _rows(world)
    return world.arguments("vote", out=world.home / "votes.safetensors")


@fault(
    "fewer than k",
    5,
    r"the label '\w+' has 6 examples, 7 were asked for. Add some or allow fewer \(--allow-fewer\)",
)
def _(world: World) -> list[str]:
    (world.target / "config.json").write_text("{")
    return world.arguments("vote", shots=7, out=world.home / "votes.safetensors")


@fault(
    "leakage", 5, r"the same example is in the few-shot set .*train.jsonl:\d+\) and in test .*test.jsonl:1"
)
def _(world: World) -> list[str]:
    rows = [json.loads(line) for line in (world.data / "train.jsonl").read_text().splitlines()]
    write_rows(
        world.data, "test", [{"text": row["text"].upper() + "  ", "label": row["label"]} for row in rows]
    )
    (world.target / "config.json").write_text("{")
    return world.arguments("vote", out=world.home / "votes.safetensors")


@fault(
    "CSV line with too many fields", 5, r"train.csv:3: 3 fields, but the header has 2 \(text, label\). Quote"
)
def _(world: World) -> list[str]:
    (world.home / "train.csv").write_bytes(b"\xef\xbb\xbftext,label\na,NA\nb,01,x\n")
    return world.arguments("select", data=world.home / "train.csv", target=None, out=world.home / "ids.json")


@fault("truncated image", 5, r"0000.png: the image cannot be decoded .*Is the file truncated")
def _(world: World) -> list[str]:
    write_rows(world.home / "pictures", "train", toy_images(6))
    path = sorted((world.home / "pictures").rglob("*.png"))[0].parent.parent / "red" / "0000.png"
    path.write_bytes(path.read_bytes()[:-60])
    return world.arguments("select", data=world.home / "pictures", target=None, out=world.home / "ids.json")


# Process ------------------------------------------------------------------------------------------------------


@fault(
    "output is an input",
    8,
    r"target is or overlaps the input .*target; inputs are never modified. Choose another",
)
def _(world: World) -> list[str]:
    return world.arguments(out=world.target, overwrite=True)


@fault(
    "output inside an input, by link",
    8,
    r"is or overlaps the input .*base; inputs are never modified. Choose",
)
def _(world: World) -> list[str]:
    (world.home / "link").symlink_to(world.base)
    return world.arguments(out=world.home / "link" / "out")


@fault(
    "votes over the weights",
    8,
    r"model.safetensors is or overlaps the input .*target; inputs are never modified",
)
def _(world: World) -> list[str]:
    return world.arguments("vote", out=world.target / "model.safetensors")


@fault("ids over the data", 8, r"train.jsonl is a data file of the input; inputs are never modified")
def _(world: World) -> list[str]:
    return world.arguments("select", target=None, out=world.data / "train.jsonl")


@fault("data inside an overwritten output", 8, r"is or overlaps the input .*data; inputs are never modified")
def _(world: World) -> list[str]:
    shutil.copytree(world.data, world.home / "big" / "data")
    return world.arguments(data=world.home / "big" / "data", out=world.home / "big", overwrite=True)


@fault("non-empty output", 8, r"out exists and is not empty. Choose another --out, or pass --overwrite")
def _(world: World) -> list[str]:
    world.out.mkdir()
    (world.out / "precious").write_text("mine")
    return world.arguments()


@fault(
    "JSON over the results",
    8,
    r"results.json is or overlaps the input .*results.json; inputs are never modified",
)
def _(world: World) -> list[str]:
    path = write_json(world.home / "results.json", {"rows": []})
    return ["report", str(path), "--out", str(world.home / "page.html"), "--json", str(path)]
