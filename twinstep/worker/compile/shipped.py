"""Programs that were compiled ahead of time for a slice, kept for the run: written by preflight, taken by the worker.

An entry is one file of a `ProgramStore`: the executable, what a Runner needs beside it, the report, and what it was
made for. It is taken only if every field of its CompileKey, the slice, the order of its devices and the versions of
jax, jaxlib, libtpu and jax-tpu-embedding are those of here; else the step is compiled, and the reason is told. What
does not shape a TPU's program (threads, C++ compiler, processor of the host) is no part of that key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from twinstep.worker.compile.kept import Kept, Made, pack, unpack
from twinstep.worker.compile.key import CompileKey, reason, versions
from twinstep.worker.compile.lifted import Lifted
from twinstep.worker.compile.store import ProgramStore

FOLDER = "ahead"
"""Below the directory of the compile cache."""
STACK = ("torch", "torchax", "jax", "jaxlib", "libtpu", "jax-tpu-embedding")
OF_THE_HOST = ("C++", "processor")
ON_META = " on meta"  # of a tensor whose program is compiled where its values are not
ABOUT, REPORT = "about", "report"


def slice_key(key: CompileKey, target: str) -> CompileKey:
    """Return the key of a step's program for a slice: the same on every host with the same versions."""
    stack = tuple(each for each in versions(STACK) if each[0] not in OF_THE_HOST)
    state, batch = (
        tuple((name, shape, kind.replace(ON_META, "")) for name, shape, kind in infos)
        for infos in (key.state, key.batch)
    )
    return dataclasses.replace(key, state=state, batch=batch, threads=0, backend=f"xla/{target}", versions=stack)


def described(devices: Sequence[Any]) -> list[str]:
    """Return kind and place of each device, in order: a program is for devices in the order it was compiled for."""
    return [
        f"{each.device_kind} {getattr(each, 'coords', None) or each.id} {getattr(each, 'core_on_chip', 0)}"
        + (f" of slice {joined}" if (joined := getattr(each, "slice_index", 0)) else "")
        for each in devices
    ]


@dataclass(frozen=True, slots=True)
class Missed:
    """Why no stored program is used."""

    why: str
    """Empty where none is kept for any step."""


class Shipped:
    """Stored programs of a slice.

    Args:
        directory: of the compile cache.
        target: name of the slice, v5p:4x4x8.
    """

    def __init__(self, directory: Path, target: str) -> None:
        self.target = target
        self._store = ProgramStore(directory / FOLDER)

    def put(
        self, key: CompileKey, kept: Kept, parts: Mapping[str, bytes], *, devices: Sequence[Any], report: Any
    ) -> Path | None:
        """Keep a program under its `slice_key`; return its file, or None where the step cannot be kept.

        Args:
            parts: the backend's, as its `load` takes them.
            devices: of the mesh, in its order.
            report: JSON values.
        """
        entry = pack(kept, parts)
        about = {"key": dataclasses.asdict(key), "slice": self.target, "devices": described(devices)}
        if entry is None:
            return None
        whole = {ABOUT: json.dumps(about).encode(), REPORT: json.dumps(report).encode(), **entry}
        return self._store.file(key.text) if self._store.put(key.text, whole) else None

    def take(self, key: CompileKey, lifted: Lifted, reached: Mapping[str, Tensor]) -> Made | Missed:
        """Return the program of a step's own key, loaded into an XLA backend; or why there is none."""
        wanted = slice_key(key, self.target)
        was_there = self._store.file(wanted.text).exists()
        parts = self._store.get(wanted.text)
        if parts is None:
            return Missed("its file is torn, or not this user's own" if was_there else self._nearest(wanted))
        try:
            there, here = json.loads(parts[ABOUT])["devices"], described(lifted.backend.layout.devices())  # type: ignore[attr-defined]
            if there != here:
                return Missed(
                    f"it is for {len(there)} devices from {there[0]} on, here are {len(here)} from {here[0]} on"
                )
            found = unpack(parts, reached)
            if found is None:
                return Missed("a tensor that the step closes over is not as it was")
            kept, backend_parts = found
            return Made(lifted.backend.load(backend_parts, kept.constants), kept, "ahead")
        except Exception as error:  # whatever unpickling or the runtime may raise of a program for another machine
            line = (str(error).strip().splitlines() or [""])[0][:200]
            return Missed(f"this machine cannot load it: {type(error).__name__}: {line}")

    def report(self, key: CompileKey) -> Any:
        """Return the report that is kept with a program, as JSON values; None where there is none."""
        parts = self._store.get(key.text)
        return None if parts is None else json.loads(parts[REPORT])

    def _nearest(self, wanted: CompileKey) -> str:
        """Say in what the stored program that is most like the wanted one differs from it."""
        best: tuple[int, str] | None = None
        for path, _, _ in self._store.entries():
            about = self._store.part(path, ABOUT)
            # An entry of another version may say something else there, and a key with other fields.
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                there = _as_key(json.loads(about or b"{}")["key"])
                differ = [field.name for field in dataclasses.fields(CompileKey)
                          if getattr(there, field.name) != getattr(wanted, field.name)]  # fmt: skip
                if differ and (best is None or len(differ) < best[0]):
                    best = len(differ), reason(there, wanted)
        return "" if best is None else f"the one that is stored differs: {best[1]}"


def _as_key(fields: Mapping[str, Any]) -> CompileKey:
    return CompileKey(**{name: _frozen(value) for name, value in fields.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
