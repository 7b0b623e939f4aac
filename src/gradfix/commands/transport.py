"""`gradfix transport`: from three checkpoints and a few labels to a fourth checkpoint."""

from __future__ import annotations

import glob
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from gradfix.checkpoints.folder import device_name
from gradfix.checkpoints.identity import check_probe, is_target
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import Checkpoint, open_checkpoint
from gradfix.checkpoints.trio import Trio
from gradfix.checkpoints.write import discard, refuse_inside, refuse_occupied
from gradfix.commands.choosing import Choice, ScaleSearch
from gradfix.commands.configs import TransportConfig, given
from gradfix.commands.guard import number_or_auto, refuse_broken, sole_writer
from gradfix.commands.halving import halving_batches, in_notes
from gradfix.commands.made import made
from gradfix.commands.outcome import TransportResult
from gradfix.commands.page import write_page
from gradfix.commands.setting import Setting, Shots, draw, setting
from gradfix.commands.shipping import (
    Verdict,
    follow,
    refuse_nothing,
    refuse_other_bound,
    refuse_strays,
    spelled_out,
)
from gradfix.commands.vote import on_disk
from gradfix.errors import DataError, IncompatibleCheckpoints, UsageError
from gradfix.registry import unknown
from gradfix.stream.checkpoint import StreamReport, transport_checkpoint, write_update
from gradfix.stream.lora_out import LoraResult, adapter_for, check_lora, save_lora
from gradfix.system.meter import Meter
from gradfix.tasks.base import TASKS, Bound
from gradfix.tasks.scoring import evaluate, mean_loss
from gradfix.vectors.masks import MASKS
from gradfix.vectors.scale import dialled
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector, check_descent
from gradfix.vectors.transported import apply, transport
from gradfix.votes.collect import collect_gradient, collect_votes

T = TypeVar("T")
WORDS = {"vote": ["majority", "mean"], "head": ["error", "copy", "skip"]}


Stage = Callable[[str], None]


@halving_batches(in_notes)
def run_transport(config: TransportConfig, stage: Stage = lambda _: None) -> TransportResult:
    """Check, vote, choose alpha, write, score. Nothing is written before every check has passed."""
    config, verdict = spelled_out(config)
    _check_words(config)
    base, target = open_checkpoint(config.base), open_checkpoint(config.target)
    tuned = open_checkpoint(config.tuned, base=base)
    out = Path(config.out)
    refuse_inside(out, [c.path for c in (base, tuned, target) if c.path is not None])
    refuse_occupied(out, config.overwrite)
    trio = Trio.open(base, tuned, target, head=config.head, strict=config.strict)
    start = setting(config)
    stage("reading examples")
    shots = draw(start, config, config.validation, config.base)
    if verdict is not None:
        shots = follow(verdict, shots, start)
    if config.report and not shots.test:
        raise DataError(f"--report needs test examples, and {config.data} has no test split.")
    checkpoints = {"base": trio.base, "tuned": trio.tuned, "target": trio.target}
    with sole_writer(config):
        if config.check and not config.force:
            stage("checking that the fine-tune beats its base")
            _refuse_swapped(config, start, shots, checkpoints)
        return _Transport(config, start, shots, checkpoints, stage, verdict).run()


def require_target(votes: SignVotes, target: Checkpoint) -> None:
    """Votes belong to one target: refuse them on another, by probe or by hash."""
    check_probe(votes.probe, target)
    if votes.target_hash is not None and not is_target(votes.target_hash, target):
        raise IncompatibleCheckpoints(
            f"the votes were taken on other weights than {target}. Vote again on this target."
        )


def open_tuned(config: TransportConfig, start: Setting, checkpoints: Mapping[str, Checkpoint]) -> Bound:
    """The fine-tune with its own head and vocabulary; an adapter is added onto its base."""
    tuned = checkpoints["tuned"]
    if tuned.path is None or not (tuned.path / "adapter_config.json").is_file():
        return start.open(config.tuned, head_from=config.base)
    bound, base = start.open(config.base), open_checkpoint(config.base)
    # Read anew: the checkpoints at hand are views in the order of the target's tokens, this model is not.
    apply(bound.model, TaskVector.between(base, open_checkpoint(config.tuned, base=base)), 1.0)
    return bound


def _refuse_swapped(
    config: TransportConfig, start: Setting, shots: Shots, checkpoints: Mapping[str, Checkpoint]
) -> None:
    """A fine-tune that is worse than its base on its own task was probably given the wrong way round."""
    if config.head != "error":
        return  # the base has no head of its own to be scored with
    losses = {}
    for role, bound in (("base", start.open(config.base)), ("tuned", open_tuned(config, start, checkpoints))):
        losses[role] = mean_loss(bound.model, bound.loss, bound.batches(shots.fewshot, config.batch_size))
    if losses["tuned"] > losses["base"]:
        raise IncompatibleCheckpoints(
            f"on these examples {config.tuned} (loss {losses['tuned']:.3f}) is worse than its base {config.base} "
            f"(loss {losses['base']:.3f}). Were --base and --tuned swapped, or is this another task? "
            "--force (or --no-check) goes on all the same."
        )


def _lender(config: TransportConfig) -> str | None:
    """Whose head the target is scored with: the fine-tune's where it is to be copied, else its own."""
    from gradfix.tasks.classification import Classification

    has_head = issubclass(TASKS[config.task], Classification)  # or a task that somebody derived from it
    return config.tuned if config.head == "copy" and has_head else None


def _check_words(config: TransportConfig) -> None:
    MASKS[config.mask]
    for name in ("alpha", "margin"):
        number_or_auto(f"--{name}", getattr(config, name))
    for name, words in WORDS.items():
        if getattr(config, name) not in words:
            raise UsageError(unknown(f"--{name}", getattr(config, name), words))
    refuse_strays(config)


class _Transport:
    """The steps of one transport, with what they share."""

    def __init__(
        self,
        config: TransportConfig,
        start: Setting,
        shots: Shots,
        checkpoints: dict[str, Checkpoint],
        stage: Stage,
        verdict: Verdict | None = None,
    ) -> None:
        self.config, self.start, self.shots, self.stage = config, start, shots, stage
        self.checkpoints, self.verdict = checkpoints, verdict
        self.bound = start.open(config.target, head_from=_lender(config))
        if verdict is not None:
            refuse_other_bound(verdict, self.bound)
        self.names = name_map(self.bound.model, checkpoints["target"].names())
        self.fewshot = list(self.bound.batches(shots.fewshot, config.batch_size))
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = list(shots.notes)

    def run(self) -> TransportResult:
        tau = self._timed("task vector", self._task_vector)
        if self.config.method != "mask":
            teacher = lambda: open_tuned(self.config, self.start, self.checkpoints)  # noqa: E731
            found = self._timed(
                self.config.method, lambda: made(self.config, self.bound, tau, self.shots, teacher)
            )
            self.notes.extend(found.notes)
            return self._finish(found.update, None, found.choice)
        ballot = self._timed("votes", self._ballot)
        search = ScaleSearch(self.config, self.bound, self.shots)
        choice = self._timed("scale", lambda: search.choose(tau, ballot))
        self.notes.extend(choice.curve.notes if choice.curve else ())
        moved = transport(tau, ballot, self.config.mask, margin=choice.margin, generator=self.config.seed)
        votes = ballot if isinstance(ballot, SignVotes) else None
        return self._finish(moved.update, votes, choice)

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        self.stage(name)
        begin = time.perf_counter()
        result = work()
        self.seconds[name] = round(time.perf_counter() - begin, 3)
        return result

    def _task_vector(self) -> TaskVector:
        """tau under the module's names, permuted to the target when asked for; heads and buffers stay out."""
        before, after = self.checkpoints["base"], self.checkpoints["tuned"]
        tau = TaskVector.of(Trio.open(before, after, self.checkpoints["target"], head=self.config.head))
        if not self.config.force:
            check_descent(tau, before, after)
        if self.config.align != "none":
            tau = self._aligned(tau)
        parameters = dict(self.bound.model.named_parameters())
        named = self.names.to_module(tau)
        return TaskVector({name: delta for name, delta in named.items() if name in parameters})

    def _aligned(self, tau: TaskVector) -> TaskVector:
        from gradfix.align import align

        base, target = self.checkpoints["base"], self.checkpoints["target"]
        alignment = align(base, target, method=self.config.align)  # as compare aligns: no seed has a say
        return TaskVector(alignment.apply(tau))

    def _ballot(self) -> SignVotes | TaskVector | None:
        """What the mask is shown: votes, the real reference for `magnitude`, or nothing."""
        sees = MASKS[self.config.mask].sees
        if sees in ("chance", "nothing"):
            return None
        if sees == "reference":
            return -collect_gradient(self.bound.model, self.bound.loss, self.fewshot)
        if self.config.votes is not None:
            return self._votes_from_file(self.config.votes)
        return self._vote(self.fewshot, None if self.config.dry_run else self._partial())

    def _vote(self, batches: Sequence[Any], checkpoint: Path | None = None) -> SignVotes:
        votes = collect_votes(
            self.bound.model, self.bound.loss, batches,
            vote=self.config.vote, engine=self.config.engine, checkpoint=checkpoint,  # type: ignore[arg-type]
            where=[row.where for row in self.shots.fewshot] if checkpoint is not None else None,
        )  # fmt: skip
        self.notes.extend(note for note in votes.notes if note not in self.notes)
        return votes

    def _partial(self) -> Path:
        """Where an interrupted vote is kept; other settings look elsewhere, so nothing stale is read."""
        settings = repr((self.config, vars(self.start.task), self.start.dataset.labels))
        name = hashlib.sha256(settings.encode()).hexdigest()[:12]
        out = Path(self.config.out)
        return out.with_name(f".{out.name}.votes-{name}.part")

    def _partials(self) -> list[Path]:
        """Interrupted votes of earlier settings for the same output."""
        out = Path(self.config.out)
        return list(out.parent.glob(f".{glob.escape(out.name)}.votes-*.part"))

    def _votes_from_file(self, path: str) -> SignVotes:
        votes = SignVotes.load(path)
        require_target(votes, self.checkpoints["target"])
        if not set(votes) <= set(dict(self.bound.model.named_parameters())):
            tensors = self.names.to_module(votes)
            votes = SignVotes(
                tensors, votes.count, rule=votes.rule, target_hash=votes.target_hash, origin=votes.origin
            )
        return votes

    def _finish(self, update: TaskVector, votes: SignVotes | None, choice: Choice) -> TransportResult:
        if self.verdict is not None and not self.config.force:
            refuse_nothing(self.verdict, choice.alpha, self.config.seed)
        adapter = None
        if self.config.out_lora is not None:  # from here on, what is measured is what the adapter will do
            adapter = adapter_for(
                update, self.config.out_lora, model=self.bound.model, target=self.checkpoints["target"]
            )
            update = adapter.approximated
        loss = lambda: mean_loss(self.bound.model, self.bound.loss, self.fewshot)  # noqa: E731
        loss_before, before = loss(), self._test_score()
        with dialled(self.bound.model, update) as dial:
            dial.turn(choice.alpha)
            loss_after, after = loss(), self._test_score()
        self.notes += refuse_broken(loss_after, choice.alpha, self.config.force)
        measured = {
            "labels_per_class": self.config.shots,
            "labelled_examples": len(self.shots.fewshot),
            "chosen_by": choice.regime,
            "fewshot_loss_before": loss_before,
            "fewshot_loss_after": loss_after,
            "test_before": before,
            "test_after": after,
        }
        report = None
        if not self.config.dry_run:
            report = self._timed("writing", lambda: self._write(update, votes, choice, measured, adapter))
            for stale in {self._partial(), *self._partials()}:
                discard(stale)
            self.notes.extend(report.notes)
        result = TransportResult(
            Path(self.config.out), choice.alpha, choice.margin, choice.regime, report, choice.curve,
            before, after, loss_before, loss_after, self.seconds, tuple(dict.fromkeys(self.notes)),
        )  # fmt: skip
        if self.config.report and not self.config.dry_run:
            write_page(self.config, result, samples=len(self.shots.fewshot))
        return result

    def _test_score(self) -> dict[str, float] | None:
        if not self.shots.test:
            return None
        return evaluate(self.bound.model, self.bound, self.bound.scoring_batches(self.shots.test, 32))

    def _write(
        self,
        update: TaskVector,
        votes: SignVotes | None,
        choice: Choice,
        measured: dict[str, Any],
        adapter: LoraResult | None,
    ) -> StreamReport:
        config = self.config
        details = {
            "command": given(config),
            "computed": self._computed(),
            "measured": measured,
            "notes": self.notes,
        }
        common: dict[str, Any] = {
            "target": self.checkpoints["target"], "out": config.out, "overwrite": config.overwrite,
            "dtype": config.out_dtype, "force": config.force, "details": details, "extras": self.bound.save_extras,
            "progress": Meter(self.checkpoints["target"].nbytes, self.stage),
        }  # fmt: skip
        if adapter is not None:
            return self._write_lora(adapter, choice, details)
        # Coins are drawn by the module's names, as in compare; a stream would draw them by those on disk.
        streams = (
            config.method == "mask"
            and config.align == "none"
            and MASKS[config.mask].sees not in ("reference", "chance")
        )
        if not streams:
            return write_update(
                self.names.to_disk({n: t.cpu() for n, t in update.items()}), alpha=choice.alpha,
                inputs=self.checkpoints, head=self._lent_head(), **common,
            )  # fmt: skip
        ballot = on_disk(votes, self.bound, config.target) if votes is not None else None
        return transport_checkpoint(
            base=self.checkpoints["base"], tuned=self.checkpoints["tuned"], votes=ballot, mask=config.mask,
            alpha=choice.alpha, margin=choice.margin, seed=config.seed, head=config.head, strict=config.strict,
            **common,
        )  # fmt: skip

    def _lent_head(self) -> dict[str, Tensor]:
        """The head that only the fine-tune has, where it is to be copied."""
        base, tuned, target = (self.checkpoints[role] for role in ("base", "tuned", "target"))
        trio = Trio.open(base, tuned, target, head=self.config.head, strict=self.config.strict)
        return {name: tuned.read(name) for name in trio.heads} if trio.head == "copy" else {}

    def _computed(self) -> dict[str, Any]:
        """What changes bits besides inputs, seed, versions and threads."""
        config = self.config
        return {
            "batch_size": config.batch_size, "dtype": config.dtype, "engine": config.engine,
            "device": device_name(next(self.bound.model.parameters()).device),
        }  # fmt: skip

    def _write_lora(self, adapter: LoraResult, choice: Choice, details: dict[str, Any]) -> StreamReport:
        measured, config = details["measured"], self.config
        notes = check_lora(
            adapter, loss_before=measured["fewshot_loss_before"], loss_after=measured["fewshot_loss_after"],
            force=config.force,
        )  # fmt: skip
        save_lora(
            adapter.scaled(choice.alpha), config.out, model=self.bound.model, target=self.checkpoints["target"],
            base_name=config.target, overwrite=config.overwrite, inputs=self.checkpoints, notes=notes,
            config={"mask": config.mask, "alpha": choice.alpha, "margin": choice.margin, "seed": config.seed},
            details=details, extras=self.bound.save_extras,
        )  # fmt: skip
        held = len(adapter.factors) + len(adapter.whole)
        return StreamReport(
            Path(config.out), held, 0, len(adapter.dropped), adapter.retained, 1.0, 0.0, notes=tuple(notes)
        )
