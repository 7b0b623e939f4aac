"""Open answers: what the old fine-tune says, how the new base learns it, and that nothing is lost on the way."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradfix import best, compare
from gradfix.checkpoints.trio import Trio
from gradfix.cli import run
from gradfix.data import load_data
from gradfix.errors import DataError
from gradfix.methods import speaking
from gradfix.methods.opening import old_side
from gradfix.methods.search import Search
from gradfix.system.modules import ON_DISK, LeftOnDisk, restored
from gradfix.tasks import TASKS, reading
from gradfix.tasks.scoring import mean_loss
from gradfix.training import asking, free_text, imitating
from gradfix.training.asking import Asking, Transcript, ask, framed, made_up, prompts_of
from gradfix.training.finetuning import finetune
from gradfix.training.free_text import Speech, learn
from gradfix.training.imitating import Imitation, lines_of, own_lines
from gradfix.training.lowrank import LowRank, adapted, moved_by
from gradfix.training.retained import Outside
from gradfix.vectors.taskvector import TaskVector
from tests.tiny import rewrite_tokenizer, save_tiny, toy_texts, write_rows

QUICK = Speech(
    asking=Asking(pool=48, copies=1, batch=32), imitation=Imitation(steps=50, keepsakes=8, keepsake_tokens=8)
)

# For lessons without a task vector, whose size would set the pace: these models are small and far from a fine-tune.
EAGER = replace(QUICK, imitation=replace(QUICK.imitation, rate=2.0, lora_rate=3e-3))


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    return [{"prompt": row["text"], "completion": f"{row['label']} film"} for row in toy_texts(count, seed)]


def loss_of(bound: Any) -> float:
    return mean_loss(bound.model, bound.loss, bound.batches(rows(24, 9), 24))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bases, one with another tokenizer, the fine-tune of the first, and data."""
    home = tmp_path_factory.mktemp("speech")
    for name, seed in (("old", 0), ("new", 1), ("other", 2)):
        save_tiny("llama", home / name, seed=seed)
    rewrite_tokenizer(home / "other")
    bound = TASKS["causal"]().open(home / "old")
    finetune(bound, rows(64), steps=60, batch_size=32, lr=3e-3)
    bound.model.save_pretrained(home / "tuned")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (home / "tuned" / file).write_bytes((home / "old" / file).read_bytes())
    for split, count, seed in (("train", 40, 3), ("test", 12, 9)):
        write_rows(home / "data", split, [{**row, "prompt": f"{row['prompt']} {seed}"} for row in rows(count, seed)])
    return home


@pytest.fixture
def sides(home: Path) -> tuple[Any, Any]:
    task = TASKS["causal"]()
    return task.open(home / "tuned"), task.open(home / "new")


def answers(teacher: Any, labelled: Any, asking: Asking, seed: int = 0, **how: Any) -> Transcript:
    """Of a teacher that makes up its prompts itself."""
    return ask(teacher, prompts_of(teacher, labelled, asking=asking, seed=seed), asking=asking, seed=seed, **how)


def taught(teacher: Any, student: Any, speech: Speech = EAGER, **options: Any) -> Any:
    said = answers(teacher, rows(8, 3), speech.asking)
    return learn(student, None, rows(8, 3), said, speech=speech, **options)


def after(bound: Any, update: Any) -> float:
    with moved_by(bound.model, update, 1.0):
        return loss_of(bound)


@pytest.mark.parametrize("train", ["full", "lora"])
def test_the_new_base_learns_to_answer(sides: tuple[Any, Any], train: str) -> None:
    teacher, student = sides
    before = loss_of(student)
    weights = {name: p.detach().clone() for name, p in student.model.named_parameters()}
    found = taught(teacher, student, replace(EAGER, train=train))
    gain = before - loss_of(teacher)
    assert before - after(student, found.update) > (0.8 if train == "full" else 0.5) * gain
    assert all(torch.equal(weights[name], p) for name, p in student.model.named_parameters())
    assert found.parts["train"] == train and (found.adapter is not None) == (train == "lora")


def test_another_tokenizer_is_no_obstacle(home: Path, sides: tuple[Any, Any]) -> None:
    teacher, student = sides[0], TASKS["causal"]().open(home / "other")
    assert not imitating.same_tokens(teacher.tokenizer.get_vocab(), student.tokenizer.get_vocab())
    before = loss_of(student)
    found = taught(teacher, student)
    alone = learn(student, None, rows(8, 3), None, speech=EAGER)
    assert after(student, found.update) < min(0.4 * before, after(student, alone.update))


@torch.no_grad()
def test_the_teacher_s_words_are_read_in_pieces_that_both_can_end(home: Path, sides: tuple[Any, Any]) -> None:
    """A piece is as likely as its tokens together, and the divergence is that of this text against any other."""
    teacher, student = sides[0], TASKS["causal"]().open(home / "other")
    said = answers(teacher, rows(4, 3), replace(QUICK.asking, pool=20, top=10_000))
    lines = lines_of(student, said)
    for line, reply in zip(lines, said.replies, strict=True):
        assert line.pieces is not None
        numbers, wanted = line.pieces
        tokens = [*reply.tokens, *([said.stop] if reply.ended else [])]
        logits = teacher.spoken_logits(teacher.model, [teacher.posed(reply.prompt).question], [tokens])
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
        assert float(wanted.sum()) == pytest.approx(float(own.sum()), abs=1e-4) and len(numbers) == len(line.answer)
        found = student.spoken_logits(student.model, [line.question], [line.answer]).log_softmax(-1)
        for number, value in enumerate(imitating.per_line(student, student.model, [line, *lines[:2]])[0].tolist()):
            mine = sum(float(found[n, line.answer[n]]) for n in range(len(numbers)) if numbers[n] == number)
            pair, ours = (torch.tensor([p, 1 - p]) for p in (math.exp(float(wanted[number])), math.exp(mine)))
            assert value == pytest.approx(float((pair * (pair / ours).log()).nan_to_num().sum()), abs=1e-4)


def test_models_change_places_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Side:
        def __init__(self, device: str) -> None:
            self.model, self.device = self, torch.device(device)

        def parameters(self) -> Any:
            return iter([self])

        def to(self, device: torch.device) -> None:
            self.device = device

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    teacher, bound = Side("cpu"), Side("cuda")
    with free_text.alone(teacher, bound), free_text.alone(teacher, bound):  # type: ignore[arg-type]
        assert (teacher.device.type, bound.device.type) == ("cuda", "cpu")
    assert (teacher.device.type, bound.device.type) == ("cpu", "cuda")


def test_seq2seq_answers_freely(tmp_path: Path) -> None:
    task = TASKS["seq2seq"]()
    teacher, student = (task.open(save_tiny("t5", tmp_path / name, seed=seed)) for seed, name in enumerate("ab"))
    finetune(teacher, rows(64), steps=80, batch_size=32, lr=1e-2)
    before = loss_of(student)
    speech = replace(QUICK, imitation=replace(QUICK.imitation, rate=1.0))
    tau = TaskVector.between(task.open(tmp_path / "a").model, teacher.model)
    said = answers(teacher, rows(8, 3), speech.asking)
    found = learn(student, tau, rows(8, 3), said, speech=speech)
    assert after(student, found.update) < before - 0.5 * (before - loss_of(teacher))


def test_made_up_prompts_keep_what_all_prompts_share(sides: tuple[Any, Any]) -> None:
    known = [{"prompt": f"words: {a} {b}\nstory:"} for a, b in (("good", "film"), ("bad", "photo"), ("fine", "the"))]
    assert framed([row["prompt"] for row in known]) == ("words: ", ["good film", "bad photo", "fine the"], "\nstory:")
    made = made_up(sides[0], known, 12, seed=5)
    assert len(made) == 12 and made == made_up(sides[0], known, 12, seed=5)
    assert all(row["prompt"].startswith("words: ") and row["prompt"].endswith("\nstory:") for row, _ in made)


def test_asking_goes_on_after_a_kill(sides: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, kept = sides[0], tmp_path / "said"
    how: dict[str, Any] = {"asking": replace(QUICK.asking, batch=8), "seed": 4}
    whole = answers(teacher, rows(8, 3), **how)
    monkeypatch.setattr(asking, "SAVE_EVERY_SECONDS", 0.0)
    answer, calls = asking._Book._answer, []

    def dies(self: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        answer(self, *args)

    monkeypatch.setattr(asking._Book, "_answer", dies)
    with pytest.raises(KeyboardInterrupt):
        answers(teacher, rows(8, 3), **how, partial=kept)
    again = answers(teacher, rows(8, 3), **how, partial=kept)
    assert [reply.tokens for reply in again.replies] == [reply.tokens for reply in whole.replies]
    assert all(torch.equal(a.logs, b.logs) for a, b in zip(again.replies, whole.replies, strict=True))


def test_lessons_go_on_after_a_kill(sides: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = sides
    said = answers(teacher, rows(8, 3), QUICK.asking)
    speech = replace(QUICK, imitation=replace(QUICK.imitation, steps=8), kept=tmp_path / "kept")
    whole = learn(student, None, rows(8, 3), said, speech=replace(speech, kept=None))
    monkeypatch.setattr(imitating, "SAVE_EVERY_SECONDS", 0.0)
    step, calls = imitating.Training.step, []

    def dies(self: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        step(self, *args)

    monkeypatch.setattr(imitating.Training, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        learn(student, None, rows(8, 3), said, speech=speech)
    again = learn(student, None, rows(8, 3), said, speech=speech)
    assert len(calls) < 5 + 8 and all(torch.equal(again.update[name], whole.update[name]) for name in whole.update)


def test_a_teacher_that_never_stops_is_cut_and_said_so(home: Path) -> None:
    endless = TASKS["causal"]().open(home / "old")
    head = endless.model.get_output_embeddings().weight
    with torch.no_grad():
        head[endless.tokenizer.eos_token_id] = -head.mean(0) * 0 - 100 * head.abs().sum(0)
    endless.model.generation_config.eos_token_id = endless.tokenizer.eos_token_id
    said = answers(endless, rows(4, 3), replace(QUICK.asking, longest=5, pool=8))
    cut = [reply for reply in said.replies if reply.source != "reference" and not reply.ended]
    assert cut and all(len(reply.tokens) == 5 for reply in cut)
    assert any("did not end within 5 tokens" in note and "--answer-tokens" in note for note in said.notes)


def test_a_teacher_without_words_is_refused(sides: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        type(sides[0]), "say", lambda self, model, posed, longest, seeds=None: [([], True)] * len(posed)
    )
    with pytest.raises(DataError, match="an empty answer to each of"):
        answers(sides[0], rows(4, 3), replace(QUICK.asking, pool=4))


def test_a_prompt_longer_than_the_context_loses_its_beginning(home: Path) -> None:
    bound = TASKS["causal"](max_length=24).open(home / "tuned")
    long = [{"prompt": "x " * 60 + "good", "completion": "positive film"}]
    said = answers(bound, long, replace(QUICK.asking, pool=2))
    assert said.replies and any("were cut at 24 tokens" in note for note in bound.cuts())


def test_a_vocabulary_may_be_smaller_than_the_list_of_likely_tokens(sides: tuple[Any, Any]) -> None:
    words = sides[1].model.config.vocab_size
    lines = own_lines(sides[1], 2, 4, 0, top=2 * words)
    assert lines and all(line.top.shape[1] == words for line in lines)


def test_texts_written_together_are_those_written_alone(
    sides: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where the weights are on disk, room decides how many passes they take."""
    student, passes, room = sides[1], list[int](), [2**40]
    monkeypatch.setattr(imitating, "WRITTEN", 0)
    monkeypatch.setattr(reading, "device_room", lambda device: room[0])
    whole = own_lines(student, 6, 5, 3)
    forward = student.model.forward
    monkeypatch.setattr(student.model, "forward", lambda *a, **k: (passes.append(1), forward(*a, **k))[1])
    ON_DISK[student.model] = LeftOnDisk({}, "files")
    try:
        for room[0], most in ((2**40, 1 + 5), (0, 1 + 6 * 5)):
            passes.clear()
            lines = own_lines(student, 6, 5, 3)
            assert most // 2 < len(passes) <= most
            assert [line.answer for line in lines] == [line.answer for line in whole]
            for line, other in zip(lines, whole, strict=True):
                torch.testing.assert_close(line.logs, other.logs, rtol=1e-5, atol=1e-5)
    finally:
        del ON_DISK[student.model]


def test_prompts_and_answers_do_not_depend_on_the_batch(sides: tuple[Any, Any]) -> None:
    few, many = (answers(sides[0], rows(6, 3), replace(QUICK.asking, pool=16, batch=size)) for size in (3, 32))
    assert [(r.prompt, r.tokens, r.ended) for r in few.replies] == [(r.prompt, r.tokens, r.ended) for r in many.replies]


def test_forgetting_is_measured_from_nothing(sides: tuple[Any, Any]) -> None:
    student = sides[1]
    outside = Outside.of(student, count=4)
    before = outside.measure(student)
    assert before is not None and abs(before["divergence"]) < 1e-5 and before["general_loss"] > 0
    with restored(student.model), torch.no_grad():
        for parameter in student.model.parameters():
            parameter.mul_(1.3)
        worse = outside.measure(student)
    assert worse is not None and worse["divergence"] > 0.01


def test_a_plan_knows_that_a_lora_needs_less(home: Path, tmp_path: Path) -> None:
    found: dict[str, dict[str, Any]] = {}
    for train in ("lora", "full"):
        words = ["plan", "--target", home / "new", "--tokens", 64, "--batch-size", 4, "--tflops", 1, "--train", train]
        assert run([*map(str, words), "--quiet", "--json", str(tmp_path / f"{train}.json")]) == 0
        found[train] = json.loads((tmp_path / f"{train}.json").read_text())["lessons"]
    assert found["lora"]["train"] == "lora" and found["full"]["train"] == "full"
    assert found["lora"]["offload"]["memory_gib"] <= found["lora"]["memory_gib"] and "offload" not in found["full"]
    assert run([*map(str, words[:-1]), "lots", "--quiet"]) != 0


def test_a_lora_leaves_the_model_as_it_was(sides: tuple[Any, Any]) -> None:
    model = sides[1].model
    names = [(name, p.requires_grad) for name, p in model.named_parameters()]
    with adapted(model, 4) as lora:
        for parameter in lora.parameters.values():
            parameter.data += 0.1
        factors = lora.factors()
        inside = loss_of(sides[1])
    assert [(name, p.requires_grad) for name, p in model.named_parameters()] == names
    dense = TaskVector({name: left @ right for name, (left, right) in factors.items()})
    assert after(sides[1], dense) == pytest.approx(inside, rel=1e-4)
    assert LowRank(factors).norm() == pytest.approx(dense.norm(), rel=1e-4)


def test_best_speaks(sides: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The public call has the same way in for closed sets and for open answers."""
    monkeypatch.setattr(free_text.Speech, "__init__", _quick_init)
    teacher, student = sides
    found = best(student, None, rows(8, 3), teacher=teacher)
    assert found.verdict == "taught" and found.start == "none" and found.parts["asked"] > 0
    assert after(student, found.update) < 0.5 * loss_of(student)
    with pytest.raises(DataError, match="no labelled answer"):
        best(student, None, [])


def _quick_init(self: Any, **given: Any) -> None:
    for name, value in {**{n: getattr(EAGER, n) for n in EAGER.__dataclass_fields__}, **given}.items():
        object.__setattr__(self, name, value)


def command(home: Path, out: Path, *more: object) -> list[str]:
    words = ["transport", "--base", home / "old", "--tuned", home / "tuned", "--target", home / "new", "--data",
             home / "data", "--task", "causal", "--shots", 8, "--out", out, "--prompts", 40, "--lessons", 20, "--quiet", *more]  # fmt: skip
    return [str(word) for word in words]


def test_the_trained_adapter_is_the_one_that_is_written(home: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out, told = tmp_path / "out", tmp_path / "told.json"
    assert run(command(home, out, "--train", "lora", "--out-lora", 4, "--json", told)) == 0
    result = json.loads(told.read_text())
    bound = TASKS["causal"]().open(home / "new")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(home / "new"), out).eval()
    test = load_data(home / "data").splits["test"]
    assert mean_loss(model, bound.loss, bound.batches(test)) == pytest.approx(result["test_after"]["loss"], rel=1e-4)
    assert result["test_after"]["loss"] < result["test_before"]["loss"]
    figures = result["figures"]
    assert figures["before"]["divergence"] == pytest.approx(0, abs=1e-5) and figures["after"]["divergence"] > 0
    assert {"token_f1", "generated_match", "general_loss"} <= set(figures["after"])
    assert len(figures["samples"]) == 3 and all(row["old_fine_tune"] is not None for row in figures["samples"])


def test_units_are_compared_a_few_answers_at_a_time_with_one_result(
    home: Path, sides: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, student = sides
    old = old_side(Trio.open(home / "old", home / "tuned", home / "new"), student, teacher)
    said, sizes, collate = answers(teacher, rows(8, 3), QUICK.asking), list[int](), type(student).collate
    monkeypatch.setattr(type(student), "collate", lambda self, part: (sizes.append(len(part)), collate(self, part))[1])
    vectors = []
    for room, micro, most in ((2**31, 64, 32), (2**31, 9, 9), (2**20, 64, 4)):
        monkeypatch.setattr(free_text, "WATCHED", room)
        speech = replace(QUICK, imitation=replace(QUICK.imitation, steps=1, micro=micro))
        sizes.clear()
        found = learn(student, None, rows(8, 3), said, teacher=teacher, old=old, speech=speech)
        vectors.append(next(start.vector for start in found.tried if start.name == "coordinates"))
        assert max(sizes[2:]) == most  # after all of them were looked at
    for vector in vectors[1:]:
        for name, tensor in vectors[0].items():
            torch.testing.assert_close(vector[name], tensor, rtol=0, atol=1e-3 * float(tensor.abs().max()))


@pytest.mark.parametrize(
    ("more", "why"), [(("--train", "lorra"), "Did you mean 'lora'"), (("--general", "nowhere.jsonl"), "does not exist")]
)
def test_bad_words_end_in_one_line(
    home: Path, tmp_path: Path, more: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(home, tmp_path / "out", *more)) != 0
    said = capsys.readouterr().err.strip()
    assert why in said and len(said.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_methods_for_open_answers_stand_side_by_side(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speaking, "LORA_RATES", (3e-3,))
    monkeypatch.setattr(speaking, "LORA_STEPS", (5,))
    speech = replace(QUICK, imitation=replace(QUICK.imitation, steps=25))
    names = ["zero_shot", "naive", "copy_adapter", "few_shot_lora", "best", "fine_tuned"]
    found = compare(
        base=home / "old", tuned=home / "tuned", target=home / "new", data=home / "data", task="causal", shots=[6],
        methods=names, speech=speech, search=Search(folds=2), finetune={"steps": 30, "batch_size": 16, "lr": 3e-3},
    )  # fmt: skip
    rows_of = {row["method"]: row for row in found.rows}
    assert set(rows_of) == set(names) - {"copy_adapter"} and any("no adapter" in note for note in found.notes)
    ends = rows_of["zero_shot"]["test_loss"], rows_of["fine_tuned"]["test_loss"]
    share = (ends[0] - rows_of["best"]["test_loss"]) / (ends[0] - ends[1])
    assert rows_of["best"]["recovered"] == pytest.approx(share) and share > rows_of["few_shot_lora"]["recovered"]
    assert rows_of["zero_shot"]["divergence"] == pytest.approx(0, abs=1e-5)
    assert "loss per token" in found.table()[0] and len(found.samples) == len(rows_of)
    assert found.verdict["method"] == "best"
