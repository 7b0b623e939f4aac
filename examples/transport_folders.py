"""Move a fine-tune from folder to folder, then load the result as any other checkpoint."""

from pathlib import Path

import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

import gradfix
from gradfix import pocket

torch.set_num_threads(1)
folders = pocket.materialise(Path("models"))  # the embedded models as Hugging Face folders
related = folders["related"]

target = AutoModelForImageClassification.from_pretrained(related["target"])
pixels, labels = pocket.images("train")
votes = gradfix.collect_votes(target, pocket.loss, [(pixels[:50], labels[:50])])

report = gradfix.transport_checkpoint(
    base=related["base"],
    tuned=related["tuned"],
    target=related["target"],
    votes=votes,
    mask="veto",
    margin=0.5,
    alpha=1.0,
    out="moved",
)
gradfix.verify("moved")

model = AutoModelForImageClassification.from_pretrained("moved")
AutoImageProcessor.from_pretrained("moved")
images, answers = (tensor[:200] for tensor in pocket.images("test"))
with torch.no_grad():
    right = (model(pixel_values=images).logits.argmax(-1) == answers).float().mean()
print(f"kept {report.kept:.0%}; {100 * float(right):.1f} % of 200 test images")
