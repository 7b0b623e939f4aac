"""Move a fine-tune between two models in memory: any PyTorch model, any loss that gives one number per sample."""

import torch

import gradfix
from gradfix import pocket

torch.set_num_threads(1)
pair = pocket.pair("unrelated")  # base, tuned, target: state dicts
target = pocket.model(pair.target)
pixels, labels = pocket.images("train")
few = [(pixels[:50], labels[:50])]  # five per class
held = [tensor[:100] for tensor in pocket.images("validation")]


def score(model: torch.nn.Module) -> float:
    """Minus the loss on examples that did not vote: higher is better."""
    with torch.no_grad():
        return -float(pocket.loss(model, held).mean())


def accuracy(model: torch.nn.Module) -> float:
    images, answers = (tensor[:200] for tensor in pocket.images("test"))
    with torch.no_grad():
        return 100 * float((model(pixel_values=images).logits.argmax(-1) == answers).float().mean())


tau = gradfix.TaskVector.between(pair.base, pair.tuned)
votes = gradfix.collect_votes(target, pocket.loss, few)
moved = gradfix.transport(tau, votes, mask="agree")
curve = gradfix.search_scale(target, moved.update, score, grid=[0.25, 0.5, 1.0])
before = accuracy(target)
gradfix.apply(target, moved.update, curve.best)
print(f"kept {moved.kept_share():.0%}, alpha {curve.best:g}: {before:.1f} % -> {accuracy(target):.1f} %")
