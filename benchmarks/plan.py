"""python benchmarks/plan.py [--models bert gpt2 t5 clip] [--engines auto loop] [--json benchmarks/results/plan.json]

Vote on models of real widths and less depth (random fp32 weights) and hold the peak memory and the seconds of each
real run against `gradfix plan`, which sees config and headers only. Every run is a process of its own, with one
thread, that votes on a tiny model first: memory is what the second vote adds at its peak (mapped weights included),
seconds are from start to exit without the tiny vote. A plan is for a machine that does nothing else, so its seconds
are compared with the processor's; the wall clock of a busy machine stands beside them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "src")]
SHOTS = 12
# Looked at while the memory model was made; the runs of the others are forecasts.
SEEN = (
    "bert", "gpt2", "t5", "clip", "llama", "vit", "mixtral", "encoder", "qwen2", "distilbert", "opt", "roberta",
    "gpt_neox",
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "bert": {
        "tiny": "bert_classifier", "kind": "SequenceClassification", "task": "classification", "repeat": 6,
        "sizes": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 12,
                  "vocab_size": 30522, "max_position_embeddings": 512},
    },
    "gpt2": {
        "tiny": "gpt2", "kind": "CausalLM", "task": "causal", "repeat": 4,
        "sizes": {"n_embd": 768, "n_layer": 6, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
    },
    "t5": {
        "tiny": "t5", "kind": "Seq2SeqLM", "task": "seq2seq", "repeat": 8,
        "sizes": {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12, "num_layers": 4,
                  "num_decoder_layers": 4, "vocab_size": 32128},
    },
    "clip": {
        "tiny": "clip", "task": "zero-shot", "size": 224,
        "text": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
                 "vocab_size": 49408},
        "vision": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8,
                   "num_attention_heads": 12, "image_size": 224, "patch_size": 32},
    },
    "llama": {
        "tiny": "llama", "kind": "CausalLM", "task": "causal", "repeat": 3,
        "sizes": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12,
                  "num_key_value_heads": 12, "vocab_size": 16000},
    },
    "mixtral": {
        "tiny": "mixtral", "kind": "CausalLM", "task": "causal", "repeat": 5,
        "sizes": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
                  "num_key_value_heads": 4, "vocab_size": 16000, "num_local_experts": 6},
    },
    "encoder": {
        "tiny": "bert", "task": "zero-shot", "repeat": 10,
        "sizes": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 8,
                  "vocab_size": 24000, "max_position_embeddings": 128},
    },
    "vit": {
        "tiny": "vit", "kind": "ImageClassification", "task": "classification", "size": 112,
        "sizes": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 12,
                  "image_size": 112, "patch_size": 16},
    },
    "qwen2": {
        "tiny": "llama", "config": "Qwen2Config", "kind": "CausalLM", "task": "causal", "repeat": 6,
        "sizes": {"hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 8, "num_attention_heads": 10,
                  "num_key_value_heads": 2, "vocab_size": 40000, "tie_word_embeddings": True},
    },
    "distilbert": {
        "tiny": "bert_classifier", "config": "DistilBertConfig", "kind": "SequenceClassification",
        "task": "classification", "repeat": 12,
        "sizes": {"dim": 768, "hidden_dim": 3072, "n_layers": 5, "n_heads": 12, "vocab_size": 30522,
                  "id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}},
    },
    "opt": {
        "tiny": "gpt2", "config": "OPTConfig", "kind": "CausalLM", "task": "causal", "repeat": 9,
        "sizes": {"hidden_size": 512, "ffn_dim": 2048, "word_embed_proj_dim": 512, "num_hidden_layers": 12,
                  "num_attention_heads": 8, "vocab_size": 20000, "max_position_embeddings": 256,
                  "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
    },
    "roberta": {
        "tiny": "bert_classifier", "config": "RobertaConfig", "kind": "SequenceClassification",
        "task": "classification", "repeat": 9,
        "sizes": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 9, "num_attention_heads": 8,
                  "vocab_size": 35000, "max_position_embeddings": 300, "pad_token_id": 0,
                  "id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}},
    },
    "gpt_neox": {
        "tiny": "gpt2", "config": "GPTNeoXConfig", "kind": "CausalLM", "task": "causal", "repeat": 5,
        "sizes": {"hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 7, "num_attention_heads": 10,
                  "vocab_size": 30000, "max_position_embeddings": 300},
    },
    "electra": {
        "tiny": "bert_classifier", "config": "ElectraConfig", "kind": "SequenceClassification",
        "task": "classification", "repeat": 11,
        "sizes": {"embedding_size": 256, "hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 7,
                  "num_attention_heads": 12, "vocab_size": 28000, "max_position_embeddings": 256,
                  "id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}},
    },
    "siglip": {
        "tiny": "siglip", "task": "zero-shot", "size": 160,
        "text": {"hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 3, "num_attention_heads": 10,
                 "vocab_size": 32000, "projection_size": 640},
        "vision": {"hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 9,
                   "num_attention_heads": 10, "image_size": 160, "patch_size": 16},
    },
    "mistral": {
        "tiny": "llama", "config": "MistralConfig", "kind": "CausalLM", "task": "causal", "repeat": 4,
        "sizes": {"hidden_size": 704, "intermediate_size": 2304, "num_hidden_layers": 7, "num_attention_heads": 11,
                  "num_key_value_heads": 11, "vocab_size": 24000},
    },
}  # fmt: skip


def make(name: str, folder: Path) -> None:
    """The model of this name, a tiny one of its family, and examples."""
    from gradfix._compat import heal_torchvision

    heal_torchvision()
    import torch
    import transformers

    from tiny import IMAGE_LABELS, TEXT_LABELS, save_tiny, toy_images, toy_texts, write_rows

    about = MODELS[name]
    torch.manual_seed(0)
    for part in ("tiny", "target"):
        save_tiny(about["tiny"], folder / part)
    config = transformers.AutoConfig.from_pretrained(folder / "target")
    if "config" in about:
        config = getattr(transformers, about["config"])(**about["sizes"])
    parts = [(config, "sizes"), (getattr(config, "text_config", None), "text")]
    for owner, key in [*parts, (getattr(config, "vision_config", None), "vision")]:
        for size, value in about.get(key, {}).items():
            setattr(owner, size, value)
    auto = getattr(transformers, f"AutoModelFor{about['kind']}" if "kind" in about else "AutoModel")
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder / "target")
    if "size" in about:
        size = {"height": about["size"], "width": about["size"]}
        processor: Any
        if name == "siglip":
            processor = transformers.SiglipImageProcessor(size=size)
        elif name == "clip":
            processor = transformers.CLIPImageProcessor(size={"shortest_edge": about["size"]}, crop_size=size)
        else:
            processor = transformers.ViTImageProcessor(size=size)
        processor.save_pretrained(folder / "target")
        write_rows(folder / "data", "train", toy_images(3 * SHOTS))
        labels = {label: f"a photo of {label}" for label in IMAGE_LABELS}
    else:
        rows = toy_texts(2 * SHOTS)
        write_rows(folder / "data", "train", [{**r, "text": " ".join([r["text"]] * about["repeat"])} for r in rows])
        labels = {label: label for label in TEXT_LABELS}
    (folder / "data" / "task.json").write_text(json.dumps({"labels": labels}))


def options(name: str, folder: Path, target: str, engine: str) -> Any:
    from gradfix.commands.configs import VoteConfig

    return VoteConfig(
        target=str(folder / target), data=str(folder / "data"), task=MODELS[name]["task"], shots=SHOTS,
        engine=engine, device="cpu", out=str(folder / f"{target}.safetensors"),
    )  # fmt: skip


def tokens_of(name: str, folder: Path) -> int | None:
    """How long the examples are; an image's length is in the config."""
    from gradfix.commands.setting import draw, setting

    if "size" in MODELS[name]:
        return None
    config = options(name, folder, "target", "loop")
    start = setting(config)
    batch = start.open(config.target).collate(draw(start, config, base=None).fewshot)
    return int(batch["input_ids"].shape[-1])


def vote(name: str, folder: Path, engine: str) -> None:
    """The real run, after one on a tiny model: what is imported for it does not count as the vote's memory."""
    from gradfix.commands.vote import run_vote

    begin, busy = time.perf_counter(), time.process_time()
    run_vote(options(name, folder, "tiny", engine))
    extra = time.perf_counter() - begin, time.process_time() - busy
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = memory("VmRSS")
    result = run_vote(options(name, folder, "target", engine))
    found = {"memory_mib": memory("VmHWM") - before, "extra": extra, "notes": list(result.notes)}
    print(json.dumps(found))


def memory(field: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return round(int(fields[field].split()[0]) / 1024)


def compare(name: str, engine: str, folder: Path) -> dict[str, Any]:
    from gradfix.commands.configs import PlanConfig
    from gradfix.commands.plan import run_plan

    classes = 3 if "size" in MODELS[name] else 2
    asked = PlanConfig(target=str(folder / "target"), shots=SHOTS, classes=classes, engine=engine,
                       tokens=tokens_of(name, folder), device="cpu")  # fmt: skip
    plan = run_plan(asked).plans[0]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    load, begin, busy = os.getloadavg()[0], time.perf_counter(), _children()
    done = subprocess.run(
        [sys.executable, __file__, "--one", name, str(folder), engine],
        check=True, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    seconds, processor = time.perf_counter() - begin, _children() - busy
    found = json.loads(done.stdout.splitlines()[-1])
    seconds, processor = seconds - found["extra"][0], processor - found["extra"][1]
    planned = plan.memory / 2**20
    return {
        "model": name,
        "engine": engine,
        "forecast": name not in SEEN,
        "chosen": " ".join(note for note in found["notes"] if note.startswith("engine")),
        "planned_mib": round(planned),
        "measured_mib": found["memory_mib"],
        "memory_ratio": round(planned / found["memory_mib"], 3),
        "planned_seconds": round(plan.seconds, 1),
        "processor_seconds": round(processor, 1),
        "time_ratio": round(plan.seconds / processor, 2),
        "wall_seconds": round(seconds, 1),
        "load_average_before": round(load, 2),
    }


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--engines", nargs="+", default=["auto", "loop"])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "plan.json")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        from gradfix._compat import heal_torchvision

        heal_torchvision()
        vote(arguments.one[0], Path(arguments.one[1]), arguments.one[2])
        return
    import torch

    torch.set_num_threads(1)
    rows = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as work:
            make(name, Path(work))
            for engine in arguments.engines:
                rows.append(compare(name, engine, Path(work)))
                print(json.dumps(rows[-1]), flush=True)
    result = {"rows": rows, "versions": {"torch": torch.__version__, "python": platform.python_version()},
              "machine": {"cores": os.cpu_count(), "note": "shared machine: see the load averages"}}  # fmt: skip
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
