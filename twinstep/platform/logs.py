"""How a control plane logs: one handler, one form for machines (JSON lines) and one for people, secrets struck out.

What a record is about (`request_id`, `job_id`, `run_id`, `project`) is bound where it becomes known and stands on every
record written below, whoever writes it. The form is JSON in a cluster, else for people; TWINSTEP_LOG_FORMAT says
otherwise, and TWINSTEP_LOG_LEVEL how much.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from pythonjsonlogger.json import JsonFormatter

from twinstep.spec.errors import UnavailableError

FACTS = ("request_id", "job_id", "run_id", "project")
"""What a record may be about; each is a field of its own in JSON."""
FORMATS = ("json", "human")
STRUCK = "[redacted]"
_TIME = "%Y-%m-%dT%H:%M:%S"

_facts: ContextVar[dict[str, str] | None] = ContextVar("log_facts", default=None)


@contextmanager
def about(**facts: str) -> Iterator[None]:
    """Bind what every record within is about, in this thread or task and those it hands its context to."""
    token = _facts.set({**(_facts.get() or {}), **facts})
    try:
        yield
    finally:
        _facts.reset(token)


def note(**facts: str | None) -> None:
    """Add to what the innermost `about` has bound, as more becomes known; nothing outside of one."""
    bound = _facts.get()
    if bound is not None:
        bound.update({name: value for name, value in facts.items() if value})


def facts() -> dict[str, str]:
    """Return what is bound."""
    return dict(_facts.get() or {})


# ---- secrets ----

_WORDS = r"token(?!s\b)|secret|passw(?:or)?d|credential|api[_-]?key|private[_-]?key|authorization"
# From the beginning of a word, and all of it or nothing: else a text of n letters takes the time of n³ to look through.
_NAME = rf"(?<![\w.-])(?=[\w.-]*(?:{_WORDS}))[\w.-]++"
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s,;}\])]+)"
_SECRETS = (
    # A scheme and what follows it, before the names below would take the scheme for the secret.
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]+", re.IGNORECASE), rf"\1 {STRUCK}"),
    (re.compile(r"\b(?:tsp_|whsec_)[\w+/=-]+"), STRUCK),
    # A password between the user and the host of a URL.
    (re.compile(r"(\w://[^\s/:@]*):[^\s/@]+@"), rf"\1:{STRUCK}@"),
    # {"name": "HF_TOKEN", "value": "…"}, as Kubernetes has environment variables.
    (
        re.compile(rf"(['\"]?name['\"]?\s*[:=]\s*['\"]?{_NAME}['\"]?\s*,\s*['\"]?value['\"]?\s*[:=]\s*){_VALUE}", re.I),
        rf"\1{STRUCK}",
    ),
    # HF_TOKEN=…, "hf_token": "…", password: …
    (re.compile(rf"({_NAME}['\"]?\s*[:=]\s*)(?!{re.escape(STRUCK)}|(?:Bearer|Basic) ){_VALUE}", re.I), rf"\1{STRUCK}"),
)


def redacted(text: str) -> str:
    """Return text without what looks like a secret: tokens, passwords in URLs, values whose name says so."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: STRUCK if re.fullmatch(_NAME, str(key), re.I) else _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


# ---- forms ----


class Bound(logging.Filter):
    """Writes what is bound onto each record; what the record says itself stays."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        for name, value in facts().items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


class JsonForm(JsonFormatter):
    """One JSON object a line: time, level, logger, message, what it is about, and whatever else was given."""

    def __init__(self) -> None:
        super().__init__(
            "%(levelname)s %(name)s %(message)s",
            rename_fields={"levelname": "level", "name": "logger"},
            timestamp="time",
        )

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        """Strike out secrets in everything that is written."""
        found: dict[str, Any] = _clean(super().process_log_record(log_data))
        return found


class HumanForm(logging.Formatter):
    """A line for people, with what it is about at its end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", _TIME)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, before a traceback."""
        said = [f"{name}={value}" for name in FACTS if (value := getattr(record, name, None))]
        return super().formatMessage(record) + (f" [{' '.join(said)}]" if said else "")

    def format(self, record: logging.LogRecord) -> str:
        """Return all there is to write, secrets struck out."""
        return redacted(super().format(record))


def set_up(environ: Mapping[str, str], *, in_cluster: bool, stream: TextIO | None = None) -> None:
    """Make every logger of the process write to one handler.

    Raises:
        UnavailableError: the form or the level is none.
    """
    form = environ.get("TWINSTEP_LOG_FORMAT") or ("json" if in_cluster else "human")
    if form not in FORMATS:
        raise UnavailableError(
            f"TWINSTEP_LOG_FORMAT is {form[:40]!r}", remedy=f"give one of: {', '.join(FORMATS)}"
        )  # fmt: skip
    level = (environ.get("TWINSTEP_LOG_LEVEL") or ("info" if form == "json" else "warning")).upper()
    if level not in logging.getLevelNamesMapping():
        raise UnavailableError(
            f"TWINSTEP_LOG_LEVEL is {level[:40]!r}", remedy="give one of: debug, info, warning, error"
        )  # fmt: skip
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonForm() if form == "json" else HumanForm())
    handler.addFilter(Bound())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    # Each says a line for every request it makes, address and all.
    for name in ("httpx", "httpcore", "alembic", "urllib3", "kubernetes"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
