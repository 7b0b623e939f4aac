"""The small world of `world.py`, made once per file and copied for every test that may break it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.reliability.world import World, make_world


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world") / "whole")


@pytest.fixture
def world(whole: World, tmp_path: Path) -> World:
    shutil.copytree(whole.home, tmp_path / "world")
    return World(tmp_path / "world")
