"""`gradfix push`: an output folder to the model hub, through the hub client's own code.

Only what the manifest lists is sent, after every hash has been checked. Credentials are the client's
business; gradfix never reads one."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradfix.checkpoints.write import MANIFEST, verify
from gradfix.commands.configs import PushConfig
from gradfix.errors import OutputError, UsageError


@dataclass(frozen=True)
class PushResult:
    """What was (or would be) sent, and where it can be seen."""

    repo: str
    files: Sequence[tuple[str, int]]  # name, bytes
    url: str | None

    @property
    def size(self) -> int:
        return sum(size for _, size in self.files)


def run_push(config: PushConfig) -> PushResult:
    """Verify, then make the repository and upload; a dry run stops before anybody is contacted."""
    folder = Path(config.out)
    manifest = verify(folder)
    _check_name(config.repo)
    names = sorted([*manifest["outputs"], MANIFEST])
    files = [(name, (folder / name).stat().st_size) for name in names]
    if config.dry_run:
        return PushResult(config.repo, files, None)
    return PushResult(config.repo, files, _upload(config, folder, names))


def _check_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UsageError(f"--repo {repo!r} is no repository name: {error}") from None
    if "/" not in repo:
        raise UsageError(f"--repo {repo!r} lacks its owner; write owner/name.")


def _upload(config: PushConfig, folder: Path, names: Sequence[str]) -> str:
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        page = api.create_repo(config.repo, private=config.private or None, exist_ok=True)
        api.upload_folder(
            repo_id=config.repo,
            folder_path=folder,
            commit_message=config.message or "Upload with gradfix",
            allow_patterns=[glob.escape(name) for name in names],
        )
    except (OSError, ValueError) as error:  # the client's errors: offline, no token, refused, no connection
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise OutputError(
            f"the hub did not take {folder} as {config.repo}: {reason} "
            "Log in with `hf auth login`, check the connection, and run the same command again."
        ) from error
    return str(page)
