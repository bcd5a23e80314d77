"""Pack training batches in processes of their own: those that a thread would give, in the same order.

Batch number s is a function of the loader and s alone, so process p of P packs the batches whose number is p modulo P,
and the reader takes them in turn. The dataset is written once to a file without a name, which all processes map: its
arrays are in memory once, whatever the number of processes. Arrays that are mapped from files already are mapped again.

A process packs one batch ahead of what was taken from it, and waits. It ends when its socket does, so none outlives the
run, however that ends; it is in a process group of its own, so a signal to the run's group reaches the run alone, which
then stops between steps. `packer.py` is the other end.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import torch

from twinstep.spec import errors
from twinstep.spec.errors import DataError, TwinstepError, UnavailableError
from twinstep.spec.job import DataSpec
from twinstep.worker.data.batch import Batch, BatchStats
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.multi_hot import AnyBatch, MultiHotBatch
from twinstep.worker.data.prefetch import Prefetch

BATCHES: dict[str, type[Batch | MultiHotBatch]] = {kind.__name__: kind for kind in (Batch, MultiHotBatch)}
ASKED = 2  # batches asked of a process: the one it packs, and the next, so that it never waits to be asked
ALIGNMENT = 64  # of arrays in the file, as NumPy aligns its own
ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def packed_ahead(
    loader: Loader,
    spec: DataSpec,
    start: int,
    prepared: Callable[[Iterator[tuple[AnyBatch, BatchStats]]], Iterator[tuple[Any, BatchStats]]] = lambda it: it,
) -> Iterator[Prefetch[tuple[Any, BatchStats]]]:
    """Give training batches from number `start` on, packed ahead as a spec asks: in a thread, or in processes.

    Args:
        loader: whose.
        spec: how many processes, and how far ahead.
        start: number of the first.
        prepared: what becomes of them in the thread that is ahead.

    Raises:
        UnavailableError: the processes cannot be started.
    """
    if not spec.loader_workers:
        with Prefetch(prepared(loader.train_batches(start)), depth=spec.prefetch) as batches:
            yield batches
        return
    with (
        Packers(loader, spec.loader_workers) as packers,
        Prefetch(prepared(packers.batches(start)), depth=spec.prefetch) as batches,
    ):
        try:
            yield batches
        finally:
            packers.end()  # before the thread that reads from them: none is waited for


class Packers:
    """Processes that pack batches of one loader; a context manager that closes them.

    Raises:
        UnavailableError: a process cannot be started, or the dataset cannot be written to the temporary directory.
    """

    def __init__(self, loader: Loader, count: int) -> None:
        self._ended = False
        self._sockets: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            with tempfile.TemporaryFile(prefix="twinstep-loader-") as file:
                write_shared(loader, file)
                for _ in range(count):
                    self._start(file.fileno())
        except BaseException as error:  # a signal's too, while some run already
            self.close()
            if not isinstance(error, OSError):
                raise
            raise UnavailableError(
                f"{count} loader processes cannot be started: {error.strerror or error}",
                remedy="lower data.loader_workers; 0 packs in a thread",
            ) from error

    def _start(self, data: int) -> None:
        ours, theirs = Pipe()
        self._sockets.append(ours)
        with theirs:
            paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            process = subprocess.Popen(  # noqa: S603  our own module
                [sys.executable, "-m", "twinstep.worker.data.packer", str(theirs.fileno()), str(data)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), data),
                process_group=0,
            )
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of turns."""
        return [process.pid for process in self._processes]

    def batches(self, start: int) -> Iterator[tuple[AnyBatch, BatchStats]]:
        """Yield training batches from number `start` on, without end; to be called once.

        Raises:
            DataError: packing raised it, where its batch would have come.
            UnavailableError: a process ended.
        """
        count = len(self._sockets)
        asked = taken = start
        while not self._ended:
            while asked < taken + ASKED * count:
                self._send(asked % count, asked)
                asked += 1
            answer = self._receive(taken % count)
            if answer is None:
                return
            yield answer
            taken += 1

    def _send(self, turn: int, number: int) -> None:
        with contextlib.suppress(OSError):  # it ended: what it said before is to be read first
            self._sockets[turn].send(number)

    def _receive(self, turn: int) -> tuple[AnyBatch, BatchStats] | None:
        try:
            answer = pickle.loads(self._sockets[turn].recv_bytes())  # noqa: S301  our own process
        except (EOFError, OSError):
            if self._ended:
                return None
            raise self._died(turn) from None
        if "batch" in answer:
            batch = BATCHES[answer["batch"]](*map(torch.from_numpy, answer["arrays"]))
            return batch, answer["stats"]
        if "code" in answer:
            raise _error_of(answer)
        raise RuntimeError(f"a loader process failed:\n{answer['traceback']}")

    def _died(self, turn: int) -> TwinstepError:
        code = self._processes[turn].wait()
        name = f"loader process {turn + 1} of {len(self._processes)} (pid {self._processes[turn].pid})"
        if code == -signal.SIGKILL:
            return UnavailableError(
                f"{name} was killed (SIGKILL)",
                remedy="most often memory ran out: lower data.loader_workers or data.prefetch, or give more memory",
            )
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return UnavailableError(
            f"{name} {how}", remedy="its last words stand in the log; data.loader_workers: 0 has none"
        )

    def end(self) -> None:
        """End the processes, at once: they hold nothing that is to be kept. Whoever reads `batches` comes to an end."""
        self._ended = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        """End the processes and close their sockets, from which nobody may read any more. Safe to call twice."""
        self.end()
        for each in self._sockets:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _error_of(answer: dict[str, Any]) -> TwinstepError:
    kinds = {
        kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TwinstepError)
    }
    return kinds.get(answer["code"], DataError)(answer["problem"], remedy=answer["remedy"])


class _Pickler(pickle.Pickler):
    """Names files that are mapped instead of copying them."""

    def reducer_override(self, value: Any) -> Any:
        """Return how an array that is mapped from a file is made again; others are left to pickle."""
        if not isinstance(value, np.memmap):
            return NotImplemented
        whole = isinstance(value.base, mmap.mmap) and value.flags.c_contiguous and value.filename is not None
        if whole and Path(str(value.filename)).is_file():
            return _mapped, (str(value.filename), value.dtype.str, value.offset, value.shape)
        return np.asarray, (np.array(value),)


def _mapped(name: str, kind: str, offset: int, shape: tuple[int, ...]) -> Any:
    return np.memmap(name, dtype=np.dtype(kind), mode="r", offset=offset, shape=shape)


def write_shared(value: Any, file: BinaryIO) -> None:
    """Write a value to an empty file, its arrays apart from the rest, for `read_shared`."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    views = [buffer.raw() for buffer in buffers]
    head = pickle.dumps((stream.getvalue(), [view.nbytes for view in views]))
    for part in (len(head).to_bytes(8, "little"), head):
        file.write(part)
    at = 8 + len(head)
    for view in views:
        file.write(b"\0" * (-at % ALIGNMENT))
        file.write(view)
        at += -at % ALIGNMENT + view.nbytes
    file.flush()


def read_shared(fd: int) -> Any:
    """Return what `write_shared` wrote; its arrays are mapped and cannot be written."""
    view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
    size = int.from_bytes(view[:8], "little")
    stream, sizes = pickle.loads(view[8 : 8 + size])  # noqa: S301  our own process wrote it
    at, buffers = 8 + size, []
    for each in sizes:
        at += -at % ALIGNMENT
        buffers.append(view[at : at + each])
        at += each
    return pickle.loads(stream, buffers=buffers)  # noqa: S301
