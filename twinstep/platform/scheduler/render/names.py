"""Names of a run's objects, and the budget of every name that the cluster derives from them.

JobSet puts its own name twice into the coordinator's label, Ray cuts names without a word: a name that is accepted here
is short enough for everything made of it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from twinstep.spec.errors import Fault, SpecError

LABEL_MAX = 63  # characters of a label's value, and of a DNS label
RAYJOB_MAX = 47  # KubeRay: its webhook's limit; the cluster's name adds "-" and 5 characters
PREFIX_MAX = 20
REPLICATED_JOB = "slice"
GROUP = "gpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class DerivedName:
    """A name the cluster makes from a run's name."""

    of: str
    """What bears it."""
    text: str
    most: int
    """Characters it may have."""


def object_name(title: str, seed: str) -> str:
    """Return the name of a run's objects: the beginning of the job's name, and a digest of `seed`.

    The same job and seed give the same name, so that creating it twice cannot make two.
    """
    prefix = title[:PREFIX_MAX].rstrip("-")
    return f"{prefix}-{hashlib.sha256(f'{title}/{seed}'.encode()).hexdigest()[:5]}"


def jobset_names(name: str, *, slices: int, hosts: int) -> tuple[DerivedName, ...]:
    """Return what JobSet and Jobs derive from a JobSet's name: `hosts` pods in each of `slices` Jobs.

    Source: jobset's webhook and controller.
    """
    job = f"{name}-{REPLICATED_JOB}-{slices - 1}"
    pod = f"{job}-{hosts - 1}-abcde"
    coordinator = f"{name}-{REPLICATED_JOB}-0-0.{name}"
    return (
        DerivedName(of="service", text=name, most=LABEL_MAX),
        DerivedName(of="Job", text=job, most=LABEL_MAX),
        DerivedName(of="pod", text=pod, most=LABEL_MAX),
        DerivedName(of="coordinator label", text=coordinator, most=LABEL_MAX),
    )


def rayjob_names(name: str) -> tuple[DerivedName, ...]:
    """Return what KubeRay derives from a RayJob's name."""
    cluster = f"{name}-abcde"
    return (
        DerivedName(of="RayJob", text=name, most=RAYJOB_MAX),
        DerivedName(of="RayCluster", text=cluster, most=53),
        DerivedName(of="head service", text=f"{cluster}-head-svc", most=LABEL_MAX),
        # Longer ones are cut without a word, and two pods could come to the same name.
        DerivedName(of="worker pod prefix", text=f"{cluster}-{GROUP}-worker-", most=LABEL_MAX),
    )


def check_names(derived: tuple[DerivedName, ...]) -> None:
    """Raise SpecError for the first derived name that is too long.

    Raises:
        SpecError: the name, its length, what is allowed.
    """
    for each in derived:
        if len(each.text) > each.most:
            over = len(each.text) - each.most
            fault = Fault(
                field="name",
                problem=f"makes a {each.of} of {len(each.text)} characters",
                given=each.text,
                allowed=f"at most {each.most}",
                remedy=f"shorten it by {over}",
            )
            raise SpecError(
                f"the name of the {each.of} would be {over} characters too long", remedy=fault.remedy, faults=(fault,)
            )


_LABEL = re.compile(r"[^A-Za-z0-9_.-]+")


def label_value(text: str) -> str:
    """Return any text as a label's value: what a label cannot hold becomes `-`, its ends are letters or digits."""
    return _LABEL.sub("-", text)[:LABEL_MAX].strip("-_.")
