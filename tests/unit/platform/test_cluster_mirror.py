"""The mirror of a cluster: never backwards, joined by uid and label, whatever order it is told things in."""

from __future__ import annotations

import copy
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.platform.scheduler.cluster.mirror import EVENTS_EACH, Mirror, newer
from twinstep.platform.scheduler.cluster.port import WorkloadRef

REF = WorkloadRef(kind="JobSet", namespace="n", name="a")


def made(kind: str, name: str, uid: str, version: int, *, run: str = "r1", **more: Any) -> dict[str, Any]:
    labels = {"twinstep.dev/run": run, **more.pop("labels", {})}
    metadata = {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"kind": kind, "metadata": metadata | more.pop("metadata", {}), "spec": {}, "status": {}, **more}


def told(number: int, *, about: str) -> dict[str, Any]:
    metadata = {"name": f"{about}.{number}", "uid": f"{about}-{number}", "resourceVersion": str(number)}
    return {"metadata": metadata, "involvedObject": {"uid": about}, "lastTimestamp": f"2026-{number:04}"}


def test_a_run_is_joined_by_label_and_uid_never_by_name() -> None:
    mirror = Mirror()
    mirror.put("JobSet", made("JobSet", "a", "new", 10))
    mirror.put("Pod", made("Pod", "a-slice-0-0-x", "p1", 11, labels={"jobset.sigs.k8s.io/jobset-uid": "new"}))
    mirror.put("Pod", made("Pod", "a-slice-0-0-y", "p2", 5, labels={"jobset.sigs.k8s.io/jobset-uid": "old"}))
    mirror.put("Pod", made("Pod", "a-slice-0-0-z", "p3", 12, run="r2"))
    owned = {"ownerReferences": [{"uid": "new", "kind": "JobSet"}]}
    mirror.put("Workload", made("Workload", "jobset-a-12345", "w1", 13, metadata=owned))
    mirror.put("Workload", made("Workload", "jobset-a-00000", "w0", 4, metadata={"ownerReferences": [{"uid": "old"}]}))
    seen = mirror.evidence("r1", REF, now=1.0)
    assert seen.workload is not None
    assert seen.admission is not None
    assert seen.admission["metadata"]["uid"] == "w1"
    assert [pod["metadata"]["uid"] for pod in seen.pods] == ["p1"]
    other = WorkloadRef(kind="JobSet", namespace="n", name="a", uid="old")
    assert mirror.evidence("r1", other, now=1.0).workload is None
    assert mirror.evidence("r2", REF, now=1.0).workload is None


def test_a_new_object_of_the_same_name_takes_the_place_of_the_old_and_late_word_of_the_old_changes_nothing() -> None:
    mirror = Mirror()
    mirror.put("JobSet", made("JobSet", "a", "old", 1))
    mirror.put("JobSet", made("JobSet", "a", "new", 5))
    assert not mirror.put("JobSet", made("JobSet", "a", "old", 3))
    assert not mirror.remove("JobSet", made("JobSet", "a", "old", 4))
    assert mirror.evidence("r1", REF, now=0.0).workload["metadata"]["uid"] == "new"  # type: ignore[index]


def test_what_is_not_in_a_list_is_gone_and_does_not_come_back_by_an_old_event() -> None:
    mirror = Mirror()
    mirror.put("JobSet", made("JobSet", "a", "u", 3))
    mirror.put("JobSet", {**made("JobSet", "b", "v", 3), "metadata": {**made("JobSet", "b", "v", 3)["metadata"]}})
    assert mirror.replace("JobSet", None, [made("JobSet", "b", "v", 3)], "9")
    assert not mirror.put("JobSet", made("JobSet", "a", "u", 8))
    assert mirror.evidence("r1", REF, now=0.0).workload is None
    assert mirror.put("JobSet", made("JobSet", "a", "u", 10))  # its label was taken off and put on again


def test_a_list_of_one_namespace_leaves_the_others_alone() -> None:
    mirror = Mirror()
    mirror.put("JobSet", made("JobSet", "a", "u", 3))
    assert not mirror.replace("JobSet", "elsewhere", [], "9")
    assert mirror.evidence("r1", REF, now=0.0).workload is not None


def test_memory_is_bounded_for_events_and_what_was_deleted() -> None:
    mirror = Mirror()
    for number in range(6000):
        mirror.put("Event", told(number, about=f"pod-{number % 5000}"))
    for number in range(100):
        mirror.put("Event", told(number, about="u"))
    mirror.put("JobSet", made("JobSet", "a", "u", 1))
    events = mirror.evidence("r1", REF, now=0.0).events
    assert [event["metadata"]["uid"] for event in events] == [f"u-{number}" for number in range(100 - EVENTS_EACH, 100)]
    assert mirror.count()["Event"] <= 4096 * EVENTS_EACH


def test_a_newer_version_is_a_larger_number() -> None:
    assert newer("10", "9")
    assert not newer("9", "10")
    assert not newer("9", "9")
    assert newer("a", "b")
    assert newer("1", None)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, dict[str, Any]]]:
    """A server's true history of two names: created, changed, deleted, created anew; versions only grow."""
    alive: dict[str, dict[str, Any]] = {}
    told: list[tuple[str, dict[str, Any]]] = []
    for version in range(1, draw(st.integers(2, 14))):
        name = draw(st.sampled_from(["a", "b"]))
        if name not in alive:
            alive[name] = made("JobSet", name, f"u{version}", version)
            told.append(("ADDED", copy.deepcopy(alive[name])))
        elif draw(st.booleans()):
            alive[name]["metadata"]["resourceVersion"] = str(version)
            told.append(("MODIFIED", copy.deepcopy(alive[name])))
        else:
            gone = alive.pop(name)
            gone["metadata"]["resourceVersion"] = str(version)
            told.append(("DELETED", gone))
    return told


@settings(max_examples=300, deadline=None)
@given(histories(), st.randoms(use_true_random=False))
def test_events_told_twice_late_and_out_of_order_come_to_the_same_end(
    told: list[tuple[str, dict[str, Any]]], chance: random.Random
) -> None:
    straight, mixed = Mirror(), Mirror()
    for kind, found in told:
        (straight.remove if kind == "DELETED" else straight.put)("JobSet", found)
    shuffled = [*told, *chance.choices(told, k=len(told))]
    chance.shuffle(shuffled)
    for kind, found in shuffled:
        (mixed.remove if kind == "DELETED" else mixed.put)("JobSet", found)
    for name in ("a", "b"):
        ref = WorkloadRef(kind="JobSet", namespace="n", name=name)
        assert mixed.evidence("r1", ref, now=0.0) == straight.evidence("r1", ref, now=0.0)


def test_what_is_told_of_objects_that_are_no_runs_is_no_news() -> None:
    """Of a namespace that others use too; each piece of news is a pass over the runs."""
    mirror = Mirror()

    def event(number: int, kind: str, name: str) -> dict[str, Any]:
        found = told(number, about=name)
        return {**found, "involvedObject": {"uid": name, "kind": kind, "namespace": "n", "name": name}}

    def admits(name: str, owner: str, version: int) -> dict[str, Any]:
        owners = {"ownerReferences": [{"uid": owner, "kind": "JobSet", "name": owner}]}
        return made("Workload", name, name, version, metadata=owners)

    assert not mirror.put("Event", event(1, "Pod", "mine"))  # before its pod, whose coming is the news
    assert mirror.put("JobSet", made("JobSet", "a", "a", 2))
    assert mirror.put("Pod", made("Pod", "mine", "mine", 3))
    assert mirror.put("Workload", admits("wl-a", "a", 4))
    assert not mirror.put("Workload", admits("wl-other", "other", 5))
    for number, (kind, name, news) in enumerate(
        (
            ("Pod", "mine", True), ("JobSet", "a", True), ("Workload", "wl-a", True), ("Pod", "other", False),
            ("Workload", "wl-other", False), ("Node", "a", False), ("Deployment", "web", False),
        ),
        start=10,
    ):  # fmt: skip
        assert mirror.put("Event", event(number, kind, name)) is news, (kind, name)
        assert not mirror.put("Event", event(number, kind, name))
    seen = mirror.evidence("r1", REF, now=1.0)
    assert {event["involvedObject"]["name"] for event in seen.events} == {"a", "wl-a", "mine"}
