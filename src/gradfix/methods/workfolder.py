"""The folder a comparison works in: finished units and votes, each a file that is whole or absent.

File names are hashes of everything the content depends on, so a folder can serve any number of comparisons
and a stale entry is never read. Contents carry their own hash, so a damaged one is never read either."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradfix.checkpoints.hashes import hash_file, holds
from gradfix.checkpoints.write import discard, write_text
from gradfix.errors import CorruptInput, GradfixError, OutputError
from gradfix.methods.trial import Store
from gradfix.system.processes import current
from gradfix.training.costs import Work
from gradfix.vectors.signvotes import SignVotes
from gradfix.vectors.taskvector import TaskVector


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]


class Folder(Store):
    """Units and shared products of the comparison with this identity."""

    def __init__(self, home: Path, identity: str, votes_identity: str) -> None:
        self.home, self.identity, self.votes_identity = Path(home), identity, votes_identity
        if self.home.exists() and not self.home.is_dir():
            raise OutputError(f"{home} is a file; give a folder for the finished units as --work.")

    def read_unit(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        path = self._unit_path(key)
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if content["hash"] == digest(content["unit"]):
                unit: dict[str, Any] = content["unit"]
                return unit
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise CorruptInput(f"{path} is damaged or no finished unit of work; remove it and run again.")

    def write_unit(self, key: Mapping[str, Any], unit: Mapping[str, Any]) -> None:
        """Of processes that share the work the first one writes; the others have the same."""
        if not current().leads:
            return
        text = json.dumps({"key": dict(key), "unit": dict(unit), "hash": digest(unit)}, allow_nan=False)
        write_text(self._unit_path(key), text + "\n")

    def load(self, key: str) -> tuple[Any, Work | None]:
        path = self._product_path(key)
        bill = path.with_suffix(".json")
        if not (path.is_file() and bill.is_file()):
            return None, None
        try:
            billed = json.loads(bill.read_text(encoding="utf-8"))
            work = Work(**billed["work"])
            if not holds(path, billed["content"]):
                raise ValueError("other bytes than were written")
            value = SignVotes.load(path) if key.startswith("votes-") else TaskVector.load(path)
        except (GradfixError, ValueError, TypeError, KeyError, RecursionError):
            raise CorruptInput(f"{path} or the file beside it is damaged; remove both and run again.") from None
        return value, work

    def save(self, key: str, value: Any, work: Work) -> None:
        if not current().leads:
            return
        path = self._product_path(key)
        value.save(path)
        billed = {"work": asdict(work), "content": hash_file(path)}
        write_text(path.with_suffix(".json"), json.dumps(billed) + "\n")

    def checkpoint(self, key: str) -> Path:
        """Where a long product saves itself while it is being made."""
        return self._product_path(key).with_suffix(".part.safetensors")

    def _unit_path(self, key: Mapping[str, Any]) -> Path:
        name = digest([self.identity, dict(key)])
        return self.home / "units" / f"{key['method']}-{name}.json"

    def _product_path(self, key: str) -> Path:
        identity = self.votes_identity if key.startswith("votes-") else self.identity
        return self.home / "shared" / f"{key.split('-', maxsplit=1)[0]}-{digest([identity, key])}.safetensors"


class Partials(Store):
    """Where the interrupted votes of one output are kept; other settings look elsewhere, so nothing stale is read."""

    def __init__(self, out: Path, settings: str, keep: bool) -> None:
        self.out, self.settings, self.keep = out, settings, keep

    def partial(self, key: str) -> Path | None:
        name = hashlib.sha256(f"{self.settings}{key}".encode()).hexdigest()[:12]
        return self.out.with_name(f".{self.out.name}.votes-{name}.part") if self.keep else None

    def forget(self) -> None:
        for path in self.out.parent.glob(f".{glob.escape(self.out.name)}.votes-*.part*"):
            discard(path)
