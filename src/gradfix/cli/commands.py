"""The commands. Each body parses nothing, computes nothing: it calls one workflow and prints what comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import typer

from gradfix.cli.console import asker, bar, say, say_notes, stages, table, write_json, write_text_or_stdout
from gradfix.cli.options import command
from gradfix.commands import configs
from gradfix.errors import UsageError


def build() -> typer.Typer:
    app = typer.Typer(
        name="gradfix",
        help="Move a fine-tune onto the next release of its base model with a handful of labelled examples.",
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for name, (kind, body, doc) in COMMANDS.items():
        app.command(name, help=doc)(command(kind, body, doc=doc))
    return app


def _version(value: bool) -> None:
    if value:
        from gradfix._version import __version__

        typer.echo(f"gradfix {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Move a fine-tune onto the next release of its base model with a handful of labelled examples."""


def _transport(config: configs.TransportConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.transport import run_transport

    with stages(quiet) as stage:
        result = run_transport(config, stage)
    write_json(result.as_json(), json_out)
    quiet = quiet or json_out == "-"
    rows = [("alpha", f"{result.alpha:g}"), ("chosen by", result.regime)]
    if result.margin is not None:
        rows.append(("margin", f"{result.margin:g}"))
    if result.report is not None:
        rows.append(("kept", f"{result.report.kept:.1%}"))
    rows.append(("few-shot loss", f"{result.loss_before:.4f} -> {result.loss_after:.4f}"))
    if result.before and result.after:
        rows.append(("test accuracy", f"{result.before['accuracy']:.2f} -> {result.after['accuracy']:.2f}"))
    table("transport" + (" (dry run)" if config.dry_run else ""), ("", ""), rows, quiet)
    say_notes(result.notes, quiet)
    if config.dry_run:
        say(f"would write {result.out}", quiet)
    else:
        say(f"wrote {result.out}", quiet)


def _vote(config: configs.VoteConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.vote import run_vote
    from gradfix.system.processes import leads

    with bar("voting", None, quiet or not leads()) as step:
        result = run_vote(config, step)
    if not leads():
        return
    votes = result.votes
    content = {
        "out": str(result.out), "samples": votes.count, "tensors": len(votes), "tie_rate": votes.tie_rate(),
        "target_hash": votes.target_hash, "notes": list(result.notes),
    }  # fmt: skip
    write_json(content, json_out)
    say_notes(result.notes, quiet)
    say(f"wrote {result.out}: {votes.count} samples, {len(votes)} tensors, {votes.tie_rate():.1%} ties",
        quiet or json_out == "-")  # fmt: skip


def _plan(config: configs.PlanConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.plan import run_plan

    result = run_plan(config)
    write_json(result.as_json(), json_out)
    quiet = quiet or json_out == "-"
    header = ("way to vote (* chosen)", "devices", "memory per device", "time", "operations")
    table(f"{config.target}: {result.samples} samples", header, result.rows(), quiet)
    disk = {name.replace("_", " "): f"{size / 2**30:.2f} GiB" for name, size in result.disk.items()}
    table("disk", ("", ""), list(disk.items()), quiet)
    say_notes(result.notes, quiet)
    if not result.fits:
        say("no way fits the memory there is: more --devices, or --dtype bf16", quiet)


def _evaluate(config: configs.EvaluateConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.evaluate import run_evaluate

    with stages(quiet) as stage:
        result = run_evaluate(config, stage)
    write_json(result, json_out)
    say(f"{config.model}: accuracy {result['accuracy']:.2f} %, loss {result['loss']:.4f}, "
        f"{result['samples']} examples of {result['split']}", quiet or json_out == "-")  # fmt: skip


def _finetune(config: configs.FinetuneConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.evaluate import run_finetune

    with bar("fine-tuning", config.steps, quiet) as step:
        result = run_finetune(config, step)
    write_json(result, json_out)
    say_notes(result["notes"], quiet)
    say(result["summary"], quiet or json_out == "-")


def _inspect(config: configs.InspectConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.inspect import run_inspect

    with stages(quiet) as stage:
        result = run_inspect(config, stage)
    write_json(result.as_json(), json_out)
    quiet = quiet or json_out == "-"
    for title, header, rows in result.tables(config.names):
        table(title, header, rows, quiet)
    say_notes(result.notes, quiet)


def _verify(config: configs.VerifyConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.checkpoints.write import verify

    content = verify(config.out)
    write_json({"ok": True, "files": len(content["outputs"])}, json_out)
    say(f"{config.out}: manifest and {len(content['outputs'])} hashes hold", quiet or json_out == "-")


def _select(config: configs.SelectConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.evaluate import run_select

    result = run_select(config)
    write_json(result, json_out)
    say(f"wrote {config.out}: {len(result['ids'])} examples by {config.select}", quiet or json_out == "-")


def _demo(config: configs.DemoConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.demo import run_demo, unpack

    if config.dry_run:
        say(f"would write {config.unpack or config.report}", quiet)
        return
    if config.unpack is not None:
        folders = [str(folder) for folder in unpack(config.unpack)]
        write_json({"folders": folders}, json_out)
        say("wrote " + "\n      ".join(folders), quiet or json_out == "-")
        return
    with stages(quiet) as stage:
        results = run_demo(config, stage)
    write_text_or_stdout(results.to_json(), json_out)
    _show(results, quiet or json_out == "-", config.report)


def _compare(config: configs.CompareConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.compare import run_compare
    from gradfix.commands.shipping import ship_command

    with stages(quiet) as stage:
        results = run_compare(config, json_out, stage)
    write_text_or_stdout(results.to_json(), json_out)
    _show(results, quiet or json_out == "-", config.report, partial(ship_command, config))


def _show(
    results: Any, quiet: bool, report: str | None, ship: Callable[[Any], str | None] = lambda _: None
) -> None:
    header, *cells = results.table()
    table("accuracy on test, mean and spread over seeds", header, cells, quiet)
    for verdict in results.verdicts:
        name = f"{verdict['pair']}: " if verdict.get("pair") else ""
        say(f"\n{name}{verdict['text']}", quiet)
        command = ship(verdict)
        if command:
            say(f"ship it with: {command}", quiet)
    say_notes(results.notes, quiet)
    if report:
        say(f"\nwrote {report}", quiet)


def _merge(config: configs.MergeConfigOptions, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.merge import run_merge_command

    with stages(quiet) as stage:
        result = run_merge_command(config, stage)
    write_json(result, json_out)
    say(result["summary"], quiet or json_out == "-")
    say_notes(result.get("notes", []), quiet)


def _reproduce(config: configs.ReproduceConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.experiments import plan_reproduce

    job = plan_reproduce(config.table, config.suite, quick=config.quick, out=config.out, local=config.local)
    say_notes([job.estimate.words], quiet)
    if config.dry_run:
        say(f"would reproduce {config.table} of the {config.suite} suite", quiet)
        return
    asks = job.suite.asks_first and not config.yes and sys.stdin.isatty()
    if asks and not typer.confirm("Start?", err=True):
        raise UsageError("not started. --yes starts without asking, --quick and a single table cost less.")
    with stages(quiet) as stage:
        result = job.run(stage)
    write_json(result.as_json(), json_out)
    for title, header, rows in result.tables():
        table(title, header, rows, quiet or json_out == "-")


def _report(config: configs.ReportConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.compare import run_report

    path = run_report(config)
    write_json({"out": str(path)}, json_out)
    say(f"wrote {path}", quiet or json_out == "-")


def _init(config: Any, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.init import run_init

    result = run_init(config, None if quiet else asker())
    content = {"out": str(result.out), "command": result.command, "missing": list(result.missing)}
    write_json(content, json_out)
    quiet = quiet or json_out == "-"
    if not result.written:
        say(result.text, quiet)
    say(f"{'wrote' if result.written else 'would write'} {result.out}; {result.next_step}", quiet)


def _push(config: configs.PushConfig, *, json_out: str | None, quiet: bool) -> None:
    from gradfix.commands.push import run_push

    with stages(quiet) as stage:
        stage(f"sending {config.out}")
        result = run_push(config)
    write_json({"repo": result.repo, "files": [name for name, _ in result.files], "bytes": result.size,
                "url": result.url}, json_out)  # fmt: skip
    quiet = quiet or json_out == "-"
    table(f"{'would send' if config.dry_run else 'sent'} to {result.repo}", ("file", "bytes"),
          [(name, f"{size:,}") for name, size in result.files], quiet)  # fmt: skip
    if result.url:
        say(f"see {result.url}", quiet)


def _or_plan(body: Callable[..., None]) -> Callable[..., None]:
    """The same command with a dry run: `plan_NAME` of the dryrun module says what it would do."""

    def run(config: Any, *, json_out: str | None, quiet: bool) -> None:
        if not config.dry_run:
            body(config, json_out=json_out, quiet=quiet)
            return
        from gradfix.commands import dryrun

        sentence = getattr(dryrun, f"plan{body.__name__}")(config)
        write_json({"dry_run": True, "summary": sentence}, json_out)
        say(sentence, quiet or json_out == "-")

    return run


COMMANDS: dict[str, tuple[type[Any], Any, str]] = {
    "demo": (configs.DemoConfig, _demo, "Run the whole job on embedded models, in under a minute."),
    "transport": (configs.TransportConfig, _transport, "Move a fine-tune onto a new base model."),
    "compare": (
        configs.CompareConfig,
        _or_plan(_compare),
        "All methods side by side under one label budget, with a verdict.",
    ),
    "vote": (
        configs.VoteConfig,
        _or_plan(_vote),
        "Take a target's votes and save them for any number of transports.",
    ),
    "plan": (configs.PlanConfig, _plan, "What a vote and a transport will need, before anything is loaded."),
    "merge": (
        configs.MergeConfigOptions,
        _merge,
        "Merge task vectors, each with its own base, onto one target.",
    ),
    "inspect": (
        configs.InspectConfig,
        _inspect,
        "Can these checkpoints be combined? Names, shapes, norms, cosines.",
    ),
    "verify": (configs.VerifyConfig, _verify, "Check an output folder against its manifest."),
    "finetune": (configs.FinetuneConfig, _finetune, "Fine-tune a checkpoint with the paper's recipe."),
    "evaluate": (configs.EvaluateConfig, _evaluate, "Score a checkpoint on labelled examples."),
    "select": (configs.SelectConfig, _or_plan(_select), "Choose the few-shot examples and write their ids."),
    "reproduce": (configs.ReproduceConfig, _reproduce, "Reproduce the paper's tables and figures."),
    "report": (configs.ReportConfig, _or_plan(_report), "Make the HTML report of an earlier result."),
    "init": (configs.InitConfig, _init, "Write a commented YAML file of options, by asking or by flags."),
    "push": (configs.PushConfig, _push, "Send an output folder to the model hub, after checking it."),
}
