"""Checkpoints of one run: saved beside the training thread, restored from the newest that is whole, pruned.

`save` copies the state in memory and returns; a thread writes the copy. What goes wrong there (a full disk, a store
that is away) ends no run: it is a note that the loop reports, and the checkpoints before stay as they are.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from twinstep.spec.errors import TwinstepError
from twinstep.worker.checkpoint.content import Snapshot, check_fits, load_tensors
from twinstep.worker.checkpoint.crew import Beside, Crew, NotWritten, prefix_of, written_or_why
from twinstep.worker.checkpoint.errors import DamagedError, TakenError
from twinstep.worker.checkpoint.keep import Keep, to_remove
from twinstep.worker.checkpoint.lease import Hold, hold
from twinstep.worker.checkpoint.manifest import MANIFEST, Manifest
from twinstep.worker.checkpoint.place import in_words, open_place, unavailable
from twinstep.worker.checkpoint.read import Reader
from twinstep.worker.checkpoint.shares import Held, shares
from twinstep.worker.checkpoint.write import Written, commit

Value = TypeVar("Value")
NAME = re.compile(r"^(\d{6,12})-step-(\d{1,12})(?:-[0-9a-f]{8})?$")  # number, step, and who wrote it where several may


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something that happened to a checkpoint, to be reported by whoever owns the run."""

    name: str
    """Of the event: checkpoint_saved, checkpoint_failed, checkpoint_damaged, checkpoint_lost."""
    reason: str
    data: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run in one place.

    Args:
        where: directory or fsspec URI.
        owner: who writes, in words, for whoever else would.
        lineage, attempt: the job and which try at it; a later one takes a URI's lease over.
        only_finite: leave out a state with NaN or infinity in it, from which no run could go on.

    Raises:
        TakenError: another process writes there.
        UnavailableError: the place cannot be reached or written.
    """

    def __init__(
        self,
        where: str | Path,
        *,
        keep: Keep | None = None,
        owner: str = "a run",
        lineage: str = "",
        attempt: int = 0,
        only_finite: bool = True,
    ) -> None:
        self.place = open_place(where)
        self.stall_seconds = 0.0
        """That the run has waited for copies, all together."""
        self.snapshot = Snapshot()
        self.last_step: int | None = None
        """Of the newest checkpoint that is whole."""
        self.crew: Crew | None = None
        """The run's processes, where each writes rows of its own; this is process 0 then."""
        self._keep, self._only_finite = keep or Keep(), only_finite
        self._hold: Hold = hold(self.place, owner, lineage=lineage, attempt=attempt)
        self._nonce = uuid.uuid4().hex[:8]
        self._lock = threading.Lock()
        self._notes: list[Note] = []
        self._beside = Beside()
        self._whole: dict[str, Manifest] = {}
        self._broken: list[tuple[int, str]] = []
        try:
            self.place.sweep()
            self._number = max((number for number, _ in self._numbered()), default=0)
        except Exception as error:
            self._hold.release()
            raise unavailable(self.place.url, error) from error

    def restore(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        *,
        fits: Callable[[Manifest], None] | None = None,
    ) -> tuple[Manifest, dict[str, Tensor]] | None:
        """Load the newest checkpoint that is whole into a model and its optimizers; None: there is none to load.

        Damaged ones are passed over, each with a note.

        Args:
            fits: raises MisfitError where a checkpoint, whose tensors fit, is of another job for other reasons.

        Returns:
            Its manifest, and all its tensors, those of random generators too.

        Raises:
            MisfitError: it is of another model; nothing was changed.
            DamagedError: there are checkpoints, and none is whole; nothing was changed.
            ForeignError: the newest is of another version's format; nothing was changed.
            UnavailableError: the disk or store does not give one; nothing was changed.
        """

        def take(reader: Reader) -> tuple[Manifest, dict[str, Tensor]]:
            values = reader.tensors({path: self.snapshot.tensors.get(path) for path in reader.manifest.tensors})
            load_tensors(values, model, optimizers)
            self.snapshot.tensors = values
            return reader.manifest, values

        return self._newest(take, model, optimizers, fits)

    def find(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        *,
        fits: Callable[[Manifest], None] | None = None,
    ) -> str | None:
        """Return the name of the checkpoint that `restore` would load, every byte of which holds; raises as it does."""

        def take(reader: Reader) -> str:
            reader.verify()
            return reader.name

        return self._newest(take, model, optimizers, fits)

    def _newest(
        self,
        take: Callable[[Reader], Value],
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        fits: Callable[[Manifest], None] | None,
    ) -> Value | None:
        problem: DamagedError | None = None
        for reader in self._newest_first():
            if isinstance(reader, DamagedError):
                problem = reader
                continue
            check_fits(reader.manifest, model, optimizers)
            if fits is not None:
                fits(reader.manifest)
            try:
                found = take(reader)
            except DamagedError as error:
                problem = error
                self._set_aside(reader.name, error)
                continue
            self.last_step = reader.manifest.step
            return found
        if problem is not None:
            raise DamagedError(
                f"no checkpoint in {self.place.url} is whole; the last one tried: {problem.problem}",
                remedy="bring its files back, or remove the directory to start anew",
            )
        return None

    def _newest_first(self) -> Iterator[Reader | DamagedError]:
        try:
            numbered = sorted(self._numbered(), reverse=True)
        except Exception as error:
            raise unavailable(self.place.url, error) from error
        for number, name in numbered:
            try:
                reader = Reader(self.place, name)
            except DamagedError as error:
                if "never written to its end" not in error.problem:  # half an upload is no loss, the rest is
                    self._set_aside(name, error)
                    yield error
                else:
                    self._broken.append((number, name))
                continue
            self._whole[name] = reader.manifest
            yield reader

    def _set_aside(self, name: str, error: DamagedError) -> None:
        self._whole.pop(name, None)
        self._broken.append((int(name.split("-")[0]), name))
        self._note("checkpoint_damaged", f"{error.problem}; an older one is taken", {"name": name})

    def _numbered(self) -> list[tuple[int, str]]:
        return [(int(match[1]), name) for name in self.place.names() if (match := NAME.match(name))]

    @property
    def busy(self) -> bool:
        """Whether the one before is still being written."""
        return self._beside.busy

    def save(
        self,
        tensors: Mapping[str, Tensor],
        *,
        step: int,
        about: dict[str, Any],
        scores: dict[str, float] | None = None,
        held: Held = MappingProxyType({}),
    ) -> float:
        """Copy `tensors` and let a thread write them; return the seconds that took here.

        Waits first for the one before, if that is still being written: ask `busy` to avoid it.

        Args:
            held: of tensors that no process of a crew has whole, who has which rows.
        """
        started = time.perf_counter()
        self.finish()
        self.snapshot.take(tensors, None if self.crew is None else shares(tensors, self.crew.count, held)[0])
        self._number += 1
        # The other processes of a crew have no lock: one that an earlier attempt left behind must not write into this.
        writer = self._hold.writer or ("" if self.crew is None else self._nonce)
        name = "-".join(filter(None, (f"{self._number:06d}-step-{step}", writer)))
        manifest = Manifest(
            number=self._number,
            step=step,
            written_at=time.time(),
            scores=scores or {},
            about=about,
            files={},
            tensors={},
        )
        self._beside.start(self._write, name, manifest)
        stall = time.perf_counter() - started
        self.stall_seconds += stall
        return stall

    def finish(self, timeout: float | None = None) -> bool:
        """Wait until the checkpoint that is being written is whole, or has failed; return whether that was in time."""
        return self._beside.finish(timeout)

    def notes(self) -> list[Note]:
        """Return what happened since this was last asked."""
        with self._lock:
            found, self._notes = self._notes, []
        return found

    def close(self) -> None:
        """Finish writing, and let others write here."""
        self.finish()
        self._hold.release()

    def give_up(self) -> None:
        """Let others write here without waiting for what is being written, which will have no manifest."""
        self._beside.give_up()
        self._hold.release()

    def _write(self, name: str, manifest: Manifest) -> None:
        try:
            self._write_and_say(name, manifest)
        finally:
            if self.crew is not None:
                with contextlib.suppress(Exception):  # nobody is there to be told
                    self.crew.of_first(self.last_step)

    def _write_and_say(self, name: str, manifest: Manifest) -> None:
        started = time.perf_counter()
        try:
            whole = self._write_files(name, manifest)
        except Exception as error:  # a file system's OSError, or whatever the client of a store raises
            why = error.problem if isinstance(error, TakenError) else in_words(error)
            why = str(error) if isinstance(error, NotWritten) else why
            # Whoever has lost the place, or lets it go, removes nothing there either.
            if not isinstance(error, TakenError) and not self._beside.given_up:
                self._drop(name)
            good = (
                "there is none before it"
                if self.last_step is None
                else f"the last good one is of step {self.last_step}"
            )
            kind = "checkpoint_lost" if isinstance(error, TakenError) else "checkpoint_failed"
            data = {"step": manifest.step, "last_good": self.last_step}
            self._note(kind, f"the checkpoint of step {manifest.step} could not be written: {why}; {good}", data)
            return
        seconds = time.perf_counter() - started
        self.last_step = whole.step
        self._whole[name] = whole
        size = sum(whole.files.values())
        text = f"step {whole.step}: {size / 2**20:,.1f} MiB in {seconds:.2f} s to {self.place.url}/{name}"
        self._note(
            "checkpoint_saved", text, {"step": whole.step, "bytes": size, "seconds": round(seconds, 4), "name": name}
        )
        self._prune()

    def _write_files(self, name: str, manifest: Manifest) -> Manifest:
        crew, begun = self.crew, False
        try:
            self._hold.check()
            self.place.begin(name)
            begun = True
        finally:
            if crew is not None:
                crew.of_first(name if begun else None)
        prefix = "data" if crew is None else prefix_of(0)
        found = written_or_why(
            self.place, name, self.snapshot, prefix=prefix, only_finite=self._only_finite, check=self._beside.check
        )
        everyones = [found] if crew is None else crew.to_first(found)
        written = [each for each in everyones if isinstance(each, Written)]
        for rank, each in enumerate(everyones):
            if isinstance(each, str):
                raise NotWritten(f"process {rank}: {each}" if crew is not None else each)
        self._beside.check()
        self._hold.check()
        return commit(self.place, name, manifest, written)

    def _drop(self, name: str) -> None:
        try:
            self.place.remove(name, MANIFEST)
        except Exception:  # it has no manifest, so no reader takes it for one
            return

    def _prune(self) -> None:
        try:
            self._hold.check()
        except Exception:  # the place is another's now, or away
            return
        self._count_older()
        for name in to_remove(self._whole, self._broken, self._keep):
            with contextlib.suppress(Exception):  # it is tried again after the next one
                self.place.remove(name, MANIFEST)
                self._whole.pop(name, None)
                self._broken = [each for each in self._broken if each[1] != name]

    def _count_older(self) -> None:
        """Count what earlier attempts left, which a restored run has not looked at: it goes and stays with the rest."""
        known = {*self._whole, *(name for _, name in self._broken)}
        with contextlib.suppress(Exception):  # the place is away: after the next one
            for number, name in self._numbered():
                if name in known:
                    continue
                try:
                    self._whole[name] = Reader(self.place, name).manifest
                except DamagedError:
                    self._broken.append((number, name))
                except TwinstepError:  # another version's, or not to be read now: it stays
                    continue

    def _note(self, name: str, reason: str, data: dict[str, Any]) -> None:
        with self._lock:
            self._notes.append(Note(name=name, reason=reason, data=data))
