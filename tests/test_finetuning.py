"""Fine-tuning is a function of its arguments: same bits again, resumed or not, and the model is returned clean."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gradfix.errors import CorruptInput, DataError, UnsafeResult, UsageError
from gradfix.system.modules import restored
from gradfix.tasks import TASKS, Bound
from gradfix.tasks.scoring import evaluate
from gradfix.training import finetuning
from gradfix.training.finetuning import Recipe, finetune, tune
from gradfix.training.steps import SCHEDULES, change
from tiny import TEXT_LABELS, save_tiny, toy_texts

ROWS = toy_texts(24)
RECIPE = {"steps": 6, "batch_size": 8, "lr": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("bert", tmp_path_factory.mktemp("bert"))


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> Bound:
    return TASKS["zero-shot"]({label: label for label in TEXT_LABELS}).open(folder, dtype=dtype)


def weights(bound: Bound) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in bound.model.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_it_learns(folder: Path) -> None:
    bound = opened(folder)
    finetune(bound, toy_texts(64), steps=40, batch_size=32, lr=3e-3)
    held = toy_texts(40, seed=9)
    assert evaluate(bound.model, bound, bound.batches(held))["accuracy"] > 90


def test_same_seed_same_bits_and_other_seed_other_bits(folder: Path) -> None:
    first, second, third = opened(folder), opened(folder), opened(folder)
    finetune(first, ROWS, **RECIPE, seed=1)
    torch.rand(3)  # the caller's random state plays no part
    finetune(second, ROWS, **RECIPE, seed=1)
    finetune(third, ROWS, **RECIPE, seed=2)
    assert same(weights(first), weights(second))
    assert not same(weights(first), weights(third))


def test_dropout_is_on_and_reproducible(folder: Path) -> None:
    runs = []
    for probability in (0.0, 0.3, 0.3):
        bound = opened(folder)
        for module in bound.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = probability
        finetune(bound, ROWS, **RECIPE)
        runs.append(weights(bound))
    assert same(runs[1], runs[2]) and not same(runs[0], runs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_equals_uninterrupted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    whole, cut, again = (opened(folder, dtype) for _ in range(3))
    state = tmp_path / "state.safetensors"
    finetune(whole, ROWS, **RECIPE)
    monkeypatch.setattr(finetuning, "SAVE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(finetuning, "SAVE_SHARE", math.inf)
    done = []

    def stop_after_three(count: int) -> None:
        done.append(count)
        if len(done) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(cut, ROWS, **RECIPE, progress=stop_after_three, checkpoint=state)
    steps: list[int] = []
    finetune(again, ROWS, **RECIPE, progress=steps.append, checkpoint=state)
    assert same(weights(whole), weights(again))
    assert steps == [3, 1, 1, 1]


def test_a_state_made_under_other_labels_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetuning, "SAVE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(finetuning, "SAVE_SHARE", math.inf)
    state = tmp_path / "state.safetensors"
    finetune(opened(folder), ROWS, **RECIPE, checkpoint=state)
    other = opened(folder)
    other.prompts = {"negative": ["something else"], "positive": ["entirely"]}
    with pytest.raises(CorruptInput, match="belongs to another fine-tune"):
        finetune(other, ROWS, **RECIPE, checkpoint=state)


def test_a_state_of_another_run_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetuning, "SAVE_EVERY_SECONDS", 0.0)
    state = tmp_path / "state.safetensors"
    finetune(opened(folder), ROWS, **RECIPE, checkpoint=state)
    with pytest.raises(CorruptInput, match="another fine-tune"):
        finetune(opened(folder), ROWS[:-1], **RECIPE, checkpoint=state)


LABELS = {"negative": "bad", "positive": "good"}
FILMS = [{"text": "good film", "label": "positive"}, {"text": "bad film", "label": "negative"}]


def talks(answer: str) -> list[dict[str, object]]:
    turns = [{"role": "user", "content": "a film"}, {"role": "assistant", "content": answer}]
    return [{"messages": turns}] * 2


def opened_as(family: str, home: Path, task: str, options: dict[str, object], seed: int | None) -> Bound:
    """A tiny checkpoint of seed 0 under a task; its head of another seed where one is given."""
    folder = save_tiny(family, home / f"{family}-0")
    lender = None if seed is None else save_tiny(family, home / f"{family}-{seed}", seed)
    labels = {} if task == "causal" else LABELS
    return TASKS[task](labels, **options).open(folder, head_from=lender)


@pytest.mark.parametrize(
    ("family", "task", "before", "after"),
    [
        ("bert", "zero-shot", {}, {"options": {"pooling": "cls"}}),
        ("bert", "zero-shot", {}, {"options": {"scale": 5.0}}),
        ("bert", "zero-shot", {}, {"options": {"max_length": 8}}),
        ("bert", "zero-shot", {}, {"head": 1}),
        ("bert_classifier", "classification", {}, {"options": {"max_length": 8}}),
        ("t5", "seq2seq", {}, {"options": {"loss": "sum"}}),
        ("t5", "seq2seq", {}, {"rows": [{**row, "text": row["text"].upper()} for row in FILMS]}),
        ("llama", "causal", {"rows": talks("good")}, {"rows": talks("bad")}),
    ],
    ids=["pooling", "scale", "length", "head", "classifier", "loss", "letters", "answers"],
)
def test_a_state_is_believed_only_under_the_same_settings(
    family: str, task: str, before: dict, after: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetuning, "SAVE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(finetuning, "SAVE_SHARE", math.inf)
    state = tmp_path / "state.safetensors"

    def run(rows=FILMS, options=(), head=None) -> list[int]:
        steps: list[int] = []
        bound = opened_as(family, tmp_path, task, dict(options), head)
        finetune(bound, rows, steps=2, batch_size=2, checkpoint=state, progress=steps.append)
        return steps

    assert run(**before) == [1, 1]
    with pytest.raises(CorruptInput, match="another fine-tune"):
        run(**after)
    assert run(**before) == [2]


def test_a_state_of_another_tokenizer_or_other_statistics_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetuning, "SAVE_EVERY_SECONDS", 0.0)
    state = tmp_path / "state.safetensors"
    finetune(opened(folder), ROWS, **RECIPE, checkpoint=state)
    other = opened(folder)
    other.encoder.tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(CorruptInput, match="another fine-tune"):
        finetune(other, ROWS, **RECIPE, checkpoint=state)
    other = opened(folder)
    other.model.register_buffer("running_mean", torch.ones(3))
    with pytest.raises(CorruptInput, match="another fine-tune"):
        finetune(other, ROWS, **RECIPE, checkpoint=state)


def test_only_the_named_weights_move_and_everything_else_comes_back(folder: Path) -> None:
    bound = opened(folder)
    before, mode = weights(bound), [m.training for m in bound.model.modules()]
    flags = [p.requires_grad for p in bound.model.parameters()]
    name = bound.trainable()[-1]
    finetune(bound, ROWS, **RECIPE, names=[name])
    after = weights(bound)
    assert [key for key in after if not torch.equal(after[key], before[key])] == [name]
    assert mode == [m.training for m in bound.model.modules()]
    assert flags == [p.requires_grad for p in bound.model.parameters()]
    assert all(p.grad is None for p in bound.model.parameters())


def test_bfloat16_does_not_swallow_small_steps(folder: Path) -> None:
    bound = opened(folder, torch.bfloat16)
    before = weights(bound)
    finetune(bound, ROWS, steps=60, batch_size=8, lr=1e-4, weight_decay=0, schedule="constant")
    name = "encoder.layer.0.output.dense.weight"
    moved = (weights(bound)[name] != before[name]).float().mean()
    assert moved > 0.5  # stepping in bfloat16 itself moves a quarter of them


def test_micro_batches_change_nothing_but_memory(folder: Path) -> None:
    one, many = opened(folder, torch.float64), opened(folder, torch.float64)
    finetune(one, ROWS, **RECIPE)
    finetune(many, ROWS, **RECIPE, micro_batch=3)
    for name, value in weights(one).items():
        if not name.endswith("key.bias"):  # zero gradient by construction: Adam turns rounding noise into steps
            torch.testing.assert_close(weights(many)[name], value, rtol=0, atol=1e-7)


def test_one_step_is_one_adamw_step(folder: Path) -> None:
    bound = opened(folder, torch.float64)
    before = weights(bound)
    with restored(bound.model) as old:
        finetune(bound, ROWS, steps=1, lr=1e-5, weight_decay=0, warmup=0, schedule="constant", micro_batch=16)
        update = change(bound.model, old)
    assert same(before, weights(bound))
    reference = opened(folder, torch.float64)
    trained = [p for p in reference.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0)
    reference.loss(reference.model, reference.collate(ROWS)).mean().backward()
    optimizer.step()
    for name, value in weights(reference).items():
        if not name.endswith("key.bias"):
            torch.testing.assert_close(before[name] + update[name], value, rtol=0, atol=1e-9)


def test_few_shot_steps_are_adamw_steps_and_every_stop_is_on_one_path(folder: Path) -> None:
    bound, alone, reference = (opened(folder, torch.float64) for _ in range(3))
    path = {}
    for steps, work, _ in tune(bound, ROWS, rate=1e-3, stops=[1, 3], batch=len(ROWS), seed=0):
        path[steps] = weights(bound)
        assert (work.steps, work.forward, work.backward) == (steps, steps * len(ROWS), steps * len(ROWS))
    for _ in tune(alone, ROWS, rate=1e-3, stops=[3], batch=len(ROWS), seed=0):
        assert same(path[3], weights(alone))
    optimizer = torch.optim.AdamW([p for p in reference.model.parameters() if p.requires_grad], 1e-3)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    reference.loss(reference.model, reference.collate(ROWS)).mean().backward()
    optimizer.step()
    for name, value in weights(reference).items():
        if not name.endswith("key.bias"):
            torch.testing.assert_close(path[1][name], value, rtol=0, atol=1e-9)


def test_few_shot_steps_that_diverge_are_refused_by_number(folder: Path) -> None:
    bound = opened(folder)
    bound.model.embeddings.word_embeddings.weight.data.fill_(float("nan"))
    with pytest.raises(DataError, match="rate 0.001 diverged in step 1"):
        list(tune(bound, ROWS, rate=1e-3, stops=[2], batch=8, seed=0))


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_schedule_starts_at_one_and_stays_within(name: str) -> None:
    recipe = Recipe(steps=20, lr=2.0, warmup=4, schedule=name)
    rates = [recipe.rate(step) for step in range(20)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0] and rates[4] == 2.0
    assert all(0 <= rate <= 2 for rate in rates)


def test_warmup_below_one_is_a_share() -> None:
    assert Recipe(steps=2000).rate(199) == Recipe(steps=2000, warmup=200).rate(199) == 1e-5


def test_bad_input_is_refused(folder: Path) -> None:
    bound = opened(folder)
    with pytest.raises(DataError, match="no examples"):
        finetune(bound, [])
    with pytest.raises(UsageError, match="steps"):
        finetune(bound, ROWS, steps=0)
    with pytest.raises(UsageError, match="Did you mean 'cosine'"):
        finetune(bound, ROWS, schedule="cosin")
    with pytest.raises(UsageError, match="no parameter 'x'"):
        finetune(bound, ROWS, names=["x"])
    bound.model.embeddings.word_embeddings.weight.data.fill_(float("nan"))
    with pytest.raises(UnsafeResult, match="step 0"):
        finetune(bound, ROWS, **RECIPE)
