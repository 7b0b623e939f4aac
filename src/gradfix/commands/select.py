"""`gradfix select`: choose the few-shot examples, and write which they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradfix.checkpoints.write import refuse_odd_file, write_text
from gradfix.commands.configs import SelectConfig
from gradfix.commands.guard import halving_batches, in_dict
from gradfix.commands.setting import draw, setting


def plan_select(config: SelectConfig) -> str:
    shots = draw(setting(config), config, base=config.base)
    return f"would write {len(shots.indices)} examples chosen by {config.select} to {config.out}"


@halving_batches(in_dict)
def run_select(config: SelectConfig) -> dict[str, Any]:
    """Choose the few-shot examples; the ids are row numbers of the train split."""
    refuse_odd_file(Path(config.out))
    shots = draw(setting(config), config, base=config.base)
    rows = [{"id": index, "label": row.get("label")} for index, row in zip(shots.indices, shots.fewshot)]
    path = Path(config.out)
    lines = json.dumps(rows, indent=1) if path.suffix == ".json" else "\n".join(json.dumps(row) for row in rows)
    write_text(path, lines + "\n")
    return {"out": str(path), "ids": shots.indices, "method": config.select}
