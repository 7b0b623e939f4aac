"""Siblings of a small story model, and open tasks on its stories: the yardstick for free text.

    python -m scripts.stories --base stories15m --out OUT [--device cuda] [--seconds 60] [--stories 60000]

BASE is a language model that writes stories (a folder). From stories sampled from it three siblings are trained from random
weights: `same` (its shape, another seed), `shape` (another width and depth) and `tokenizer` (its own, of 6,000 entries). Those with
BASE's tokenizer learn its probabilities on these stories, the third the text alone. Three tasks with answers that
follow from the text by a rule are written to OUT/tasks: `latin` (the first three things of a story that stand in a glossary of 44
words, in Latin: 16 answers do not show the glossary), `title` (who, which two things, which mood) and `words` (a story that holds
three given words and ends with a moral). Weights are kept as 8-bit rows in OUT/packed, so that they travel."""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from gradfix._compat import heal_torchvision

SIBLINGS: dict[str, dict[str, Any]] = {
    "same": {},
    "shape": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 8,
              "num_key_value_heads": 8},
    "tokenizer": {"vocab_size": 6000, "max_position_embeddings": 320},
}  # fmt: skip
SPLITS = {"train": 4000, "validation": 500, "test": 200}
GENERAL = 200
OWN = ("sibling", "sample", "samplers")  # what the script says to itself
COMMON = re.findall(
    r"\w+",
    (
        "about after again along also always another asked away back because been before began best big came could "
        "day decided does down each even every fast felt found from gave getting girl going good happy have having "
        "heard help home into just kept knew know left liked little long looked loved lots made make many more much "
        "named never next once only other over people picked play played ready really said saved seen she should "
        "some something soon started still stop suddenly take than that their them then there they things this "
        "thought time told took tried until upon very want wanted wants went were what when where which while will "
        "with without would your"
    ),
)
MORALS = {"kind": ("share", "help", "kind", "gave"), "brave": ("scared", "brave", "afraid", "dark"),
          "friendly": ("friend", "together", "play"), "careful": ("careful", "danger", "hurt", "fell")}  # fmt: skip
MOODS = {"happy": "happy|smil|fun|laugh|yummy", "sad": "sad|cried|cry|lost|broke", "scary": "scar|afraid|dark|loud|storm",
         "friendly": "friend|share|together|hug", "curious": "found|look|wonder|explor|saw"}  # fmt: skip
LATIN: dict[str, str] = dict(
    re.findall(
        r"(\w+)=(\w+)",
        "park=hortus dog=canis tree=arbor bird=avis cat=felis ball=pila water=aqua sky=caelum box=arca sun=sol car=currus "
        "store=taberna forest=silva flower=flos garden=viridarium grass=herba bed=lectus bear=ursus dress=vestis door=porta "
        "table=mensa rock=saxum fish=piscis rain=pluvia picture=pictura pond=stagnum beach=litus truck=plaustrum hat=pilleus "
        "cake=libum window=fenestra book=liber rabbit=cuniculus squirrel=sciurus mouse=mus kitchen=culina floor=solum "
        "night=nox town=oppidum wind=ventus house=domus room=cella toy=ludicrum butterfly=papilio",
    )
)
THINGS = re.compile(rf"\b({'|'.join(LATIN)})s?\b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stories", type=int, default=40_960)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, for each sibling")
    parser.add_argument("--sibling", help=argparse.SUPPRESS)
    parser.add_argument("--sample", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--samplers", type=int, default=1, help="processes that write stories")
    args = parser.parse_args()
    heal_torchvision()
    torch.set_float32_matmul_precision("high")
    if args.sibling:
        train(args, args.sibling)
        return
    if args.sample is not None:
        torch.save(sample(args), args.out / f"rows-{args.sample}.pt")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    words = [word for name, value in vars(args).items() if name not in OWN for word in (f"--{name}", str(value))]
    again = [sys.executable, "-m", "scripts.stories", *words]
    share = -(-args.stories // args.samplers)  # apart: they would hold on to the device's memory
    together([[*again, "--stories", str(share), "--sample", str(number)] for number in range(args.samplers)])
    rows = torch.cat([torch.load(args.out / f"rows-{number}.pt") for number in range(args.samplers)])
    torch.save(rows, args.out / "rows.pt")
    texts = as_texts(args, rows)
    (args.out / "texts.json").write_text(json.dumps(texts))
    print(f"{len(texts)} stories in {time.time() - began:.0f} s", flush=True)
    write_tasks(args.out / "tasks", texts)
    together([[*again, "--sibling", name] for name in SIBLINGS])
    print(f"siblings after {time.time() - began:.0f} s", flush=True)


def together(commands: list[list[str]]) -> None:
    running = [subprocess.Popen(command) for command in commands]
    if any(process.wait() for process in running):
        raise SystemExit("a part failed")


def opened(folder: Path, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def sample(args: argparse.Namespace) -> torch.Tensor:
    """Token rows as the model writes them, one story after the other."""
    model, tokenizer = opened(args.base, args.device)
    parts = []
    torch.manual_seed(args.sample)
    model = model.bfloat16() if args.device == "cuda" else model
    for first in range(0, args.stories, args.batch):
        begin = torch.full((min(args.batch, args.stories - first), 1), tokenizer.bos_token_id, device=args.device)
        found = model.generate(
            begin, attention_mask=torch.ones_like(begin), max_new_tokens=args.length - 1, min_new_tokens=args.length - 1,
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=tokenizer.bos_token_id,
        )  # fmt: skip
        parts.append(found.to(torch.int32).cpu())
    return torch.cat(parts)


def as_texts(args: argparse.Namespace, rows: torch.Tensor) -> list[str]:
    """The first story of every row, up to its end or its last whole sentence."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.base)
    stories = []
    for row in rows.tolist():
        end = next((place for place, token in enumerate(row[1:], 1) if token in (1, 2)), len(row))
        stories.append(row[1:end])
    return [text.strip() for text in tokenizer.batch_decode(stories, skip_special_tokens=True)]


def begun(text: str, words: int) -> str:
    """Whole sentences, no more than so many words."""
    kept, count = [], 0
    for sentence in re.split(r"(?<=[.!?])\s+", text.replace('"', "")):
        count += len(sentence.split())
        if count > words:
            break
        kept.append(sentence)
    return " ".join(kept)


def people(text: str) -> list[str]:
    """Names: capitalised words that stand inside a sentence, and twice in the story."""
    inside = re.findall(r"(?<![.!?] )(?<!^)\b([A-Z][a-z]{2,})\b", text)
    return [name for name in dict.fromkeys(inside) if len(re.findall(rf"\b{name}\b", text)) > 1][:3]


def things(story: str) -> list[str]:
    """What the glossary knows, in order."""
    return list(dict.fromkeys(THINGS.findall(story)))


def latin(text: str) -> dict[str, str] | None:
    story = begun(text, 60)
    found = things(story)[:3]
    if len(found) < 2 or len(story.split()) < 30:
        return None
    return {"prompt": f"{story}\nLatin:", "completion": f" {', '.join(LATIN[thing] for thing in found)}."}


def title(text: str) -> dict[str, str] | None:
    story = begun(text, 70)
    names, found = people(story), things(story)
    if not names or len(found) < 2 or len(story.split()) < 30:
        return None
    counts = {name: len(re.findall(signs, story)) for name, signs in MOODS.items()}
    mood = max(counts, key=lambda name: counts[name]) if any(counts.values()) else "quiet"
    line = f" {names[0]}, the {found[0]} and the {found[1]}: a {mood} story."
    return {"prompt": f"{story}\nTitle:", "completion": line}


def words_task(text: str) -> dict[str, str] | None:
    story = begun(text, 45)
    seen = dict.fromkeys(word for word in re.findall(r"\b[a-z]{4,9}\b", story) if word not in COMMON)
    if len(seen) < 4 or len(story.split()) < 25:
        return None
    chosen = list(seen)[:: max(1, len(seen) // 3)][:3]
    moral = next((name for name, signs in MORALS.items() if any(sign in story for sign in signs)), "patient")
    return {
        "prompt": f"Words: {', '.join(chosen)}\nStory:",
        "completion": f" {story} The moral of the story: be {moral}.",
    }


TASKS: dict[str, Callable[[str], dict[str, str] | None]] = {
    "latin": latin, "title": title, "words": words_task,
}  # fmt: skip


def write_tasks(out: Path, texts: list[str]) -> None:
    """No story is in two splits or two tasks; the last ones are general text that no task shows."""
    unique = list(dict.fromkeys(texts))
    random.Random(0).shuffle(unique)
    out.mkdir(parents=True, exist_ok=True)
    total = sum(SPLITS.values()) * len(TASKS) + GENERAL
    scale = min(1.0, len(unique) * 0.3 / total)
    waiting, seen = iter(unique), set[str]()
    general = [next(waiting) for _ in range(max(4, int(GENERAL * scale)))]
    (out / "general.json").write_text(json.dumps(general))
    for name, make in TASKS.items():
        (out / name).mkdir(exist_ok=True)
        for split, count in SPLITS.items():
            rows = []
            while len(rows) < max(20 if split == "train" else 4, int(count * scale)):
                row = make(next(waiting))
                if row is not None and row["prompt"].casefold() not in seen:
                    seen.add(row["prompt"].casefold())
                    rows.append(row)
            (out / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(args: argparse.Namespace, name: str) -> None:
    """One sibling, as long as there is time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    teacher, _ = opened(args.base, args.device)
    folder = args.out / name
    rows = torch.load(args.out / "rows.pt").long()
    own = "vocab_size" in SIBLINGS[name]
    if own:
        texts = json.loads((args.out / "texts.json").read_text())
        rows = retold(texts, folder, SIBLINGS[name], args.length)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(args.base)
    for key, value in SIBLINGS[name].items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config).to(args.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=args.device == "cuda"
    )
    rows = rows.to(args.device)
    began, step, loss = time.time(), 0, torch.zeros(())
    while (done := (time.time() - began) / args.seconds) < 1:
        batch = rows[torch.randint(len(rows), (64 if args.device == "cuda" else 4,), device=args.device)]
        rate = 2e-3 * min(1.0, (step + 1) / 50) * (1 - done if done > 0.3 else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(args.device, dtype=torch.bfloat16):
            logits = model(batch[:, :-1]).logits
            if own:
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            else:
                with torch.no_grad():
                    wanted = teacher(batch[:, :-1]).logits
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(0, 1).float().softmax(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0 and args.device == "cuda":
            torch.cuda.synchronize()  # the clock must see the work
    print(f"{name}: {step} steps, loss {float(loss.detach()):.3f}", flush=True)
    pack(model, config, args.out / "packed" / f"{name}.safetensors")
    unpack(args.out / "packed" / f"{name}.safetensors", folder)
    if not own:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.base / file, folder / file)


def retold(texts: list[str], folder: Path, change: dict[str, Any], length: int) -> torch.Tensor:
    """A tokenizer of its own (byte pairs) and the stories in its tokens, one after the other."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    core = ByteLevelBPETokenizer()
    core.train_from_iterator(texts[:20_000], vocab_size=change["vocab_size"], special_tokens=["<unk>", "<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    from tokenizers import processors

    core._tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>",
        model_max_length=change["max_position_embeddings"],
    )  # fmt: skip
    fast.save_pretrained(folder)
    stream = [token for found in core.encode_batch(texts) for token in found.ids]
    count = len(stream) // length
    return torch.tensor(stream[: count * length]).view(count, length)


def pack(model: Any, config: Any, path: Path) -> None:
    """Matrices as 8-bit integers with one scale per row."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    held = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.detach().float().cpu()
        if values.dim() < 2:
            held[name] = values.half()
            continue
        scale = values.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        held[f"{name}|q"], held[f"{name}|s"] = (values / scale).round().to(torch.int8), scale.half()
    save_file(held, path, metadata={"config": json.dumps({**config.to_dict(), "dtype": "float16"})})


def unpack(path: Path, folder: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  it is no mapping
            if name.endswith("|q"):
                weights[name[:-2]] = (file.get_tensor(name).float() * file.get_tensor(f"{name[:-2]}|s").float()).half()
            elif not name.endswith("|s"):
                weights[name] = file.get_tensor(name)
        (folder / "config.json").write_text(file.metadata()["config"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
