"""A task vector in another base's coordinates: exact where the answer is known, never silent where it is not."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

from gradfix.align.coordinates import OUTSIDES, Side, move
from gradfix.align.correspondence import Correspondence, correspond, depth_rule
from gradfix.align.pairing import SideBySide, _by_decomposition, _by_products, polar
from gradfix.errors import CorruptInput
from gradfix.vectors.taskvector import TaskVector
from tests.align.symmetry import random_alignment

TEXT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def bert(seed=0, **changes):
    torch.manual_seed(seed)
    config = hf.BertConfig(**{**TEXT, "vocab_size": 40, "max_position_embeddings": 16, **changes})
    model = hf.BertModel(config, add_pooling_layer=False).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # a fresh model is too symmetric: biases 0, gains 1
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def modernbert(seed=0):
    torch.manual_seed(seed)
    config = hf.ModernBertConfig(
        **TEXT, vocab_size=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    )
    return hf.ModernBertModel(config).double().eval()


def shapes(model):
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def side(model, head=None):
    width = model.config.hidden_size
    if head is None:
        head = torch.randn(3, width, generator=torch.Generator().manual_seed(width)).double()

    def loss(model, batch):
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        hidden = model(**inputs).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.cross_entropy(pooled @ head.T, batch["labels"], reduction="none")

    return Side(model, loss)


def batches(count=12, size=16, length=10):
    torch.manual_seed(5)
    made = []
    for _ in range(count):
        mask = (torch.arange(length) < torch.randint(3, length + 1, (size, 1))).long()
        ids = torch.randint(3, 40, (size, length)) * mask
        made.append({"input_ids": ids, "attention_mask": mask, "labels": torch.randint(3, (size,))})
    return [(batch, batch) for batch in made]


def vector(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return TaskVector(
        {name: torch.randn(p.shape, generator=generator).double() for name, p in model.named_parameters()}
    )


@pytest.mark.parametrize("shape", [(7, 7), (9, 4), (4, 9)])
def test_polar_is_the_orthogonal_factor(shape):
    cross = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    left, _, right = torch.linalg.svd(cross, full_matrices=False)
    assert torch.allclose(polar(cross), left @ right, atol=1e-9)


@pytest.mark.parametrize("falls", [0, 3, 12])
def test_decomposition_and_products_agree(falls):
    """Also on directions that fade out: both ways make the same of a singular value."""
    left, right = torch.linalg.qr(torch.randn(2, 24, 24, generator=torch.Generator().manual_seed(falls)).double())[0]
    x = (left * torch.logspace(0, -falls, 24).double()) @ right
    rounding = max(1e-9, 10.0 ** (falls - 15))
    assert torch.allclose(_by_decomposition(x), _by_products(x), atol=rounding)
    assert torch.isnan(_by_decomposition(x * float("nan"))).all()


def test_polar_leaves_out_what_no_input_reached():
    cross = torch.diag(torch.tensor([3.0, 1.0, 0.0]).double())
    assert torch.allclose(polar(cross), torch.diag(torch.tensor([1.0, 1.0, 0.0]).double()), atol=1e-9)


@pytest.mark.parametrize("method", list(OUTSIDES))
def test_permuted_units_are_found_again(method):
    base = bert(intermediate_size=24)  # outputs of fewer inputs than units would not tell all units apart
    alignment = random_alignment(base, heads=4, seed=3)
    target = copy.deepcopy(base)
    target.load_state_dict(alignment.apply(dict(base.state_dict())))
    head = torch.randn(3, 24, generator=torch.Generator().manual_seed(9)).double()
    order = alignment.groups["residual"][0]
    tau = vector(base)
    what = correspond(shapes(base), shapes(target))
    found = move(tau, what, side(base, head), side(target, head[:, order]), batches(), method=method)
    wanted = alignment.apply(tau)
    names = [f"{pair.target.name}.weight" for pair in what.linear] + [table.target for table in what.tables]
    assert len(names) == 13
    for name in names:
        change = wanted[name]
        if method == "bico" and "output.dense" in name:
            # The norm behind it ignores the mean, so no gradient asks for it.
            change = change - change.mean(0)
        assert torch.allclose(found.vector[name], change, atol=1e-5), name
    assert {entry.target for entry in what.same} == set(tau) - set(names) - {
        f"{pair.target.name}.bias" for pair in what.linear
    }


def test_groups_of_layers_change_nothing():
    base, target = bert(), bert(1)
    what = correspond(shapes(base), shapes(target))
    whole, thin = (
        move(vector(base), what, side(base), side(target), batches(3), memory=memory) for memory in (1 << 30, 1)
    )
    for name in whole.vector:
        assert torch.equal(whole.vector[name], thin.vector[name])
    assert thin.passes == 2 * whole.passes


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        (2, 4, [(0, 0, 0.5), (1, 0, 0.5), (2, 1, 0.5), (3, 1, 0.5)]),
        (4, 2, [(0, 0, 1.0), (1, 2, 1.0)]),
        (3, 3, [(0, 0, 1.0), (1, 1, 1.0), (2, 2, 1.0)]),
    ],
)
def test_depth_rule(source, target, wanted):
    assert depth_rule(source, target) == wanted


@pytest.mark.parametrize("change", [{"hidden_size": 16}, {"hidden_size": 32, "num_hidden_layers": 3}])
def test_other_widths_and_depths_fit_the_target(change):
    base, target = bert(), bert(1, **change)
    what = correspond(shapes(base), shapes(target))
    before = {name: p.clone() for name, p in target.named_parameters()}
    found = move(vector(base), what, side(base), side(target), batches(3))
    assert {name: tuple(t.shape) for name, t in found.vector.items()} == shapes(target)
    for pair in what.linear:
        assert bool(found.vector[f"{pair.target.name}.weight"].any())
    assert all(torch.equal(before[name], p) for name, p in target.named_parameters())
    norms = [entry for entry in what.nothing if "LayerNorm" in entry.name and entry.side == "target"]
    assert norms and all("shape" in entry.reason for entry in norms)


def test_another_architecture_pairs_by_role():
    base, target = bert(), modernbert()
    what = correspond(shapes(base), shapes(target), target_config=target.config.to_dict())
    roles = {pair.target.role: pair.source.role for pair in what.linear}
    assert roles == {"q": "q", "k": "k", "v": "v", "o": "o", "gate": "up", "down": "down"}
    found = move(vector(base), what, side(base), side(target), batches(3))
    fused = found.vector["layers.0.mlp.Wi.weight"]
    assert bool(fused[:32].any()) and not bool(fused[32:].any())
    assert bool(found.vector["layers.1.attn.Wqkv.weight"].any(1).all())


def test_every_tensor_is_accounted_for():
    base, target = bert(), modernbert()
    what = correspond(shapes(base), shapes(target), target_config=target.config.to_dict())
    placed = {f"{pair.target.name}.weight" for pair in what.linear} | {t.target for t in what.tables}
    placed |= {entry.target for entry in what.same}
    left = {entry.name for entry in what.nothing if entry.side == "target"}
    assert placed | left == set(shapes(target))
    assert not what.empty
    text = "\n".join(what.lines())
    assert "no counterpart" in text and "layers: 2, one to one" in text


def test_the_hash_tells_correspondences_apart():
    one = correspond(shapes(bert()), shapes(bert(1)))
    assert one.hash == correspond(shapes(bert(2)), shapes(bert(3))).hash
    assert one.hash != correspond(shapes(bert()), shapes(bert(1, num_hidden_layers=3))).hash


def test_a_saved_correspondence_is_the_one_that_was_found(tmp_path):
    found = correspond(shapes(bert()), shapes(bert(1, num_hidden_layers=3)))
    found.save(tmp_path / "what.json")
    again = Correspondence.load(tmp_path / "what.json")
    assert again == found and again.hash == found.hash
    text = (tmp_path / "what.json").read_text()
    (tmp_path / "what.json").write_text(text.replace('"role": "q"', '"role": "k"', 1))
    with pytest.raises(CorruptInput, match="changed after it was written"):
        Correspondence.load(tmp_path / "what.json")
    (tmp_path / "what.json").write_text("[]")
    with pytest.raises(CorruptInput, match="no correspondence"):
        Correspondence.load(tmp_path / "what.json")


def test_token_rows_follow_their_tokens():
    base, target = bert(), bert(1, vocab_size=43)
    what = correspond(
        shapes(base),
        shapes(target),
        base_tokens={f"t{i}": i for i in range(40)},
        target_tokens={f"t{i}": 42 - i for i in range(43)},
    )
    (table,) = what.tables
    assert (table.rows, table.of) == (40, 43)
    rows = torch.tensor([42 - i if 42 - i < 40 else -1 for i in range(43)])
    found = move(vector(base), what, side(base), side(target), batches(3), rows={table.target: rows}).vector[
        table.target
    ]
    assert not bool(found[:3].any()) and bool(found[3:].any(1).all())


def test_tables_of_different_heights_without_tokens_are_named():
    what = correspond(shapes(bert()), shapes(bert(1, vocab_size=43)))
    assert not what.tables
    assert any("token tables" in entry.reason for entry in what.nothing)


def test_rows_of_other_cuts_are_averaged_over_the_same_stretches():
    ours = torch.arange(4.0).reshape(1, 4, 1)
    theirs = torch.tensor([[[0.5], [2.5], [9.0]]])
    cut = (
        {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.ones(1, 4)},
        {"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.tensor([[1, 1, 0]])},
    )
    first, second = SideBySide(cut)(ours, theirs)
    assert first.shape == second.shape == (3, 1)
    assert torch.allclose(first.mean(), ours.mean())
    assert torch.allclose(second, torch.tensor([[0.5], [1.5], [2.5]]))


def test_patches_of_two_sizes_meet_on_one_grid():
    fine, coarse = torch.randn(2, 17, 3), torch.randn(2, 5, 6)
    images = ({"pixel_values": torch.empty(2)}, {"pixel_values": torch.empty(2)})
    first, second = SideBySide(images)(fine, coarse)
    assert first.shape == (10, 3) and second.shape == (10, 6)
    assert torch.allclose(first[1], fine[0, [1, 2, 5, 6]].mean(0), atol=1e-6)
    assert torch.equal(second, coarse.flatten(0, 1))


def test_registers_are_no_patches():
    picture = {"pixel_values": torch.empty(2, 3, 16, 16)}
    plain, registers = torch.randn(2, 5, 3), torch.randn(2, 9, 3)  # one class token; and four registers beside it
    first, second = SideBySide((picture, picture))(plain, registers)
    assert torch.equal(first, plain.flatten(0, 1))
    assert torch.equal(second, registers[:, [0, 5, 6, 7, 8]].flatten(0, 1))


@pytest.mark.parametrize("seed", range(6))
def test_polar_never_runs_away(seed):
    """A strong direction that a vector of ones does not see, as the gradients in front of a layer norm have it."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(2, 96, generator=generator)
    left, right = left - left.mean(), right - right.mean()
    cross = torch.randn(96, 96, generator=generator) + (3 + 2 * seed) * torch.outer(left, right)
    cross = cross - cross.mean(1, keepdim=True)
    found = polar(cross)
    assert torch.isfinite(found).all()
    assert float(torch.linalg.matrix_norm(found, 2)) < 1.01


def test_maps_without_a_change_are_not_compared():
    model = bert()
    found = correspond(shapes(model), shapes(bert(1)))
    tau = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    tau["encoder.layer.1.attention.self.query.weight"] += 1
    assert [pair.source.place for pair in found.of_changed(tau).linear] == [("", 1, "q")]
    assert found.of_changed({}).linear == ()


def test_models_without_blocks_pair_their_matrices_by_name():
    found = correspond({"0.weight": (4, 3), "0.bias": (4,)}, {"0.weight": (6, 3), "0.bias": (6,)})
    assert [(pair.source.name, pair.target.outputs) for pair in found.linear] == [("0", 6)]
    assert not found.nothing


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_the_size_of_what_is_compared_does_not_matter(size):
    cross = torch.randn(12, 9, generator=torch.Generator().manual_seed(0))
    for way in (_by_decomposition, _by_products):
        assert torch.allclose(way(cross * size), polar(cross.double()).float(), atol=1e-4)
