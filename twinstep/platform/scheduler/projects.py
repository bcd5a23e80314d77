"""What a project says of where its jobs run. Pure."""

from __future__ import annotations

from twinstep.platform.store.users import Project
from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.roles import DEFAULT_PROJECT

UNSAID = "default"
"""A spec that says nothing of its namespace has this one; it stands for the project's."""


def place(spec: JobSpec, project: Project, *, freely: bool) -> JobSpec:
    """Return the spec with its project's namespace, queue and image where it names none.

    Args:
        freely: a namespace or queue of its own holds (whoever may submit anywhere asks); else it is refused.

    Raises:
        SpecError: it names a namespace or a queue that is not the project's.
    """
    told = spec.kubernetes
    faults = []
    if told.namespace not in (UNSAID, project.namespace) and not freely:
        faults.append(_fault("namespace", told.namespace, project.namespace, project.name))
    if project.queue is not None and told.queue not in (None, project.queue) and not freely:
        faults.append(_fault("queue", told.queue or "", project.queue, project.name))
    if faults:
        raise SpecError(
            f"spec is not valid: it leaves the project {project.name}",
            remedy="leave the fields out: the project fills them in",
            faults=tuple(faults),
        )
    changes = {
        "namespace": project.namespace if told.namespace == UNSAID else told.namespace,
        "queue": told.queue or project.queue,
        "image": told.image or project.image,
    }
    if changes == {name: getattr(told, name) for name in changes}:
        return spec
    return spec.model_copy(update={"kubernetes": told.model_copy(update=changes)})


def _fault(field: str, given: str, allowed: str, project: str) -> Fault:
    return Fault(
        field=f"kubernetes.{field}",
        problem=f"is not the one of the project {project}",
        given=f"'{given}'",
        allowed=allowed,
        remedy=f"{field}: {allowed}" + (", or another --project" if project != DEFAULT_PROJECT else ""),
    )
