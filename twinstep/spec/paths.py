"""Paths of a spec that lead elsewhere from another folder: named, refused, or made whole. Pure.

`twinstep train` starts where its user is; a submitted job's worker starts in its run's folder.
"""

from __future__ import annotations

import posixpath

from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.job import NAME_MAX, JobSpec
from twinstep.spec.parse import show
from twinstep.spec.text import dump_yaml

PATHS = (("model", "source"), ("data", "path"), ("compile", "cache_dir"), ("checkpoint", "path"))
"""Fields that may hold a relative path; `data.cache_dir` and `data.vocabulary` never do; `source` is a module's."""


def is_whole(path: str) -> bool:
    """Say whether a path means one place wherever it is read: from the root, a home folder, or a URI."""
    return path.startswith(("/", "~")) or "://" in path


def relative_paths(spec: JobSpec) -> dict[tuple[str, str], str]:
    """Return the fields of a spec that hold a relative path."""
    values = {at: getattr(getattr(spec, at[0]), at[1], None) for at in PATHS}
    return {at: value for at, value in values.items() if value is not None and not is_whole(value)}


def with_whole_paths(spec: JobSpec, folder: str) -> JobSpec:
    """Return a spec whose relative paths lead from `folder`, itself a whole path."""
    for (part, field), value in relative_paths(spec).items():
        whole = posixpath.normpath(posixpath.join(folder, value))
        spec = spec.model_copy(update={part: getattr(spec, part).model_copy(update={field: whole})})
    return spec


def check_paths(spec: JobSpec) -> None:
    """Raise unless every path of a spec that is submitted is whole.

    Raises:
        SpecError: one is relative; the faults name each field.
    """
    faults = tuple(
        Fault(
            field=f"{part}.{field}",
            problem="is no whole path, and a job's worker starts in its run's folder",
            given=show(value),
            allowed="a path that begins with / or ~/, or a URI",
            remedy=dump_yaml({field: f"/data/{value.rsplit('/', 1)[-1].lstrip('.')[:NAME_MAX]}"}, flow=True)[1:-2],
        )
        for (part, field), value in relative_paths(spec).items()
    )
    if faults:
        raise SpecError(
            f"spec is not valid: a path of it is relative ({', '.join(each.field for each in faults)})",
            remedy="; ".join(each.remedy for each in faults),
            faults=faults,
        )
