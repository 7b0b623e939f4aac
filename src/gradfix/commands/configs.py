"""Every option of every command, declared once.

A config is a frozen dataclass; its fields are the command's options, the keys of its YAML file and the
arguments of its workflow; its docstring is what `gradfix --help` says. The help text lives in the field, the
names an option may take in their registry. Importing this module imports no heavy library."""

from __future__ import annotations

import shlex
from dataclasses import Field, dataclass, field, fields, make_dataclass
from pkgutil import resolve_name
from typing import Any


def option(
    help: str,
    default: Any = None,
    *,
    required: bool = False,
    positional: bool = False,
    least: float | None = None,
    most: float | None = None,
    choices: str | None = None,
    stand_in: str | None = None,
) -> Any:
    """A field of a config; `choices` is where the registry of its names stands, as `module:NAME`.

    Where a required option is missing, the one called `stand_in` stands in for it."""
    metadata = {"help": help, "required": required, "positional": positional, "least": least, "most": most,
                "choices": choices, "stand_in": stand_in}  # fmt: skip
    return field(default=tuple(default) if isinstance(default, list) else default, metadata=metadata)


def help_text(item: Field[Any]) -> str:
    """The option's help with the names there are; loads their registry, and with it heavy libraries."""
    text, choices = item.metadata["help"], item.metadata["choices"]
    return f"{text} There are: {', '.join(resolve_name(choices))}." if choices else text


SEEDS: dict[str, Any] = {"least": -(2**63), "most": 2**64 - 1}  # what torch's generators take
METHODS = "gradfix.methods.methods:METHODS"
ENGINE = "Vote engine; auto takes the fastest that the model allows."
SPLIT = "Split the model over the processes: for models that no device holds."
OFFLOAD = "One device, model larger than memory: folder for weights that do not fit."
MAX_MEMORY = "With --offload: memory the weights may take, as 20GiB."
PROCESSES = "Processes that share scores, votes and training steps (torchrun brings its own)."
AUTO_BATCH = "When memory runs out, start again with half the batch; the batch used is recorded."
DUPLICATES = "Examples that stand in train and in test: take them out of train, or of test, instead of refusing them."
MOST_SHOTS = 50  # labelled examples per class that are used where nobody says how many
SHOTS = f"Labelled examples per class; by default all there are, up to {MOST_SHOTS} per class."
DRY_RUN = "Check everything and say what would be done; write nothing."


def given(config: Any) -> dict[str, Any]:
    """The options that differ from their defaults: what a person would have to type."""
    values = {item.name: (getattr(config, item.name), item.default) for item in fields(config)}
    return {name: value for name, (value, default) in values.items() if value != default}


def command_line(command: str, config: Any) -> str:
    """The command that runs this config again."""
    words = ["gradfix", command]
    for name, value in given(config).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            parts = value if isinstance(value, tuple) else (value,)
            words += [f"--{flag}", *map(str, parts)]
    return shlex.join(words)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    data: str = option(
        "File, folder with train/validation/test files, image folder or hub dataset.", required=True,
        stand_in="unlabelled",
    )  # fmt: skip
    task: str = option("What the models do.", required=True, choices="gradfix:TASKS")
    label_column: str | None = option("Column that holds the label.")
    text_column: tuple[str, ...] = option("Column(s) that hold the text.", ())
    text_template: str | None = option("Build the text from columns: '{premise} therefore {hypothesis}'.")
    image_column: str | None = option("Column that holds the image.")
    pooling: str | None = option(
        "Text encoders: mean, cls, max, ... (default: what a sentence-transformers folder says, else mean)."
    )
    max_length: int | None = option("Longest text in tokens (default: what the model takes).", least=1)
    templates: tuple[str, ...] = option("Zero-shot: wrap every prompt, e.g. 'a photo of a {}.'.", ())
    architecture: str | None = option("open_clip: the architecture of a bare weights file, e.g. ViT-B-16.")
    scoring: str | None = option("seq2seq and causal: likelihood, generate or (causal) exact.")
    freeze_head: bool = option("Classification: leave the head out of votes and training.", False)
    label_names: tuple[str, ...] = option("Labels that are numbers: the names of the classes, that of 0 first.", ())
    encoding: str | None = option("Encoding of text files (default: utf-8), e.g. cp1252.")
    separator: str | None = option("Sign between the columns of a .csv file (default: ,), e.g. ';'.")
    drop_unlabelled: bool = option("Skip rows without a label instead of refusing them.", False)
    batch_size: int = option("Samples per pass; affects speed, not the votes.", 16, least=1)
    dtype: str = option("Precision the model computes in: fp32, bf16, fp16, fp64.", "fp32")
    device: str | None = option("cpu, cuda, cuda:1 ...; the best there is by default.")
    trust_remote_code: bool = option("Allow model code from the checkpoint to run. Off unless you read it.", False)


@dataclass(frozen=True, kw_only=True)
class ShotOptions(DataOptions):
    shots: int | None = option(SHOTS)
    seed: int = option("Seed of every random choice.", 0, **SEEDS)
    select: str = option("How the examples are chosen.", "random", choices="gradfix:SELECTORS")
    allow_fewer: bool = option("Accept classes with fewer than --shots examples.", False)
    drop_duplicates: str | None = option(DUPLICATES)
    engine: str = option(ENGINE, "auto", choices="gradfix:ENGINES")
    auto_batch: bool = option(AUTO_BATCH, False)


@dataclass(frozen=True, kw_only=True)
class TrioOptions:
    """The three checkpoints, and what shapes them."""

    base: str = option("The old base model.", required=True)
    tuned: str = option("Your fine-tune of the old base (a folder, a file or a LoRA folder).", required=True)
    target: str = option("The new base model.", required=True)
    head: str = option("A head only the fine-tune has: error, copy or skip.", "error")
    strict: bool = option("Refuse tensors that not all three checkpoints share.", False)
    align: str = option("Permute the task vector to the target first, or none.", "none", choices="gradfix:ALIGNERS")
    train: str = option("Open answers, --method best: train a lora, full weights or auto (full where it fits).", "auto")
    answer_tokens: int | None = option(
        "Open answers: longest answer of the old fine-tune (default: by the labelled ones).", least=1
    )
    prompts: int = option("Open answers: how many prompts the old fine-tune is asked.", 512, least=1)
    lessons: int = option("Open answers: optimiser steps on its answers.", 240, least=1)
    general: str | None = option("Open answers: texts to measure forgetting on (default: the new base writes some).")


@dataclass(frozen=True, kw_only=True)
class VoteConfig(ShotOptions):
    """Take a target's votes and save them for any number of transports."""

    target: str = option("The new base model.", required=True)
    out: str = option("Votes file to write (.safetensors).", required=True)
    base: str | None = option("Old base model; only needed for --select other than random.")
    vote: str = option("majority (of per-sample signs) or mean (sign of the summed gradient).", "majority")
    processes: int = option("Processes that share the samples.", 1, least=1)
    sharded: bool = option(SPLIT, False)
    replicas: int = option("With --sharded: how many times the processes hold the whole model.", 1, least=1)
    recompute: bool = option("With --sharded: keep no activations inside layers, compute them twice.", False)
    offload: str | None = option(OFFLOAD)
    max_memory: str | None = option(MAX_MEMORY)
    resume: bool = option("Go on from an interrupted vote with the same settings.", True)
    dry_run: bool = option(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What a vote and a transport will need, before anything is loaded."""

    target: str = option("The new base model.", required=True)
    shots: int = option("Labelled examples per class.", 5)
    classes: int = option("Number of classes.", 2)
    tokens: int | None = option("Tokens per example; 128, or an image's own number of patches.")
    batch_size: int = option("Samples per pass.", 16)
    engine: str = option("Vote engine; auto is planned as batched.", "auto", choices="gradfix:ENGINES")
    dtype: str = option("Precision the model computes in: fp32, bf16, fp16, fp64.", "fp32")
    device: str | None = option("cpu, cuda, cuda:1 ...; the best there is by default.")
    devices: int = option("Devices (processes) at hand.", 1)
    device_memory: float | None = option("Memory of one device in GiB; what is free here by default.")
    tflops: float | None = option("Speed of one device in this dtype; measured here by default.")
    train: str | None = option("Open answers: also plan the lessons of --method best: lora, full or auto.")
    rank: int | None = option("With --train lora: the rank of the adapter (16).", least=1)
    answer_tokens: int = option("With --train: tokens of an answer.", 64, least=1)


@dataclass(frozen=True, kw_only=True)
class TransportConfig(TrioOptions, ShotOptions):
    """Move a fine-tune onto a new base model."""

    out: str = option("Folder to write.", required=True)
    method: str | None = option(
        "How it is moved: best, our recipe, by default; gradfix is the paper's way, and so is giving one of its options "
        "(--mask, --alpha, --margin, --vote, --votes) without a name.",
        choices=METHODS,
    )
    verdict: str | None = option("results.json of a compare on these inputs: ship the method it says.")
    mask: str | None = option(
        "Which entries of the update the votes let through (agree is the paper's).", choices="gradfix:MASKS"
    )
    margin: str | None = option("veto only: how confident a vote must be to drop an entry, 0 to 1, or auto.")
    alpha: str | None = option("Scale of the update, or auto: chosen on validation data or by folds.")
    vote: str | None = option("majority (the default) or mean.")
    votes: str | None = option("Votes file made earlier on this target; no gradients are computed then.")
    validation: str | None = option("Validation data; 'none' to choose by folds of the few-shot examples.")
    unlabelled: str | None = option("Unlabelled inputs for --method best.")
    keep_index: bool = option(
        "Embedding: also write a map by which the new model's queries search the old index.", False
    )
    out_dtype: str | None = option("Dtype of the written weights; the target's own by default.")
    out_lora: int | None = option("Write a LoRA adapter of this rank for the target instead of full weights.")
    report: str | None = option("Also write an HTML report of this transport.")
    check: bool = option("Check on the examples that the fine-tune beats its base.", True)
    overwrite: bool = option("Replace a non-empty output folder.", False)
    force: bool = option("Go on where a check would refuse.", False)
    processes: int = option(PROCESSES, 1, least=1)
    sharded: bool = option(f"{SPLIT} With --method best.", False)
    offload: str | None = option(f"{OFFLOAD} With --method best --train lora.")
    max_memory: str | None = option(MAX_MEMORY)
    dry_run: bool = option(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(DataOptions):
    """Fine-tune a checkpoint with the paper's recipe."""

    model: str = option("Checkpoint to fine-tune.", required=True)
    out: str = option("Folder to write.", required=True)
    steps: int = option("Optimizer steps.", 2000)
    train_batch: int = option("Samples per step.", 128)
    lr: float = option("Peak learning rate.", 1e-5)
    weight_decay: float = option("AdamW weight decay.", 0.1)
    warmup: float = option("Share of the steps spent warming up.", 0.1)
    seed: int = option("Seed of every random choice.", 0, **SEEDS)
    shots: int | None = option("Use only this many examples per class.")
    drop_duplicates: str | None = option(DUPLICATES)
    new_head: bool = option("Classification: put a new head on a model that has none.", False)
    processes: int = option(PROCESSES, 1, least=1)
    sharded: bool = option(SPLIT, False)
    overwrite: bool = option("Replace a non-empty output folder.", False)
    dry_run: bool = option(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(DataOptions):
    """Score a checkpoint on labelled examples."""

    model: str = option("Checkpoint to score.", required=True)
    split: str = option("Split to score on.", "test")
    head_from: str | None = option(
        "Zero-shot: pre-trained checkpoint whose frozen head is used. Adapters: the base they are put on."
    )
    processes: int = option(PROCESSES, 1, least=1)
    auto_batch: bool = option(AUTO_BATCH, False)


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Can these checkpoints be combined? Names, shapes, norms, cosines."""

    checkpoints: tuple[str, ...] = option("Two or three checkpoints: base, tuned [, target].", (), positional=True)
    names: bool = option("List every tensor.", False)


@dataclass(frozen=True, kw_only=True)
class SelectConfig(ShotOptions):
    """Choose the few-shot examples and write their ids."""

    base: str | None = option("Base model whose frozen encoder gives the features.")
    out: str = option("Where to write the chosen ids (.jsonl or .json).", required=True)
    dry_run: bool = option(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class CompareConfig(TrioOptions, DataOptions):
    """All methods side by side under one label budget, with a verdict."""

    target_tuned: str | None = option("A full fine-tune of the target, for the oracle and the upper line.")
    finetune_target: bool = option("Fine-tune the target on the train split when no --target-tuned is given.", False)
    finetune_steps: int = option("Steps of that fine-tune.", 400, least=1)
    shots: tuple[int, ...] = option(
        f"{SHOTS} Several budgets may be given; 0 with --unlabelled: methods that need none.", ()
    )
    seeds: tuple[int, ...] = option("Seeds.", (0,), **SEEDS)
    methods: tuple[str, ...] = option("Methods to compare; all by default.", (), choices=METHODS)
    validation: str | None = option("Validation data; 'none' to choose by folds of the few-shot examples.")
    unlabelled: str | None = option("Unlabelled inputs for the methods that learn from the old fine-tune's answers.")
    engine: str = option(ENGINE, "auto", choices="gradfix:ENGINES")
    allow_fewer: bool = option("Accept classes with fewer than --shots examples.", False)
    drop_duplicates: str | None = option(DUPLICATES)
    auto_batch: bool = option(AUTO_BATCH, False)
    processes: int = option(PROCESSES, 1, least=1)
    work: str | None = option("Folder for finished units, to resume from; beside --json by default.")
    report: str | None = option("HTML report to write.")
    track: str | None = option(
        "Also log to a tracker: NAME:PROJECT, or tensorboard:FOLDER.", choices="gradfix.report.tracking:TRACKERS"
    )
    dry_run: bool = option(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Run the whole job on embedded models, in under a minute."""

    unpack: str | None = option("Only write the embedded models and data into this folder, to play with.")
    report: str | None = option("HTML page to write.", "gradfix-demo.html")
    shots: int = option("Labelled examples per class.", 5)
    seeds: tuple[int, ...] = option("Seeds; one keeps the demo under a minute.", (0,), **SEEDS)
    dry_run: bool = option("Say what would be written; write nothing.", False)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Check an output folder against its manifest."""

    out: str = option("Folder that gradfix wrote.", required=True, positional=True)


@dataclass(frozen=True, kw_only=True)
class MergeConfigOptions:
    """Merge task vectors, each with its own base, onto one target."""

    config: str | None = option("Merge recipe (YAML).", positional=True)
    out: str | None = option("Folder to write.")
    from_mergekit: str | None = option("Run a mergekit YAML file instead, as it is.")
    target: str | None = option(
        "Target model, where the recipe does not name one; mergekit files: their base by default."
    )
    overwrite: bool = option("Replace a non-empty output folder.", False)
    force: bool = option("Go on where a check would refuse.", False)
    dry_run: bool = option(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """Make a LoRA adapter of a full fine-tune, for its own base."""

    base: str = option("The base model the adapter is for.", required=True)
    tuned: str = option("The fine-tune of it.", required=True)
    out: str = option("Folder to write.", required=True)
    rank: int = option("Rank of the adapter.", 16, least=1)
    keep_small: bool = option("Carry norms and biases in full, which no adapter can factor.", False)
    overwrite: bool = option("Replace a non-empty output folder.", False)
    force: bool = option("Go on where a check would refuse.", False)
    dry_run: bool = option(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Reproduce the paper's tables and figures."""

    table: str = option(
        "Table or figure to reproduce, or all.", "all", positional=True, choices="gradfix.experiments:EXPERIMENTS"
    )
    suite: str = option("Models and data to measure on.", "pocket", choices="gradfix.experiments:SUITES")
    quick: bool = option("Fewer seeds and budgets.", False)
    out: str | None = option("Folder for tables, figures and finished units.")
    yes: bool = option("Start without asking after the cost estimate.", False)
    local: tuple[str, ...] = option(
        "Folders that stand in for models or datasets: NAME=FOLDER; encoders=FOLDER is the encoders suite's own.", ()
    )
    jobs: int | None = option("Processes that measure side by side; on a GPU they share it.")
    dry_run: bool = option("Say what it would cost; measure and write nothing.", False)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Make the HTML report of an earlier result."""

    results: str = option("results.json of an earlier compare or demo.", required=True, positional=True)
    out: str | None = option("HTML (or .md) file to write; beside the results by default.")
    dry_run: bool = option(DRY_RUN, False)


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """Send an output folder to the model hub, after checking it."""

    out: str = option("Folder that gradfix wrote.", required=True, positional=True)
    repo: str = option("Hub repository, owner/name; made if it does not exist.", required=True)
    private: bool = option("Make a new repository private.", False)
    message: str | None = option("Commit message.")
    dry_run: bool = option("Check the folder and list what would be sent; contact nobody.", False)


INITIALISED = {"transport": TransportConfig, "compare": CompareConfig}  # and merge, whose YAML is a recipe
PLENTY = ("base", "tuned", "data", "shots", "seeds", "methods", "text_column", "templates", "label_names")


def _union() -> list[tuple[str, Any, Any]]:
    """Every option that a command of `init` knows, unset; `out` is the file that init itself writes."""
    found: dict[str, tuple[str, Any, Any]] = {}
    for kind in INITIALISED.values():
        for item in fields(kind):
            several = item.name in PLENTY
            hint = tuple[str, ...] if several else bool | None if "bool" in str(item.type) else str | None
            again = option(item.metadata["help"], () if several else None, choices=item.metadata["choices"])
            found[item.name] = (item.name, hint, again)
    for name in ("out", "dry_run", "overwrite"):
        found.pop(name)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Write a commented YAML file of options, by asking or by flags."""

    command: str | None = option("What the file is for: transport, compare or merge.")
    out: str | None = option("YAML file to write; COMMAND.yml by default.")
    into: str | None = option("Folder that the command itself will write.")
    overwrite: bool = option("Replace the file.", False)
    dry_run: bool = option("Print the file instead of writing it.", False)


InitConfig = make_dataclass("InitConfig", _union(), bases=(InitOptions,), frozen=True, kw_only=True)
InitConfig.__doc__ = InitOptions.__doc__
