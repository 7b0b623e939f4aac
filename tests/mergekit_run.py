"""PYTHON_WITH_MERGEKIT tests/mergekit_run.py JOBS.json

Runs mergekit on every [file, out] pair of the list and prints, as JSON, the versions and what went wrong where."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions


def main(jobs: list[list[str]]) -> dict[str, dict[str, str]]:
    failed = {}
    for file, out in jobs:
        content = yaml.safe_load(Path(file).read_text())
        options = MergeOptions(
            write_model_card=False, quiet=True, random_seed=0, lora_merge_cache=str(Path(out).parent)
        )
        try:
            run_merge(MergeConfiguration.model_validate(content), out, options)
        except Exception as error:
            failed[out] = f"{type(error).__name__}: {error}"
    return {"failed": failed, "versions": {name: version(name) for name in ("mergekit", "torch", "transformers")}}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
