"""A LoRA trained with peft on the old base, moved to the new one and loaded there with peft again."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from gradfix import pocket
from gradfix.commands.configs import TransportConfig
from gradfix.commands.transport import run_transport

torch.set_num_threads(1)
torch.manual_seed(0)
folders = pocket.materialise(Path("models"))
related, data = folders["related"], folders["tasks"][pocket.PRIMARY]
pixels, labels = pocket.images("train")

layers = ["q_proj", "v_proj", "query", "value"]  # the names differ between transformers releases
model = get_peft_model(pocket.model(pocket.pair("related").base), LoraConfig(r=8, target_modules=layers))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
for _ in range(8):
    pocket.loss(model, (pixels[:100], labels[:100])).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained("adapter")

config = TransportConfig(
    base=str(related["base"]), tuned="adapter", target=str(related["target"]), data=str(data), task="classification",
    shots=2, mask="veto", margin="0.5", alpha="1", out="moved-adapter", out_lora=8,
)  # fmt: skip
result = run_transport(config)
print(f"test accuracy {result.test_before['accuracy']:.1f} % -> {result.test_after['accuracy']:.1f} %")
PeftModel.from_pretrained(pocket.model(pocket.pair("related").target), "moved-adapter")
