"""What a transport did, for people and for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradfix.stream.checkpoint import StreamReport
from gradfix.vectors.scale import ScaleCurve


@dataclass(frozen=True)
class TransportResult:
    """What was written, and what it measured."""

    out: Path
    alpha: float
    margin: float | None
    regime: str  # what chose alpha: "given", "validation", "few_shot" or "recipe"
    report: StreamReport | None
    curve: ScaleCurve | None
    before: dict[str, float] | None
    after: dict[str, float] | None
    loss_before: float | None
    loss_after: float | None
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        content = {
            "out": str(self.out),
            "alpha": self.alpha,
            "margin": self.margin,
            "regime": self.regime,
            "kept": self.report.kept if self.report else None,
            "curve": self.curve.points if self.curve else None,
            "test_before": self.before,
            "test_after": self.after,
            "fewshot_loss_before": self.loss_before,
            "fewshot_loss_after": self.loss_after,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }
        return dict(_finite(content))


def _finite(content: Any) -> Any:
    """The same content for JSON, which has no NaN and no infinity: null instead."""
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
