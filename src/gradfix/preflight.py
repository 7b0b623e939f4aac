"""Can these checkpoints be combined? Every tensor is accounted for before anything is computed.

`check_pair` and `plan_transport` look at names, shapes and dtypes only; weights are not read."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradfix.checkpoints.open import Checkpoint
from gradfix.errors import IncompatibleCheckpoints

# Modules that model classes put on top of an encoder; a fine-tune may drop those of its base.
HEADS = frozenset(
    {
        *("cls", "lm_head", "classifier", "pre_classifier", "score", "head", "heads", "qa_outputs", "pooler"),
        *("predictions", "generator_predictions", "discriminator_predictions"),
    }
)
# Buffers of batch norm: floating tensors on disk, but measured on data, never learned by gradients.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Plan:
    """The fate of every tensor of the target, and of the fine-tune's extra ones."""

    transported: list[str]
    copied: dict[str, str] = field(default_factory=dict)  # name -> reason
    extra: dict[str, str] = field(default_factory=dict)  # in the fine-tune only -> what is done with it


def check_pair(base: Checkpoint, tuned: Checkpoint) -> list[str]:
    """Names of the floating tensors both sides share; raises when names or shapes differ."""
    missing = sorted(set(base.names()) ^ set(tuned.names()))
    if missing:
        raise IncompatibleCheckpoints(
            f"{base} and {tuned} differ in {len(missing)} tensor names, first {missing[0]!r}. "
            f"Run `gradfix inspect {base} {tuned}` to see all."
        )
    _check_shapes(base, tuned, base.names())
    return floating(base, base.names())


def floating(checkpoint: Checkpoint, names: list[str]) -> list[str]:
    return [name for name in names if checkpoint.info(name).dtype.is_floating_point]


def _check_shapes(left: Checkpoint, right: Checkpoint, names: list[str]) -> None:
    for name in names:
        a, b = left.info(name), right.info(name)
        if a.shape == b.shape:
            continue
        if len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[1]:
            raise IncompatibleCheckpoints(
                f"tensor {name!r} has {a.shape[0]} rows in {left} and {b.shape[0]} in {right}: the vocabularies "
                "differ. Give checkpoints with tokenizers on both sides so that rows can be matched by token."
            )
        raise IncompatibleCheckpoints(
            f"tensor {name!r} is {list(a.shape)} in {left} and {list(b.shape)} in {right}. "
            f"Run `gradfix inspect {left} {right}` to see all."
        )


def plan_transport(
    base: Checkpoint,
    tuned: Checkpoint,
    target: Checkpoint,
    *,
    head: str = "error",
    strict: bool = False,
) -> Plan:
    """Decide what happens to each tensor.

    A tensor that only the fine-tune has (a new head) follows the `head` policy; one that only the
    target has, or that belongs to a head the fine-tune dropped, is copied; one that base and fine-tune share but the target lacks is an error."""
    before, after, goal = set(base.names()), set(tuned.names()), set(target.names())
    dropped = {name for name in before - after if HEADS & set(name.split("."))}
    lost = sorted(before - after - dropped)
    if lost:
        raise IncompatibleCheckpoints(
            f"{tuned} lacks {len(lost)} tensors of its base {base}, first {lost[0]!r}. "
            "Is it a fine-tune of that base? A LoRA folder needs its adapter_config.json."
        )
    homeless = sorted((before & after) - goal)
    if homeless:
        raise IncompatibleCheckpoints(
            f"{target} lacks {len(homeless)} tensors of {base}, first {homeless[0]!r}: not the same architecture. "
            f"Run `gradfix inspect {base} {target}` to see all."
        )
    _check_quantised(base, tuned, target)
    shared = [name for name in target.names() if name in before and name not in dropped]
    _check_shapes(base, tuned, shared)
    _check_shapes(base, target, shared)
    copied = {name: "running statistics of the target" for name in shared if name.endswith(STATISTICS)}
    transported = [name for name in floating(target, shared) if name not in copied]
    copied |= {n: "not a floating tensor" for n in shared if n not in copied and n not in set(transported)}
    copied |= dict.fromkeys(goal - before - after, "only in the target")
    copied |= dict.fromkeys(goal & dropped, "a head the fine-tune dropped")
    extra = _plan_extra(base, tuned, target, sorted(after - before), head)
    copied |= {name: "replaced by the fine-tune's head" for name in extra if name in goal}
    if strict and (extra or any(reason == "only in the target" for reason in copied.values())):
        odd = sorted([*extra, *(n for n, r in copied.items() if r == "only in the target")])
        raise IncompatibleCheckpoints(
            f"--strict: {len(odd)} tensors are not shared by all three, first {odd[0]!r}."
        )
    return Plan(transported, copied, extra)


def _plan_extra(
    base: Checkpoint, tuned: Checkpoint, target: Checkpoint, names: list[str], head: str
) -> dict[str, str]:
    if not names:
        return {}
    if head == "error":
        raise IncompatibleCheckpoints(
            f"{tuned} has {len(names)} tensors that {base} lacks, first {names[0]!r}: a head trained with the "
            "fine-tune. Choose --head copy (take the tuned head as it is) or --head skip (leave it out)."
        )
    return dict.fromkeys(names, "copied from the fine-tune" if head == "copy" else "skipped")


def _check_quantised(*checkpoints: Checkpoint) -> None:
    for checkpoint in checkpoints:
        for name in checkpoint.names():
            info = checkpoint.info(name)
            small = info.dtype.itemsize == 1 or not info.dtype.is_floating_point
            if small and len(info.shape) >= 2 and name.endswith("weight"):
                raise IncompatibleCheckpoints(
                    f"tensor {name!r} of {checkpoint} is {info.dtype}: quantised weights cannot be transported. "
                    "Use the unquantised release."
                )
