"""The report: what it says, and that no name, path or text can become markup or a request."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gradfix.cli import run
from gradfix.methods.results import Results
from gradfix.report import render_html, to_markdown, write_report
from gradfix.report.plots import Series, curves, ticks
from gradfix.report.sections import flops, seconds
from report.browser import CHROMIUM, Browser
from tests.stage import setup

EVIL = "<script>alert(1)</script>"
SNEAKY = "\"><img src=x onerror=alert(2)> 'onmouseover='alert(3) {{ 7*7 }} javascript:alert(4) [a](http://evil.test) |"


def row(
    method: str, accuracy: float, validation: float, *, seed: int, pair: str | None, shots: int = 5
) -> dict[str, Any]:
    return {
        "pair": pair, "task": EVIL, "method": method, "shots": shots, "seed": seed, "accuracy": accuracy + seed,
        "recovered": None, "alpha": 0.0 if method == "zero_shot" else 0.7, "margin": 0.4 if method == "veto" else None,
        "seconds": 1.5, "regime": "validation", "validation_accuracy": validation, "validation_score": validation,
        "loss_before": 2.0, "loss_after": 1.0 + seed, "kept": 0.5, "flops": 2.5e9, "samples": 50, "test_samples": 500,
        "notes": [],
    }  # fmt: skip


def results(pairs: tuple[str | None, ...] = (None,), winner: str = "veto", shots: tuple[int, ...] = (5, 50)) -> Results:
    scores = {"zero_shot": 22, "naive": 30, "few_shot": 55, "gradfix": 58, "gradfix_mean": 57, "veto": 60,
              "random": 25, "oracle": 80, "fine_tuned": 85, EVIL: 21}  # fmt: skip
    scores[winner] = 70
    rows = [
        row(method, score + (k > 5), score, seed=seed, pair=pair, shots=k)
        for pair in pairs for k in shots for seed in (0, 1) for method, score in scores.items()
    ]  # fmt: skip
    where = [{"pair": pair, "shots": k, "seed": s} for pair in pairs for k in shots for s in (0, 1)]
    blocks = {EVIL: 0.55, "encoder.layer.0": 0.61, "encoder.layer.1": 0.72}
    curve = [(0.0, 22.0), (0.5, 50.0), (1.0, 58.0), (2.0, 30.0)]
    example = {"text": f"good {EVIL} {SNEAKY}", "label": EVIL, "before": "left", "after": EVIL, "kind": "repaired"}
    provenance = {
        "command": f"gradfix compare --data '{SNEAKY}'", "inputs": {"base": {"name": SNEAKY, "weights": "ab" * 32, "files": {SNEAKY: "cd" * 32}}},
        "data": {"name": EVIL, "sha256": {"test": "ef" * 32}, "examples": {"train": 100, "test": 500}},
        "parameters": 1_000_000, "tokens": 50.0, "config": {"labels": {EVIL: SNEAKY}, "regime": "validation"},
    }  # fmt: skip
    return Results.build(
        rows,
        titles={**{name: name.replace("_", " ").capitalize() for name in scores}, EVIL: EVIL},
        versions={"gradfix": "0.0", EVIL: EVIL},
        curves=[
            {**w, "method": m, "rule": rule, "points": curve, "best": 1.0}
            for w in where
            for m, rule in (("gradfix", "majority"), ("gradfix_mean", "mean"))
        ],
        agreement=[
            {**w, "method": "gradfix", "rule": "majority", "with": "the task vector", "blocks": blocks} for w in where
        ],
        kept=[{**w, "method": "veto", "blocks": blocks} for w in where],
        changed=[
            {
                "pair": p,
                "method": winner,
                "shots": 50,
                "seed": 0,
                "counts": {"repaired": 1, "broken": 0, "moved": 0},
                "examples": [example],
            }
            for p in pairs
        ],
        notes=[SNEAKY],
        provenance=[{**provenance, "pair": pair} for pair in pairs],
    )


class Tags(HTMLParser):
    """Every tag and attribute a parser sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(page)
    return parser.seen


@pytest.fixture(scope="module")
def page() -> str:
    return render_html(results(("unrelated", EVIL)))


def test_no_name_becomes_markup(page):
    seen = tags(page)
    assert not [tag for tag, _ in seen if tag in ("script", "iframe", "object", "base", "form")]
    assert not [name for _, attributes in seen for name in attributes if name.startswith("on")]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "{{ 7*7 }}" in page


def test_nothing_is_fetched_from_elsewhere(page):
    for tag, attributes in tags(page):
        for name in ("src", "href", "srcset", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:"), (tag, name, value)
    assert "@import" not in page
    assert "url(" not in page


def test_attributes_made_from_numbers_hold_numbers_only(page):
    for _, attributes in tags(page):
        style = attributes.get("style")
        if style:
            assert re.fullmatch(r"(?:(?:width|left|--shade):[\d.]+%;?)+", style), style


def test_the_verdict_comes_first(page):
    body = page[page.index("<main>") :]
    assert body.index("Ship veto") < body.index("<table")
    for text in ("alpha", "Loss on the few-shot set", "Sign agreement", "kept", "Provenance", "Answers that changed"):
        assert text in body


def test_the_page_says_where_a_baseline_wins():
    assert "A baseline wins here" in render_html(results(winner="few_shot"))
    assert "does better than moving the old fine-tune" in render_html(results(winner="few_shot"))
    assert "A baseline wins here" not in render_html(results())


def test_a_page_without_extras_still_renders():
    bare = [row(name, score, score, seed=0, pair=None) for name, score in (("zero_shot", 20), ("gradfix", 30))]
    for entry in bare:
        entry["loss_before"] = entry["flops"] = None
    page = render_html(Results.build(bare, versions={}))
    assert "Ship gradfix" in page


def test_exact_match_is_not_called_accuracy():
    rows = [
        row(name, score, score, seed=0, pair=None) | {"measure": "exact match"}
        for name, score in (("zero_shot", 20), ("gradfix", 30))
    ]
    found = Results.build(rows, versions={})
    assert "test exact match 30.0%" in found.verdict["text"] and "exact match" in found.table()[0]
    page, text = render_html(found), to_markdown(found)
    assert "Test exact match" in page and "Test accuracy" not in page
    assert "| exact match |" in text and "accuracy" not in text


def test_report_is_deterministic_and_written_with_markdown(tmp_path):
    path = write_report(results(), tmp_path / "r.html")
    assert path.read_text(encoding="utf-8") == render_html(results())
    assert (tmp_path / "r.md").read_text(encoding="utf-8") == to_markdown(results())


def test_markdown_names_stay_text():
    text = to_markdown(results(("unrelated", EVIL)))
    assert "<script>" not in text.replace("\\<script\\>", "")
    assert not re.search(r"(?<!\\)\]\(", text)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {8}


@pytest.mark.parametrize(("low", "high"), [(0, 1), (20, 85), (22.2, 22.3), (0, 8), (50, 50), (-3, 1)])
def test_ticks_cover_the_range(low, high):
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8


def test_a_curve_is_drawn_where_all_runs_were_measured():
    series = Series(EVIL, "main", [[(0, 1), (1, 2), (2, 3)], [(0, 3), (1, 4)]], [1.0, 1.0])
    assert series.mean() == [(0, 2), (1, 3)]
    drawn = curves([series], "alpha", EVIL)
    assert "<script>" not in drawn
    assert drawn.count("<polyline") == 3


def test_amounts_read_well():
    assert [flops(value) for value in (None, 12, 2.5e9, 1e15)] == ["", "12", "2.5 G", "1 P"]
    assert [seconds(value) for value in (0.01, 2.34, 600)] == ["under 0.1 s", "2.3 s", "10.0 min"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: the page is only checked as text")
    running = Browser(tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.mark.parametrize("width", [1100, 390])
def test_in_a_browser_the_page_is_silent_and_fits(browser, tmp_path, width):
    visit = browser.visit(write_report(results(("unrelated", EVIL)), tmp_path / "r.html"), width=width)
    assert EVIL in visit.text
    assert visit.scripts == 0
    assert visit.console == []
    assert visit.requests == []
    assert visit.dialogs == []
    assert visit.overflow <= 0


def test_the_browser_check_can_fail(browser, tmp_path):
    """The same harness sees a script, a console line, a dialog-free request: it is not blind."""
    page = tmp_path / "bad.html"
    page.write_text("<script>console.log('hello')</script><img src='http://127.0.0.1:9/x.png'>")
    visit = browser.visit(page)
    assert visit.scripts == 1
    assert any("hello" in line for line in visit.console)
    assert visit.requests == ["http://127.0.0.1:9/x.png"]


TRANSPORT = [
    "transport", "--base", "bert-old", "--tuned", "bert-old-reviews", "--target", "bert-new", "--data", "reviews",
    "--task", "zero-shot", "--shots", "2", "--report", "page.html",
]  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "says", "silent"),
    [
        (["--alpha", "0.5"], "Alpha 0.5 was given", "hosen on the validation split"),
        (["--method", "few_shot"], "nothing of bert-old-reviews was moved", "moving the old fine-tune"),
        (["--mask", "agree", "--validation", "none"], "score on held-out folds", "accuracy on held-out folds"),
        (["--vote", "mean"], "Mean vote", "Majority vote"),
    ],
)
def test_the_page_of_one_transport_says_what_was_done(typed, says, silent, tmp_path, monkeypatch):
    setup("bert-zero-shot", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run([*TRANSPORT, *typed, "--out", "moved", "--force", "-q"]) == 0
    page = Path("page.html").read_text()
    assert says in page
    for untrue in (silent, "A baseline wins", "Do not transport", ">chosen<", "gradfix comparison"):
        assert untrue not in page
    assert re.search(r"Test accuracy on 12 examples: [\d.]+% before, [\d.]+% after", page)
    assert "No other method was tried" in Path("page.md").read_text()
