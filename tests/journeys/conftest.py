"""One place for the tiny checkpoints of a test run, shared by its worker processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kinds are built; with several workers, the folder above theirs."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "journeys"
