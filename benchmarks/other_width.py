"""Another width, on real weights: a narrower encoder is made from a released one, and fine-tunes go there and back.

    python -m benchmarks.other_width --fieldtest FOLDER [--work WORK] [--device cuda] [--jobs 6] [--distil 2000]

FOLDER is that of `benchmarks.any_base`. The narrow encoder keeps 256 of 384 units, 8 of 12 heads and 1024 of 1536 hidden
units of every layer, those with the largest weights, and then learns the wide one's sentence embeddings on texts that
belong to none of the tasks it is judged on (the train texts of `banking`, and random words; no labels). It is kept in
WORK. Fine-tunes of the wide encoder are moved onto it and back, beside few-shot fine-tuning on the same labels, and so
are those of the 12-layer encoders, for another width and another depth at once. Further options are those of
`benchmarks.any_base`. Writes benchmarks/results/other_width.json."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks import any_base

TEXTS = "banking"  # where the narrow encoder's texts come from; it is judged on the others
TASKS = ("movie", "amazon", "tweets")
WIDTHS = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 1024}
TOKENS, RATE = 48, 4e-4
RESULTS = Path(__file__).parent / "results" / "other_width.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fieldtest", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("other-width-work"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--distil", type=int, default=2000, help="steps of 64 texts")
    parser.add_argument("--texts", type=int, default=100_000, help="at most so many")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, more = parser.parse_known_args()
    out = args.work / "models" / any_base.NARROW
    if not (out / "tokenizer.json").is_file():
        make_narrow(args, args.fieldtest / "models" / any_base.SIX, out)
    words = ["--fieldtest", args.fieldtest, "--work", args.work, "--device", args.device, "--out", args.out]
    asked = ["--groups", *any_base.OTHER_WIDTH, "--tasks", *TASKS, "--methods", "best", "bico", "few_shot"]
    any_base.main([*map(str, words), *asked, *more])
    result = json.loads(args.out.read_text())
    result["narrow"] = {**WIDTHS, **json.loads((out / "distilled.json").read_text())}
    result["command"] = "python -m benchmarks.other_width"
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def make_narrow(args: argparse.Namespace, source: Path, out: Path) -> None:
    """Cut the encoder, teach it the whole one's embeddings, and write it as a base of its own."""
    import torch

    from gradfix._compat import heal_torchvision

    heal_torchvision()
    import transformers as hf

    wide = hf.AutoModel.from_pretrained(source, dtype=torch.float32).to(args.device).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(source)
    narrow, units = cut(wide)
    texts = task_free_texts(args, tokenizer)
    begin = time.perf_counter()
    known = torch.cat([embed(wide, tokenizer, texts[i : i + 256]) for i in range(0, len(texts), 256)])
    figures = teach(narrow, tokenizer, texts, known, units, args.distil)
    figures |= {"texts": len(texts), "steps": args.distil, "seconds": round(time.perf_counter() - begin, 1)}
    print("narrow encoder", figures, flush=True)
    narrow.half().save_pretrained(out)
    for file in source.glob("tokenizer*"):
        shutil.copyfile(file, out / file.name)
    (out / "distilled.json").write_text(json.dumps(figures))


def task_free_texts(args: argparse.Namespace, tokenizer: Any) -> list[str]:
    """Texts of a task that is not scored, and as many rows of random words, so that no word is new to the encoder."""
    from gradfix.data import load_data

    rows = load_data(args.fieldtest / "tasks" / TEXTS).splits["train"][: args.texts // 2]
    words = sorted(token for token in tokenizer.get_vocab() if token.isalpha())
    draw = random.Random(0)
    salad = [" ".join(draw.choices(words, k=draw.randint(3, 16))) for _ in rows]
    return [text for pair in zip((str(row["text"]) for row in rows), salad, strict=True) for text in pair]


def cut(wide: Any) -> tuple[Any, Any]:
    """A BERT of the smaller widths with the largest parts of the wide one; and the units it keeps."""
    import torch
    import transformers as hf

    config = hf.BertConfig(**{**wide.config.to_dict(), **WIDTHS})
    state = wide.state_dict()
    size = wide.config.hidden_size // wide.config.num_attention_heads
    weight = sum(t.square().sum(0) for n, t in state.items() if t.dim() == 2 and t.shape[1] == wide.config.hidden_size)
    units = weight.topk(config.hidden_size).indices.sort().values
    found = {}
    for layer in range(config.num_hidden_layers):
        prefix = f"encoder.layer.{layer}."
        outgoing = state[f"{prefix}attention.output.dense.weight"].square().sum(0).view(-1, size).sum(1)
        heads = outgoing.topk(config.num_attention_heads).indices.sort().values
        inner = (heads[:, None] * size + torch.arange(size, device=heads.device)).flatten()
        middle = state[f"{prefix}output.dense.weight"].square().sum(0)
        middle = middle.topk(config.intermediate_size).indices.sort().values
        for name in [name for name in state if name.startswith(prefix)]:
            rows, columns = units, units
            if ".attention.self." in name:
                rows = inner
            elif ".attention.output.dense" in name:
                columns = inner
            elif ".intermediate." in name:
                rows = middle
            elif ".output.dense" in name:
                columns = middle
            found[name] = state[name][rows][:, columns] if state[name].dim() == 2 else state[name][rows]
    for name in [name for name in state if not name.startswith("encoder.")]:
        tensor = state[name]
        outside = tensor[units] if name.startswith("pooler") or tensor.dim() == 1 else tensor
        found[name] = outside[:, units] if tensor.dim() == 2 and tensor.shape[1] == len(weight) else outside
    narrow = hf.BertModel(config).to(wide.device)
    fitting = {n: t for n, t in found.items() if n in narrow.state_dict() and narrow.state_dict()[n].shape == t.shape}
    narrow.load_state_dict(fitting, strict=False)
    lacking = set(dict(narrow.named_parameters())) - set(fitting) - {"pooler.dense.weight", "pooler.dense.bias"}
    assert not lacking, lacking
    return narrow, units


def embed(model: Any, tokenizer: Any, texts: list[str], learning: bool = False) -> Any:
    import torch

    batch = tokenizer(texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt").to(model.device)
    with torch.set_grad_enabled(learning):
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def teach(narrow: Any, tokenizer: Any, texts: list[str], known: Any, units: Any, steps: int) -> dict[str, float]:
    """Cosines between texts as the wide encoder has them, and the units that were kept as they were."""
    import torch
    from torch.nn.functional import cosine_similarity

    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW([p for n, p in narrow.named_parameters() if "pooler" not in n], lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    losses: list[float] = []
    for _ in range(steps):
        rows = torch.randint(len(texts), (64,), generator=generator)
        wanted = known[rows.to(known.device)]
        found = embed(narrow, tokenizer, [texts[int(row)] for row in rows], learning=True)
        apart = (found @ found.T - wanted @ wanted.T).square().mean()
        loss = 10 * apart + (1 - cosine_similarity(found, wanted[:, units])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(apart.detach()) ** 0.5)
    ends = losses[: max(1, steps // 20)], losses[-max(1, steps // 20) :]
    return {name: round(sum(part) / len(part), 4) for name, part in zip(("gap_before", "gap_after"), ends, strict=True)}


if __name__ == "__main__":
    main()
