"""A job spec's own step compiled ahead of time for its TPU slice, in a process of its own: `twinstep compile`.

`compile_spec` starts the process, which is `python -m twinstep.worker.train.ahead`: spec in, report out, one JSON line
each. libtpu wants its environment before it is loaded, aborts where it is unhappy, and takes gigabytes while it works.
No parameter is made: model and optimizers live on the meta device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from twinstep.spec.accelerator import TpuSpec
from twinstep.spec.errors import CompileError, SpecError, TwinstepError, UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.slices import parse_slice
from twinstep.worker.compile.aot import Ahead, check_divides, compile_ahead, need_libtpu
from twinstep.worker.compile.aot_report import AotReport, Effort
from twinstep.worker.data.batch import BATCH_DIMS, meta_batch
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.data.multi_hot import MULTI_HOT_DIMS, MultiHotSchema, meta_multi_hot
from twinstep.worker.embedding.optim import build_optimizers
from twinstep.worker.models.registry import build_meta_model
from twinstep.worker.train.asked import sizes_of, strategies_of
from twinstep.worker.train.environment import cache_path
from twinstep.worker.train.sparsecore import ahead_parts
from twinstep.worker.train.step import make_train_step
from twinstep.worker.train.tables import cores_of_slice

TIME_LIMIT = 1800.0  # seconds; a step of many layers on a busy machine takes minutes
_LAST_LINES = 5
_KINDS = {each.code: each for each in (CompileError, SpecError, UnavailableError)}


def slice_name(spec: JobSpec) -> str:
    """Return the name of the slice, or slices, that a spec asks for.

    Raises:
        SpecError: it asks for no TPU, or there is no such slice.
    """
    if not isinstance(spec.accelerator, TpuSpec):
        raise SpecError(
            f"the spec asks for accelerator {spec.accelerator.kind!r}, which has no TPU topology",
            remedy="give --topology, v5p:2x2x1 say, or set accelerator: {kind: tpu, generation: v5p, topology: 2x2x1}",
        )
    return parse_slice(f"{spec.accelerator.generation}:{spec.accelerator.topology} × {spec.accelerator.slices}").name


def compile_spec(
    spec: JobSpec,
    *,
    topology: str | None = None,
    strategies: Sequence[str] | None = None,
    effort: Effort = "full",
    keep: bool = False,
    time_limit: float = TIME_LIMIT,
) -> AotReport:
    """Compile a spec's training step for a TPU slice in a process of its own, and return what the compiler says.

    Args:
        topology: name of the slice, `v5p:4x4x8`; None: the one of the spec's accelerator.
        strategies: names; None: those that the spec asks for.
        effort: `quick` to ask what a slice would need, `full` for what is going to run.
        keep: leave the program in the spec's compile cache, for a run on the slice to take.
        time_limit: seconds after which the process is ended.

    Raises:
        SpecError: there is no such slice.
        UnavailableError: libtpu is not installed, or its process ended without a word.
        CompileError: as `compile_ahead`, or it took longer than `time_limit`.
    """
    target = parse_slice(topology or slice_name(spec))
    need_libtpu()
    check_divides(spec.data.batch_size, target)
    request = {
        "spec": spec.model_dump(mode="json"),
        "topology": target.name,
        "strategies": strategies,
        "effort": effort,
        "keep": keep,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "twinstep.worker.train.ahead"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=time_limit,
            env=child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CompileError(
            f"the TPU compiler took longer than {time_limit:g} seconds for {target.name}",
            remedy="give it more time, or compile for a smaller slice",
        ) from None
    return read_answer(done.stdout, done.stderr, done.returncode)


def child_environment() -> dict[str, str]:
    """Return the environment of the process that compiles: this one's, and what libtpu needs."""
    from twinstep.worker.compile.aot import ENVIRONMENT

    return {**os.environ, **ENVIRONMENT}


def read_answer(out: str, errors: str, code: int) -> AotReport:
    """Return the report that the process printed.

    Raises:
        TwinstepError: the error that it printed, or that it printed nothing.
    """
    last = (out.strip().splitlines() or [""])[-1]
    try:
        answer: Any = json.loads(last)
    except json.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict) or not {"report", "problem"} & set(answer):
        said = " | ".join(line.strip() for line in errors.strip().splitlines()[-_LAST_LINES:])[-600:]
        raise UnavailableError(
            f"the TPU compiler's process ended with code {code} and no report: {said or 'it said nothing'}",
            remedy="check that libtpu fits this machine (x86-64 Linux) and that memory suffices",
        )
    if "problem" in answer:
        raise _KINDS.get(answer["code"], CompileError)(answer["problem"], remedy=answer["remedy"])
    return AotReport.from_json(answer["report"])


def compile_here(
    spec: JobSpec,
    *,
    topology: str,
    strategies: Sequence[str] | None = None,
    effort: Effort = "full",
    keep: Path | None = None,
) -> Ahead:
    """Compile a spec's training step in this process.

    Raises:
        DataError: the dataset, whose schema decides the tables, is missing or broken.
        CompileError: as `compile_ahead`.
    """
    dataset = load_dataset(spec.data)
    schema = dataset.schema
    model = build_meta_model(spec, schema)
    model.train()
    optimizers = build_optimizers(spec.optimizers, model)
    batch = meta_multi_hot(schema, spec.data) if isinstance(schema, MultiHotSchema) else meta_batch(schema, spec.data)
    how: dict[str, Any] = {
        "topology": topology,
        "strategies": strategies_of(spec.compile, spec.embedding.engine, model) if strategies is None else strategies,
        "batch_size": spec.data.batch_size,
        "sizes": sizes_of(spec),
        "effort": effort,
        "keep": keep,
    }
    if spec.embedding.engine != "sparsecore":
        return compile_ahead(
            make_train_step(clip_norm=spec.train.clip_norm),
            model,
            optimizers,
            batch,
            batch_dims=BATCH_DIMS | MULTI_HOT_DIMS,
            **how,
        )
    parts = ahead_parts(spec, dataset, model, optimizers, batch, cores_of_slice(topology))
    how |= {"batch_dims": parts.batch_dims, "around": parts.around}
    return compile_ahead(parts.train_step, parts.model, parts.optimizers, parts.batch, **how)


def main() -> None:
    """Read a request from standard input and print the answer, one JSON line."""
    # Libraries print to standard output; the answer must not be mixed with that.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.load(sys.stdin)
    torch.set_num_threads(1)
    spec = JobSpec.model_validate(request["spec"])
    try:
        done = compile_here(
            spec,
            topology=request["topology"],
            strategies=request["strategies"],
            effort=request["effort"],
            keep=cache_path(spec) if request["keep"] else None,
        )
        answer: dict[str, Any] = {"report": done.report.as_json()}
    except TwinstepError as error:
        answer = {"problem": error.problem, "remedy": error.remedy, "code": error.code}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
