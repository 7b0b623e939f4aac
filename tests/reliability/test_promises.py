"""What must go right: the other half of the catalogue, and the promises that are not refusals."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gradfix
from gradfix.checkpoints import write
from gradfix.data import load_data
from gradfix.errors import CorruptInput, Locked, OutputError
from gradfix.votes.tally import SignVotes
from tests.reliability.world import World, hashes, left_behind, make_world, rewrite, say
from tests.tiny import save_tiny
from tests.torture.crashes import relative, three

pytestmark = pytest.mark.filterwarnings("ignore:.*tensors abstained")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world") / "whole")


@pytest.fixture
def world(whole: World, tmp_path: Path) -> World:
    shutil.copytree(whole.home, tmp_path / "world")
    return World(tmp_path / "world")


def manifest(folder: Path) -> dict:
    return gradfix.verify(folder)


# Models -------------------------------------------------------------------------------------------------------


def test_tied_weights_vote_once_and_stay_tied(tmp_path: Path) -> None:
    """One tensor on disk, one vote with the gradients of both uses, one tensor when loaded again."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=12, tie_word_embeddings=True)
    for seed, role in enumerate(("base", "tuned", "target")):
        torch.manual_seed(seed if role == "target" else 0)
        model = LlamaForCausalLM(config)
        if role == "tuned":
            with torch.no_grad():
                model.model.embed_tokens.weight += 0.01
        model.save_pretrained(tmp_path / role)
    ids = torch.randint(0, 12, (3, 5), generator=torch.Generator().manual_seed(0))

    def loss(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits = m(batch).logits[:, :-1]
        each = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        return each.view(len(batch), -1).mean(1)

    votes = gradfix.collect_votes(model, loss, [ids], engine="loop")
    assert "lm_head.weight" not in votes and votes["model.embed_tokens.weight"].any()
    roles = {role: tmp_path / role for role in ("base", "tuned", "target")}
    gradfix.transport_checkpoint(**roles, votes=votes, out=tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_buffers_come_from_the_target_whatever_the_mask(tmp_path: Path) -> None:
    """Running statistics are floating tensors on disk, so a mask that needs no votes would move them."""
    from safetensors.torch import save_file

    state = {"bn.running_mean": torch.ones(4), "bn.running_var": torch.ones(4), "w": torch.ones(4, 4),
             "bn.num_batches_tracked": torch.tensor(3)}  # fmt: skip
    for scale, role in ((1.0, "base"), (1.1, "tuned"), (5.0, "target")):
        (tmp_path / role).mkdir()
        moved = {n: (t * scale).to(t.dtype) for n, t in state.items()}
        save_file(moved, tmp_path / role / "model.safetensors")
    roles = {role: tmp_path / role for role in ("base", "tuned", "target")}
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    out, target = (load_file(tmp_path / f / "model.safetensors") for f in ("out", "target"))
    assert all(torch.equal(out[n], target[n]) for n in state if n.startswith("bn."))
    assert not torch.equal(out["w"], target["w"])
    told = manifest(tmp_path / "out")["tensors"]
    assert told["bn.running_mean"] == {"fate": "copied", "reason": "running statistics of the target"}


def test_unused_parameters_abstain_and_are_reported(world: World) -> None:
    """The pooler takes no part in a mean-pooled encoder."""
    said = say(world.arguments())
    assert said.code == 0 and "2 tensors have no votes (frozen or unused)" in said.err
    told = manifest(world.out)["tensors"]
    assert told["pooler.dense.weight"] == {"fate": "copied", "reason": "no votes"}
    out, target = (load_file(folder / "model.safetensors") for folder in (world.out, world.target))
    assert torch.equal(out["pooler.dense.weight"], target["pooler.dense.weight"])


def test_an_extra_head_is_listed(world: World) -> None:
    rewrite(world.target, {"extra.weight": torch.ones(2, 32)})
    recipe = world.home / "recipe.yaml"
    vectors = [{"base": str(world.base), "tuned": str(world.tuned)}]
    recipe.write_text(
        json.dumps({"target": str(world.target), "vectors": vectors, "method": "task_arithmetic"})
    )
    assert say(["merge", str(recipe), "--out", str(world.out)]).code == 0
    told = manifest(world.out)
    assert told["tensors"]["extra.weight"] == {"fate": "copied", "reason": "only in the target"}
    counts = told["counts"]
    assert (
        counts["transported"] + counts["copied"] + counts["skipped"]
        == counts["total"]
        == len(told["tensors"])
    )


def test_a_stranger_goes_through_when_forced(world: World) -> None:
    save_tiny("bert", world.home / "stranger", seed=9)
    assert say(world.arguments(tuned=world.home / "stranger", force=True)).code == 0


def test_base_and_fine_tune_the_wrong_way_round(world: World) -> None:
    """Of the two orders exactly one is refused: the fine-tune must beat its base on its own examples."""
    orders = [(world.base, world.tuned), (world.tuned, world.base)]
    said = [
        say(world.arguments(base=a, tuned=b, out=world.home / f"out{i}", no_check=None))
        for i, (a, b) in enumerate(orders)
    ]
    assert sorted(answer.code for answer in said) == [0, 4]
    refused = next(answer for answer in said if answer.code == 4)
    assert "Were --base and --tuned swapped" in refused.err and "--force" in refused.err


# Files: hostile ones ------------------------------------------------------------------------------------------


def test_a_pickle_that_claims_more_than_it_holds(tmp_path: Path) -> None:
    """Four bytes that unfold to a terabyte, and tensors without any data."""
    torch.save({"w": torch.zeros(1).expand(1 << 20, 1 << 18)}, tmp_path / "views.pt")
    with pytest.raises(CorruptInput, match="'w' claims 274,877,906,944 entries that the file does not hold"):
        gradfix.open_checkpoint(tmp_path / "views.pt")
    torch.save({"w": torch.zeros(3, device="meta")}, tmp_path / "meta.pt")
    with pytest.raises(CorruptInput, match=r"meta\.pt"):
        gradfix.open_checkpoint(tmp_path / "meta.pt")


def test_a_compressed_pickle_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    import zipfile

    torch.save({"w": torch.zeros(3)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for record in whole.infolist():
            data = bytes(50_000_000) if record.filename.endswith("data.pkl") else whole.read(record)
            bomb.writestr(record.filename, data, zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.pt").stat().st_size < 100_000
    with pytest.raises(CorruptInput, match=r"bomb\.pt: record .* is compressed or larger than the file"):
        gradfix.open_checkpoint(tmp_path / "bomb.pt")


def test_flipped_bits_of_a_pickle_are_noticed(tmp_path: Path) -> None:
    """torch does not look at checksums in files that it maps."""
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "w.pt")
    data = bytearray((tmp_path / "w.pt").read_bytes())
    data[data.index(torch.tensor([500.0, 501.0]).numpy().tobytes())] ^= 1
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(CorruptInput, match=r"record '.*data/0' has another checksum"):
        gradfix.open_checkpoint(tmp_path / "w.pt")


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CorruptInput, match="no regular file"):
        gradfix.open_checkpoint(tmp_path / "x.safetensors")


def test_names_no_system_can_hold(tmp_path: Path) -> None:
    with pytest.raises(CorruptInput, match="does not exist"):
        gradfix.open_checkpoint("x" * 5000)
    (tmp_path / "gradfix.json").write_text(json.dumps({"outputs": {"y" * 5000: "0", "z\0": "0"}}))
    with pytest.raises(CorruptInput, match="is missing"):
        gradfix.verify(tmp_path)


def test_postscript_is_never_decoded(tmp_path: Path) -> None:
    """Under whatever name: an interpreter would run what is in it."""
    from gradfix.errors import DataError

    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "x.png").write_bytes(
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
        )
    with pytest.raises(DataError, match=r"x\.png: this is not an image any more"):
        load_data(tmp_path)


@pytest.mark.parametrize("template", ["{text:>999999999}", "{text.__class__}", "{text[0]}", "{text!r}"])
def test_a_template_that_comes_with_the_data_names_columns_only(tmp_path: Path, template: str) -> None:
    from gradfix.errors import UsageError

    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.json").write_text(json.dumps({"text_template": template}))
    with pytest.raises(UsageError, match="use plain column names"):
        load_data(tmp_path)


def test_a_parquet_file_that_claims_a_billion_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    from gradfix.errors import DataError

    parquet.write_table(
        pyarrow.table({"text": ["a"] * 1000, "label": ["x"] * 1000}), tmp_path / "train.parquet"
    )
    monkeypatch.setattr("gradfix.data.files.MAX_ROWS", 999)
    with pytest.raises(DataError, match=r"train.parquet claims 1,000 rows, more than 999. Take a sample"):
        load_data(tmp_path / "train.parquet")


def test_code_in_a_checkpoint_is_not_copied_along(world: World) -> None:
    (world.target / "modeling_own.py").write_text("x = 1")
    (world.target / "cache.pkl").write_bytes(b"x")
    assert say(world.arguments()).code == 0
    assert not {"modeling_own.py", "cache.pkl"} & {path.name for path in world.out.iterdir()}


# Data ---------------------------------------------------------------------------------------------------------


def test_csv_values_stay_strings(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_bytes(b"\xef\xbb\xbftext,label\r\nNA,01\r\n1e5,NA\r\n")
    rows = load_data(tmp_path / "train.csv").pick("train")
    assert [(row["text"], row["label"]) for row in rows] == [("NA", "01"), ("1e5", "NA")]
    assert [row.where.rsplit(":", 1)[1] for row in rows] == ["2", "3"]


def test_allow_fewer_takes_what_there_is(world: World) -> None:
    said = say(world.arguments("select", target=None, shots=7, allow_fewer=True, out=world.home / "ids.json"))
    assert said.code == 0
    assert len(json.loads((world.home / "ids.json").read_text())) == 12


# Process ------------------------------------------------------------------------------------------------------


def test_a_held_lock_is_code_seven(world: World) -> None:
    before = hashes(world.home)
    lock = world.home / ".out.gradfix.lock"
    with open(lock, "w", encoding="ascii") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        said = say(world.arguments())
    assert said.code == Locked.exit_code == 7
    assert "another gradfix process is writing" in said.err and "choose another --out" in said.err
    lock.unlink()
    for part in world.home.glob(".out.votes-*.part"):
        part.unlink()  # the finished vote is kept for the next try
    assert left_behind(world.home, before) == []


def test_a_disk_without_room_is_known_before_the_first_byte(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hashes(world.home)
    monkeypatch.setattr(write.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    recipe = world.home / "recipe.yaml"
    vectors = [{"base": str(world.base), "tuned": str(world.tuned)}]
    recipe.write_text(
        json.dumps({"target": str(world.target), "vectors": vectors, "method": "task_arithmetic"})
    )
    said = say(["merge", str(recipe), "--out", str(world.out)])
    assert said.code == 8 and "GiB free" in said.err and "are needed" in said.err
    assert set(left_behind(world.home, before)) == {str(recipe)}


def test_a_writer_killed_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    """The old output is put back by the next run, whether or not it may overwrite."""
    roles = three(tmp_path)
    out = tmp_path / "place" / "out"
    gradfix.transport_checkpoint(**roles, mask="none", alpha=0.25, out=out)
    old = relative(out)
    out.rename(tmp_path / "place" / ".out.gradfix-old-0123")
    with pytest.raises(OutputError, match="--overwrite"):
        gradfix.transport_checkpoint(**roles, mask="none", out=out)
    assert relative(out) == old
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_stale_staging_is_cleaned_and_other_outputs_are_not(tmp_path: Path) -> None:
    roles = three(tmp_path)
    place = tmp_path / "place"
    for name in (".o[1].gradfix-123-ab", ".other.gradfix-123-ab"):
        (place / name).mkdir(parents=True)
    gradfix.transport_checkpoint(**roles, mask="none", out=place / "o[1]")
    assert sorted(path.name for path in place.iterdir()) == [".other.gradfix-123-ab", "o[1]"]
    (place / ".v.safetensors.gradfix-1-a").write_bytes(b"half")
    SignVotes({"w": torch.ones(3, dtype=torch.int8)}, 1).save(place / "v.safetensors")
    assert not (place / ".v.safetensors.gradfix-1-a").exists()


def test_finished_shards_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted transport goes on after its last finished shard and ends in the same bits."""
    import gradfix.stream

    roles = three(tmp_path)
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "whole")
    moved: list[str] = []
    real = gradfix.stream._Job._pieces

    def counted(self, name, *rest):
        moved.append(name)
        if len(moved) == 4:
            raise KeyboardInterrupt
        return real(self, name, *rest)

    monkeypatch.setattr(gradfix.stream._Job, "_pieces", counted)
    with pytest.raises(KeyboardInterrupt):
        gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    first = list(moved)
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    assert len(moved) - len(first) < 5
    assert relative(tmp_path / "out") == relative(tmp_path / "whole")
    assert not list(tmp_path.glob(".out*"))


def test_a_changed_input_is_not_taken_for_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gradfix.stream

    roles = three(tmp_path)
    real, calls = gradfix.stream._Job._pieces, iter(range(100))

    def dying(self, name, *rest):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return real(self, name, *rest)

    monkeypatch.setattr(gradfix.stream._Job, "_pieces", dying)
    with pytest.raises(KeyboardInterrupt):
        gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    state = load_file(roles["tuned"] / "model.safetensors")
    rewrite(roles["tuned"], {"layer.bias": state["layer.bias"] + 0.05})
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "out")
    gradfix.transport_checkpoint(**roles, mask="none", out=tmp_path / "fresh")
    assert relative(tmp_path / "out") == relative(tmp_path / "fresh")


def _small_memory(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    from gradfix.tasks.zero_shot import ZeroShotBound

    real = ZeroShotBound.logits

    def logits(self, model, batch):
        if len(batch["labels"]) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, model, batch)

    monkeypatch.setattr(ZeroShotBound, "logits", logits)


def test_out_of_memory_is_an_error_unless_the_batch_may_shrink(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_memory(monkeypatch, 2)
    before = hashes(world.home)
    words = {"out": world.home / "votes.safetensors", "batch_size": 16}
    said = say(world.arguments("vote", **words))
    assert said.code == 8
    assert "out of memory" in said.err and "--auto-batch" in said.err
    assert left_behind(world.home, before) == []


def test_the_batch_halves_only_when_allowed_and_is_recorded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = world.home / "small.safetensors"
    assert say(world.arguments("vote", out=small, batch_size=2)).code == 0
    _small_memory(monkeypatch, 2)
    out = world.home / "votes.safetensors"
    said = say(world.arguments("vote", out=out, batch_size=16, auto_batch=True))
    assert said.code == 0 and "batch size 16 ran out of memory; 2 was used" in said.err
    assert SignVotes.load(out).origin["settings"]["batch_size"] == 2
    assert out.read_bytes() == small.read_bytes()


# Determinism --------------------------------------------------------------------------------------------------


def test_same_seed_same_settings_same_bits(world: World) -> None:
    files = []
    for name in ("one", "two"):
        folder = world.home / name
        folder.mkdir()
        assert say(world.arguments("vote", out=folder / "v.safetensors")).code == 0
        assert (
            say(world.arguments(out=folder / "out", alpha="auto", validation="none", mask="veto")).code == 0
        )
        files.append(
            {p: h for p, h in relative(folder).items() if p not in ("out/gradfix.json", "out/README.md")}
        )
    assert files[0] == files[1] and len(files[0]) >= 5
    other = world.home / "three.safetensors"
    assert say(world.arguments("vote", out=other, seed=1)).code == 0
    assert other.read_bytes() != (world.home / "one" / "v.safetensors").read_bytes()


def test_what_changes_bits_is_in_the_manifest(world: World) -> None:
    votes = world.home / "v.safetensors"
    assert say(world.arguments("vote", out=votes, batch_size=3, dtype="bf16")).code == 0
    assert say(world.arguments(votes=votes, batch_size=5)).code == 0
    told = manifest(world.out)
    assert told["details"]["computed"] == {
        "batch_size": 5,
        "dtype": "fp32",
        "engine": "auto",
        "device": "cpu",
    }
    assert {"threads", "cpu", "arch", "matmul"} <= set(told["machine"])
    assert {"torch", "gradfix", "python", "safetensors"} <= set(told["versions"])
    origin = told["votes"]["origin"]
    assert origin["settings"]["batch_size"] == 3 and origin["settings"]["dtype"] == "bf16"
    assert origin["device"] == "cpu" and origin["machine"]["threads"] == torch.get_num_threads()
    assert told["config"]["seed"] == 0


def test_a_resumed_vote_keeps_engine_samples_and_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last batch holds one sample: chosen anew there, the engine would be another one."""
    monkeypatch.setattr("gradfix.votes.resume.resumable.__defaults__", (0.0,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(301, 3)
    x[7] = float("nan")
    batches = [{"x": x[i : i + 150]} for i in range(0, 301, 150)]

    def loss(m: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return m(batch["x"]).square().mean(1)

    whole = gradfix.collect_votes(model, loss, batches, checkpoint=tmp_path / "a")
    calls = iter(range(100))

    def dying(amount: int) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gradfix.collect_votes(model, loss, batches, checkpoint=tmp_path / "b", progress=dying)
    again = gradfix.collect_votes(model, loss, batches, checkpoint=tmp_path / "b")
    assert again.notes == whole.notes and any("sample 7: loss is nan" in note for note in again.notes)
    assert again.count == whole.count == 300
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_a_frozen_weight_is_part_of_a_votes_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradfix.votes.resume.resumable.__defaults__", (0.0,))
    model = nn.Sequential(nn.Linear(2, 100), nn.Linear(100, 1))
    model[1].requires_grad_(False)
    batches = [torch.ones(2, 2), torch.zeros(2, 2) + 0.5]
    calls = iter(range(9))

    def dying(amount: int) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt

    def loss(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return m(batch).squeeze(1)

    with pytest.raises(KeyboardInterrupt):
        gradfix.collect_votes(model, loss, batches, checkpoint=tmp_path / "p", progress=dying)
    with torch.no_grad():
        model[1].weight[0, 99] += 1  # far from the first entries
    with pytest.raises(CorruptInput, match="belongs to another vote"):
        gradfix.collect_votes(model, loss, batches, checkpoint=tmp_path / "p")


def test_compare_keeps_units_of_other_task_settings_apart(world: World) -> None:
    """Pooling changes every number: a work folder of one must not answer for the other."""
    from gradfix.comparison.inputs import Inputs
    from gradfix.comparison.searching import Search
    from gradfix.tasks.zero_shot import ZeroShot

    def identity(**options: object) -> dict:
        data = load_data(world.data)
        return Inputs(
            base=world.base, tuned=world.tuned, target=world.target, target_tuned=None, data=data,
            task=ZeroShot(data.labels, **options), validation="none", finetune=False, task_options={},
            search=Search(), unlabelled=None, batch_size=4, dtype=torch.float32, device="cpu", engine="loop", allow_fewer=False,
            work=None,
        ).identity  # fmt: skip

    assert identity() == identity()
    assert identity() != identity(pooling="cls")
    assert identity() != identity(max_length=3)


def test_code_named_by_a_known_model_does_not_run_either(world: World) -> None:
    """The family's own classes are used where there are any; the named ones are never imported."""
    canary = world.home / "canary"
    code = f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\n"
    (world.target / "evil.py").write_text(code)
    for file, names in (
        ("config.json", {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    ):
        path = world.target / file
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": names}))
    said = say(world.arguments())
    assert said.code in (0, 3), said
    assert not canary.exists()
    assert "evil.py" not in [path.name for path in world.out.glob("*")]
