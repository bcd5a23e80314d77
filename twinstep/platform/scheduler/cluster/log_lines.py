"""A container's log as the API server sends it, with times: cut where it was read up to, and where that is now. Pure.

The place is (time of the line read last, bytes read since the first line of that time). Requests begin at a whole
second, so what comes first was read before; lines of one moment are told apart by the bytes, and so is half a line.
"""

from __future__ import annotations

import re

from twinstep.platform.store.logs import cut_character

_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)(?: |(?=\n)|$)")
TIME_MAX = 40  # bytes that a time and the space after it have at most
Moment = tuple[bytes, bytes]


def moment(text: str) -> Moment | None:
    """Return a time as something that can be compared: (second, nanoseconds); None for none."""
    found = _TIME.match(text.encode())
    return None if found is None else (found[1], (found[2] or b"").ljust(9, b"0"))


def since(text: str) -> str:
    """Return the whole second of a time, as `sinceTime` of a request: the kubelet knows no parts of a second."""
    return re.sub(r"\.\d+", "", text)


class LogReader:
    """Takes in the bytes of one answer; gives out what is new and the place up to there."""

    def __init__(self, time: str = "", count: int = 0) -> None:
        """Begin at a place: (time of the line read last, bytes read since the first line of that time)."""
        self.time, self.count = time, count
        self._moment = moment(time)
        self.line_end = (time, count)
        """The place after the last whole line."""
        self._skip = count
        """Bytes of the place's time that were read before and are still to come."""
        self._found = not time
        """The first line of the place's time has come, or a later one."""
        self._drops = False
        """The line at hand is from before the place."""
        self._within = False
        """The time of the line at hand was read."""
        self._held = b""
        """The beginning of a line whose time may not be whole yet."""

    def take(self, data: bytes) -> bytes:
        """Return what is new in `data`, without times; it may end anywhere within a line."""
        found = bytearray()
        data, at = self._held + data, 0
        self._held = b""
        while at < len(data):
            if not self._within:
                if len(data) - at < TIME_MAX and data.find(b"\n", at) < 0:
                    self._held = data[at:]
                    break
                at = self._begin(data, at)
            end = data.find(b"\n", at)
            stop = len(data) if end < 0 else end + 1
            found += self._new(data[at:stop])
            self._within = end < 0
            if not self._within:
                self.line_end = (self.time, self.count)
            at = stop
        return bytes(found)

    def rest(self) -> bytes:
        """Return what is new in what was held back, at the end of the answer."""
        data, self._held = self._held, b""
        return self._new(data[self._begin(data, 0) :]) if data else b""

    def _begin(self, data: bytes, at: int) -> int:
        """Read the time of the line that begins at `at`; return where its text begins."""
        self._within = True
        read = _TIME.match(data, at)
        given, place = (None if read is None else (read[1], (read[2] or b"").ljust(9, b"0"))), self._moment
        later = given is not None and (place is None or given > place)
        if not self._found:
            self._drops = not later and given != place
            self._found = not self._drops
        if later:
            self._skip = 0  # what was still to be skipped is gone from the log
            self.time, self.count = (read[0].strip().decode() if read else ""), 0
            self._moment = given
        return at if read is None else read.end()

    def _new(self, text: bytes) -> bytes:
        if self._drops:
            return b""
        known = min(self._skip, len(text))
        self._skip -= known
        self.count += len(text) - known
        return text[known:]


def whole(data: bytes) -> bytes:
    """Return data without the beginning of a character at its end whose rest is still to come."""
    return data[: len(data) - cut_character(data)]
