"""A vote costs gradients, a mask is free: save the votes once, try every mask, add one of your own."""

import torch

import gradfix
from gradfix import pocket
from gradfix.vectors.masks import mask


@mask("half_ties")
def half_ties(delta: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """agree, but where the samples cancel out half of the entry is kept."""
    return torch.where(delta.sign() == direction, delta, torch.where(direction == 0, delta / 2, 0))


torch.set_num_threads(1)
pair = pocket.pair("unrelated")
target = pocket.model(pair.target)
pixels, labels = pocket.images("train")
gradfix.collect_votes(target, pocket.loss, [(pixels[:20], labels[:20])]).save("votes.safetensors")

votes = gradfix.SignVotes.load("votes.safetensors")
tau = gradfix.TaskVector.between(pair.base, pair.tuned)
images, answers = (tensor[:100] for tensor in pocket.images("test"))
for name, options in {"none": {}, "agree": {}, "half_ties": {}, "force": {}, "veto": {"margin": 0.3}}.items():
    moved = gradfix.transport(tau, votes, mask=name, **options)
    model = pocket.model(pair.target)
    gradfix.apply(model, moved.update, 1.0)
    with torch.no_grad():
        right = (model(pixel_values=images).logits.argmax(-1) == answers).float().mean()
    print(f"{name:9} keeps {moved.kept_share():4.0%}, {100 * float(right):.0f} % right")
