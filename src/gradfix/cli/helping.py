"""`--help` of a command: its options in groups, the common ones first, and examples at the end."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

GROUPS: dict[str, tuple[str, ...]] = {
    "Checkpoints": (
        "base", "tuned", "target", "target_tuned", "finetune_target", "finetune_steps", "model", "head", "head_from",
        "new_head", "align", "strict", "architecture", "trust_remote_code",
    ),
    "Data": (
        "data", "task", "shots", "validation", "unlabelled", "text_column", "label_column", "image_column",
        "text_template", "label_names", "encoding", "separator", "drop_unlabelled", "drop_duplicates", "select",
        "allow_fewer", "split", "templates", "max_length", "classes", "tokens", "general",
    ),
    "Method": (
        "method", "methods", "verdict", "mask", "alpha", "margin", "vote", "votes", "pooling", "scoring", "freeze_head",
        "steps", "lr", "train_batch", "weight_decay", "warmup", "table", "suite", "local", "from_mergekit", "quick",
        "train", "rank", "answer_tokens", "prompts", "lessons",
    ),
    "Output": (
        "out", "report", "json", "into", "overwrite", "out_lora", "out_dtype", "track", "repo", "private", "message",
        "unpack", "names", "command", "keep_index", "keep_small",
    ),
    "Running": (
        "config", "dry_run", "quiet", "seed", "seeds", "device", "dtype", "batch_size", "auto_batch", "engine", "processes", "jobs",
        "sharded", "replicas", "recompute", "offload", "max_memory", "devices", "device_memory", "tflops", "resume",
        "work", "check", "force", "yes", "help",
    ),
}  # fmt: skip
"""Every option of every command by its group, in the order of the page."""

TRIO = "--base old-base --tuned my-fine-tune --target new-base --data my-data --task zero-shot"
EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("gradfix demo", "gradfix demo --unpack pocket"),
    "transport": (
        f"gradfix transport {TRIO} --out moved --report moved.html",
        f"gradfix transport {TRIO} --method gradfix --shots 5 --out moved",
        f"gradfix transport {TRIO} --verdict results.json --out moved",
    ),
    "compare": (
        f"gradfix compare {TRIO} --json results.json --report report.html",
        f"gradfix compare {TRIO} --shots 5 50 --seeds 0 1 2 --methods naive few_shot gradfix best",
    ),
    "vote": ("gradfix vote --target new-base --data my-data --task zero-shot --shots 5 --out votes.safetensors",),
    "inspect": ("gradfix inspect old-base my-fine-tune new-base",),
    "evaluate": ("gradfix evaluate --model moved --data my-data --task zero-shot --head-from new-base",),
    "finetune": ("gradfix finetune --model old-base --data my-data --task zero-shot --steps 400 --out my-fine-tune",),
    "merge": ("gradfix merge recipe.yml --out merged",),
    "verify": ("gradfix verify moved",),
    "report": ("gradfix report results.json --out report.html",),
}


class GroupedCommand(TyperCommand):
    """A command whose help has a section per group of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        order = [(group, name) for group, names in GROUPS.items() for name in names]
        sections: dict[str, list[tuple[int, tuple[str, str]]]] = {"Arguments": [], **{group: [] for group in GROUPS}}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            place = next((n for n, (_, name) in enumerate(order) if name == param.name), len(order))
            group = order[place][0] if place < len(order) else "Running"
            sections["Arguments" if param.param_type_name == "argument" else group].append((place, record))
        for group, found in sections.items():
            if found:
                with formatter.section(group):
                    formatter.write_dl([record for _, record in sorted(found, key=lambda item: item[0])])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples as they are typed: a line each, whatever the width."""
        examples = EXAMPLES.get(self.name or "", ())
        if examples:
            formatter.write(f"\n{'Example' if len(examples) == 1 else 'Examples'}:\n")
            for line in examples:
                formatter.write(f"  {line}\n")
