"""What a merge of whole models is written onto: the base's weights where changes are added to them, zeros where the
result is computed whole; and the files around the weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradfix.checkpoints.folder import SHARD_BYTES
from gradfix.checkpoints.safetensors_file import SafetensorsFile, TensorInfo
from gradfix.checkpoints.weights import CHUNK, Checkpoint
from gradfix.errors import UsageError
from gradfix.registry import unknown

LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %} {{ message['content'] }}"
    "{{ eos_token }}{% else %}[INST] {{ message['content'] }} [/INST]{% endif %}{% endfor %}"
)
ALPACA = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}{% else %}"
    "### {{ 'Response' if message['role'] == 'assistant' else 'Instruction' }}:\n{{ message['content'] }}{% endif %}\n\n"
    "{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "alpaca": ALPACA}
SHORTEST_TEMPLATE = 20


class Canvas(Checkpoint):
    """Named tensors of given kinds: of another checkpoint where there is one `under` them, zeros elsewhere."""

    def __init__(
        self,
        infos: Mapping[str, TensorInfo],
        under: Mapping[str, Checkpoint],
        reference: Checkpoint,
        rounded: torch.dtype | None = None,
    ) -> None:
        self.infos, self.under, self.reference, self.rounded = dict(infos), dict(under), reference, rounded
        self.path, self.notes = reference.path, reference.notes

    def names(self) -> list[str]:
        return list(self.infos)

    def info(self, name: str) -> TensorInfo:
        return self.infos[name]

    def span(self, name: str, first: int, count: int) -> Tensor:
        if name not in self.under:
            return torch.zeros(count, dtype=self.infos[name].dtype)
        return self._as_read(self.under[name].span(name, first, count))

    def chunks(self, name: str, elements: int = CHUNK) -> Iterator[Tensor]:
        if name not in self.under:
            return super().chunks(name, elements)
        return (self._as_read(piece) for piece in self.under[name].chunks(name, elements))

    def _as_read(self, piece: Tensor) -> Tensor:
        return piece.to(self.rounded) if self.rounded is not None and piece.dtype.is_floating_point else piece

    def stored(self, name: str) -> tuple[SafetensorsFile, str] | None:
        if name not in self.under:
            return None
        dtype = self.under[name].info(name).dtype
        same = self.rounded in (None, dtype) or not dtype.is_floating_point
        return self.under[name].stored(name) if same else None

    def identity(self) -> Any:
        parts = {name: source.identity() for name, source in self.under.items()}
        return None if None in parts.values() else [self.reference.identity(), list(self.infos), str(self.rounded)]

    def layout(self) -> dict[str, list[str]] | None:
        """The reference's own files where it has the very tensors, else new ones in the order given."""
        own = self.reference.layout()
        if own is not None and {name for names in own.values() for name in names} == set(self.infos):
            return own
        shards: list[list[str]] = [[]]
        size = 0
        for name in sorted(self.infos, key=lambda n: -self.infos[n].dtype.itemsize):  # stable
            if shards[-1] and size + self.infos[name].nbytes > SHARD_BYTES:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += self.infos[name].nbytes
        if len(shards) == 1:
            return {"model.safetensors": shards[0]}
        return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": s for i, s in enumerate(shards, 1)}

    @property
    def files(self) -> list[Path]:
        return self.reference.files

    def __contains__(self, name: object) -> bool:
        return name in self.infos


class Shifted(Checkpoint):
    """The target less another model's base: what is merged over that base then lands on the target."""

    def __init__(self, target: Checkpoint, base: Checkpoint) -> None:
        self.target, self.base = target, base
        self.path, self.notes = target.path, target.notes

    def names(self) -> list[str]:
        return self.target.names()

    def info(self, name: str) -> TensorInfo:
        return self.target.info(name)

    def span(self, name: str, first: int, count: int) -> Tensor:
        return self._shifted(name, self.target.span(name, first, count), lambda: self.base.span(name, first, count))

    def chunks(self, name: str, elements: int = CHUNK) -> Iterator[Tensor]:
        if name not in self.base:
            yield from self.target.chunks(name, elements)
            return
        for goal, base in zip(self.target.chunks(name, elements), self.base.chunks(name, elements), strict=True):
            yield self._shifted(name, goal, lambda base=base: base)  # type: ignore[misc]

    def _shifted(self, name: str, goal: Tensor, base: Callable[[], Tensor]) -> Tensor:
        if name not in self.base or not goal.dtype.is_floating_point:
            return goal
        wide = torch.promote_types(goal.dtype, torch.float32)
        return goal.to(wide) - base().to(wide)

    def identity(self) -> Any:
        parts = [self.target.identity(), self.base.identity()]
        return None if None in parts else parts

    def layout(self) -> dict[str, list[str]] | None:
        return self.target.layout()

    @property
    def files(self) -> list[Path]:
        return self.target.files


def amend_config(folder: Path, layers: list[int] | None, vocabulary: int | None, dtype: str | None) -> None:
    """config.json of what was written: its layers (numbers of the reference's), its tokens, its dtype."""
    path = folder / "config.json"
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    home = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    key = next((key for key in LAYER_KEYS if key in home), None)
    if layers is not None and key is not None:
        before = home[key]
        for name, value in home.items():
            if isinstance(value, list) and len(value) == before and "layer" in name:
                home[name] = [value[layer] for layer in layers if layer < before]
        home[key] = len(layers)
    if vocabulary is not None:
        home["vocab_size"] = vocabulary
    for key in [key for key in ("dtype", "torch_dtype") if dtype is not None and key in config]:
        config[key] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def chat_template(wanted: str, folders: list[Path], where: str) -> str | None:
    """A template by name, as it is written, or ("auto") the one most of the models have."""
    if wanted == "auto":
        found = [text for text in map(_template_of, folders) if text]
        return max(found, key=found.count) if found else None
    if wanted in TEMPLATES:
        return TEMPLATES[wanted]
    if len(wanted) < SHORTEST_TEMPLATE or "{" not in wanted:
        raise UsageError(
            f"{where}: {unknown('chat_template', wanted, ['auto', *TEMPLATES])} Or give the template itself."
        )
    return wanted


def _template_of(folder: Path) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8").strip()
    try:
        template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError):
        return None
    return template.strip() if isinstance(template, str) else None


def set_chat_template(folder: Path, template: str) -> None:
    path = folder / "tokenizer_config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.pop("chat_template", None) is not None:
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
