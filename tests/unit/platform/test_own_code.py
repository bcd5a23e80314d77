"""Whose code runs on a control plane's machine: a module's where nobody else reaches it, or where it was asked for."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from twinstep.platform.scheduler.runnable import check_runnable
from twinstep.platform.settings import Settings
from twinstep.spec.errors import SpecError
from twinstep.spec.parse import validate_spec

DATABASES = ("sqlite",)
SPEC = validate_spec({"name": "own", "model": {"kind": "module", "factory": "nobody_has_this:build"}})


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),  # noqa: S104  compared, not bound
        ({"host": "10.1.2.3"}, False),
        ({"public_url": "https://twinstep.example.com"}, False),
        ({"allowed_hosts": ("twinstep.example.com",)}, False),
        ({"host": "0.0.0.0", "modules": True}, True),  # noqa: S104
        ({"modules": False}, False),
    ],
    ids=str,
)
def test_a_submitters_own_code_runs_where_nobody_else_submits(
    settings: Settings, changes: dict[str, object], runs: bool
) -> None:
    chosen = replace(settings, **changes)  # type: ignore[arg-type]
    check_runnable(validate_spec({"name": "built-in"}), chosen)
    if runs:
        check_runnable(SPEC, chosen)
    else:
        with pytest.raises(SpecError) as caught:
            check_runnable(SPEC, chosen)
        (fault,) = caught.value.faults
        assert fault.field == "model.kind"
        assert "--modules" in fault.remedy
    assert "nobody_has_this" not in sys.modules
