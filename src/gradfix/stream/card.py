"""The model card of an output folder: README.md with front matter that the hub understands.

It is made from the manifest alone, so the same result has the same card. Every name in it comes from
outside and is treated as hostile: YAML strings are quoted, Markdown and HTML are escaped, commands are
shell-quoted inside a fence that no name can close."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from gradfix.vectors.masks import USUAL_MASK

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_CACHED = re.compile(r"^models--([\w.-]+?)--([\w.-]+)$")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
ROLES = {"base": "old base", "tuned": "fine-tune", "target": "new base"}
LONGEST = 300
RETRIEVER = "sentence-transformers"


def library_of(folder: Path) -> str | None:
    """The library that the hub offers a folder's model with, where it is not the usual one."""
    return RETRIEVER if (folder / "modules.json").is_file() else None


def card(manifest: Mapping[str, Any], *, library: str | None = None) -> str:
    """The text of README.md for a folder with this manifest."""
    adapter = manifest.get("kind") == "lora"
    library = library or ("peft" if adapter else "transformers")
    parts = [
        _front_matter(manifest, library, "adapter" if adapter else "finetune"),
        f"# {_title(manifest)}\n",
        _summary(manifest, adapter),
        _inputs(manifest),
        _settings(manifest),
        _measured(manifest),
        _notes(manifest),
        _reproduce(manifest),
        "Every number above, the fate of every tensor and the hash of every file are in `gradfix.json`; "
        "`gradfix verify` checks them.\n",
    ]
    return "\n".join(part for part in parts if part)


def safe(value: object) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    text = _plain(value)
    return _SPECIAL.sub(r"\\\1", text).replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;")


def _plain(value: object) -> str:
    text = " ".join(_CONTROL.sub(" ", str(value)).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _front_matter(manifest: Mapping[str, Any], library: str, relation: str) -> str:
    lines = ["---", f"library_name: {json.dumps(_plain(library))}"]
    target = hub_id(_path(manifest, "target"))
    if target:
        lines += [f"base_model: {json.dumps(target)}", f"base_model_relation: {relation}"]
    tags = ["gradfix", "task-vector", "model-merging"]
    if library == RETRIEVER:
        lines, tags = [*lines, "pipeline_tag: sentence-similarity"], [*tags, RETRIEVER]
    lines += ["tags:", *(f"- {tag}" for tag in tags), "---", ""]
    return "\n".join(lines)


def hub_id(path: str) -> str | None:
    """owner/name where the path is a hub id or lies in the hub's cache; local folders have none."""
    for part in PurePath(path).parts:
        match = _CACHED.match(part)
        if match:
            return f"{match.group(1)}/{match.group(2)}"
    local = path.startswith((".", "/", "~")) or "\\" in path
    return path.partition("@")[0] if not local and _HUB_ID.fullmatch(path.partition("@")[0]) else None


def _path(manifest: Mapping[str, Any], role: str) -> str:
    return str(_section(_section(manifest, "inputs"), role).get("path", ""))


def _section(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = whole.get(key)
    return value if isinstance(value, Mapping) else {}


def _name(manifest: Mapping[str, Any], role: str) -> str:
    path = _path(manifest, role)
    return safe(hub_id(path) or PurePath(path).name or path)


def _title(manifest: Mapping[str, Any]) -> str:
    tuned = _name(manifest, "tuned")
    if _untouched(manifest):
        return f"{_name(manifest, 'target')} as it is"
    if _trained_alone(manifest):
        return f"{_name(manifest, 'target')} fine-tuned on a few examples"
    if _merged(manifest):
        return f"A merge of {_merged(manifest)}"
    return f"{tuned} moved to {_name(manifest, 'target')}" if tuned else f"An update of {_name(manifest, 'target')}"


def _summary(manifest: Mapping[str, Any], adapter: bool) -> str:
    if _untouched(manifest):
        what = (
            f"{_name(manifest, 'target')} was kept as it is: alpha is 0, so nothing was added to it and nothing "
            "trained into it."
        )
    elif _trained_alone(manifest):
        what = (
            f"{_name(manifest, 'target')} was fine-tuned on a few labelled examples; nothing of "
            f"{_name(manifest, 'tuned')} is in it."
        )
    elif _merged(manifest):
        method = _section(_section(manifest, "details"), "merge").get("method")
        what = f"{_merged(manifest)} were merged by {safe(method)} onto {_name(manifest, 'target')}."
    elif _path(manifest, "base") and _path(manifest, "tuned"):
        what = (
            f"What the fine-tune {_name(manifest, 'tuned')} learned on top of {_name(manifest, 'base')} was carried "
            f"over to {_name(manifest, 'target')}{_way(manifest)}"
        )
    else:
        what = f"An update was added to {_name(manifest, 'target')}."
    if adapter:
        lora = _section(manifest, "lora")
        what += (
            f" This is a LoRA adapter of rank {safe(lora.get('rank'))}; it holds "
            f"{_percent(lora.get('retained_energy'))} of the update's energy."
        )
    return what + "\n"


def _way(manifest: Mapping[str, Any]) -> str:
    """How it was carried over, as a half-sentence after the target's name."""
    mask = _mask(manifest)
    if _method(manifest) is not None:
        way = _section(_section(manifest, "details"), "method").get("way")
        return str(way) if way else f" by the method {safe(_method(manifest))} of `gradfix compare`."
    if mask == "none":
        return ", without training: the difference of the first two was scaled and added to the third."
    if str(mask).startswith("random"):
        return ", without training: a random part of the difference of the first two was added to the third."
    if mask == "magnitude":
        return (
            ", without training: the difference of the first two was weighed by its agreement with the gradient of a "
            "few labelled examples and added to the third."
        )
    return (
        ", without training: the difference of the first two was masked by the signs of gradients of a few "
        "labelled examples and added to the third."
    )


def _merged(manifest: Mapping[str, Any]) -> str:
    """The models of a merge, the target left out; nothing for what is none."""
    if manifest.get("kind") != "merge":
        return ""
    roles = [role for role in _section(manifest, "inputs") if role.startswith(("tuned ", "model "))]
    others = [role for role in roles if _path(manifest, role) != _path(manifest, "target")]
    return ", ".join(dict.fromkeys(_name(manifest, role) for role in others or roles))


def _trained_alone(manifest: Mapping[str, Any]) -> bool:
    """Whether nothing of the old fine-tune is in it."""
    return _section(_section(manifest, "details"), "method").get("transports") is False


def _method(manifest: Mapping[str, Any]) -> object:
    return _section(_section(manifest, "details"), "command").get("method")


def _untouched(manifest: Mapping[str, Any]) -> bool:
    return _section(manifest, "config").get("alpha") == 0


def _mask(manifest: Mapping[str, Any]) -> object:
    """The mask the user asked for: an update masked beforehand is written with none."""
    written, command = (_section(manifest, "config").get("mask"), _section(_section(manifest, "details"), "command"))
    if written != "none" or not command or _method(manifest) is not None:
        return written
    return command.get("mask", USUAL_MASK)


def _inputs(manifest: Mapping[str, Any]) -> str:
    lines = ["## Made from", "", "| role | model | file | hash |", "|---|---|---|---|"]
    for role, entry in _section(manifest, "inputs").items():
        about = entry if isinstance(entry, Mapping) else {}
        hashes = _section(about, "hashes") or {"": ""}
        for file, digest in sorted(hashes.items()):
            lines.append(f"| {safe(ROLES.get(role, role))} | {_name(manifest, role)} | {safe(file)} | {safe(digest)} |")
    return "\n".join(lines) + "\n" if len(lines) > 4 else ""


def _settings(manifest: Mapping[str, Any]) -> str:
    config, measured = _section(manifest, "config"), _section(_section(manifest, "details"), "measured")
    counts, voted = _section(manifest, "counts"), _section(manifest, "votes").get("count")
    drawn = measured.get("labelled_examples")
    per_class = measured.get("labels_per_class") if not voted or voted == drawn else None  # votes from a file
    rows: list[tuple[str, object]] = [
        ("method", _method(manifest)),
        ("mask", _mask(manifest) if _method(manifest) is None else None),
        ("margin", config.get("margin")),
        ("alpha", config.get("alpha")),
        ("alpha chosen by", measured.get("chosen_by")),
        ("seed", config.get("seed")),
        ("labelled examples", voted or drawn or None),
        ("labelled examples per class", per_class),
        ("tensors moved / copied / skipped", _counts(counts)),
        ("share of the task vector kept", _percent(manifest.get("kept"))),
        ("share that survives rounding", _percent(manifest.get("survived_rounding"))),
    ]
    lines = [f"| {name} | {safe(value)} |" for name, value in rows if value is not None]
    return "\n".join(["## How", "", "| setting | value |", "|---|---|", *lines]) + "\n" if lines else ""


def _counts(counts: Mapping[str, Any]) -> str | None:
    keys = ("transported", "copied", "skipped")
    return " / ".join(str(counts[key]) for key in keys) if all(key in counts for key in keys) else None


def _percent(value: object) -> str | None:
    return f"{value:.1%}" if isinstance(value, float | int) else None


def _measured(manifest: Mapping[str, Any]) -> str:
    measured = _section(_section(manifest, "details"), "measured")
    rows: list[tuple[str, object, object, object]] = [
        ("few-shot loss", None, measured.get("fewshot_loss_before"), measured.get("fewshot_loss_after"))
    ]
    had, before, after = (_section(measured, name) for name in ("had", "test_before", "test_after"))
    called = {"accuracy": measured.get("measure", "accuracy")}
    rows += [
        (f"test {safe(called.get(key, key))}", had.get(key), before.get(key), after.get(key))
        for key in sorted({*before, *after}, key=str)
    ]
    lines = [
        f"| {name} | {f'{_number(old)} | ' if had else ''}{_number(left)} | {_number(right)} |"
        for name, old, left, right in rows
        if left is not None or right is not None
    ]
    if not lines:
        return "## Measured\n\nNothing was measured when this folder was written. Evaluate it before you use it.\n"
    head = ["| | before | after |", "|---|---:|---:|"]
    if had:
        head = ["| | what you had (the fine-tune on its old base) | before | after |", "|---|---:|---:|---:|"]
    return "\n".join(["## Measured", "", *head, *lines]) + "\n"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else safe("-" if value is None else value)


def _notes(manifest: Mapping[str, Any]) -> str:
    said = [manifest.get("notes"), _section(manifest, "details").get("notes")]
    notes = list(dict.fromkeys(str(note) for part in said if isinstance(part, list) for note in part))
    if not notes:
        return ""
    return "\n".join(["## Notes", "", *(f"- {safe(note)}" for note in notes)]) + "\n"


def _reproduce(manifest: Mapping[str, Any]) -> str:
    command = _section(_section(manifest, "details"), "command")
    text, language = (_shell(command), "sh") if command else (_python(manifest), "python")
    if not text:
        return ""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"## Reproduce\n\n{fence}{language}\n{text}\n{fence}\n"


def _shell(command: Mapping[str, Any]) -> str:
    words = ["gradfix transport"]
    for key, value in command.items():
        flag = "--" + re.sub(r"[^a-z0-9]+", "-", str(key).lower()).strip("-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            words += [f"{flag} {_quoted(item)}" for item in value]
        elif value is not None:
            words.append(f"{flag} {_quoted(value)}")
    return " \\\n  ".join(words)


def _quoted(value: object) -> str:
    """One word for the shell, every space kept; control characters are spelled out, so none reaches a terminal."""
    text = str(value)
    parts, end = [], 0
    for found in _CONTROL.finditer(text):
        spelled = "".join(f"\\x{byte:02x}" for byte in found.group().encode())
        parts += [shlex.quote(text[end : found.start()]), f"$'{spelled}'"]
        end = found.end()
    return "".join([*parts, shlex.quote(text[end:])])


def _python(manifest: Mapping[str, Any]) -> str:
    if not all(_path(manifest, role) for role in ROLES):
        return ""
    config = _section(manifest, "config")
    arguments = {role: _plain(_path(manifest, role)) for role in ROLES}
    options = {key: config[key] for key in ("mask", "alpha", "margin", "seed") if config.get(key) is not None}
    listed = [f"    {key}={_literal(value)}," for key, value in {**arguments, **options}.items()]
    votes = (
        ["    votes=...,  # made with `gradfix vote` on the new base"]
        if _section(manifest, "votes").get("count")
        else []
    )
    return "\n".join(["gradfix.transport_checkpoint(", *listed, *votes, "    out=...,", ")"])


def _literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str | int | float) else json.dumps(_plain(value))
