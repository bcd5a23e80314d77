"""What an export holds: a model's tensors, tables as float32 or int8, and the words that make a model of them again.

Paths are the checkpoint's (`parameter:…`, `buffer:…`). A table as int8 is three tensors: `codes:NAME` [rows, dim] int8,
and `low:NAME`, `high:NAME` [rows, 1] or [1, 1] float64, the ends of its range, of each row or of the whole table; see
`embedding/sparsecore/int8.py` for the formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from twinstep.spec.errors import DataError
from twinstep.spec.job import JobSpec
from twinstep.worker.checkpoint.content import live_tensors
from twinstep.worker.checkpoint.errors import ForeignError
from twinstep.worker.checkpoint.manifest import Manifest
from twinstep.worker.data.events import DataSchema
from twinstep.worker.data.multi_hot import AnySchema, MultiHotSchema
from twinstep.worker.embedding.collection import EmbeddingTable
from twinstep.worker.embedding.sparsecore.int8 import dequantize, quantize
from twinstep.worker.models.registry import build_model

Ranges = Literal["row", "table"]
KIND = "export"
_PARAMETER = "parameter:"
_SCHEMAS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in (DataSchema, MultiHotSchema)}
REMEDY = "export the run again with this version of Twinstep: twinstep export JOB --out DIRECTORY"


def model_tensors(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors that a model has, without what optimizers and generators keep."""
    return {path: value for path, value in values.items() if path.startswith((_PARAMETER, "buffer:"))}


def table_paths(model: nn.Module) -> list[str]:
    """Return the paths of a model's embedding tables."""
    return [f"{_PARAMETER}{name}.weight" for name, each in model.named_modules() if isinstance(each, EmbeddingTable)]


def as_int8(values: Mapping[str, Tensor], tables: list[str], ranges: Ranges) -> dict[str, Tensor]:
    """Return the tensors with the tables among them as int8.

    Args:
        ranges: `row`: each row has a range of its own; `table`: all rows share one.

    Raises:
        DataError: a table holds NaN or infinity.
    """
    found = dict(values)
    for path in tables:
        name = path.removeprefix(_PARAMETER)
        weight = found.pop(path).detach().numpy()
        if not np.isfinite(weight).all():
            raise DataError(f"the table {name} holds NaN or infinity", remedy="export an earlier checkpoint: --step")
        axis = 1 if ranges == "row" else None
        low, high = (reduce(weight, axis=axis, keepdims=True).astype(np.float64) for reduce in (np.min, np.max))
        found[f"codes:{name}"] = torch.from_numpy(quantize(weight, low, high))
        found[f"low:{name}"], found[f"high:{name}"] = torch.from_numpy(low), torch.from_numpy(high)
    return found


def as_float(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with tables as float32 again."""
    found = {path: value for path, value in values.items() if not path.startswith(("codes:", "low:", "high:"))}
    for path, codes in values.items():
        if path.startswith("codes:"):
            name = path.removeprefix("codes:")
            low, high = (values[f"{end}:{name}"].numpy() for end in ("low", "high"))
            found[f"{_PARAMETER}{name}"] = torch.from_numpy(dequantize(codes.numpy(), low, high))
    return found


def about_of(spec: JobSpec, schema: AnySchema, **more: Any) -> dict[str, Any]:
    """Return what an export's manifest says of it."""
    kind = type(schema).__name__
    described = {"kind": kind, "value": _SCHEMAS[kind].dump_python(schema, mode="json")}
    return {"kind": KIND, "spec": spec.model_dump(mode="json"), "schema": described, **more}


def spec_of(manifest: Manifest, *, where: str) -> JobSpec:
    """Return the spec that a checkpoint or an export was trained from.

    Raises:
        ForeignError: this version cannot read it.
    """
    try:
        return JobSpec.model_validate(manifest.about["spec"])
    except (KeyError, ValidationError) as error:
        raise ForeignError(
            f"the spec in {where} is not one that this version of Twinstep reads: {str(error)[:200]}",
            remedy="go on with the version of Twinstep that wrote it",
        ) from None


def schema_of(manifest: Manifest, *, where: str) -> AnySchema:
    """Return the schema in an export.

    Raises:
        ForeignError: this version cannot read it.
    """
    try:
        said = manifest.about["schema"]
        schema: AnySchema = _SCHEMAS[said["kind"]].validate_python(said["value"])
    except (KeyError, TypeError, ValidationError) as error:
        raise ForeignError(
            f"the schema in {where} is not one that this version of Twinstep reads: {str(error)[:200]}", remedy=REMEDY
        ) from None
    return schema


def model_of(spec: JobSpec, schema: AnySchema, values: Mapping[str, Tensor], *, where: str) -> nn.Module:
    """Return the model, filled and ready to score.

    Raises:
        ForeignError: the tensors are not those of the model that this version builds from the spec.
    """
    model = build_model(spec, schema)
    live = live_tensors(model, {})
    faults = [
        f"{path}: {tuple(values[path].shape) if path in values else 'missing'}, "
        f"expected {tuple(live[path].shape) if path in live else 'none'}"
        for path in {**live, **values}
        if path not in live or path not in values or live[path].shape != values[path].shape
    ]
    if faults:
        more = f", and {len(faults) - 4} more" if len(faults) > 4 else ""
        raise ForeignError(f"{where} is not of the model in its spec: {'; '.join(faults[:4])}{more}", remedy=REMEDY)
    with torch.no_grad():
        for path, tensor in live.items():
            tensor.copy_(values[path])
    return model.eval()
