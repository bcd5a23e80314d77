"""Submits that come all at once: a connection each, opened beforehand, and every request sent at one moment.

Whoever sends them must not be what is measured: bare HTTP/1.1 over asyncio, in a process of its own, whose answers are
stamped as they come in. httpx's client has 100 connections at most: of 200 that ask it at once the second hundred wait
until the first have their answers, or fail with PoolTimeout.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

from twinstep.spec.job import JobSpec

WARM = 10  # submits before those that count
LONGEST_S = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """Submits that were sent at one moment."""

    seconds: list[float]
    """From sending the first of all requests to having each answer."""
    jobs: list[str]
    """The job of each."""
    again: list[str]
    """The job of each of the same submits, sent again."""


def send_rounds(url: str, count: int, rounds: int) -> tuple[list[Round], list[str]]:
    """Send so many submits at once, so many times, and each of them again; return the rounds and all jobs stored."""
    return uvloop.run(_rounds(url, count, rounds))


async def _rounds(url: str, count: int, rounds: int) -> tuple[list[Round], list[str]]:
    await _at_once(url, [_submit(f"warm-{number}") for number in range(WARM)])
    found = []
    for each in range(rounds):
        requests = [_submit(f"round-{each}-{number}", seed=each * count + number) for number in range(count)]
        seconds, jobs = await _at_once(url, requests)
        _, again = await _at_once(url, requests)
        found.append(Round(seconds, jobs, again))
    return found, await _stored(url)


def _submit(name: str, *, seed: int = 0) -> bytes:
    """Return a whole request; no two have the same spec, by any part of it that could be kept from one to the next."""
    spec = JobSpec.model_validate(
        {
            "name": name,
            "data": {"batch_size": 1 + seed % 512},
            "optimizers": {"dense": {"lr": 0.001 + seed * 1e-6}},
            "train": {"seed": seed, "steps": 1 + seed % 1000},
        }
    )
    body = json.dumps(spec.model_dump(mode="json")).encode()
    return _head("POST /v1/jobs", {"Content-Type": "application/json", "Idempotency-Key": name}, len(body)) + body


def _head(line: str, headers: dict[str, str], length: int = 0) -> bytes:
    told = {"Host": "localhost", "Content-Length": str(length), **headers}
    return (f"{line} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in told.items()) + "\r\n").encode()


async def _stored(url: str) -> list[str]:
    found: list[str] = []
    cursor = ""
    while True:
        _, (page,) = await _answers(url, [_head(f"GET /v1/jobs?limit=200{cursor}", {})])
        found += [job["id"] for job in page["items"]]
        if page["next_cursor"] is None:
            return found
        cursor = f"&cursor={page['next_cursor']}"


async def _at_once(url: str, requests: list[bytes]) -> tuple[list[float], list[str]]:
    seconds, answers = await _answers(url, requests)
    return seconds, [str(answer["id"]) for answer in answers]


async def _answers(url: str, requests: list[bytes]) -> tuple[list[float], list[Any]]:
    """Open a connection for each request, send all of them, and wait for the answers."""
    loop, place = asyncio.get_running_loop(), urlsplit(url)
    host, port = place.hostname or "127.0.0.1", place.port or 80
    opened = await asyncio.gather(*(loop.create_connection(_Asking, host, port) for _ in requests))
    await asyncio.sleep(0.1)  # until the other side has taken them all
    started = time.perf_counter()
    for (_, asking), request in zip(opened, requests, strict=True):
        asking.send(request)
    try:
        async with asyncio.timeout(LONGEST_S):
            ends = [await asking.answered for _, asking in opened]
    finally:
        for transport, _ in opened:
            transport.close()
    return [end - started for end in ends], [asking.answer() for _, asking in opened]


class _Asking(asyncio.Protocol):
    """A connection with one request on it."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """When the whole answer was there."""
        self._transport: asyncio.Transport | None = None
        self._got = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, mark, body = bytes(self._got).partition(b"\r\n\r\n")
        if mark and not self.answered.done():
            (length,) = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if len(body) >= int(length):
                self.answered.set_result(time.perf_counter())

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_exception(error or ConnectionError("it was closed without an answer"))

    def answer(self) -> Any:
        head, _, body = bytes(self._got).partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status >= 300:
            raise RuntimeError(f"{status}: {body[:500]!r}")
        return json.loads(body)
