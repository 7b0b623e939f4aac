"""Which method `gradfix transport` was asked for: a name, or the mask that the options spell out.

An option that nothing would read is an error, not ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gradfix.commands.configs import TransportConfig, given
from gradfix.commands.guard import number_or_auto
from gradfix.errors import UsageError
from gradfix.methods.masked import Masked
from gradfix.methods.method import Method
from gradfix.methods.methods import METHODS
from gradfix.registry import unknown
from gradfix.vectors.masks import MASKS

DEFAULT = "best"
SPELLED = "mask"  # the name that stands for the options themselves
DIALS = ("mask", "margin", "alpha", "vote", "votes", "align")
FIXED = ("mask", "vote", "align")  # what the name of a masking method stands for
VOTED = ("direction", "votes")  # what a mask that asks the target's votes sees
READERS = {
    "margin": ("votes",),
    "vote": VOTED,
    "votes": VOTED,
}  # which masks read an option, by what they see
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
        _refuse_strays(config)
        return Asked(_name_of(config), Method(_masked(config), config.mask), replace(config, method=None))
    if name not in shippable():
        raise UsageError(unknown("method", name, shippable()))
    method = METHODS[name]
    if config.unlabelled is not None and not method.traits.unlabelled:
        if not by_verdict:
            raise UsageError(f"--method {name} has no --unlabelled: leave it out.")
        config = replace(config, unlabelled=None)  # it was for a verdict that might have been best
    if not isinstance(method.run, Masked) or method.run.noise:
        for dial in given(config).keys() & set(DIALS):
            raise UsageError(f"--method {name} has no --{dial}: leave it out.")
        return Asked(name, method, replace(config, method=name))
    _refuse_other_words(config, name, method.run)
    config = replace(config, method=None, **{word: getattr(method.run, word) for word in FIXED})
    _refuse_strays(config)
    return Asked(name, replace(method, run=_masked(config)), config)


def _masked(config: TransportConfig) -> Masked:
    def number(text: str) -> float | None:
        return None if text == "auto" else float(text)

    margin = number(config.margin) if MASKS[config.mask].sees == "votes" else None
    return Masked(config.mask, config.vote, config.align, alpha=number(config.alpha), margin=margin)


def _name_of(config: TransportConfig) -> str:
    """The method that these options spell out, or the mask's name where none is declared."""
    plain = Masked(**{word: getattr(config, word) for word in FIXED})
    return next((name for name, method in METHODS.items() if method.run == plain), config.mask)


def _check_words(config: TransportConfig) -> None:
    MASKS[config.mask]
    for name in ("alpha", "margin"):
        number_or_auto(f"--{name}", getattr(config, name))
    for name, words in WORDS.items():
        if getattr(config, name) not in words:
            raise UsageError(unknown(f"--{name}", getattr(config, name), words))
    if config.margin != "auto" and not 0 <= float(config.margin) <= 1:
        raise UsageError(f"--margin must lie between 0 and 1, got {config.margin}.")


def _refuse_other_words(config: TransportConfig, name: str, run: Masked) -> None:
    told: Mapping[str, object] = given(config)
    for word in FIXED:
        wanted = getattr(run, word)
        if told.get(word, wanted) != wanted:
            raise UsageError(
                f"--method {name} means --{word} {wanted}: leave --{word} out, or leave --method out and spell "
                "out --mask, --vote and --align."
            )


def _refuse_strays(config: TransportConfig) -> None:
    if config.unlabelled is not None:
        raise UsageError("--unlabelled is for --method best: leave it out.")
    sees = MASKS[config.mask].sees
    for name in [name for name in READERS if name in given(config)]:
        if sees not in READERS[name]:
            able = [mask for mask in MASKS if MASKS[mask].sees in READERS[name]]
            raise UsageError(
                f"--mask {config.mask} reads no --{name} ({', '.join(able)} would): leave it out."
            )
    if config.votes is not None and "vote" in given(config):
        raise UsageError(f"--votes {config.votes} holds votes already taken: leave --vote out.")
