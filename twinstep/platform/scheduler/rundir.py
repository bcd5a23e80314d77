"""The files of one run, read and written: spec, token, log, spool. Knows no process and no store.

A log is read by byte cursor, so that a reader can stop anywhere and go on; what is not UTF-8 is shown as U+FFFD,
and the run's token, should a worker print it, as stars.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from twinstep.platform.scheduler.supervise import write_json
from twinstep.platform.store.logs import EVERYBODY, MAX_LOG_READ, TAIL_REACH, cut_character, meant
from twinstep.platform.store.records import LogFilter, LogPart, LogSpan
from twinstep.spec.errors import UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.report import MAX_RECORDS_PER_POST, Record

MAX_LINE = 8 * 1024 * 1024  # bytes of a spool line; a longer one is no record
_RECORD: TypeAdapter[Record] = TypeAdapter(Record)


class RunDir:
    """`DATA_DIR/runs/RUN_ID/`."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.path = root / run_id
        self.run_id = run_id

    def prepare(self, spec: JobSpec) -> str:
        """Make the directory, the spec and the token where they are missing; return the token's hash.

        Doing it twice changes nothing: a worker that runs already keeps its token.

        Raises:
            UnavailableError: the disk does not take it.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.spec_path.exists():
                write_json(self.spec_path, spec.model_dump(mode="json"))
            if not self._token_path.exists():
                write_json(self._token_path, secrets.token_urlsafe(32))
        except OSError as error:
            raise UnavailableError(
                f"the run's directory {self.path} cannot be written: {error.strerror or error}",
                remedy="make room on the disk, or mend the directory's permissions",
            ) from None
        return hash_token(self.token())

    @property
    def spec_path(self) -> Path:
        """The JobSpec as JSON."""
        return self.path / "spec.json"

    @property
    def log_path(self) -> Path:
        """The worker's output and errors."""
        return self.path / "log"

    @property
    def _token_path(self) -> Path:
        return self.path / "token"

    def token(self) -> str:
        """Return the run's token, or "" where it has none."""
        try:
            return self._token_path.read_text().strip().strip('"')
        except OSError:
            return ""

    def log_size(self) -> int:
        """Return the bytes the log has."""
        try:
            return self.log_path.stat().st_size
        except OSError:
            return 0

    def read_log(
        self, *, offset: int = 0, limit: int = 65536, final: bool = False, wanted: LogFilter = EVERYBODY
    ) -> LogPart:
        """Return up to `limit` bytes of the log from byte `offset`; one process has written it all.

        A character whose bytes are not all there yet is left for the next read, unless the run is `final`.
        """
        limit = max(4, min(limit, MAX_LOG_READ))  # 4: the longest character
        size = self.log_size()
        offset = max(0, min(offset, size))
        if not _is_alone(wanted):
            return LogPart(offset=offset, next_offset=size, size=size, text="")
        if offset == size:
            return LogPart(offset=offset, next_offset=offset, size=size, text="")
        data = self._redacted(offset, limit)
        at_end = offset + len(data) >= size
        if not (final and at_end):
            data = data[: len(data) - cut_character(data)]
        text = data.decode("utf-8", errors="replace")
        return LogPart(
            offset=offset,
            next_offset=offset + len(data),
            size=size,
            text=text,
            spans=[LogSpan(length=len(text))] if text else [],
        )

    def tail(self, lines: int, *, final: bool = False, wanted: LogFilter = EVERYBODY) -> LogPart:
        """Return the last `lines` lines, looking back a mebibyte at most."""
        size = self.log_size()
        start = max(0, size - TAIL_REACH)
        data = self._redacted(start, size - start)
        if start:
            data = data[data.find(b"\n") + 1 :]
            start = size - len(data)
        kept = data.splitlines(keepends=True)[-lines:] if lines > 0 else []
        begin = start + len(data) - sum(map(len, kept))
        return self.read_log(offset=begin, limit=TAIL_REACH, final=final, wanted=wanted)

    def last_line(self) -> str:
        """Return the last line of the log that says something, cut to 300 characters."""
        return meant(self.tail(50, final=True).text)

    def _redacted(self, offset: int, length: int) -> bytes:
        token = self.token().encode()
        margin = len(token)  # a token that straddles the border is found as well
        begin = max(0, offset - margin)
        try:
            with self.log_path.open("rb") as file:
                file.seek(begin)
                data = file.read(offset - begin + length + margin)
        except OSError:
            return b""
        if token:
            data = data.replace(token, b"*" * len(token))
        return data[offset - begin : offset - begin + length]

    def spool_size(self) -> int:
        """Return the bytes the spool file has."""
        try:
            return (self.path / "spool.jsonl").stat().st_size
        except OSError:
            return 0

    def spool(self, *, after: int, offset: int = 0) -> Iterator[tuple[list[Record], int]]:
        """Yield the spooled records from byte `offset` on that have a seq above `after`, a batch at a time.

        Each batch comes with the byte to go on from once it is stored; the last one may hold no record, only that
        byte. A line that is no record is passed over, but a last one that is half written is left for the next time.
        """
        with contextlib.suppress(FileNotFoundError), (self.path / "spool.jsonl").open("rb") as file:
            file.seek(offset)
            batch: list[Record] = []
            while line := file.readline(MAX_LINE):
                if not line.endswith(b"\n") and len(line) < MAX_LINE:
                    break
                offset += len(line)
                with contextlib.suppress(ValidationError):
                    record = _RECORD.validate_json(line)
                    if record.seq > after:
                        batch.append(record)
                if len(batch) >= MAX_RECORDS_PER_POST:
                    yield batch, offset
                    batch = []
            yield batch, offset


def hash_token(token: str) -> str:
    """Return what is stored of a token; it has 256 random bits, so one plain hash is enough."""
    return hashlib.sha256(token.encode()).hexdigest()


def _is_alone(wanted: LogFilter) -> bool:
    """Say whether a filter lets the one process of a local run through."""
    return all(number in (None, 0) for number in (wanted.slice, wanted.host, wanted.restart))
