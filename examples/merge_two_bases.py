"""Two fine-tunes of one task, each with its own base, merged onto a third model that votes on both."""

import torch

import gradfix
from gradfix import pocket

torch.set_num_threads(1)
sources, pair = pocket.sources()
target = pocket.model(pair.target)
pixels, labels = pocket.images("train")
votes = gradfix.collect_votes(target, pocket.loss, [(pixels[:50], labels[:50])])  # once, shared by all sources
vectors = [gradfix.TaskVector.between(source.base, source.tuned) for source in sources]
images, answers = (tensor[:200] for tensor in pocket.images("test"))


def accuracy(update: gradfix.TaskVector) -> float:
    model = pocket.model(pair.target)
    gradfix.apply(model, update, 1.0)
    with torch.no_grad():
        return 100 * float((model(pixel_values=images).logits.argmax(-1) == answers).float().mean())


print(f"{'target as it is':22} {accuracy(vectors[0] * 0.0):.1f} %")
for source, tau in zip(sources, vectors):
    print(f"{source.name + ' alone':22} {accuracy(gradfix.transport(tau, votes).update):.1f} %")
for method in ("task_arithmetic", "mean", "ties"):
    moved = gradfix.mask_then_merge(vectors, votes, method)
    print(f"{'mask, then ' + method:22} {accuracy(moved.update):.1f} %")
print(f"{'merge without votes':22} {accuracy(gradfix.merge(vectors, method='mean')):.1f} %")
