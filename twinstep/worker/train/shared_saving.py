"""Checkpoints of a run of several processes: each writes its own rows where all see the place, else process 0 all.

Process 0 decides when, holds the place and speaks of what happened; going on from a checkpoint, it reads, and all take
up what it read.
"""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed, nn
from torch.optim import Optimizer

from twinstep.spec.errors import UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.worker.checkpoint.content import live_tensors, load_tensors
from twinstep.worker.checkpoint.crew import Member, prefix_of
from twinstep.worker.checkpoint.manifest import MANIFEST, Manifest
from twinstep.worker.checkpoint.place import open_place
from twinstep.worker.checkpoint.read import Reader, SavedRows
from twinstep.worker.checkpoint.shares import Held
from twinstep.worker.compile.state import materialise
from twinstep.worker.embedding.declared import all_declared, declared
from twinstep.worker.train.declared import has_declared
from twinstep.worker.train.engines import Stepper
from twinstep.worker.train.processes import Together
from twinstep.worker.train.saving import Saving, only_finite, run_tensors
from twinstep.worker.train.writers import HASTE_S, FirstsTurn, StoreCrew

Value = TypeVar("Value")
SEEN = "shared.json"
"""File beside the checkpoints by which processes find out whether they see the same place."""
TRIAL = "shared"
"""Beginning of the name of what they write, as they would a checkpoint, to find out whether they can."""


class SharedSaving:
    """What a loop asks of checkpoints, for all processes at once; each call is made by all."""

    def __init__(
        self,
        spec: JobSpec,
        where: str | Path,
        together: Together,
        *,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        stepper: Stepper,
        tell: Callable[[str, str, dict[str, Any]], None],
    ) -> None:
        self._spec, self._together, self._stepper, self._where = spec, together, stepper, where
        self._model, self._optimizers = model, optimizers
        self._saving: Saving | None = None
        self._member: Member | None = None
        self._crew: StoreCrew | None = None
        self.key = ""
        store = distributed.distributed_c10d._get_default_store()
        self._turn = FirstsTurn(together.process, store)
        self._saving = self._do(
            lambda: Saving(spec, where, model=model, optimizers=optimizers, stepper=stepper, tell=tell)
        )
        self._sharded = self._all_see(where)
        if not self._sharded:
            if self._saving is not None:
                text = f"other processes do not see {where}, or cannot write: process 0 writes all of each checkpoint"
                tell("checkpoints_by_one", text, {})
            return
        self._crew = StoreCrew(together.process, store)
        if self._saving is not None:
            self._saving.join(self._crew)
        else:
            self._member = Member(open_place(where), self._crew, only_finite=only_finite(spec))

    def _do(self, work: Callable[[], Value]) -> Value | None:
        """Run process 0's part, None elsewhere; where it fails, all fail. However long it takes, it is waited for."""
        problem, found = None, None
        try:
            found = work() if self._together.first else None
        except Exception as error:
            problem = error
        self._turn.over()
        told = self._together.of_first(None if problem is None else f"{problem}")
        if problem is not None:
            raise problem
        if told is not None:
            raise UnavailableError(f"process 0 failed: {told}", remedy="see the log of process 0")
        return found

    def _all_see(self, where: str | Path) -> bool:
        """Say whether what process 0 writes to the place is there for all others, and they can write beside it."""
        token = uuid.uuid4().hex
        try:
            if self._saving is not None:
                self._saving.place.put(SEEN, token.encode())
                self._saving.place.begin(f"{TRIAL}-{token}")
        except Exception:  # a disk that is full now, a store that is away: process 0 says so when it writes
            token = ""
        token = self._together.of_first(token)
        seen = all(self._together.gather(bool(token) and self._can_use(where, token)))
        if self._saving is not None and token:
            with contextlib.suppress(Exception):  # no reader takes it for a checkpoint
                self._saving.place.remove(f"{TRIAL}-{token}", MANIFEST)
        return seen

    def _can_use(self, where: str | Path, token: str) -> bool:
        """Say whether this process sees what process 0 wrote, and can write where process 0 began."""
        try:
            place = open_place(where)
            if place.get(SEEN) != token.encode():
                return False
            place.write(f"{TRIAL}-{token}", prefix_of(self._together.process.rank), [token.encode()])
        except Exception:  # a file system's OSError, or whatever the client of a store raises
            return False
        return True

    @property
    def last_good(self) -> int | None:
        """Step of the newest checkpoint that is whole."""
        return self._together.of_first(None if self._saving is None else self._saving.last_good)

    @property
    def kept(self) -> tuple[str, int | None]:
        """Where checkpoints lie, and the step of the newest that is whole; only process 0 knows."""
        return ("", None) if self._saving is None else self._saving.kept

    def restore(self) -> Manifest | None:
        """Bring back the newest state that is whole, in every process."""
        for name, optimizer in self._optimizers.items():
            materialise(name, optimizer)
        if self._sharded and has_declared(self._model):
            return self._restore_own_rows()
        found = self._do(lambda: None if self._saving is None else self._saving.restore())
        manifest = self._together.of_first(found)
        if manifest is None:
            return None
        group = self._together.host  # the live state is the host's, whatever device it is trained on
        for tensor in live_tensors(self._model, self._optimizers).values():
            held = tensor.detach().contiguous()
            distributed.broadcast(held, src=0, group=group)
            tensor.detach().copy_(held)
            if (known := declared(tensor)) is not None:
                known.is_whole()
        self._take_up()
        return manifest

    def _take_up(self) -> None:
        """Let all processes but the first, which did it already, take the state from their live models."""
        random = self._stepper.random_state()
        distributed.broadcast(random, src=0, group=self._together.host)
        if not self._together.first:
            self._stepper.push()
            self._stepper.set_random_state(random)

    def _restore_own_rows(self) -> Manifest | None:
        """Bring back the newest state that is whole: each process reads what all have, and its own rows of tables."""
        name = self._together.of_first(self._do(lambda: None if self._saving is None else self._saving.find()))
        if name is None:
            return None
        reader = Reader(open_place(self._where), name)
        live, there = live_tensors(self._model, self._optimizers), reader.manifest.tensors
        apart = dict(all_declared(live))
        for path, known in apart.items():
            if path in there:
                known.source = SavedRows(reader, path)
        values = reader.tensors(dict.fromkeys(path for path in there if path not in apart))
        load_tensors(values, self._model, self._optimizers)
        self._do(lambda: None if self._saving is None else self._saving.take(reader.manifest, values))
        self._take_up()
        return reader.manifest

    def due(self, step: int, *, scored: bool = False, ends: bool = False) -> bool:
        """Say whether the state after `step` is to be saved now; `scored`: it was evaluated; `ends`: it is the last."""
        here = self._saving is not None and self._saving.due(step, scored=scored, ends=ends)
        return self._together.of_first(here)

    def save(self, step: int, about: dict[str, Any], *, scores: Mapping[str, float | None] | None = None) -> None:
        """Save the state after `step`."""
        held: Held = {}
        if self._sharded:
            self.finish()  # what is being written may be what own rows are brought into
            held = self._stepper.pull_own()
        else:
            self._stepper.pull()

        def save() -> None:
            if self._saving is not None:
                self._saving.key = self.key
                self._saving.save(step, about, scores=scores, held=held)

        if self._member is not None:  # all copy at once, and agree on it afterwards
            tensors = run_tensors(self._spec, self._model, self._optimizers, self._stepper)
            self._member.save(tensors, held)
        self._do(save)

    def finish(self) -> None:
        """Wait for what is being written."""
        if self._member is not None:
            self._member.finish()
        if self._saving is not None:
            self._saving.finish()

    def save_last(self, step: int, about: dict[str, Any], *, within: float) -> bool:
        """Save the state after `step` where it is not saved yet, and wait until it is written."""
        ends = time.monotonic() + within
        if self._member is not None:  # as long as process 0 does, who would be waited for else
            self._member.finish(within)
        wanted = self._do(lambda: self._saving is not None and self._saving.wants_last(step, within=within))
        if self._together.of_first(wanted):
            self.save(step, about)
        if self._member is not None:
            self._member.finish(max(0.0, ends - time.monotonic()))
        has = self._do(lambda: self._saving is not None and self._saving.has_last(step, within=ends - time.monotonic()))
        return bool(self._together.of_first(has))

    def look(self) -> None:
        """Report what happened beside the run."""
        if self._saving is not None:
            self._saving.look()

    def close(self) -> None:
        """Wait for what is being written."""
        if self._crew is not None and isinstance(sys.exception(), Exception):
            self._crew.silence_s = HASTE_S  # another process may be lost
        if self._saving is not None:
            self._saving.close()
        if self._member is not None:
            self._member.finish()
        if self._crew is not None:
            self._crew.close()

    def give_up(self) -> None:
        """Wait for nothing that is being written, which will not count."""
        if self._saving is not None:
            self._saving.give_up()
        if self._member is not None:
            self._member.give_up()
        if self._crew is not None:
            self._crew.close()
