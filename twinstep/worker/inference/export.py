"""From a checkpoint to an export: `twinstep export`. Nothing is at the export's place before all of it is."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from twinstep.spec.errors import ConflictError, NotFoundError, UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.worker.checkpoint.errors import DamagedError, ForeignError
from twinstep.worker.checkpoint.manifest import MANIFEST, Manifest
from twinstep.worker.checkpoint.place import LocalPlace, Place, in_words, open_place
from twinstep.worker.checkpoint.read import Reader
from twinstep.worker.checkpoint.saver import NAME
from twinstep.worker.checkpoint.write import write_whole
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.loader import Loader
from twinstep.worker.inference.content import (
    KIND,
    REMEDY,
    Ranges,
    about_of,
    as_float,
    as_int8,
    model_of,
    model_tensors,
    schema_of,
    spec_of,
    table_paths,
)
from twinstep.worker.train.evaluate import evaluate
from twinstep.worker.train.stop import StopSignal
from twinstep.worker.train.versions import software_versions


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    place: str
    checkpoint: str
    """Name of the checkpoint it was made from."""
    step: int
    bytes: int
    int8: Ranges | None
    scores: dict[str, dict[str, float | None]]
    """Held-out scores by what the tables hold, `float32` and `int8`; empty where none were asked for."""

    @property
    def auc_loss(self) -> float | None:
        """What int8 costs of the first task's AUC; None where it was not measured, or is undefined."""
        before, after = (self.scores.get(kind, {}).get("auc") for kind in ("float32", "int8"))
        return None if before is None or after is None else before - after

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"auc_loss": self.auc_loss}


def export(source: str, out: str, *, step: int | None = None, int8: Ranges | None = None) -> Exported:
    """Write an export of a checkpoint; with `int8`, tables are int8, and what that costs is measured on held-out data.

    Args:
        source: directory or URI of a checkpoint, or of a run's checkpoints: then the newest that is whole.
        out: directory or URI that is not there yet.
        step: the checkpoint after this step, of a run's.

    Raises:
        NotFoundError: there is no checkpoint.
        DamagedError: none is whole.
        ForeignError: it is of another version.
        ConflictError: something is at `out` already.
        DataError: the dataset of the run's spec is missing.
        UnavailableError: `out` cannot be written.
    """
    place, name = _split(out)
    _refuse_taken(place, name, out)
    reader, values = _newest(source, step)
    where = f"{source} ({reader.name})"
    if reader.manifest.about.get("kind") == KIND:
        raise ForeignError(f"{source} is an export already", remedy="give a run, or one of its checkpoints")
    spec = spec_of(reader.manifest, where=where)
    dataset = load_dataset(spec.data)
    tensors = model_tensors(values)
    model = model_of(spec, dataset.schema, tensors, where=where)
    scores: dict[str, dict[str, float | None]] = {}
    if int8 is not None:
        loader = Loader(dataset, spec.data, seed=spec.train.seed)
        smaller = as_int8(tensors, table_paths(model), int8)
        for kind, held in (("float32", tensors), ("int8", as_float(smaller))):
            model = model_of(spec, dataset.schema, held, where=where)
            found = evaluate(model, loader, dataset.schema, max_batches=None, stop=StopSignal())
            scores[kind] = {} if found is None else found.values()
        tensors = smaller
    about = about_of(
        spec, dataset.schema, checkpoint=reader.name, int8=int8, scores=scores, versions=software_versions()
    )
    manifest = Manifest(
        number=reader.manifest.number,
        step=reader.manifest.step,
        written_at=time.time(),
        scores=reader.manifest.scores,
        about=about,
        files={},
        tensors={},
    )
    whole = _written(place, name, tensors, manifest, out=out)
    size = sum(whole.files.values())
    return Exported(place=out, checkpoint=reader.name, step=whole.step, bytes=size, int8=int8, scores=scores)


def open_export(where: str) -> tuple[JobSpec, Any, dict[str, Tensor], Manifest]:
    """Return an export's spec, schema and tensors, tables as float32, and its manifest.

    Raises:
        NotFoundError: nothing is there.
        DamagedError: a file is missing, short or damaged.
        ForeignError: it is no export, or one of another version.
    """
    place, name = _split(where)
    if name not in place.names():
        raise NotFoundError(f"there is no export at {where}", remedy="twinstep export JOB --out DIRECTORY makes one")
    if any(NAME.match(each) for each in open_place(where).names()):
        raise NotFoundError(
            f"{where} holds a run's checkpoints, not an export", remedy=f"twinstep export {where} --out DIRECTORY"
        )
    try:
        reader = Reader(place, name)
        if reader.manifest.about.get("kind") != KIND:
            raise ForeignError(
                f"{where} is a checkpoint, not an export", remedy=f"twinstep export {where} --out DIRECTORY"
            )
        values = reader.tensors()
    except DamagedError as error:
        raise DamagedError(error.problem, remedy=REMEDY) from None
    spec, schema = spec_of(reader.manifest, where=where), schema_of(reader.manifest, where=where)
    return spec, schema, as_float(values), reader.manifest


def _split(where: str) -> tuple[Place, str]:
    """Return the place that a directory lies in, and its name there."""
    text = where.rstrip("/")
    parts = urlsplit(text)
    path = PurePosixPath(text if not parts.scheme else f"{parts.netloc}{parts.path}")
    if path.name in ("", ".", ".."):
        raise NotFoundError(f"{where!r} is no name for a directory", remedy="give the path of one, exports/mine")
    if not parts.scheme:
        return open_place(str(path.parent)), path.name
    return open_place(text.removesuffix(f"/{path.name}")), path.name


def _refuse_taken(place: Place, name: str, out: str) -> None:
    if name in place.names() or (place.url and _there(place, name)):
        raise _taken(out)


def _taken(out: str) -> ConflictError:
    return ConflictError(f"there is something at {out} already", remedy="give --out a name that is not taken")


def _written(place: Place, name: str, tensors: Mapping[str, Tensor], manifest: Manifest, *, out: str) -> Manifest:
    """Write an export, whole or not at all, whatever ends it; one that another has written meanwhile stays.

    Raises:
        ConflictError: another was quicker.
        UnavailableError: `out` cannot be written.
    """
    own = secrets.token_hex(4)  # two exports to one name never write the same file; the manifest says whose count
    if isinstance(place, LocalPlace):
        place = LocalPlace(place.path, mark=f"-{own}")
    prefix = f"data-{own}"
    _refuse_taken(place, name, out)  # reading and measuring took their time

    def still_free() -> None:
        with contextlib.suppress(FileNotFoundError):
            place.read(name, MANIFEST)
            raise _taken(out)

    whole = {path: value.contiguous() for path, value in tensors.items()}
    try:
        return write_whole(place, name, whole, manifest, check=still_free, prefix=prefix)
    except BaseException as error:  # Ctrl-C too, a disk's OSError, or whatever the client of a store raises
        with contextlib.suppress(Exception):
            place.abandon(name, MANIFEST, prefix)
        if not isinstance(error, Exception) or isinstance(error, ConflictError):
            raise
        with contextlib.suppress(OSError):
            _refuse_taken(place, name, out)
        raise UnavailableError(
            f"the export cannot be written to {out}: {in_words(error)}", remedy="give --out a place with room"
        ) from error


def _there(place: Place, name: str) -> bool:
    """Say whether a file of that name, which is no directory, is in the way."""
    try:
        return place.get(name) is not None
    except OSError:
        return True


def _newest(source: str, step: int | None) -> tuple[Reader, dict[str, Tensor]]:
    """Return the newest checkpoint that is whole, of those at `source`, and its model's tensors."""
    problem: DamagedError | None = None
    for place, name in _candidates(source, step):
        try:
            reader = Reader(place, name)
            paths = model_tensors(dict.fromkeys(reader.manifest.tensors))  # type: ignore[arg-type]
            return reader, reader.tensors(paths)
        except DamagedError as error:
            problem = problem or error
    if problem is not None:
        raise DamagedError(
            f"no checkpoint at {source} is whole; the newest: {problem.problem}", remedy="bring its files back"
        )
    wanted = f" of step {step}" if step is not None else ""
    raise NotFoundError(
        f"there is no checkpoint{wanted} at {source}",
        remedy="give a job, a checkpoint, or the place of a run's checkpoints; a run that has ended has one, "
        "unless checkpoint.at_end is false",
    )


def _candidates(source: str, step: int | None) -> Iterator[tuple[Place, str]]:
    """Yield checkpoints, the newest first: the one at `source`, or those in it."""
    place, name = _split(source)
    if NAME.match(name):
        yield place, name
        return
    inside = open_place(source)
    found = [(int(match[1]), int(match[2]), each) for each in inside.names() if (match := NAME.match(each))]
    for _, done, each in sorted(found, reverse=True):
        if step is None or done == step:
            yield inside, each
