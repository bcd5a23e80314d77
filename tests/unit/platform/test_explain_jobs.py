"""Why a job waits or has failed: every cause by what its log or its reason says."""

from __future__ import annotations

from typing import Any

import pytest

from twinstep.platform.scheduler.explain import SIGNATURES, SILENT_S, explain
from twinstep.platform.store.records import Event, JobDetail
from twinstep.spec.states import RunState

NOW = 1000.0


def job(state: RunState, reason: str = "", **fields: Any) -> JobDetail:
    blank = {str: "", int: 0, float: 1.0}  # most fields say nothing of why
    needed = {name: field.annotation for name, field in JobDetail.model_fields.items() if field.is_required()}
    base = {name: blank.get(kind, {}) for name, kind in needed.items()} | {"id": "job-1", "created_at": 1.0}
    return JobDetail.model_validate({**base, "state": state, "reason": reason, **fields})


def failed_event(reason: str, step: int | None = 7) -> Event:
    return Event(
        id=1, job_id="job-1", run_id="run-1", time=2.0, name="failed", actor="worker", reason=reason,
        data={"step": step},
    )  # fmt: skip


# Lines as the libraries print them.
LINES = {
    "accelerator_memory": [
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 12884901888 bytes.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "Ran out of memory in memory space hbm. Used 96.11G of 95.74G hbm.",
    ],
    "host_memory": [
        "numpy._core._exceptions._ArrayMemoryError: MemoryError",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
    "disk_full": ["OSError: [Errno 28] No space left on device: '/var/cache'"],
    "loss_not_finite": ["error: the loss of step 1,200 is nan; fix: lower optimizers.dense.lr"],
    "peer_lost": [
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited",
        "[rank3] ProcessGroupNCCL's watchdog got stuck: timeout",
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242",
    ],
    "coordinator_lost": [
        "JaxRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: [Init]Wait_for_all_tasks_to_register",
        "F0101 client.cc] Terminating process because the coordination service is unavailable",
    ],
    "tpu_busy": ["ABORTED: Internal error when accessing libtpu multi-process lockfile."],
    "tpu_missing": ["RuntimeError: Unable to initialize backend 'tpu': UNKNOWN: TPU initialization failed"],
    "image": ["Back-off pulling image: ImagePullBackOff"],
    "compiler_missing": ["error: Inductor needs a C++ compiler, and g++ is not on PATH"],
    "crash": ["Fatal Python error: Segmentation fault"],
}


def test_every_signature_has_a_line() -> None:
    assert set(LINES) == {each.cause for each in SIGNATURES}


@pytest.mark.parametrize(("cause", "line"), [(cause, line) for cause, lines in LINES.items() for line in lines])
def test_a_line_of_the_log_tells_the_cause(cause: str, line: str) -> None:
    ended = job(RunState.FAILED, "its worker ended with exit code 1")
    found = explain(ended, log=["step 6 done", line, "Traceback follows"])
    assert found.cause == cause
    assert found.next_step
    assert line.strip()[:300] in found.evidence
    assert found.text.startswith("The job failed")


def test_what_killed_a_process_is_told_before_what_its_peers_say() -> None:
    log = ["NCCL error in: ProcessGroupNCCL.cpp", "CUDA out of memory. Tried to allocate 1 GiB"]
    assert explain(job(RunState.FAILED, "x"), log=log).cause == "accelerator_memory"


def test_an_error_of_ours_brings_its_own_remedy() -> None:
    event = failed_event("batch leaf ids is float32; fix: cast it to int64")
    found = explain(job(RunState.FAILED, "its worker ended with exit code 2: error"), events=[event])
    assert (found.cause, found.next_step) == ("error", "cast it to int64")


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("stopped at its time limit: runtime.max_seconds is 5", "time_limit"),
        ("its worker ended with SIGKILL (out of memory?)", "killed"),
        ("its supervisor vanished without a word (killed, or the machine restarted)", "supervisor_lost"),
        ("its directory is gone, and its worker with it", "directory_lost"),
        ("its spec is not one this version of Twinstep can read", "spec_version"),
    ],
)
def test_a_reason_of_the_schedulers_tells_the_cause(reason: str, cause: str) -> None:
    found = explain(job(RunState.FAILED, reason))
    assert found.cause == cause
    assert found.next_step


def test_what_nobody_knows_is_shown_as_it_is() -> None:
    found = explain(job(RunState.FAILED, "its worker ended with exit code 9"), log=["one", "", "two", "three", "four"])
    assert (found.cause, found.evidence) == ("unknown", ["two", "three", "four"])
    assert "exit code 9" in found.text


def test_a_job_that_waits_says_for_what() -> None:
    found = explain(job(RunState.QUEUED, "waits for 3 runs ahead of it"))
    assert (found.cause, "3 runs ahead" in found.text) == ("waits_for_others", True)
    trouble = explain(job(RunState.QUEUED, "is tried again: the disk is full"))
    assert (trouble.cause, "the disk is full" in trouble.text) == ("trouble", True)


def test_a_silent_worker_is_told_of_after_a_while() -> None:
    started = job(RunState.RUNNING, "its worker reports", started_at=1.0, heartbeat_at=NOW - SILENT_S * 2)
    assert explain(started, now=NOW).cause == "silent"
    assert explain(started.model_copy(update={"heartbeat_at": NOW - 1}), now=NOW).cause == "starting"


def test_an_ended_job_needs_no_next_step() -> None:
    assert explain(job(RunState.SUCCEEDED, started_at=1.0, finished_at=61.0)).next_step == ""


def test_a_cancelled_job_says_so_once_and_how_to_run_it_again() -> None:
    cancelled = job(RunState.CANCELLED, "cancelled")
    found = explain(cancelled)
    assert (found.cause, found.text) == ("cancelled", "The job was cancelled.")
    assert found.next_step == (
        f"twinstep retry {cancelled.id} runs it again, from the beginning: it has saved no checkpoint"
    )
    saved = explain(cancelled, saved=400)
    assert saved.next_step == f"twinstep retry {cancelled.id} runs it again, from its checkpoint of step 400"
    killed = explain(job(RunState.CANCELLED, "cancelled; killed 10 s after it was asked to stop"))
    assert "killed 10 s after" in killed.text


def test_a_job_says_from_which_checkpoint_it_would_go_on_or_does() -> None:
    failed = job(RunState.FAILED, "its worker ended with exit code 1")
    assert "twinstep retry" not in explain(failed).text
    again = " Tried again (twinstep retry job-1), it goes on from its checkpoint of step 400."
    assert explain(failed, saved=400).text.endswith(again)
    waits = job(RunState.QUEUED, "waits for 2 runs ahead", attempt=2)
    assert explain(waits, saved=400).text.endswith(" Attempt 2 goes on from its checkpoint of step 400.")
    assert explain(waits).text.endswith(" Attempt 2 goes on from the beginning: it has saved no checkpoint.")
    assert "goes on" not in explain(job(RunState.QUEUED, "waits for 2 runs ahead", attempt=1), saved=400).text


def test_the_api_explains_a_job(live) -> None:
    made = live.submit("crashes")
    live.when(made["id"], "failed")
    found = live.http.get(f"/v1/jobs/{made['id']}/explain").json()
    assert found["state"] == "failed"
    assert found["text"].startswith("The job failed")
    assert live.http.get("/v1/jobs/job-none/explain").status_code == 404


@pytest.mark.parametrize(
    "reason", ["waits for 3 runs ahead", "is next to start", "waits for quota in its queue: 8 chips"]
)
def test_a_wait_that_is_long_is_told_with_its_length(reason: str) -> None:
    waits = job(RunState.QUEUED, reason, run_created_at=NOW - 2 * 3600)
    assert "it has waited for 2 h" in explain(waits, now=NOW).text
    short = explain(job(RunState.QUEUED, reason, run_created_at=NOW - 60), now=NOW)
    preempted = explain(job(RunState.QUEUED, reason, run_created_at=NOW - 2 * 3600, started_at=NOW - 3600), now=NOW)
    assert [text for text in (short.text, preempted.text, explain(waits).text) if "has waited" in text] == []
    assert short.cause == preempted.cause == explain(waits, now=NOW).cause
