"""`gradfix transport`: open the trio, make a trial, run one method, write what it ships.

`gradfix compare` runs the same methods on the same trial, so what ships is what was compared."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from gradfix.checkpoints.folder import device_name
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.trio import Trio
from gradfix.checkpoints.write import check_space, refuse_inside, refuse_occupied, torch_dtype
from gradfix.commands.asked import DEFAULT, SPELLED, Asked, asked, refuse_apart, refuse_large, refuse_odd_task
from gradfix.commands.configs import TransportConfig, given
from gradfix.commands.guard import among_processes, halving_batches, in_notes, refuse_broken, refuse_risen, sole_writer
from gradfix.commands.page import Along, TransportResult, write_page
from gradfix.commands.setting import (
    Prepared,
    Shots,
    device_of,
    draw,
    dtype_of,
    refuse_swapped,
    setting,
    unseen_unlabelled,
    weights_on_disk,
)
from gradfix.commands.telling import Telling, refuse_closed
from gradfix.commands.verdict import Verdict, follow, read_verdict, refuse_nothing, refuse_other_bound
from gradfix.commands.vote import on_disk, require_target
from gradfix.errors import DataError, GradfixError, UsageError
from gradfix.methods.changed import changed_examples
from gradfix.methods.headed import fill, has_new_head, lent_head, open_target, uncalled
from gradfix.methods.method import NotHere, Outcome
from gradfix.methods.opening import lenders_of, open_old, refuse_itself, rounds, unmoved_on_disk, vector_of
from gradfix.methods.speaking import factors_of
from gradfix.methods.trained import is_turned
from gradfix.methods.trial import Passes, Splits, Trial
from gradfix.methods.workfolder import Partials
from gradfix.methods.yardsticks import had, tokens_seen, trained_weights
from gradfix.stream.checkpoint import StreamReport, transport_checkpoint, write_update
from gradfix.stream.lora_out import LoraResult, adapter_for, check_lora, save_lora
from gradfix.system.meter import Meter, steps_told
from gradfix.system.processes import ALONE, current, sharing
from gradfix.tasks.base import Bound
from gradfix.tasks.embedding import EmbeddingBound
from gradfix.tasks.scoring import evaluate, mean_loss
from gradfix.training.lowrank import moved_by, put_together
from gradfix.training.oldindex import OldIndex, enough, keep_index
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector, check_descent

T = TypeVar("T")
Stage = Callable[[str], None]


@among_processes
@halving_batches(in_notes)
def run_transport(config: TransportConfig, stage: Stage = lambda _: None) -> TransportResult:
    """Check, run the method, write, score. Nothing is written before every check has passed."""
    if config.verdict is not None and (config.method not in (None, SPELLED, DEFAULT) or "mask" in given(config)):
        raise UsageError(f"--verdict {config.verdict} says what to ship: leave --method and --mask out.")
    config = refuse_odd_task(config)
    wanted = asked(config) if config.verdict is None else None
    trio = Trio.open(config.base, config.tuned, config.target, head=config.head, strict=config.strict, across=True)
    verdict = None
    if config.verdict is not None:
        verdict = read_verdict(config, trio)
        wanted = asked(replace(config, verdict=None, shots=verdict["shots"]), verdict["method"])
    assert wanted is not None
    refuse_large(wanted)
    refuse_apart(wanted, trio)
    config = wanted.config
    twice = refuse_itself(trio, config.force)
    out = Path(config.out)
    refuse_inside(out, [c.path for c in trio.sources.values() if c.path is not None])
    refuse_occupied(out, config.overwrite)
    if config.out_lora is None and not config.dry_run:
        check_space(out.parent, trio.target.nbytes)  # better known before the work than after
    stage("reading examples")
    start = setting(config)
    refuse_closed(config, start)
    shots = draw(start, config, config.validation, config.base)
    config = replace(config, shots=shots.per_class, allow_fewer=shots.allow_fewer)
    wanted = replace(wanted, config=config)
    if verdict is not None:
        shots = follow(verdict, shots, start)
    if config.report and not shots.test:
        raise DataError(f"--report needs test examples, and {config.data} has no test split.")
    shots = replace(shots, notes=(*twice, *shots.notes))
    with sole_writer(config), weights_on_disk(config):
        if config.check and not config.force and shots.fewshot:
            stage("checking that the fine-tune beats its base")
            refuse_swapped(config, start, shots, trio)
        return _Transport(wanted, trio, start, shots, stage).run(verdict)


def nothing_of(bound: Bound) -> TaskVector:
    nothing = torch.zeros(())  # of any shape, and takes no memory
    return TaskVector({name: nothing.expand(p.shape) for name, p in bound.model.named_parameters()})


class _Transport:
    """The steps of one transport, with what they share."""

    def __init__(self, wanted: Asked, trio: Trio, start: Prepared, shots: Shots, stage: Stage) -> None:
        self.wanted, self.config, self.trio = wanted, wanted.config, trio
        self.start, self.shots, self.stage = start, shots, stage
        config = self.config
        self.bound = open_target(trio, start.task, torch_dtype(dtype_of(config)), device_of(config.device))
        self.telling = Telling(config, self.bound, shots)
        self.names = name_map(self.bound.model, trio.target.names())
        settings = repr((config, vars(start.task), start.dataset.labels))
        self.partials = Partials(Path(config.out), settings, not config.dry_run)
        self.examples = self.bound.linked(shots.fewshot)
        self.fewshot = list(self.bound.batches(self.examples, config.batch_size))
        self.seconds: dict[str, float] = {}
        self.flops: float | None = None
        self.notes: list[str] = [*shots.notes, *(self.bound.notes if trio.apart is not None else ())]

    def run(self, verdict: Verdict | None) -> TransportResult:
        if verdict is not None:
            refuse_other_bound(verdict, self.bound)
        trial = self._timed("task vector", self._trial)
        outcome = self._timed(self.wanted.name, lambda: self._outcome(trial))
        if verdict is not None and not self.config.force:
            refuse_nothing(verdict, outcome.alpha, self.config.seed)
        return self._finish(trial, outcome)

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        self.stage(name)
        begin = time.perf_counter()
        with steps_told(self.stage):
            result = work()
        self.seconds[name] = round(time.perf_counter() - begin, 3)
        return result

    def _trial(self) -> Trial:
        """One target, one vector, one few-shot set: the ground on which compare would judge the method."""
        config, shots, speech = self.config, self.shots, self.telling.speech
        low = factors_of(self.trio, self.bound) if self.telling.by_lora and self.wanted.name == DEFAULT else None
        tau = low or vector_of(self.trio, config.align if self.wanted.masked is None else "none")
        if not config.force:
            check_descent(low.renamed(self.names.renamed) if low else tau, self.trio.base, self.trio.tuned)
        unlabelled = unseen_unlabelled(config, shots.test) if config.unlabelled else None
        if config.keep_index:
            enough([*(unlabelled or ()), *self.examples])
        trial = Trial(
            self.bound, tau if self.trio.apart is None else None,
            Splits(shots.fewshot, shots.validation, shots.test or (), unlabelled),
            passes=Passes(batch_size=config.batch_size, engine=config.engine),
            store=self.partials, lenders=lenders_of(self.trio, self.bound, self.start.task, speech), judged=False,
        )  # fmt: skip
        trial.speech = speech
        trial.define(trial.set_name(shots.per_class, config.seed), self.examples)
        return trial

    def _outcome(self, trial: Trial) -> Outcome:
        run = self.wanted.method.run
        if self.config.votes is not None and self.wanted.masked is not None:
            run = replace(self.wanted.masked, votes=self._votes_from_file(self.config.votes))
        trial.open_bill()
        with warnings.catch_warnings():  # a few examples of a fold say nothing about the transport itself
            warnings.filterwarnings("ignore", message=".*tensors abstained")
            try:
                outcome = run(trial, trial.support(self.shots.per_class, self.config.seed))
            except NotHere as error:  # compare goes on without the method; here its reason is the answer
                raise (error.__cause__ if isinstance(error.__cause__, GradfixError) else error) from None
        self.flops = trial.bill.total(0.0).flops(trained_weights(self.bound), tokens_seen(trial))
        said = outcome.votes.notes if outcome.votes is not None else ()
        self.notes.extend(note for note in (*trial.notes, *said, *outcome.notes) if note not in self.notes)
        return outcome

    def _votes_from_file(self, path: str) -> SignVotes:
        votes = SignVotes.load(path)
        require_target(votes, self.trio.target)
        if not set(votes) <= set(dict(self.bound.model.named_parameters())):
            tensors = self.names.to_module(votes)
            votes = SignVotes(tensors, votes.count, rule=votes.rule, target_hash=votes.target_hash, origin=votes.origin)
        return votes

    def _finish(self, trial: Trial, outcome: Outcome) -> TransportResult:
        config, alpha = self.config, outcome.alpha
        update = outcome.update if outcome.update is not None else nothing_of(self.bound)
        adapter = outcome.adapter if config.out_lora is not None else None
        if config.out_lora is not None and adapter is None:  # from here on, what is measured is what the adapter does
            saved = self._heads() | uncalled(self.bound, update, self.fewshot or trial.unlabelled)
            adapter = adapter_for(update, config.out_lora, model=self.bound.model, target=self.trio.target, saved=saved)
            update = adapter.approximated
        chosen_by = outcome.chosen_by or trial.regime
        loss_before, (before, answers) = self._loss(), self._test(trial)
        held_out = chosen_by != "recipe"
        right = 0.0 if held_out else self._right()
        self.telling.before(trial)
        with moved_by(self.bound.model, update, alpha):
            loss_after, (after, new_answers) = self._loss(), self._test(trial)
            self.telling.after(outcome.parts)
            vouched = held_out or self._right() > right
            kept = self._old_index(trial) if config.keep_index else None
        self.notes += refuse_broken(loss_after, alpha, config.force)
        if loss_before is not None and loss_after is not None:
            self.notes += refuse_risen(loss_before, loss_after, vouched, config.force)
        self.notes += self.bound.cuts()
        measured: dict[str, Any] = {
            "labels_per_class": self.shots.per_class,
            "labelled_examples": len(self.shots.fewshot),
            "chosen_by": chosen_by,
            "fewshot_loss_before": loss_before,
            "fewshot_loss_after": loss_after,
            "measure": self.bound.measure,
            "had": self._timed("the old fine-tune on test", lambda: self._had(trial)),
            "test_before": before,
            "test_after": after,
            **({"figures": self.telling.figures} if self.telling.figures else {}),
        }
        if kept is not None:
            measured["keep_index"] = kept.as_json()
            self.notes.append(kept.note())
        report = None
        update = put_together(update)
        writes = not config.dry_run and current().leads
        if writes:
            look = self._read_back(trial, measured, adapter is not None and outcome.adapter is None, kept)
            with sharing(ALONE):
                report = self._timed("writing", lambda: self._write(update, outcome, measured, adapter, look))
            self.partials.forget()
            self.notes.extend(report.notes)
        curve = None if outcome.curve is None else outcome.curve.values()
        result = TransportResult(
            Path(config.out), alpha, outcome.margin, chosen_by, report, curve,
            before, measured["test_after"], loss_before, measured["fewshot_loss_after"], self.seconds,
            tuple(dict.fromkeys(self.notes)), self.bound.measure, measured["had"], Along.of(outcome), self.flops,
            changed_examples(self.shots.test or (), self.bound.labels, answers, new_answers) if config.report else {},
            measured.get("keep_index"), self.telling.figures,
        )  # fmt: skip
        if config.report and writes:
            write_page(self.wanted, result, self.shots)
        return result

    def _old_index(self, trial: Trial) -> OldIndex:
        """The map from the model as it stands now into the old fine-tune's space."""
        teacher = trial.teacher()
        assert isinstance(self.bound, EmbeddingBound) and isinstance(teacher, EmbeddingBound)  # refused before
        texts = [*trial.unlabelled, *self.examples]
        return keep_index(self.bound, teacher, texts, self.shots.test or (), self.config.seed)

    def _loss(self) -> float | None:
        """On the few-shot examples; None without any."""
        return mean_loss(self.bound.model, self.bound.loss, self.fewshot) if self.fewshot else None

    def _right(self) -> float:
        return evaluate(self.bound.model, self.bound, self.fewshot)["accuracy"] if self.fewshot else 0.0

    def _test(self, trial: Trial) -> tuple[dict[str, float] | None, list[int]]:
        """The score on test and the answers; nothing without a test split."""
        if not self.shots.test:
            return None, []
        score, answers = trial.predictions("test")
        return score.as_json(), answers

    def _had(self, trial: Trial) -> dict[str, float] | None:
        found = had(trial, lambda: open_old(self.trio, trial, self.start.task))
        self.notes.extend(note for note in trial.notes if note not in self.notes)
        return found

    def _heads(self) -> set[str]:
        """Parameters that an adapter holds in full: the model's head, and what the fine-tune lends."""
        parameters = dict(self.bound.model.named_parameters())
        lent = self.names.to_module(lent_head(self.trio, self.bound))
        return {name for name in (*self.bound.head_names(), *lent) if name in parameters}

    def _read_back(
        self, trial: Trial, measured: dict[str, Any], adapter: bool, kept: OldIndex | None
    ) -> Callable[[Path], None]:
        """What an output does besides: it adds the task's files, and where writing rounds, it is measured as written."""
        target, config = self.trio.target, self.config
        coarser = adapter or rounds(target, config.out_dtype, torch_dtype(dtype_of(config)))
        if coarser and (current().in_step or config.offload is not None):
            self.notes.append(
                "measured before it was rounded for writing: a split or offloaded model is not read back."
            )
            coarser = False

        def look(folder: Path) -> None:
            self.bound.save_extras(folder)
            if kept is not None:
                kept.save(folder)
            if coarser:
                stored = open_checkpoint(folder, base=target)
                fill(self.bound.model, stored, stored, stored.names())
                measured.update(fewshot_loss_after=self._loss(), test_after=self._test(trial)[0])

        return look

    def _made(self, outcome: Outcome) -> dict[str, Any]:
        """How an update that is not masked while it is written came about, for the manifest."""
        masked = self.wanted.masked
        made = {"mask": masked.mask if masked else "none", "margin": outcome.margin, "seed": self.config.seed}
        if masked is not None and masked.align != "none":
            made["align"] = masked.align
        return {**made, "kept": outcome.parts.get("kept_share", 1.0)}

    def _write(
        self,
        update: TaskVector,
        outcome: Outcome,
        measured: dict[str, Any],
        adapter: LoraResult | None,
        look: Callable[[Path], None],
    ) -> StreamReport:
        config, trio, masked = self.config, self.trio, self.wanted.masked
        details: dict[str, Any] = {
            **{name: outcome.parts[name] for name in ("correspondence", "start", "starts") if name in outcome.parts},
            "command": given(config),
            "computed": self._computed(),
            "measured": measured,
            "notes": self.notes,
        }
        if self.trio.apart is not None:
            details["another_shape"] = self.trio.apart
        if masked is None or masked.noise or is_turned(masked.align):
            traits = self.wanted.method.traits
            details["method"] = {"name": self.wanted.name, "transports": traits.transports, "way": traits.way}
        if adapter is not None:
            return self._write_lora(adapter, outcome, details, look)
        common: dict[str, Any] = {
            "target": trio.target, "out": config.out, "overwrite": config.overwrite, "dtype": config.out_dtype,
            "force": config.force, "details": details, "extras": look, "alpha": outcome.alpha,
            "progress": Meter(trio.target.nbytes, self.stage), "leave": unmoved_on_disk(self.bound, trio.target),
        }  # fmt: skip
        # Coins are drawn by the module's names, as in compare; a stream would draw them by those on disk.
        streams = masked is not None and masked.align == "none" and not masked.noise
        if masked is None or not streams or masked.sees in ("reference", "chance"):
            inputs = {"base": trio.base, "tuned": trio.tuned, "target": trio.target}
            moved = self.names.to_disk({n: t.cpu() for n, t in update.items()})
            return write_update(
                moved,
                inputs=inputs,
                head=lent_head(self.trio, self.bound),
                new_head=has_new_head(self.bound),
                made=self._made(outcome),
                **common,
            )
        ballot = on_disk(outcome.votes, self.bound, config.target) if outcome.votes is not None else None
        return transport_checkpoint(
            base=trio.base, tuned=trio.tuned, votes=ballot, mask=masked.mask, margin=outcome.margin,
            seed=config.seed, head=config.head, strict=config.strict, **common,
        )  # fmt: skip

    def _computed(self) -> dict[str, Any]:
        """What changes bits besides inputs, seed, versions and threads."""
        config = self.config
        return {
            "batch_size": config.batch_size, "dtype": dtype_of(config), "engine": config.engine,
            "device": device_name(next(self.bound.model.parameters()).device),
        }  # fmt: skip

    def _write_lora(
        self, adapter: LoraResult, outcome: Outcome, details: dict[str, Any], look: Callable[[Path], None]
    ) -> StreamReport:
        measured, config, trio = details["measured"], self.config, self.trio
        notes = check_lora(
            adapter, loss_before=measured["fewshot_loss_before"], loss_after=measured["fewshot_loss_after"],
            force=config.force,
        )  # fmt: skip
        made, votes = self._made(outcome), outcome.votes
        facts = {
            "kept": made.pop("kept"),
            "votes": {"count": votes.count if votes else 0, "target_hash": votes.target_hash if votes else None,
                      "origin": votes.origin if votes else {}},
        }  # fmt: skip
        return save_lora(
            adapter.scaled(outcome.alpha), config.out, model=self.bound.model, target=trio.target,
            base_name=config.target, overwrite=config.overwrite, notes=notes, details=details, facts=facts,
            inputs={"base": trio.base, "tuned": trio.tuned, "target": trio.target}, extras=look,
            config={**made, "alpha": outcome.alpha},
        )  # fmt: skip
