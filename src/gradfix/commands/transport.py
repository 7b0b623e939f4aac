"""`gradfix transport`: open the trio, make a trial, run one method, write what it ships.

`gradfix compare` runs the same methods on the same trial, so what ships is what was compared."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from gradfix.checkpoints.folder import device_name
from gradfix.checkpoints.identity import check_probe, is_target
from gradfix.checkpoints.names import name_map
from gradfix.checkpoints.open import Checkpoint, open_checkpoint
from gradfix.checkpoints.trio import Trio
from gradfix.checkpoints.write import refuse_inside, refuse_occupied, torch_dtype
from gradfix.commands.asked import DEFAULT, SPELLED, Asked, asked, refuse_apart
from gradfix.commands.configs import TransportConfig, given
from gradfix.commands.guard import halving_batches, in_notes, refuse_broken, refuse_risen, sole_writer
from gradfix.commands.page import write_page
from gradfix.commands.setting import Prepared, Shots, device_of, draw, read_unlabelled, setting
from gradfix.commands.verdict import Verdict, follow, read_verdict, refuse_nothing, refuse_other_bound
from gradfix.commands.vote import on_disk
from gradfix.data import check_disjoint
from gradfix.errors import DataError, IncompatibleCheckpoints, UsageError
from gradfix.methods.headed import fill, has_new_head, lent_head, open_target
from gradfix.methods.method import Outcome
from gradfix.methods.opening import lenders_of, open_tuned, refuse_itself, rounds, unmoved_on_disk, vector_of
from gradfix.methods.trained import is_turned
from gradfix.methods.trial import Passes, Splits, Trial
from gradfix.methods.workfolder import Partials
from gradfix.stream.checkpoint import StreamReport, transport_checkpoint, write_update
from gradfix.stream.lora_out import LoraResult, adapter_for, check_lora, layer_kinds, save_lora
from gradfix.system.meter import Meter
from gradfix.system.modules import left_as_it_was
from gradfix.tasks.base import Bound
from gradfix.tasks.scoring import evaluate, mean_loss
from gradfix.vectors.scale import dialled
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector, check_descent

T = TypeVar("T")
Stage = Callable[[str], None]


@dataclass(frozen=True)
class TransportResult:
    """What was written, and what it measured."""

    out: Path
    alpha: float
    margin: float | None
    regime: str  # what chose alpha: "given", "validation", "few_shot" or "recipe"
    report: StreamReport | None
    curve: list[tuple[float, float]] | None  # alpha and the score where it was chosen
    test_before: dict[str, float] | None
    test_after: dict[str, float] | None
    fewshot_loss_before: float | None
    fewshot_loss_after: float | None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    measure: str = "accuracy"  # what the share of right answers is called

    def as_json(self) -> dict[str, Any]:
        content = {name: value for name, value in vars(self).items() if name != "report"}
        kept = self.report.kept if self.report else None
        return dict(_finite({**content, "out": str(self.out), "kept": kept}))


def _finite(content: Any) -> Any:
    """The same content for JSON, which has no NaN and no infinity: null instead."""
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


@halving_batches(in_notes)
def run_transport(config: TransportConfig, stage: Stage = lambda _: None) -> TransportResult:
    """Check, run the method, write, score. Nothing is written before every check has passed."""
    if config.verdict is not None and (config.method not in (None, SPELLED, DEFAULT) or "mask" in given(config)):
        raise UsageError(f"--verdict {config.verdict} says what to ship: leave --method and --mask out.")
    wanted = asked(config) if config.verdict is None else None
    trio = Trio.open(config.base, config.tuned, config.target, head=config.head, strict=config.strict, across=True)
    verdict = None
    if config.verdict is not None:
        verdict = read_verdict(config, trio)
        wanted = asked(replace(config, verdict=None), verdict["method"])
    assert wanted is not None
    refuse_apart(wanted, trio)
    config = wanted.config
    twice = refuse_itself(trio, config.force)
    out = Path(config.out)
    refuse_inside(out, [c.path for c in trio.sources.values() if c.path is not None])
    refuse_occupied(out, config.overwrite)
    start = setting(config)
    stage("reading examples")
    shots = draw(start, config, config.validation, config.base)
    if verdict is not None:
        shots = follow(verdict, shots, start)
    if config.report and not shots.test:
        raise DataError(f"--report needs test examples, and {config.data} has no test split.")
    shots = replace(shots, notes=(*twice, *shots.notes))
    with sole_writer(config):
        if config.check and not config.force and shots.fewshot:
            stage("checking that the fine-tune beats its base")
            _refuse_swapped(config, start, shots, trio)
        return _Transport(wanted, trio, start, shots, stage).run(verdict)


def require_target(votes: SignVotes, target: Checkpoint) -> None:
    """Votes belong to one target: refuse them on another, by probe or by hash."""
    check_probe(votes.probe, target)
    if votes.target_hash is not None and not is_target(votes.target_hash, target):
        raise IncompatibleCheckpoints(
            f"the votes were taken on other weights than {target}. Vote again on this target."
        )


def _refuse_swapped(config: TransportConfig, start: Prepared, shots: Shots, trio: Trio) -> None:
    """A fine-tune that is worse than its base on its own task was probably given the wrong way round."""
    if config.head != "error":
        return  # the base has no head of its own to be scored with
    losses = {}
    settings = torch_dtype(config.dtype), device_of(config.device)
    base = start.open(config.base)
    for role, bound in (("base", base), ("tuned", open_tuned(trio, start.task, *settings))):
        losses[role] = mean_loss(bound.model, bound.loss, bound.batches(shots.fewshot, config.batch_size))
    if losses["tuned"] > losses["base"]:
        raise IncompatibleCheckpoints(
            f"on these examples {config.tuned} (loss {losses['tuned']:.3f}) is worse than its base {config.base} "
            f"(loss {losses['base']:.3f}). Were --base and --tuned swapped, or is this another task? "
            "--force (or --no-check) goes on all the same."
        )


def nothing_of(bound: Bound) -> TaskVector:
    return TaskVector({name: torch.zeros_like(p) for name, p in bound.model.named_parameters()})


class _Transport:
    """The steps of one transport, with what they share."""

    def __init__(self, wanted: Asked, trio: Trio, start: Prepared, shots: Shots, stage: Stage) -> None:
        self.wanted, self.config, self.trio = wanted, wanted.config, trio
        self.start, self.shots, self.stage = start, shots, stage
        config = self.config
        self.bound = open_target(trio, start.task, torch_dtype(config.dtype), device_of(config.device))
        self.names = name_map(self.bound.model, trio.target.names())
        settings = repr((config, vars(start.task), start.dataset.labels))
        self.partials = Partials(Path(config.out), settings, not config.dry_run)
        self.fewshot = list(self.bound.batches(shots.fewshot, config.batch_size))
        self.seconds: dict[str, float] = {}
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
        result = work()
        self.seconds[name] = round(time.perf_counter() - begin, 3)
        return result

    def _trial(self) -> Trial:
        """One target, one vector, one few-shot set: the ground on which compare would judge the method."""
        config, shots = self.config, self.shots
        tau = vector_of(self.trio, config.align if self.wanted.masked is None else "none")
        if not config.force:
            check_descent(tau, self.trio.base, self.trio.tuned)
        unlabelled = None
        if config.unlabelled:
            unlabelled = read_unlabelled(config.unlabelled, config)
            check_disjoint({"unlabelled": unlabelled, "test": shots.test or ()})
        trial = Trial(
            self.bound, tau if self.trio.apart is None else None,
            Splits(shots.fewshot, shots.validation, shots.test or (), unlabelled),
            passes=Passes(batch_size=config.batch_size, engine=config.engine),
            store=self.partials, lenders=lenders_of(self.trio, self.bound, self.start.task), judged=False,
        )  # fmt: skip
        trial.define(trial.set_name(config.shots, config.seed), shots.fewshot)
        return trial

    def _outcome(self, trial: Trial) -> Outcome:
        run = self.wanted.method.run
        if self.config.votes is not None and self.wanted.masked is not None:
            run = replace(self.wanted.masked, votes=self._votes_from_file(self.config.votes))
        with warnings.catch_warnings():  # a few examples of a fold say nothing about the transport itself
            warnings.filterwarnings("ignore", message=".*tensors abstained")
            outcome = run(trial, trial.support(self.config.shots, self.config.seed))
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
        adapter = None
        if config.out_lora is not None:  # from here on, what is measured is what the adapter will do
            saved = self._heads() | self._uncalled(update)
            adapter = adapter_for(update, config.out_lora, model=self.bound.model, target=self.trio.target, saved=saved)
            update = adapter.approximated
        chosen_by = outcome.chosen_by or trial.regime
        loss_before, before = self._loss(), self._test_score(trial)
        held_out = chosen_by != "recipe"
        right = 0.0 if held_out else self._right()
        with dialled(self.bound.model, update) as dial:
            dial.turn(alpha)
            loss_after, after = self._loss(), self._test_score(trial)
            vouched = held_out or self._right() > right
        self.notes += refuse_broken(loss_after, alpha, config.force)
        if loss_before is not None and loss_after is not None:
            self.notes += refuse_risen(loss_before, loss_after, vouched, config.force)
        self.notes += self.bound.cuts()
        measured: dict[str, Any] = {
            "labels_per_class": config.shots,
            "labelled_examples": len(self.shots.fewshot),
            "chosen_by": chosen_by,
            "fewshot_loss_before": loss_before,
            "fewshot_loss_after": loss_after,
            "measure": self.bound.measure,
            "test_before": before,
            "test_after": after,
        }
        report = None
        if not config.dry_run:
            look = self._read_back(trial, measured, adapter is not None)
            report = self._timed("writing", lambda: self._write(update, outcome, measured, adapter, look))
            self.partials.forget()
            self.notes.extend(report.notes)
        curve = None if outcome.curve is None else outcome.curve.values()
        result = TransportResult(
            Path(config.out), alpha, outcome.margin, chosen_by, report, curve,
            before, measured["test_after"], loss_before, measured["fewshot_loss_after"], self.seconds,
            tuple(dict.fromkeys(self.notes)), self.bound.measure,
        )  # fmt: skip
        if config.report and not config.dry_run:
            write_page(self.wanted, result, samples=len(self.shots.fewshot))
        return result

    def _loss(self) -> float | None:
        """On the few-shot examples; None without any."""
        return mean_loss(self.bound.model, self.bound.loss, self.fewshot) if self.fewshot else None

    def _right(self) -> float:
        return evaluate(self.bound.model, self.bound, self.fewshot)["accuracy"] if self.fewshot else 0.0

    def _test_score(self, trial: Trial) -> dict[str, float] | None:
        return trial.score("test").as_json() if self.shots.test else None

    def _heads(self) -> set[str]:
        """Parameters that an adapter holds in full: the model's head, and what the fine-tune lends."""
        parameters = dict(self.bound.model.named_parameters())
        lent = self.names.to_module(lent_head(self.trio, self.bound))
        return {name for name in (*self.bound.head_names(), *lent) if name in parameters}

    def _uncalled(self, update: TaskVector) -> set[str]:
        """Changed weights of layers that the model reads without calling them: a wrapper around such a layer is idle."""
        called: set[nn.Module] = set()
        layers = {name.removesuffix(".weight"): name for name in layer_kinds(self.bound.model)}
        modules = {path: self.bound.model.get_submodule(path) for path in layers}
        hooks = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in modules.values()]
        with torch.no_grad(), left_as_it_was(self.bound.model):
            self.bound.judge(self.bound.model, self.fewshot[0])
        for hook in hooks:
            hook.remove()
        idle = [name for path, name in layers.items() if modules[path] not in called]
        return {name for name in idle if name in update and bool(update[name].any())}

    def _read_back(self, trial: Trial, measured: dict[str, Any], adapter: bool) -> Callable[[Path], None]:
        """What an output does besides: it adds the task's files, and where writing rounds, it is measured as written."""
        target, config = self.trio.target, self.config
        coarser = adapter or rounds(target, config.out_dtype, torch_dtype(config.dtype))

        def look(folder: Path) -> None:
            self.bound.save_extras(folder)
            if coarser:
                stored = open_checkpoint(folder, base=target)
                fill(self.bound.model, stored, stored, stored.names())
                measured.update(fewshot_loss_after=self._loss(), test_after=self._test_score(trial))

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
            "batch_size": config.batch_size, "dtype": config.dtype, "engine": config.engine,
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
