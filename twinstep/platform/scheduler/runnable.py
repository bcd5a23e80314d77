"""Can a spec run here? Asked before anything is stored: what a cluster would refuse is refused to its submitter."""

from __future__ import annotations

from dataclasses import replace
from difflib import unified_diff
from functools import lru_cache
from pathlib import Path

from twinstep.platform.scheduler.render.render import RenderedRun, render
from twinstep.platform.scheduler.validate.check import check
from twinstep.platform.scheduler.validate.schemas import CustomResources
from twinstep.platform.settings import Settings
from twinstep.platform.store.records import JobDetail
from twinstep.preflight.check import check_fits
from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.module import ModuleSpec
from twinstep.spec.parse import validate_spec


def check_runnable(spec: JobSpec, settings: Settings) -> tuple[str, ...]:
    """Raise SpecError unless a backend of this control plane takes `spec`; return what speaks against it all the same.

    Raises:
        SpecError: there is no cluster for it, it does not fit its accelerator, or the cluster would refuse what it
            renders to.
    """
    kind, cluster = spec.accelerator.kind, settings.cluster
    if kind == "cpu" and (why := _no_machine(settings)):
        raise _refused(
            why[0],
            Fault(
                field="accelerator.kind",
                problem=f"cannot run on this control plane, which {why[1]}",
                given="'cpu'",
                allowed="tpu, gpu" if cluster is not None else "none: it has no cluster either",
                remedy="kind: tpu, or gpu",
            ),
            "run it on your own machine: twinstep up, or twinstep train",
        )
    if kind == "cpu" and isinstance(spec.model, ModuleSpec) and not settings.runs_modules:
        raise _refused(
            "its model is code of its submitter's own, which does not run on this control plane's machine",
            Fault(
                field="model.kind",
                problem="cannot run on this control plane's own machine, which others reach",
                given="'module'",
                allowed="dlrmv3, dlrm" + (", or accelerator: tpu or gpu, in an image of yours" if cluster else ""),
                remedy="kind: dlrmv3, or a control plane that was started with --modules",
            ),
            "twinstep train runs it on your own machine; whoever runs this control plane may start it with --modules",
        )
    if kind == "cpu":
        return ()
    if cluster is None:
        raise _refused(
            f"no {kind} to run on here",
            Fault(
                field="accelerator.kind",
                problem="cannot run on this control plane, which has only its own machine",
                given=f"'{kind}'",
                allowed="cpu",
                remedy="kind: cpu, or a control plane with a cluster: twinstep up --kubeconfig FILE",
            ),
            "set accelerator: cpu to run it here, or start the control plane with a cluster: twinstep up --kubeconfig",
        )
    if spec.kubernetes.namespace not in cluster.namespaces:
        raise _refused(
            "its namespace is not one of this control plane's",
            Fault(
                field="kubernetes.namespace",
                problem="is not one that this control plane looks after",
                given=f"'{spec.kubernetes.namespace}'",
                allowed=", ".join(cluster.namespaces),
                remedy=f"namespace: {cluster.namespaces[0]}",
            ),
            f"set kubernetes.namespace: {cluster.namespaces[0]}",
        )
    return planned(spec, settings).warnings


def _no_machine(settings: Settings) -> tuple[str, str] | None:
    """Return why nothing runs on the control plane's own machine, as a summary and of itself; None where jobs may."""
    if settings.cluster is not None and settings.cluster.in_cluster:
        return "no machine of its own to run on", "is a pod without processors to spare"
    if settings.max_parallel_runs == 0:
        return "nothing runs on this control plane's own machine", "was started with --max-parallel 0"
    return None


def planned(spec: JobSpec, settings: Settings) -> RenderedRun:
    """Return what a spec would become in a cluster, checked as the cluster would; preflight's warnings beside its own.

    Raises:
        SpecError: it is no cluster's, does not fit its accelerator, or the cluster would refuse what it renders to.
    """
    cluster = settings.cluster
    warned = tuple(f"preflight: {each.problem}" for each in check_fits(spec))
    url = None if cluster is None else cluster.api_url
    found = render(spec, default_image=settings.worker_image, api_url=url, followed=True)
    check(found.objects, None if cluster is None or cluster.crds is None else _resources(cluster.crds))
    return replace(found, warnings=(*found.warnings, *warned))


def diff_of(job: JobDetail, spec: JobSpec, settings: Settings) -> str:
    """Return the unified diff from the manifests of a job's newest run to those it would have with `spec`.

    Both are rendered as that run, so that names differ only where the specs make them differ.
    """
    old, new = (
        as_run(each, settings, job_id=job.id, run_id=job.run_id, attempt=job.attempt)
        for each in (validate_spec(job.spec, source="the job's spec"), spec)
    )
    lines = unified_diff(old.splitlines(), new.splitlines(), f"attempt {job.attempt}", "planned", lineterm="", n=3)
    return "\n".join(lines)


def as_run(spec: JobSpec, settings: Settings, *, job_id: str, run_id: str, attempt: int) -> str:
    """Return the manifests of a run, as they are sent to the cluster; raises SpecError where it is no cluster's."""
    cluster = settings.cluster
    return render(
        spec,
        default_image=settings.worker_image,
        job_id=job_id,
        run_id=run_id,
        attempt=attempt,
        api_url=None if cluster is None else cluster.api_url,
    ).yaml


@lru_cache(maxsize=4)
def _resources(directory: Path) -> CustomResources:
    return CustomResources(directory)


def _refused(problem: str, fault: Fault, remedy: str) -> SpecError:
    return SpecError(f"spec is not valid: {problem}", remedy=remedy, faults=(fault,))
