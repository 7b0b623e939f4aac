"""What a sentence-transformers folder says about its encoder: pooling, length, prompt, dense layers behind it.

`modules.json` lists the modules behind the transformer. Pooling is read from the folder, so that a CLS model is
never averaged in silence; a module that would change the vectors and is not known here is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradfix.checkpoints.open import open_checkpoint
from gradfix.checkpoints.write import write_text
from gradfix.errors import CorruptInput, UsageError
from gradfix.registry import unknown
from gradfix.tasks.loading import read_json
from gradfix.tasks.reading import masked_mean

MODULES = "modules.json"
# Old folders have one flag per pooling, new ones a word.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLINGS = ("mean", "cls", "max", "mean_sqrt_len", "weightedmean", "lasttoken")
DOCUMENTS = ("document", "passage", "corpus")  # what the prompt of a document is called
VECTOR = "sentence_embedding"  # what a module reads and writes that stands behind the pooling
NORMALIZE = "Normalize"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda vectors: vectors,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": functional.gelu,
    "SiLU": functional.silu,
    "Sigmoid": torch.sigmoid,
    NORMALIZE: lambda vectors: functional.normalize(vectors, dim=-1),
}
Layer = tuple[str, Tensor | None, Tensor | None]  # activation, weight and bias; a plain `Normalize` has no weight


@dataclass(frozen=True)
class Sentences:
    """How texts become vectors. Several poolings, joined by "+", give the vectors one behind the other.

    A `prompt` is put before every text; it counts in the pooling unless `include_prompt` is off. `prompts` are those
    that queries and documents have of their own. `behind` are the layers that a pooled vector goes through; they stay
    as they are."""

    pooling: str = "mean"
    max_length: int | None = None
    lower: bool = False
    prompt: str = ""
    include_prompt: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    behind: tuple[Layer, ...] = ()

    def prompt_for(self, role: str) -> str:
        """What sentence-transformers' own encode_query and encode_document put before a text of this role.

        A text of no role has the default prompt; where there is none, that of a document."""
        names = {"query": ("query",), "document": DOCUMENTS}.get(role, () if self.prompt else DOCUMENTS)
        return next((self.prompts[name] for name in names if name in self.prompts), self.prompt)


def read_sentences(folder: Path, pooling: str | None, base: Path | None = None) -> Sentences:
    """The folder's own settings, else those of its base, or the mean where none has any.

    A fine-tune saved with transformers alone has lost the files that say how its base is pooled. `pooling`
    replaces what the folder says, and nothing stands behind it then."""
    for word in (pooling or "mean").split("+"):
        if word not in POOLINGS:
            raise UsageError(unknown("pooling", word, list(POOLINGS)))
    if base is not None and not (folder / MODULES).is_file():
        folder = base
    if not (folder / MODULES).is_file():
        return Sentences(pooling or "mean")
    about = _optional(folder / "sentence_bert_config.json")
    length = about.get("max_seq_length")
    pooled, include, behind = _pooling(folder, pooling)
    return Sentences(
        pooled,
        length if isinstance(length, int) and length > 0 else None,
        about.get("do_lower_case") is True,
        _default_prompt(folder),
        include,
        _prompts(folder),
        behind,
    )


def sent_through(vectors: Tensor, layers: tuple[Layer, ...]) -> Tensor:
    """Pooled vectors behind the folder's own layers."""
    for activation, weight, bias in layers:
        if weight is not None:
            vectors = functional.linear(vectors, weight.to(vectors), None if bias is None else bias.to(vectors))
        vectors = ACTIVATIONS[activation](vectors)
    return vectors


def pool(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """One vector per text. Sums are taken in float32 or better: many half-precision vectors would lose bits."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return torch.cat([_pooled(hidden, wide, mask, word) for word in pooling.split("+")], dim=-1)


def _pooled(hidden: Tensor, wide: Tensor, mask: Tensor, pooling: str) -> Tensor:
    places = torch.arange(mask.shape[1], device=mask.device)
    shown = mask.bool()
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "lasttoken":
        last = torch.where(shown, places, 0).max(1).values
        return hidden[torch.arange(len(hidden), device=mask.device), last]
    if pooling == "max":
        return wide.masked_fill(~shown.unsqueeze(-1), float("-inf")).max(1).values
    if pooling == "weightedmean":
        return masked_mean(wide, mask * (places + 1))
    mean = masked_mean(wide, mask)
    return mean if pooling == "mean" else mean * mask.sum(1, keepdim=True).to(wide.dtype).sqrt()


def _pooling(folder: Path, asked: str | None) -> tuple[str, bool, tuple[Layer, ...]]:
    """The pooling by the folder's own config, whether a prompt counts in it, and what stands behind it."""
    found, include, strange, behind = None, True, None, list[Layer]()
    for kind, path in _modules(folder):
        if kind == "Pooling":
            config = read_json(path / "config.json")
            found, include = _word(config, path, asked), config.get("include_prompt") is not False
        elif kind == NORMALIZE:
            behind.append((NORMALIZE, None, None))
        elif kind == "Dense" and found is not None and asked is None:
            behind.append(_dense(path))
        elif kind != "Transformer":
            strange = kind
    if asked is not None:
        return asked, include, ()
    if strange is not None or found is None:
        what = f"a module {strange!r} behind its pooling" if strange else "no pooling module"
        raise UsageError(
            f"{folder} is a sentence-transformers model with {what}, which gradfix cannot follow. Give --pooling "
            f"({', '.join(POOLINGS)}) to use the encoder without it."
        )
    while behind and behind[-1][0] == NORMALIZE:  # cosines are taken of normalised vectors anyway
        behind.pop()
    return found, include, tuple(behind)


def _dense(path: Path) -> Layer:
    config = read_json(path / "config.json")
    activation = str(config.get("activation_function") or "Tanh").rsplit(".", 1)[-1]
    sides = {str(config.get(name) or VECTOR) for name in ("module_input_name", "module_output_name")}
    if activation not in ACTIVATIONS or sides != {VECTOR}:
        what = (
            f"the activation {activation!r}" if sides == {VECTOR} else f"the input or output {min(sides - {VECTOR})!r}"
        )
        raise UsageError(
            f"{path} is a dense layer with {what}, which gradfix cannot follow. Give --pooling ({', '.join(POOLINGS)}) "
            "to use the encoder without it."
        )
    weights = open_checkpoint(path).state()
    if "linear.weight" not in weights or set(weights) - {"linear.weight", "linear.bias"}:
        raise CorruptInput(f"{path} holds no dense layer (linear.weight, linear.bias); copy it from the model again.")
    return activation, weights["linear.weight"], weights.get("linear.bias")


def _word(config: dict[str, Any], path: Path, asked: str | None) -> str | None:
    """The pooling of a module's config; one that is not known is refused unless another was asked for."""
    word = config.get("pooling_mode")
    words = [word] if isinstance(word, str) else list(word) if isinstance(word, list) else []
    words = [str(one).removesuffix("_tokens") for one in words]
    flags = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    words += [FLAGS.get(name, name) for name in sorted(flags, key=[*FLAGS, *flags].index)]
    odd = [one for one in words if one not in POOLINGS]
    if odd and asked is None:
        raise UsageError(
            f"{path / 'config.json'} asks for the pooling {odd[0]!r}, which gradfix does not know. "
            f"Give --pooling ({', '.join(POOLINGS)})."
        )
    return "+".join(words) or None


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Kind and folder of each module, in order."""
    try:
        listed = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        return [(str(one["type"]).rsplit(".", 1)[-1], folder / str(one["path"])) for one in listed]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptInput(
            f"{folder / MODULES} is no list of modules ({type(error).__name__}); copy it from the model again."
        ) from None


def _default_prompt(folder: Path) -> str:
    """What sentence-transformers puts before every text when it is told nothing else."""
    about = _optional(folder / "config_sentence_transformers.json")
    prompts, name = about.get("prompts"), about.get("default_prompt_name")
    return str(prompts[name] or "") if isinstance(prompts, dict) and name in prompts else ""


def _prompts(folder: Path) -> dict[str, str]:
    prompts = _optional(folder / "config_sentence_transformers.json").get("prompts")
    return {str(name): str(text or "") for name, text in prompts.items()} if isinstance(prompts, dict) else {}


def write_sentences(folder: Path, own: Sentences, width: int, length: int, asked: str | None = None) -> None:
    """The files by which sentence-transformers reads the folder as `own` says.

    Those that are there stay, unless a pooling was `asked` for: a folder that still told its own would not be
    the model that was trained and scored."""
    listed = _modules(folder) if (folder / MODULES).exists() else []
    if listed and asked is None:
        return
    for kind, path in listed:
        if kind != "Transformer" and path.is_dir() and path.parent == folder:
            shutil.rmtree(path)
    words = own.pooling.split("+")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    if any(kind == NORMALIZE for kind, _ in listed):
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
        (folder / "2_Normalize").mkdir(exist_ok=True)
    flags = {flag: word in words for flag, word in FLAGS.items()}
    about = {"word_embedding_dimension": width, **flags, "include_prompt": own.include_prompt}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    write_text(folder / "1_Pooling" / "config.json", json.dumps(about, indent=1))
    if not listed:
        about = {"max_seq_length": length, "do_lower_case": own.lower}
        write_text(folder / "sentence_bert_config.json", json.dumps(about))
    write_text(folder / MODULES, json.dumps(modules, indent=1))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
