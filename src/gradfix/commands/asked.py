"""Which method `gradfix transport` was asked for: a name, or the mask that the options spell out.

An option that nothing would read is an error, not ignored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradfix.checkpoints.trio import ACROSS, Trio
from gradfix.commands.configs import TransportConfig, given
from gradfix.commands.guard import number_or_auto
from gradfix.errors import IncompatibleCheckpoints, UsageError
from gradfix.methods.masked import Masked
from gradfix.methods.method import Method
from gradfix.methods.methods import METHODS
from gradfix.methods.trained import is_turned
from gradfix.registry import unknown
from gradfix.tasks.base import TASKS
from gradfix.tasks.reading import AnswerTask
from gradfix.training.free_text import FULL, LORA
from gradfix.vectors.masks import MASKS

DEFAULT = "best"
PAPER = Masked()  # what an option of the mask means where it is not given
SPELLED = "mask"  # the name that stands for the options themselves
DIALS = ("mask", "margin", "alpha", "vote", "votes")
FIXED = ("mask", "vote", "align")  # what the name of a masking method stands for
VOTED = ("direction", "votes")  # what a mask that asks the target's votes sees
READERS = {"margin": ("votes",), "vote": VOTED, "votes": VOTED}  # which masks read an option, by what they see
NO_SHOTS = (
    "0 examples per class is no few-shot set; give 1 or more. --shots 0 is for --method best, bico or theseus "
    "with --unlabelled: the old fine-tune alone is asked."
)
WORDS = {"vote": ["majority", "mean"], "head": ["error", "copy", "skip"]}


@dataclass(frozen=True)
class Asked:
    """The method to run, and the config with everything that its name stands for written out."""

    name: str
    method: Method
    config: TransportConfig

    @property
    def masked(self) -> Masked | None:
        return self.method.run if isinstance(self.method.run, Masked) else None


def shippable() -> list[str]:
    """What `--method` takes: all of compare but the target as it is and the references nobody could ship."""
    able = [name for name, method in METHODS.items() if method.traits.ships]
    return list(dict.fromkeys([SPELLED, DEFAULT, *able]))


def asked(config: TransportConfig, name: str | None = None) -> Asked:
    """What the options ask for; `name` is the method a verdict says."""
    _check_words(config)
    by_verdict = name is not None
    name = name or config.method or (SPELLED if given(config).keys() & set(DIALS) else DEFAULT)
    if name == SPELLED:
        if config.shots == 0:
            raise UsageError(NO_SHOTS)
        run = _masked(config, PAPER)
        known = next((n for n, m in METHODS.items() if m.run == replace(run, alpha=None, margin=None)), None)
        if known is not None:
            return Asked(known, replace(METHODS[known], run=run), replace(config, method=None, mask=run.mask))
        return Asked(run.mask, Method(run, run.mask), replace(config, method=None))
    if name not in shippable():
        raise UsageError(unknown("method", name, shippable()))
    method = METHODS[name]
    if config.unlabelled is not None and not method.traits.unlabelled:
        if not by_verdict:
            raise UsageError(f"--method {name} has no --unlabelled: leave it out.")
        config = replace(config, unlabelled=None)  # it was for a verdict that might have been best
    if config.shots == 0 and (method.traits.labels or config.unlabelled is None):
        raise UsageError(NO_SHOTS)
    if not isinstance(method.run, Masked) or method.run.noise:
        for dial in given(config).keys() & set(DIALS):
            raise UsageError(f"--method {name} has no --{dial}: leave it out.")
        return Asked(name, method, replace(config, method=name))
    _refuse_other_words(config, name, method.run)
    run = _masked(config, method.run)
    if is_turned(run.align):  # no option spells this out
        return Asked(name, replace(method, run=run), replace(config, method=name))
    words = {word: getattr(run, word) for word in FIXED if getattr(run, word) != getattr(PAPER, word)}
    return Asked(name, replace(method, run=run), replace(config, method=None, **{"mask": run.mask, **words}))


def refuse_odd_task(config: TransportConfig) -> TransportConfig:
    """What only some tasks can do; texts that are all there is mean that no label is asked for."""
    import gradfix.tasks  # noqa: F401  fills the registry

    task = TASKS[config.task]
    if config.keep_index and config.task != "embedding":
        raise UsageError("--keep-index is for --task embedding: other models have no index to keep.")
    if config.offload is not None:
        if not issubclass(task, AnswerTask):
            raise UsageError(
                "--offload is for --task causal and seq2seq; other models are moved in memory: leave it out."
            )
        if config.train == FULL:
            raise UsageError(
                "--offload leaves the weights on disk, and --train full changes them all: give --train lora."
            )
        config = replace(config, train=LORA)
    if config.data != config.unlabelled:
        return config
    if not task.takes_bare:
        raise UsageError("--data is missing: only --task embedding can do with --unlabelled texts alone.")
    return replace(config, shots=0)


def _masked(config: TransportConfig, kind: Masked) -> Masked:
    """The mask that the options spell out; `kind` says what those mean that are not given."""
    run = replace(
        kind,
        mask=config.mask or kind.mask,
        vote=config.vote or kind.vote,
        align=config.align if config.align != "none" else kind.align,
        alpha=number_or_auto("--alpha", config.alpha),
        margin=number_or_auto("--margin", config.margin),
    )
    _refuse_strays(config, run)
    return run


def _check_words(config: TransportConfig) -> None:
    if config.mask is not None:
        MASKS[config.mask]
    for name, words in WORDS.items():
        value = getattr(config, name)
        if value is not None and value not in words:
            raise UsageError(unknown(f"--{name}", value, words))


def _refuse_other_words(config: TransportConfig, name: str, run: Masked) -> None:
    for word in FIXED:
        wanted = getattr(run, word)  # any vector may be aligned first
        if (word, wanted) != ("align", PAPER.align) and given(config).get(word, wanted) != wanted:
            raise UsageError(
                f"--method {name} means --{word} {wanted}: leave --{word} out, or leave --method out and spell "
                "out --mask, --vote and --align."
            )


def _refuse_strays(config: TransportConfig, run: Masked) -> None:
    if run.margin is not None and not 0 <= run.margin <= 1:
        raise UsageError(f"--margin must lie between 0 and 1, got {config.margin}.")
    if config.unlabelled is not None and not is_turned(run.align):
        raise UsageError("--unlabelled is for --method best, theseus or bico: leave it out.")
    for name in [name for name in READERS if name in given(config)]:
        if run.sees not in READERS[name]:
            able = [mask for mask in MASKS if MASKS[mask].sees in READERS[name]]
            raise UsageError(f"--mask {run.mask} reads no --{name} ({', '.join(able)} would): leave it out.")
    if config.votes is not None and "vote" in given(config):
        raise UsageError(f"--votes {config.votes} holds votes already taken: leave --vote out.")


def refuse_large(wanted: Asked) -> None:
    """Models larger than memory are moved by the recipe alone."""
    if wanted.name == DEFAULT:
        return
    for option in ("sharded", "offload"):
        if getattr(wanted.config, option):
            raise UsageError(
                f"--{option} is for --method best; votes for other methods are taken by `gradfix vote --{option}`."
            )


def refuse_apart(wanted: Asked, trio: Trio) -> None:
    """A method that adds weight to weight, asked for a target of another shape."""
    if trio.apart is not None and not wanted.method.traits.across:
        raise IncompatibleCheckpoints(
            f"{wanted.name} adds weight to weight, and {trio.target} has another shape than {trio.sources['base']}: "
            f"{trio.apart}. {ACROSS} Run `gradfix inspect` on the three to see what answers to what."
        )
