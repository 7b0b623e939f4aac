"""What the table says: every command works on every kind, but for the refusals listed here.

This is the one place for expectations. `python -m tests.journeys.expected --write` renders them to
docs/journeys.md; the tests hold the commands to them and the page to this file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "journeys.md"


@dataclass(frozen=True)
class Refusal:
    """A pattern that the message must show, and the reason in the table's words."""

    says: str
    why: str


# Each pattern asks for the true reason and for a way out that exists.
LOST = Refusal(
    r"pooler.*modules_to_save",
    "the adapter was trained beside a pooler that neither it nor the base holds: train with it in `modules_to_save`",
)
DORA = Refusal(r"DoRA.*[Mm]erge", "DoRA is more than base + B A: merge it in peft and give the merged model")
TOKENS = Refusal(
    r"trainable tokens.*[Mm]erge",
    "trained token rows are more than base + B A: merge in peft and give the merged model",
)
ADAPTER = Refusal(
    r"adapter(?!.*--base).*(base|merge)", "an adapter is no model to train: give its base, or merge it first"
)
FILE = Refusal(r"(single )?file.*folder", "a bare file has no config and no tokenizer: give the folder")
NEEDS_MODEL = ("transport", "best", "few_shot", "naive", "compare", "out-lora", "evaluate", "merge")

REFUSED: dict[tuple[str, str], Refusal] = {
    **{("lora-bert-lost-pooler", command): LOST for command in ("inspect", *NEEDS_MODEL)},
    **{("lora-bert-mlm-qv", command): LOST for command in NEEDS_MODEL},
    **{(kind, command): DORA for kind in ("dora-roberta", "dora-llama") for command in ("inspect", *NEEDS_MODEL)},
    **{("lora-llama-token-rows", command): TOKENS for command in ("inspect", *NEEDS_MODEL)},
    ("single-file", "evaluate"): FILE,
    ("single-file", "finetune"): FILE,
}


def expected(kind: str, command: str) -> Refusal | None:
    """The refusal that a cell must show, or None where the command works."""
    from tests.journeys.kinds import load_all

    if command == "finetune" and load_all()[kind].adapter:
        return ADAPTER
    return REFUSED.get((kind, command))


def page() -> str:
    """The table as Markdown: kinds down, commands across, the reasons of refusals below."""
    from tests.journeys.commands import COMMANDS
    from tests.journeys.kinds import load_all

    reasons: list[str] = []
    lines = []
    for name, kind in load_all().items():
        marks = []
        for command in COMMANDS:
            refusal = expected(name, command)
            if refusal is not None and refusal.why not in reasons:
                reasons.append(refusal.why)
            marks.append("works" if refusal is None else f"refused {reasons.index(refusal.why) + 1}")
        flags = " ".join(kind.shaping)
        lines.append(f"| {kind.says} | {kind.task}{f', `{flags}`' if flags else ''} | " + " | ".join(marks) + " |")
    header = ["base and fine-tune", "task", *COMMANDS]
    return "\n".join(
        [
            "# Which checkpoints work",
            "",
            "Every row is a kind of checkpoint, made small with the tools people use; every column a command. A cell",
            "*works* when the command ends well, its output loads with transformers, peft or timm, and plain code measures",
            "the accuracy that was reported, to 0.1 point. A cell is *refused* when the command says within seconds why it",
            "cannot be done and what to do instead. The table is made and checked by `make journeys`; every test run",
            "walks a share of it.",
            "",
            "`transport` runs without `--method`, `best`, `few_shot` and `naive` are its methods, `out-lora` writes an",
            "adapter, `evaluate` scores the fine-tune, `finetune` trains the base (or the adapter, where there is one).",
            "",
            "| " + " | ".join(header) + " |",
            "|" + "---|" * len(header),
            *lines,
            "",
            "## Why some are refused",
            "",
            *(f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, start=1)),
            "",
        ]
    )


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    PAGE.write_text(page(), encoding="utf-8")
