"""A control plane that was told to run nothing on its own machine takes no job for it, and says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinstep.platform.scheduler.runnable import check_runnable
from twinstep.platform.settings import Settings
from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec

DATABASES = ("sqlite",)


def test_none_runs_where_none_may(settings: Settings) -> None:
    check_runnable(JobSpec(name="here"), settings)
    with pytest.raises(SpecError) as caught:
        check_runnable(JobSpec(name="nowhere"), replace(settings, max_parallel_runs=0))
    (fault,) = caught.value.faults
    assert (fault.field, fault.given) == ("accelerator.kind", "'cpu'")
    assert "--max-parallel 0" in fault.problem
    assert "no cluster" in fault.allowed
