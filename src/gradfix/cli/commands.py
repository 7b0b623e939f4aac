"""The commands. Each body parses nothing, computes nothing: it calls one workflow and prints what comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import typer

from gradfix.cli.console import Printer, asker
from gradfix.cli.helping import GroupedCommand
from gradfix.cli.options import command
from gradfix.commands import configs
from gradfix.errors import UsageError

ABOUT = "Move a fine-tune onto the next release of its base model with a handful of labelled examples."


def build(asked: Iterable[str], explained: type[Any] | None = None) -> typer.Typer:
    """The parser of these commands; the options of the `explained` one list the names they may take.

    All commands have some 400 options together: a parser of the one that was asked for is there at once."""
    app = typer.Typer(
        name="gradfix",
        help=ABOUT,
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback(help=ABOUT)(_root)
    for name in asked:
        kind, body = COMMANDS[name]
        app.command(name, cls=GroupedCommand, help=kind.__doc__)(command(kind, body, explained=kind is explained))
    return app


def _version(value: bool) -> None:
    if value:
        from gradfix._version import __version__

        typer.echo(f"gradfix {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None: ...


def _transport(config: configs.TransportConfig, out: Printer) -> None:
    from gradfix.commands.transport import run_transport

    with out.stages() as stage:
        result = run_transport(config, stage)
    out.json(result.as_json())
    rows = []
    if result.along is not None:
        rows.append(("lessons began at", result.along.words()))
    elif result.regime != "recipe" or result.alpha == 0:
        rows += [("alpha", f"{result.alpha:g}"), ("chosen by", result.regime)]
    if result.margin is not None:
        rows.append(("margin", f"{result.margin:g}"))
    if result.report is not None and result.report.kept < 1:
        rows.append(("share of the vector", f"{result.report.kept:.1%}"))
    if result.fewshot_loss_before is not None and result.fewshot_loss_after is not None:
        rows.append(("few-shot loss", f"{result.fewshot_loss_before:.4f} -> {result.fewshot_loss_after:.4f}"))
    before, after = result.test_before, result.test_after
    if result.figures is not None:
        rows += _spoken_rows(result)
    elif result.had is not None:
        rows.append(
            ("what you had", f"{result.had['accuracy']:.2f} (test {result.measure}, the old fine-tune on its base)")
        )
    if before and after:
        named = {"accuracy": result.measure, **{n: n for n in after if n not in ("accuracy", "loss", "samples")}}
        rows += [(f"test {title}", f"{before[name]:.2f} -> {after[name]:.2f}") for name, title in named.items()]
    out.table("transport" + (" (dry run)" if config.dry_run else ""), ("", ""), rows)
    out.notes(result.notes)
    out.say(f"{'would write' if config.dry_run else 'wrote'} {result.out}")


def _spoken_rows(result: Any) -> list[tuple[str, str]]:
    """Figures of open answers, before and after: the loss per token first, and what was forgotten."""
    way, rows = result.of_what_you_had, []
    if result.had is not None:
        rows.append(("what you had", f"{result.had['loss']:.3f} (test loss per token, the old fine-tune on its base)"))
    if result.test_before and result.test_after:
        gone = "" if way is None else f" ({way:.0%} of the way to what you had)"
        rows.append(
            ("test loss per token", f"{result.test_before['loss']:.3f} -> {result.test_after['loss']:.3f}{gone}")
        )
    before, after = result.figures["before"], result.figures["after"]
    named = {
        "token_f1": "test token F1",
        "general_loss": "loss on general text",
        "divergence": "divergence from the new base",
    }
    return rows + [(title, f"{before[key]:.3f} -> {after[key]:.3f}") for key, title in named.items() if key in after]


def _vote(config: configs.VoteConfig, out: Printer) -> None:
    from gradfix.commands.vote import plan_vote, run_vote
    from gradfix.system.processes import leads

    if config.dry_run:
        out.would(plan_vote(config))
        return
    with out.bar("voting", None, shown=leads()) as step:
        result = run_vote(config, step)
    if not leads():
        return
    votes = result.votes
    out.json({
        "out": str(result.out), "samples": votes.count, "tensors": len(votes), "tie_rate": votes.tie_rate(),
        "target_hash": votes.target_hash, "notes": list(result.notes),
    })  # fmt: skip
    out.notes(result.notes)
    out.say(f"wrote {result.out}: {votes.count} samples, {len(votes)} tensors, {votes.tie_rate():.1%} ties")


def _plan(config: configs.PlanConfig, out: Printer) -> None:
    from gradfix.commands.plan import run_plan

    result = run_plan(config)
    lessons = None
    if config.train is not None:
        from gradfix.commands.lesson_plan import lessons_of

        lessons = lessons_of(config)
    out.json(result.as_json() | ({"lessons": lessons.as_json()} if lessons is not None else {}))
    header = ("way to vote (* chosen)", "devices", "memory per device", "time", "operations")
    out.table(f"{config.target}: {result.samples} samples", header, result.rows())
    disk = {name.replace("_", " "): f"{size / 2**30:.2f} GiB" for name, size in result.disk.items()}
    out.table("disk", ("", ""), list(disk.items()))
    if lessons is not None:
        out.table("lessons", ("", ""), lessons.rows())
    out.notes(result.notes)
    if not result.fits:
        out.say("no way fits the memory there is: more --devices, or --dtype bf16")


def _evaluate(config: configs.EvaluateConfig, out: Printer) -> None:
    from gradfix.commands.evaluate import run_evaluate

    with out.stages() as stage:
        result = run_evaluate(config, stage)
    out.json(result)
    besides = "".join(f"{name} {result[name]:.2f} %, " for name in result if name.startswith(("recall@", "MRR")))
    out.say(f"{config.model}: {result['measure']} {result['accuracy']:.2f} %, {besides}loss {result['loss']:.4f}, "
            f"{result['samples']} examples of {result['split']}")  # fmt: skip
    out.notes(result["notes"])


def _finetune(config: configs.FinetuneConfig, out: Printer) -> None:
    from gradfix.commands.finetune import run_finetune

    with out.bar("fine-tuning", config.steps) as step:
        result = run_finetune(config, step)
    out.json(result)
    out.notes(result["notes"])
    out.say(result["summary"])


def _inspect(config: configs.InspectConfig, out: Printer) -> None:
    from gradfix.commands.inspect import run_inspect

    with out.stages() as stage:
        result = run_inspect(config, stage)
    out.json(result.as_json())
    for table in result.tables(config.names):
        out.table(*table)
    out.notes(result.notes)


def _verify(config: configs.VerifyConfig, out: Printer) -> None:
    from gradfix.checkpoints.write import verify

    files = len(verify(config.out)["outputs"])
    out.json({"ok": True, "files": files})
    out.say(f"{config.out}: manifest and {files} hashes hold")


def _select(config: configs.SelectConfig, out: Printer) -> None:
    from gradfix.commands.select import plan_select, run_select

    if config.dry_run:
        out.would(plan_select(config))
        return
    result = run_select(config)
    out.json(result)
    out.say(f"wrote {config.out}: {len(result['ids'])} examples by {config.select}")


def _demo(config: configs.DemoConfig, out: Printer) -> None:
    from gradfix.commands.demo import run_demo, unpack

    if config.dry_run:
        out.say(f"would write {config.unpack or config.report}")
        return
    if config.unpack is not None:
        folders = [str(folder) for folder in unpack(config.unpack)]
        out.json({"folders": folders})
        out.say("wrote " + "\n      ".join(folders))
        return
    with out.stages() as stage:
        results = run_demo(config, stage)
    _show(results, out, config.report)


def _compare(config: configs.CompareConfig, out: Printer) -> None:
    from gradfix.commands.compare import plan_compare, run_compare
    from gradfix.commands.verdict import ship_command

    if config.dry_run:
        out.would(plan_compare(config))
        return
    with out.stages() as stage:
        results = run_compare(config, out.json_path, stage)
    _show(results, out, config.report, partial(ship_command, config))


def _show(results: Any, out: Printer, report: str | None, ship: Callable[[Any], str | None] = lambda _: None) -> None:
    from gradfix.methods.results import measure_of

    out.text(results.to_json())
    header, *cells = results.table()
    measures = " / ".join(dict.fromkeys(map(measure_of, results.rows)))
    out.table(f"{measures} on test, mean and spread over seeds", header, cells)
    for verdict in results.verdicts:
        name = f"{verdict['pair']}: " if verdict.get("pair") else ""
        out.say(f"\n{name}{verdict['text']}")
        command = ship(verdict)
        if command:
            out.say(f"ship it with: {command}")
    out.notes(results.notes)
    if report:
        out.say(f"\nwrote {report}")


def _merge(config: configs.MergeConfigOptions, out: Printer) -> None:
    from gradfix.commands.merge import run_merge_command

    with out.stages() as stage:
        result = run_merge_command(config, stage)
    out.json(result)
    out.say(result["summary"])
    out.notes(result.get("notes", []))


def _extract(config: configs.ExtractConfig, out: Printer) -> None:
    from gradfix.commands.extract import run_extract

    with out.stages() as stage:
        result = run_extract(config, stage)
    out.json(result)
    out.say(result["summary"])
    out.notes(result["notes"])


def _reproduce(config: configs.ReproduceConfig, out: Printer) -> None:
    from gradfix.experiments import plan_reproduce

    planned = plan_reproduce(
        config.table, config.suite, quick=config.quick, out=config.out, local=config.local, jobs=config.jobs
    )
    out.notes([planned.estimate.words])
    if config.dry_run:
        out.say(f"would reproduce {config.table} of the {config.suite} suite")
        return
    asks = planned.suite.asks_first and not config.yes and sys.stdin.isatty()
    if asks and not typer.confirm("Start?", err=True):
        raise UsageError("not started. --yes starts without asking, --quick and a single table cost less.")
    with out.stages() as stage:
        result = planned.run(stage)
    out.json(result.as_json())
    for table in result.tables():
        out.table(*table)


def _report(config: configs.ReportConfig, out: Printer) -> None:
    from gradfix.commands.compare import plan_report, run_report

    if config.dry_run:
        out.would(plan_report(config))
        return
    path = run_report(config)
    out.json({"out": str(path)})
    out.say(f"wrote {path}")


def _init(config: Any, out: Printer) -> None:
    from gradfix.commands.init import run_init

    result = run_init(config, None if out.quiet else asker())
    out.json({"out": str(result.out), "command": result.command, "missing": list(result.missing)})
    if not result.written:
        out.say(result.text)
    out.say(f"{'wrote' if result.written else 'would write'} {result.out}; {result.next_step}")


def _push(config: configs.PushConfig, out: Printer) -> None:
    from gradfix.commands.push import run_push

    with out.stages() as stage:
        stage(f"sending {config.out}")
        result = run_push(config)
    out.json({"repo": result.repo, "files": [name for name, _ in result.files], "bytes": result.size,
              "url": result.url})  # fmt: skip
    out.table(f"{'would send' if config.dry_run else 'sent'} to {result.repo}", ("file", "bytes"),
              [(name, f"{size:,}") for name, size in result.files])  # fmt: skip
    if result.url:
        out.say(f"see {result.url}")


COMMANDS: dict[str, tuple[type[Any], Callable[[Any, Printer], None]]] = {
    "demo": (configs.DemoConfig, _demo),
    "transport": (configs.TransportConfig, _transport),
    "compare": (configs.CompareConfig, _compare),
    "vote": (configs.VoteConfig, _vote),
    "plan": (configs.PlanConfig, _plan),
    "merge": (configs.MergeConfigOptions, _merge),
    "extract": (configs.ExtractConfig, _extract),
    "inspect": (configs.InspectConfig, _inspect),
    "verify": (configs.VerifyConfig, _verify),
    "finetune": (configs.FinetuneConfig, _finetune),
    "evaluate": (configs.EvaluateConfig, _evaluate),
    "select": (configs.SelectConfig, _select),
    "reproduce": (configs.ReproduceConfig, _reproduce),
    "report": (configs.ReportConfig, _report),
    "init": (configs.InitConfig, _init),
    "push": (configs.PushConfig, _push),
}
