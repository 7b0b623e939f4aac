"""The same faults given to three tools: `python tests/reliability/peers.py TOOL FOLDER` prints what happened as JSON.

TOOL is gradfix, mergekit or transformers (a plain script: load, add, save). Each case runs in a forked child;
every tool adds half of one fine-tune's change to its base. Run it by an interpreter that has the tool; for the
other two, gradfix lends no more than its repair of a mismatched torchvision."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}

SOURCE = Path(__file__).parents[2] / "src"
sys.path.insert(0, str(SOURCE))

import torch  # noqa: E402
import yaml  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from gradfix._compat import heal_torchvision  # noqa: E402

heal_torchvision()
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

MLP = "model.layers.0.mlp.up_proj.weight"


def build(home: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=40,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(home / "base")
    shutil.copytree(home / "base", home / "tuned")
    state = load_file(home / "base" / "model.safetensors")
    save(home / "tuned", {name: t + 0.01 * torch.randn(t.shape) for name, t in state.items()})


def save(folder: Path, state: dict[str, torch.Tensor]) -> None:
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    state = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        state.pop(name, None)
        if value is not None:
            state[name] = value
    save(folder, state)


# Faults: each damages a fresh copy of the two models --------------------------------------------------------


def missing_key(home: Path) -> None:
    edit(home / "tuned", **{MLP: None})


def other_shape(home: Path) -> None:
    edit(home / "tuned", **{MLP: torch.zeros(24, 15)})


def more_rows(home: Path) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        edit(home / "tuned", **{name: torch.ones(48, 16)})
    path = home / "tuned" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 48}))


def truncated(home: Path) -> None:
    path = home / "tuned" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _index(home: Path, file: str, *extra: str) -> None:
    path = home / "tuned" / "model.safetensors"
    names = [*load_file(path), *extra]
    path.rename(home / "tuned" / "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, file)}
    (home / "tuned" / "model.safetensors.index.json").write_text(json.dumps(index))


def index_outside(home: Path) -> None:
    _index(home, "../base/model.safetensors")


def index_ghost(home: Path) -> None:
    _index(home, "model-00001-of-00001.safetensors", "ghost.weight")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def hostile_pickle(home: Path) -> None:
    (home / "tuned" / "model.safetensors").unlink()
    with open(home / "tuned" / "pytorch_model.bin", "wb") as file:
        pickle.dump({"model.norm.weight": Evil(home / "canary")}, file)


def code_in_config(home: Path) -> None:
    path = home / "tuned" / "config.json"
    names = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "evil", "auto_map": names}))
    (home / "tuned" / "modeling_evil.py").write_text(
        f"import os\nos.mkdir({str(home / 'canary')!r})\nclass Evil: pass\n"
    )


def nan_inside(home: Path) -> None:
    value = load_file(home / "tuned" / "model.safetensors")[MLP]
    value[0, 0] = float("nan")
    edit(home / "tuned", **{MLP: value})


def same_as_base(home: Path) -> None:
    shutil.copyfile(home / "base" / "model.safetensors", home / "tuned" / "model.safetensors")


def integer_weights(home: Path) -> None:
    edit(home / "tuned", **{MLP: torch.ones(24, 16, dtype=torch.int8)})


def not_descended(home: Path) -> None:
    state = load_file(home / "tuned" / "model.safetensors")
    save(home / "tuned", {n: torch.randn(t.shape) * (t.std() + 0.1) for n, t in state.items()})


def occupied_output(home: Path) -> None:
    (home / "out").mkdir()
    (home / "out" / "model-00007-of-00009.safetensors").write_bytes(b"old")


def output_is_input(home: Path) -> None:
    (home / "out").symlink_to(home / "tuned")


def yaml_twice(home: Path) -> None:
    (home / "twice").touch()


def yaml_typo(home: Path) -> None:
    (home / "typo").touch()


FAULTS: dict[str, Callable[[Path], None]] = {
    "missing key": missing_key,
    "shape differs": other_shape,
    "vocabulary resized": more_rows,
    "truncated safetensors": truncated,
    "index points outside the folder": index_outside,
    "index lists a tensor no shard has": index_ghost,
    "pickle that runs code": hostile_pickle,
    "config that names code": code_in_config,
    "NaN in the fine-tune": nan_inside,
    "fine-tune equals its base": same_as_base,
    "int8 weights": integer_weights,
    "not a fine-tune of that base": not_descended,
    "output folder not empty": occupied_output,
    "output is an input (by link)": output_is_input,
    "YAML key twice": yaml_twice,
    "YAML key misspelt": yaml_typo,
}

# Tools ------------------------------------------------------------------------------------------------------


def _text(plain: str, home: Path, typo: tuple[str, str], twice: str) -> str:
    if (home / "typo").exists():
        plain = plain.replace(*typo)
    return plain + (twice if (home / "twice").exists() else "")


def with_gradfix(home: Path) -> None:
    from gradfix.cli import run

    vectors = [{"base": str(home / "base"), "tuned": str(home / "tuned"), "weight": 0.5}]
    recipe = {"target": str(home / "base"), "method": "task_arithmetic", "vectors": vectors}
    text = _text(yaml.safe_dump(recipe), home, ("weight:", "wieght:"), "method: mean\n")
    (home / "recipe.yaml").write_text(text)
    code = run(["merge", str(home / "recipe.yaml"), "--out", str(home / "out")])
    if code:
        sys.exit(code)


def with_mergekit(home: Path) -> None:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    models = [{"model": str(home / "tuned"), "parameters": {"weight": 0.5}}]
    recipe = {"merge_method": "task_arithmetic", "base_model": str(home / "base"), "models": models, "dtype": "float32"}
    text = _text(yaml.safe_dump(recipe), home, ("weight:", "wieght:"), "merge_method: ties\n")
    config = MergeConfiguration.model_validate(yaml.safe_load(text))
    run_merge(config, str(home / "out"), options=MergeOptions(copy_tokenizer=False, quiet=True))


def with_transformers(home: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.float32)
    tuned = AutoModelForCausalLM.from_pretrained(home / "tuned", dtype=torch.float32)
    after = tuned.state_dict()
    with torch.no_grad():
        for name, value in base.state_dict().items():
            value.add_(0.5 * (after[name] - value))
    base.save_pretrained(home / "out")


TOOLS = {"gradfix": with_gradfix, "mergekit": with_mergekit, "transformers": with_transformers}


# Judging ----------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], None], log: Path) -> tuple[int, str]:
    """Exit code and the last thing said."""
    child = os.fork()
    if child == 0:
        code = 0
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        try:
            work()
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException as error:
            code = 1
            first = " ".join(str(error).split())
            os.write(sink, f"\n{type(error).__name__}: {first}\n".encode())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return os.waitstatus_to_exitcode(status), lines[-1] if lines else ""


def verdict(home: Path, code: int, said: str, before: dict[str, bytes]) -> dict[str, Any]:
    changed = [
        name for name, data in before.items() if not (home / name).exists() or (home / name).read_bytes() != data
    ]
    found: dict[str, Any] = {
        "exit": code,
        "said": said.replace(str(home), "")[:160] if code else "",
        "ran_code": (home / "canary").exists(),
    }
    found["inputs_changed"] = bool(changed)
    out = home / "out"
    found["output"] = "none"
    if out.is_dir() and not out.is_symlink():
        try:
            state = state_of(out)
        except Exception as error:
            found["output"] = f"there, but unreadable ({type(error).__name__})"
            return found
        base = load_file(home / "base" / "model.safetensors")
        if not state:
            found["output"] = "a folder without weights"
        elif any(not t.isfinite().all() for t in state.values() if t.is_floating_point()):
            found["output"] = "weights with NaN"
        elif set(state) != set(base):
            found["output"] = f"weights without {len(set(base) - set(state))} tensors"
        elif all(torch.equal(state[n], base[n]) for n in base):
            found["output"] = "the base again"
        else:
            same = [n for n in base if torch.equal(state[n], base[n])]
            found["output"] = f"weights; {len(same)} of {len(base)} tensors unmoved"
    return found


def kills(tool: str, home: Path) -> dict[str, int]:
    """SIGKILL before each of the tool's own writes in turn: how often is half a folder left under the final name?"""
    spec = importlib.util.spec_from_file_location("faults", Path(__file__).parents[1] / "torture" / "faults.py")
    faults = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(faults)  # type: ignore[union-attr]
    fresh(home)
    in_child(lambda: TOOLS[tool](home), home / "log")
    whole = {path.name for path in (home / "out").iterdir()}
    count = half = 0
    while count < 200:
        fresh(home)

        def work(number: int = count + 1) -> None:
            faults.install(faults.Counter(number, faults.die))
            TOOLS[tool](home)

        code, _ = in_child(work, home / "log")
        if code == 0:
            break
        count += 1
        present = {path.name for path in (home / "out").iterdir()} if (home / "out").is_dir() else set()
        half += bool(present) and present != whole
    return {"kills": count, "half_an_output": half}


def fresh(home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(home.parent / "models", home, symlinks=True)


def main(tool: str, folder: Path) -> dict[str, Any]:
    if tool == "gradfix":
        import gradfix.cli.commands
        import gradfix.commands.merge  # noqa: F401
    elif tool == "mergekit":
        import mergekit.merge  # noqa: F401
    torch.set_num_threads(1)
    build(folder / "models")
    gc.freeze()  # a collection in a child would copy every page that it shares
    home = folder / "case"
    results: dict[str, Any] = {}
    for name, damage in {"nothing wrong": lambda _: None, **FAULTS}.items():
        fresh(home)
        damage(home)
        before = {
            f"{role}/{p.name}": p.read_bytes()
            for role in ("base", "tuned")
            for p in (home / role).iterdir()
            if p.is_file()
        }
        code, said = in_child(lambda: TOOLS[tool](home), home / "log")
        results[name] = verdict(home, code, said, before)
    results["killed while writing"] = kills(tool, home)
    packages = {name: version(name) for name in (tool, "torch", "transformers", "safetensors") if _installed(name)}
    return {"tool": tool, "versions": packages, "results": results}


def _installed(name: str) -> bool:
    with contextlib.suppress(Exception):
        version(name)
        return True
    return False


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2])), indent=1))
