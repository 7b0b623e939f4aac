"""Which method should I ship? Compare them under one label budget and write the page that says so."""

from pathlib import Path

import torch

import gradfix
from gradfix import pocket
from gradfix.data import load_data
from gradfix.methods.search import Search
from gradfix.report import write_report

torch.set_num_threads(1)
folders = pocket.materialise(Path("models"))
data = load_data(folders["tasks"][pocket.PRIMARY])
results = gradfix.compare(
    **folders["unrelated"],  # base, tuned, target and target_tuned
    data={"train": data.splits["train"], "test": data.splits["test"][:100]},
    validation={"validation": data.splits["validation"][:50]},
    task="classification",
    shots=[2],
    methods=["zero_shot", "naive", "gradfix", "fine_tuned"],
    search=Search.quick(),
    batch_size=50,
)
for row in results.summary_rows():
    print(f"{row['title']:24} {row['accuracy']:5.1f} %")
print(results.verdict["text"])
results.save("results.json")
write_report(results, "report.html")
