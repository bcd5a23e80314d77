"""Candidates scored in batches with an exported model: `twinstep score`, to Parquet, CSV or JSON lines.

Scoring is what an evaluation does, batch for batch, so scores are the evaluation's to the last bit.

# Shapes: Q tasks, B rows, K candidate slots.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv, parquet
from torch import Tensor

from twinstep.spec.errors import ConflictError, DataError, SpecError, UnavailableError
from twinstep.spec.job import DATASETS_OF_FILES, JobSpec
from twinstep.spec.module import ModuleSpec
from twinstep.spec.parse import validate_spec
from twinstep.worker.data.datasets import Dataset, load_dataset
from twinstep.worker.data.events import Ints
from twinstep.worker.data.loader import Loader
from twinstep.worker.data.multi_hot import AnyBatch, AnySchema, MultiHotDataset
from twinstep.worker.data.samples import make_samples
from twinstep.worker.inference.content import model_of
from twinstep.worker.inference.export import open_export
from twinstep.worker.train.evaluate import evaluate
from twinstep.worker.train.scores import Scores
from twinstep.worker.train.stop import StopSignal

Part = Literal["held-out", "all"]
FORMATS = (".parquet", ".csv", ".jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What was scored."""

    out: str
    candidates: int
    scores: Scores
    int8: str | None


def score(
    where: str,
    out: Path,
    *,
    data: str | None = None,
    part: Part = "held-out",
    batch_size: int | None = None,
    source: Path | None = None,
) -> Scored:
    """Score candidates and write one row for each, in the order of samples: by time of their first candidate.

    Args:
        where: directory or URI of an export.
        out: file to write, .parquet, .csv or .jsonl; whole or not at all.
        data: folder or URI of the dataset's files, in place of the one in the spec.
        part: `held-out`: the events that the spec's split holds out; `all`: every event.
        batch_size: samples at a time; the spec's where none is given. Attention divides by the longest row of a
            batch, so another size gives other scores.
        source: of a user's own module: folder that its package lies in; None: where Python looks. The folder that the
            export names is not looked into, since to import what lies there is to run it.

    Raises:
        NotFoundError, DamagedError, ForeignError: see `open_export`.
        SpecError: `batch_size` is not one that a spec can have, `data` is given where the dataset has no files, or the
            package of a user's own module is not found.
        DataError: the data is missing, or of another schema than the model's.
        UnavailableError: `out` has another ending, or cannot be written.
        ConflictError: `out` is there already.
    """
    check_format(out)
    spec, schema, values, manifest = open_export(where)
    spec = _with_code(_with(spec, data, batch_size), source)
    dataset = load_dataset(spec.data)
    _check_schema(schema, dataset.schema)
    if part == "all":
        dataset = _all_of(dataset, spec)
    model = model_of(spec, schema, values, where=where)
    loader = Loader(dataset, spec.data, seed=spec.train.seed)
    rows = 0
    with _written(out) as write:
        chosen = _candidates(dataset, spec.data.batch_size)

        def each(batch: AnyBatch, logits_QBK: Tensor) -> None:
            nonlocal rows
            table = _table(next(chosen), batch, logits_QBK, schema)
            rows += len(table)
            write(table)

        scores = evaluate(model, loader, schema, max_batches=None, stop=StopSignal(), each=each)
    assert scores is not None, "nobody asks for a stop"  # noqa: S101
    return Scored(out=str(out), candidates=rows, scores=scores, int8=manifest.about.get("int8"))


def check_format(out: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed.

    Raises:
        UnavailableError: it has another ending, or lies in no directory.
        ConflictError: it is there already.
    """
    if out.suffix not in FORMATS:
        raise UnavailableError(
            f"{out} ends in none of {', '.join(FORMATS)}", remedy=f"--out {out.stem or 'scores'}.parquet"
        )
    if out.is_dir() or not out.parent.is_dir():
        why = "it is a directory" if out.is_dir() else f"there is no directory {out.parent}"
        raise UnavailableError(f"scores cannot be written to {out}: {why}", remedy="--out scores.parquet")
    if out.exists():
        raise _there_already(out)


def _there_already(out: Path) -> ConflictError:
    return ConflictError(f"{out} is there already", remedy=f"give another --out, or: rm {out}")


def _with(spec: JobSpec, data: str | None, batch_size: int | None) -> JobSpec:
    """Return the spec of an export with other files of its dataset, or batches of another size.

    Scores are computed here, eagerly: what the devices ask for that the model was trained on is no matter.
    """
    if data is not None and spec.data.dataset not in DATASETS_OF_FILES:
        raise SpecError(
            f"the model was trained on {spec.data.dataset}, which is not read from files that can be given: {data}",
            remedy=f"leave --input out; it is for models of {', '.join(DATASETS_OF_FILES)}",
        )
    changed = {name: value for name, value in (("path", data), ("batch_size", batch_size)) if value is not None}
    parts = spec.model_dump(mode="json", include={"name", "model", "data"})
    asked = parts | {"data": parts["data"] | changed, "compile": {"backend": "eager"}}
    return spec.model_copy(update={"data": validate_spec(asked, source="what to score").data})


def _with_code(spec: JobSpec, source: Path | None) -> JobSpec:
    """Return the spec with the place of a user's own module that was given here, not with the export's."""
    model = spec.model
    if not isinstance(model, ModuleSpec):
        if source is not None:
            raise SpecError(
                f"the model is Twinstep's {model.kind}, and needs no code from {source}", remedy="leave --source out"
            )
        return spec
    top = model.factory.partition(":")[0].partition(".")[0]
    if source is None and top not in sys.modules and importlib.util.find_spec(top) is None:
        named = (
            "" if model.source is None else f"; the folder that the export names is not taken unasked: {model.source}"
        )
        raise SpecError(
            f"the export is of {model.factory}, and Python finds no {top}{named}",
            remedy=f"--source FOLDER, where {top} lies whose code you trust, or have it on PYTHONPATH",
        )
    place = None if source is None else str(source)
    return spec.model_copy(update={"model": model.model_copy(update={"source": place})})


def _check_schema(model: AnySchema, data: AnySchema) -> None:
    """Hold data against the schema that a model was trained with: tables may be larger than the data needs.

    Raises:
        DataError: features, tasks or tables differ, or ids would lie outside a table.
    """
    fixed = {
        name: getattr(model, name)
        for name in ("contextual", "item_features", "action_bits", "dense", "features", "tasks")
        if hasattr(model, name)
    }
    rows = {table.name: table.rows for table in model.tables}
    wrong = [name for name, value in fixed.items() if getattr(data, name, None) != value]
    wrong += [
        f"table {t.name} ({t.rows} rows, trained {rows.get(t.name, 0)})"
        for t in data.tables
        if t.rows > rows.get(t.name, 0)
    ]
    if wrong:
        raise DataError(
            f"the data is of another schema than the model's: {', '.join(wrong)}",
            remedy="give data with the features, tasks and ids of the model's; data.rows enlarges tables",
        )


def _all_of(dataset: Dataset | MultiHotDataset, spec: JobSpec) -> Dataset | MultiHotDataset:
    """Return the dataset with every event, or row, held out."""
    if isinstance(dataset, MultiHotDataset):
        return replace(dataset, eval=np.concatenate((dataset.train, dataset.eval)))
    log = replace(dataset.log, held_out=np.ones_like(dataset.log.held_out))
    every = make_samples(
        dataset.events, log, held_out=True, num_candidates=spec.data.eval_slots, uih_len=spec.data.uih_len
    )
    return replace(dataset, held_out=np.ones_like(dataset.held_out), log=log, eval=every)


def _candidates(dataset: Dataset | MultiHotDataset, size: int) -> Iterator[dict[str, Ints]]:
    """Yield, batch by batch, what candidates are: columns of as many numbers as the batch has of them."""
    for first in range(0, len(dataset.eval), size):
        if isinstance(dataset, MultiHotDataset):
            yield {"row": dataset.eval[first : first + size]}
            continue
        samples, events = dataset.eval, dataset.events
        own = slice(first, first + size)
        entries = [np.arange(*ends) for ends in zip(samples.cand_start[own], samples.cand_end[own], strict=True)]
        event = dataset.log.event[np.concatenate(entries)]
        yield {"event": event, "user": events.user[event], "item": events.item[event], "time": events.time[event]}


def _table(candidates: dict[str, Ints], batch: AnyBatch, logits_QBK: Tensor, schema: AnySchema) -> pa.Table:
    """Return a batch's candidates with score, logit and label of each task."""
    real_BK = batch.weights[0] > 0
    columns: dict[str, Any] = dict(candidates)
    for task, logits_BK, labels_BK in zip(schema.tasks, logits_QBK, batch.labels, strict=True):
        logit = logits_BK[real_BK].numpy()
        if task.kind == "binary":
            columns[task.name] = torch.sigmoid(torch.from_numpy(logit)).numpy()
            columns[f"{task.name}_logit"] = logit
        else:
            columns[task.name] = logit
        columns[f"{task.name}_label"] = labels_BK[real_BK].numpy()
    return pa.table(columns)


def _give_name(draft: Path, out: Path) -> None:
    """Give a file its name, unless that is taken by now.

    Raises:
        ConflictError: it is.
    """
    try:
        os.link(draft, out)
    except FileExistsError:
        raise _there_already(out) from None
    except OSError:  # a file system without hard links
        if out.exists():
            raise _there_already(out) from None
        draft.replace(out)


@contextlib.contextmanager
def _written(out: Path) -> Iterator[Any]:
    """Give a function that appends a table to the file; the file has its name once all are written."""
    draft = out.with_name(f".{out.name}.{uuid.uuid4().hex}")  # another may write a file of this name at the same time
    writer: Any = None

    def write(table: pa.Table) -> None:
        nonlocal writer
        if out.suffix == ".jsonl":
            writer = writer or draft.open("w", encoding="utf-8")
            writer.writelines(json.dumps(row) + "\n" for row in table.to_pylist())
            return
        kind = parquet.ParquetWriter if out.suffix == ".parquet" else csv.CSVWriter
        writer = writer or kind(draft, table.schema)
        writer.write_table(table)

    try:
        yield write
        if writer is not None:
            writer.close()
            _give_name(draft, out)
    except OSError as error:
        raise UnavailableError(
            f"scores cannot be written to {out}: {error.strerror or error}", remedy="--out with a place that has room"
        ) from error
    finally:
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close()
        draft.unlink(missing_ok=True)
