"""`gradfix inspect`: can these checkpoints be combined, and what would be transported?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradfix.align.correspondence import correspond
from gradfix.checkpoints.matched import another_shape, match_prefix, read_vocabulary
from gradfix.checkpoints.open import Checkpoint, open_checkpoint
from gradfix.checkpoints.trio import ACROSS, Trio
from gradfix.commands.configs import InspectConfig
from gradfix.errors import GradfixError, UsageError
from gradfix.tasks.loading import read_json
from gradfix.vectors.taskvector import no_change

ROLES = ("base", "tuned", "target")
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


@dataclass
class Inspection:
    """Facts about each checkpoint and each pair, and the verdict of the preflight."""

    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    pairs: dict[str, dict[str, Any]] = field(default_factory=dict)
    differences: list[dict[str, str]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    fates: list[dict[str, str]] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    correspondence: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def tables(self, names: bool) -> list[Table]:
        out: list[Table] = [
            ("checkpoints", ("", "tensors", "weights", "dtypes", "norm"),
             [(f"{r}: {c['path']}", str(c["tensors"]), f"{c['weights']:,}", c["dtypes"], _number(c["norm"]))
              for r, c in self.checkpoints.items()]),
            ("pairs", ("", "cosine", "distance", "relative"),
             [(n, f"{p['cosine']:.4f}", f"{p['distance']:.4g}", f"{p['relative']:.2%}") for n, p in self.pairs.items()]),
        ]  # fmt: skip
        if self.differences:
            pairs = [(d["tensor"], d["what"]) for d in self.differences[: None if names else 20]]
            out.append((f"differences ({len(self.differences)})", ("tensor", ""), pairs))
        if self.plan:
            out.append(("would be transported", ("", ""), [(k, str(v)) for k, v in self.plan.items()]))
            told = [(f["tensor"], f["fate"], f["reason"]) for f in self.fates if "reason" in f]
            if told:
                shown = told[: None if names else 20]
                out.append((f"otherwise than transported as it is ({len(told)})", ("tensor", "", "why"), shown))
        if self.correspondence:
            said = [("", str(line)) for line in self.correspondence["says"]]
            out.append((f"what answers to what ({self.correspondence['hash'][:12]})", ("", ""), said))
        if names:
            rows = [(t["name"], t["shape"], t["dtype"], f"{t['tau_norm']:.4g}") for t in self.tensors]
            out.append(("tensors", ("name", "shape", "dtype", "norm of the change"), rows))
        return out


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def run_inspect(config: InspectConfig, stage: Callable[[str], None] = lambda _: None) -> Inspection:
    if len(config.checkpoints) not in (2, 3):
        raise UsageError("inspect takes two or three checkpoints: base, tuned [, target].")
    opened: dict[str, Checkpoint] = {}
    for role, source in zip(ROLES, config.checkpoints):
        opened[role] = open_checkpoint(source, base=opened.get("base"))
    alike = dict(opened)
    if "target" in opened and another_shape(opened["base"], opened["target"]) is not None:
        del alike["target"]  # no weight of it stands beside one of the base
    *earlier, last = alike
    for role in earlier:  # under the target's names, as transport shows them
        opened[role] = alike[role] = match_prefix(opened[role], opened[last])
    found = Inspection()
    stage("comparing names and shapes")
    found.differences = differences(alike)
    stage("reading weights")
    norms = _measure(alike, found)
    found.checkpoints = {role: {**_about(opened[role]), "norm": norms.get(role)} for role in opened}
    _judge(opened, found)
    return found


def differences(opened: dict[str, Checkpoint]) -> list[dict[str, str]]:
    out = []
    for name in sorted(set().union(*(checkpoint.names() for checkpoint in opened.values()))):
        has = {role: checkpoint for role, checkpoint in opened.items() if name in checkpoint}
        if len(has) < len(opened):
            out.append({"tensor": name, "what": "only in " + ", ".join(has)})
        elif len({checkpoint.info(name).shape for checkpoint in has.values()}) > 1:
            shapes = ", ".join(f"{role} {list(c.info(name).shape)}" for role, c in has.items())
            out.append({"tensor": name, "what": f"shapes differ: {shapes}"})
    return out


def _measure(opened: dict[str, Checkpoint], found: Inspection) -> dict[str, float]:
    """Norms, distances and cosines over the shared floating tensors, one chunk at a time; returns the norms."""
    roles = list(opened)
    shared = [n for n in opened["base"].names() if _comparable(n, opened)]
    square = dict.fromkeys(roles, 0.0)
    pairs = [(a, b) for i, a in enumerate(roles) for b in roles[i + 1 :]]
    dots = dict.fromkeys(pairs, 0.0)
    apart = dict.fromkeys(pairs, 0.0)
    for name in shared:
        tau = 0.0
        for pieces in zip(*(opened[role].chunks(name) for role in roles), strict=True):
            wide = dict(zip(roles, (piece.double() for piece in pieces)))
            for role in roles:
                square[role] += float(wide[role] @ wide[role])
            for a, b in pairs:
                dots[a, b] += float(wide[a] @ wide[b])
                difference = wide[b] - wide[a]
                apart[a, b] += float(difference @ difference)
            change = wide["tuned"] - wide["base"]
            tau += float(change @ change)
        info = opened["base"].info(name)
        found.tensors.append(
            {"name": name, "shape": "x".join(map(str, info.shape)), "dtype": str(info.dtype)[6:], "tau_norm": tau**0.5}
        )
    for a, b in pairs:
        scale = (square[a] * square[b]) ** 0.5
        found.pairs[f"{a} - {b}"] = {
            "cosine": dots[a, b] / scale if scale else 0.0,
            "distance": apart[a, b] ** 0.5,
            "relative": (apart[a, b] / square[a]) ** 0.5 if square[a] else 0.0,
        }
    return {role: square[role] ** 0.5 for role in roles}


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    infos = [checkpoint.info(name) for name in checkpoint.names()]
    return {
        "path": str(checkpoint),
        "tensors": len(infos),
        "weights": sum(info.numel for info in infos),
        "dtypes": ", ".join(sorted({str(info.dtype)[6:] for info in infos})),
    }


def _answering(base: Checkpoint, target: Checkpoint) -> dict[str, Any]:
    """Which weight of the target answers to which of the base, in words and in full."""
    shapes, configs, tokens = [], [], []
    for checkpoint in (base, target):
        floating = [name for name in checkpoint.names() if checkpoint.info(name).dtype.is_floating_point]
        shapes.append({name: checkpoint.info(name).shape for name in floating})
        folder = checkpoint.path
        config = folder / "config.json" if folder is not None and folder.is_dir() else None
        configs.append(read_json(config) if config is not None and config.is_file() else {})
        tokens.append(read_vocabulary(folder))
    answer = correspond(
        *shapes, base_config=configs[0], target_config=configs[1], base_tokens=tokens[0], target_tokens=tokens[1]
    )
    return {"hash": answer.hash, "says": answer.lines(), **answer.as_json()}


def _comparable(name: str, opened: dict[str, Checkpoint]) -> bool:
    if not all(name in checkpoint for checkpoint in opened.values()):
        return False
    infos = [checkpoint.info(name) for checkpoint in opened.values()]
    return len({info.shape for info in infos}) == 1 and all(info.dtype.is_floating_point for info in infos)


def _judge(opened: dict[str, Checkpoint], found: Inspection) -> None:
    target = opened.get("target", opened["base"])
    try:
        trio = Trio.open(opened["base"], opened["tuned"], target, head="skip", across=True)
        if trio.apart is not None:
            found.correspondence = _answering(opened["base"], target)
            found.notes.append(f"another shape: {trio.apart}. {ACROSS}")
            found.notes.append("between the target's weights and the others' nothing was measured")
        else:
            found.plan = {
                "transported": len(trio.moved),
                "copied": len(trio.copied),
                "only in the fine-tune (see --head)": len(trio.heads),
            }
            found.fates = [{"tensor": name, **fate.as_json()} for name, fate in trio.fates.items()]
        found.notes += trio.notes
    except GradfixError as error:
        found.notes.append(f"cannot be combined: {error}")
    tuned = found.pairs["base - tuned"]
    if not found.tensors:
        found.notes.append("no tensor has the same name and shape everywhere: nothing was measured")
        return
    if tuned["distance"] == 0:
        found.notes.append(str(no_change(opened["base"], opened["tuned"])))
    elif tuned["relative"] > 0.5:
        found.notes.append(f"tuned differs from base by {tuned['relative']:.0%} of its norm: not a fine-tune of it?")
    if found.pairs.get("tuned - target", {}).get("distance") == 0:
        found.notes.append("the target is the fine-tune itself: a transport would add its update twice")
    if "base - target" in found.pairs:
        cosine = found.pairs["base - target"]["cosine"]
        kind = "related releases: the task vector itself carries over" if cosine > 0.5 else (
            "unrelated bases: the target's gradients do most of the work; compare with few-shot fine-tuning")  # fmt: skip
        found.notes.append(f"cosine of base and target is {cosine:.2f}: {kind}")
