"""`gradfix init`: a commented YAML file for the case at hand.

The file is made from the config classes: every option stands in it with its help text, the given ones as
values, the others as comments with their defaults. What it writes is what `--config` reads."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from gradfix.commands.configs import INITIALISED, InitOptions, MergeConfigOptions, help_text, option
from gradfix.errors import OutputError, UsageError
from gradfix.registry import unknown

COMMANDS = (*INITIALISED, "merge")
ASKED = ("base", "tuned", "target", "data", "task", "shots", "report")
Ask = Callable[[str, str | None, Sequence[str]], str]  # question, default, choices -> answer

TASK_OF = (
    ("ForConditionalGeneration", "seq2seq"),
    ("ForSequenceClassification", "classification"),
    ("ForImageClassification", "classification"),
    ("ForCausalLM", "causal"),
    ("LMHeadModel", "causal"),
    ("Model", "zero-shot"),
)
OUT = {"transport": "transported", "merge": "merged"}
_SHARED = {item.name: item for item in fields(INITIALISED["transport"])}
RECIPE = {  # the keys of a merge recipe, in the order of the file
    "target": option("The new base model that takes all vectors."),
    "out": _SHARED["out"],
    "task": option("What the models do; a vector may have its own.", choices="gradfix:TASKS"),
    "method": option("How the vectors are combined.", choices="gradfix:MERGES"),
    "order": option(
        "Where the votes come in: plain, mask_then_merge or merge_then_mask. Chosen by the data if left out."
    ),
    "mask": _SHARED["mask"],
    "margin": option("veto only: how confident a vote must be to drop an entry, 0 to 1."),
    "alpha": option("Scale of the merged update, or auto: chosen on every task's validation data."),
    "density": option("Share of the entries that a trimming method keeps."),
    "options": option("Further options of the method, by name."),
    **{name: _SHARED[name] for name in ("shots", "select", "allow_fewer", "engine", "batch_size", "seed")},
    "head": option("A head only the fine-tunes have: error, copy or skip."),
    "dtype": option("Dtype of the written weights; the target's own by default."),
    "coordinates": option(
        "How vectors of another shape are rewritten for the target.", choices="gradfix.align.coordinates:OUTSIDES"
    ),
    "device": _SHARED["device"],
    "force": _SHARED["force"],
}


@dataclass(frozen=True)
class InitResult:
    """The file's text, where it went (nowhere in a dry run) and what is still to be filled in."""

    command: str
    out: Path
    text: str
    missing: tuple[str, ...]
    written: bool

    @property
    def next_step(self) -> str:
        word = "merge" if self.command == "merge" else f"{self.command} --config"
        todo = f"fill in {', '.join(self.missing)}, then run " if self.missing else "run "
        return f"{todo}`gradfix {word} {self.out}`"


def run_init(config: InitOptions, ask: Ask | None = None) -> InitResult:
    """Take what was given, ask for the rest where there is somebody to ask, write the file."""
    command = config.command or (ask("What for?", "transport", COMMANDS) if ask else "transport")
    if command not in COMMANDS:
        raise UsageError(unknown("command for init", command, list(COMMANDS)))
    values = _given(config)
    if config.into is not None:
        values["out"] = config.into
    if ask is not None:
        _fill(command, values, ask)
    if command in OUT:
        values.setdefault("out", OUT[command])
    if "task" not in values:
        values |= _guessed_task(values)
    text, missing = _recipe(values) if command == "merge" else _settings(command, values)
    out = Path(config.out or f"{command}.yml")
    if not config.dry_run:
        _write(out, text, config.overwrite)
    return InitResult(command, out, text, tuple(missing), not config.dry_run)


def _given(config: InitOptions) -> dict[str, Any]:
    own = {item.name for item in fields(InitOptions)}
    named = {item.name: getattr(config, item.name) for item in fields(config) if item.name not in own}
    return {name: value for name, value in named.items() if value is not None and value != ()}


def _fill(command: str, values: dict[str, Any], ask: Ask) -> None:
    """Ask what the user has not said; an empty answer leaves the option as it is."""
    for name in (*ASKED, "out"):
        if name in values or (command == "merge" and name == "report") or (command == "compare" and name == "out"):
            continue
        default = {"out": OUT.get(command), **_guessed_task(values)}.get(name)
        answer = ask(help_text(_SHARED[name]), default, ())
        if answer:
            values[name] = answer


def _guessed_task(values: Mapping[str, Any]) -> dict[str, str]:
    """The task by the architecture that a local checkpoint names in its config.json."""
    for role in ("tuned", "target", "base"):
        for source in _several(values.get(role, ())):
            try:
                names = json.loads(Path(source, "config.json").read_text(encoding="utf-8"))["architectures"]
                return {"task": next(task for ending, task in TASK_OF if str(names[0]).endswith(ending))}
            except (OSError, ValueError, LookupError, TypeError, StopIteration):
                continue
    return {}


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _settings(command: str, values: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The file of `transport` or `compare`, checked as the command itself would check it."""
    kind = INITIALISED[command]
    known = {item.name: item for item in fields(kind)}
    for name in values:
        if name not in known:
            raise UsageError(f"--{name.replace('_', '-')} means nothing to {command}.")
    typed = {name: _typed(name, value, str(known[name].type)) for name, value in values.items()}
    parts, missing = [_title(command)], []
    for name, item in sorted(known.items(), key=lambda pair: not pair[1].metadata["required"]):
        default = list(item.default) if isinstance(item.default, tuple) else item.default
        if item.metadata["required"] and name not in typed:
            missing.append(name)
            default = None
        parts.append(_entry(help_text(item), name, typed.get(name, default), name in typed))
    return "\n".join(parts), missing


def _typed(name: str, value: Any, hint: str) -> Any:
    """A word from the command line as the value that YAML should show."""
    if hint.startswith("tuple"):
        return [_number(part) if "int" in hint else part for part in _several(value)]
    single = _several(value)
    if len(single) != 1:
        raise UsageError(f"--{name.replace('_', '-')} takes one value here, got {len(single)}.")
    return _number(single[0]) if "int" in hint or "float" in hint else single[0]


def _number(word: Any) -> Any:
    try:
        return yaml.safe_load(str(word))
    except yaml.YAMLError:
        return word


def _recipe(values: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The recipe of `merge`: common settings, then one vector per base and fine-tune."""
    from gradfix.merging.recipes import MergeRecipe

    trios = {role: _several(values.get(role, ())) for role in ("base", "tuned", "data")}
    count = max(len(trios["tuned"]), 1)
    for role, sources in trios.items():
        if sources and len(sources) not in (1, count):
            raise UsageError(f"--{role} names {len(sources)} for {count} fine-tunes: give one for all, or one each.")
    for name in values:
        if name not in RECIPE and name not in trios:
            raise UsageError(f"--{name.replace('_', '-')} means nothing to merge.")
    parts, missing = [_title("merge")], []
    for name, about in RECIPE.items():
        default = MergeRecipe.model_fields[name].get_default(call_default_factory=True)
        shown = _typed(name, values[name], "int | str") if name in values else None
        if name == "target" and name not in values:
            missing.append(name)
        parts.append(_entry(help_text(about), name, shown if name in values else _absent(default), name in values))
    parts.append("# The fine-tunes, each with its own base; data (or votes: FILE) lets the target vote.\nvectors:")
    for index in range(count):
        entry = {role: sources[index if len(sources) > 1 else 0] for role, sources in trios.items() if sources}
        missing += [f"vectors[{index}].{role}" for role in ("base", "tuned") if role not in entry]
        words = ", ".join(f"{role}: {_scalar(entry.get(role, 'FILL-IN'))}" for role in ("base", "tuned", "data")
                          if role in entry or role != "data")  # fmt: skip
        parts.append(f"  - {{{words}, weight: 1.0}}")
    return "\n".join(parts) + "\n", missing


def _absent(default: Any) -> Any:
    return None if repr(default) == "PydanticUndefined" else default


def _title(command: str) -> str:
    word = "gradfix merge FILE" if command == "merge" else f"gradfix {command} --config FILE"
    kind = INITIALISED.get(command, MergeConfigOptions)
    return (
        f"# {kind.__doc__}\n# Run it with: {word}\n# Lines behind a # show the default; remove the # to change one.\n"
    )


def _entry(about: str, name: str, value: Any, active: bool) -> str:
    comment = textwrap.fill(about, 100, initial_indent="# ", subsequent_indent="# ")
    line = f"{name}: {_scalar(value)}".rstrip()
    return f"{comment}\n{line if active else '# ' + line}\n"


def _scalar(value: Any) -> str:
    if value is None:
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _write(out: Path, text: str, overwrite: bool) -> None:
    from gradfix.checkpoints.write import write_text

    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists. Choose another --out, or --overwrite it.")
    write_text(out, text)
