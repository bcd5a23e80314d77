"""Which token the command shows to a control plane, and where it is kept: in files that their owner alone can read."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinstep.spec.errors import UnavailableError

_given: Path | None = None


def use_file(path: Path | None) -> None:
    """Take the token from this file, whatever the environment says: the command's --token-file."""
    global _given
    _given = path


def find_token(url: str, environ: Mapping[str, str]) -> str | None:
    """Return the token for a control plane: --token-file, TWINSTEP_TOKEN, TWINSTEP_TOKEN_FILE, what `login` kept.

    Raises:
        UnavailableError: a file that is named cannot be read, or others can read it.
    """
    if _given is not None:
        return _one_line(_given)
    if token := environ.get("TWINSTEP_TOKEN"):
        return token.strip()
    if named := environ.get("TWINSTEP_TOKEN_FILE"):
        return _one_line(Path(named))
    kept = _kept(environ).get(url)
    return kept if isinstance(kept, str) else None


def keep_token(url: str, token: str | None, environ: Mapping[str, str]) -> Path:
    """Keep the token of a control plane, or forget it where it is None; return the file.

    Raises:
        UnavailableError: the file cannot be written, or others can read what it holds.
    """
    path, kept = credentials_file(environ), _kept(environ)
    kept.pop(url, None)
    if token is not None:
        kept[url] = token
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(kept, file, indent=1)
        new.replace(path)
    except OSError as error:
        raise UnavailableError(
            f"{path} cannot be written: {error.strerror or error}", remedy="set TWINSTEP_TOKEN instead"
        ) from None
    return path


def credentials_file(environ: Mapping[str, str]) -> Path:
    """Return the file that `twinstep login` keeps tokens in, by control plane."""
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "twinstep" / "credentials.json"


def _kept(environ: Mapping[str, str]) -> dict[str, Any]:
    path = credentials_file(environ)
    if not path.exists():
        return {}
    try:
        found = json.loads(_read(path))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UnavailableError(f"{path} does not hold tokens", remedy="delete it, and log in again: twinstep login URL")
    return found


def _one_line(path: Path) -> str:
    token = _read(path).strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UnavailableError(f"{path} does not hold a token", remedy="put one there, on one line")
    return token


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & 0o077:
                raise UnavailableError(
                    f"others can read the token in {path} (mode {stat.S_IMODE(mode):o})",
                    remedy=f"close it: chmod 600 {path}; if it was open for long, have the token revoked",
                )
            return file.read(65536)
    except (OSError, ValueError) as error:
        raise UnavailableError(
            f"the token's file {path} cannot be read: {getattr(error, 'strerror', None) or error}",
            remedy="name another with --token-file, or set TWINSTEP_TOKEN",
        ) from None
