"""Fields of a spec and the libtpu flags they become: every field has one, and each reaches the pods."""

from __future__ import annotations

from typing import Any

import pytest

from twinstep.platform.scheduler.render.render import render
from twinstep.spec.errors import SpecError
from twinstep.spec.parse import validate_spec
from twinstep.spec.sparsecore import FLAGS, SparseCoreFlags, libtpu_arguments

OTHER = {
    "detect_nan": True,
    "assert_level": "bounds",
    "sanitize_buffers": True,
    "verify_launch_ids": True,
    "serialized_tables": 3,
    "max_ids_file": "/data/max_ids.csv",
}


def spec_of(accelerator: Any, env: dict[str, str] | None = None, **flags: Any) -> Any:
    return validate_spec(
        {
            "name": "a-job",
            "accelerator": accelerator,
            "embedding": {"sparsecore": flags},
            "kubernetes": {"image": "registry.example.com/worker:1", "env": env or {}},
        }
    )


def variables(spec: Any) -> list[dict[str, str]]:
    """Return every container's environment of a rendered job."""
    found = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("env"), list):
                found.append({each["name"]: each.get("value", "") for each in node["env"]})
            for each in node.values():
                walk(each)
        elif isinstance(node, list):
            for each in node:
                walk(each)

    for each in render(spec).objects:
        walk(each)
    return found


V5P = {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"}


def test_every_field_has_a_flag_and_no_flag_is_given_twice() -> None:
    assert set(OTHER) == set(SparseCoreFlags.model_fields) == {flag.field for flag in FLAGS}
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    assert libtpu_arguments(SparseCoreFlags()) == ""
    for field, value in OTHER.items():
        text = libtpu_arguments(SparseCoreFlags(**{field: value}))
        assert [f"--{flag.name}=" in text for flag in FLAGS] == [flag.field == field for flag in FLAGS]


def test_flags_reach_the_worker_with_the_users_own_behind() -> None:
    (ours,) = [each for each in variables(spec_of(V5P, **OTHER)) if "LIBTPU_INIT_ARGS" in each]
    assert "--xla_sc_detect_nan=true --xla_sc_assert_level=bounds" in ours["LIBTPU_INIT_ARGS"]
    both = variables(spec_of(V5P, {"LIBTPU_INIT_ARGS": "--mine=1"}, detect_nan=True))
    assert "--xla_sc_detect_nan=true --mine=1" in [each.get("LIBTPU_INIT_ARGS") for each in both]
    assert not any("LIBTPU_INIT_ARGS" in each for each in variables(spec_of(V5P)))


@pytest.mark.parametrize(
    "accelerator",
    ["cpu", {"kind": "tpu", "generation": "v5e", "topology": "4x4"}, {"kind": "gpu", "model": "h100", "count": 8}],
)
def test_flags_without_sparsecores_are_refused_by_field(accelerator: Any) -> None:
    with pytest.raises(SpecError) as found:
        spec_of(accelerator, detect_nan=True)
    assert "embedding.sparsecore" in [fault.field for fault in found.value.faults]


@pytest.mark.parametrize("flags", [{"max_ids_file": "a b"}, {"max_ids_file": "/a --x"}, {"serialized_tables": -1}])
def test_values_that_would_break_the_command_line_are_refused(flags: Any) -> None:
    with pytest.raises(SpecError):
        spec_of(V5P, **flags)


@pytest.mark.parametrize("on_nan", ["skip", "rollback"])
def test_a_pipeline_that_copies_of_the_state_would_drain_has_none(on_nan: str) -> None:
    def given(pipeline: str, on_nan: str) -> dict[str, Any]:
        return {
            "name": "t",
            "compile": {"backend": "xla"},
            "embedding": {"engine": "sparsecore", "pipeline": pipeline},
            "train": {"on_nan": on_nan},
        }

    for fine in (given("off", on_nan), given("full", "stop")):
        validate_spec(fine)
    with pytest.raises(SpecError) as refused:
        validate_spec(given("full", on_nan))
    (fault,) = refused.value.faults
    assert fault.field == "train.on_nan"
    assert "pipeline: full" in fault.problem
    assert fault.remedy == "on_nan: stop"
