"""A real Ray, and a rendered RayJob's entrypoint submitted to it as KubeRay does: two ranks, one job, byte for byte."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from twinstep.platform.scheduler.render.render import render
from twinstep.spec.parse import parse_spec

ROOT = Path(__file__).parents[2]
MARK = "TWINSTEP_TEST_CLUSTER"
PATIENCE = 900.0  # seconds; a busy machine takes its time

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

TINY: dict[str, Any] = {
    "name": "under-ray",
    "model": {
        "embedding_dim": 4, "transducer_dim": 4, "num_layers": 1, "num_heads": 1,
        "linear_dim": 4, "attention_dim": 4, "hidden_dim": 4,
    },
    "data": {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 6, "num_candidates": 2},
    "optimizers": {"dense": {"kind": "sgd"}, "sparse": {"kind": "sgd"}},
    "compile": {"backend": "eager"},
    "embedding": {"engine": "torchrec"},
    "train": {"steps": 4},
}  # fmt: skip


def entrypoint() -> str:
    """The line of a rendered RayJob, as the kubelet hands it on."""
    spec = parse_spec((ROOT / "examples/clusters/gpu-4x-h100.yaml").read_bytes(), source="example")
    line: str = render(spec).workload["spec"]["entrypoint"]
    return line.replace("$$", "$")


@dataclass
class Cluster:
    """A head of two processors, its files, and the processes that came of it."""

    folder: Path
    mark: str
    environment: dict[str, str]
    port: int
    cpus: int = 2
    gcs: int = 0
    joined: list[subprocess.Popen[bytes]] = field(default_factory=list)
    block: subprocess.Popen[bytes] | None = None
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(100)))

    def start(self) -> None:
        ports = free_ports(8)
        self.gcs = ports[0]
        names = (
            "port", "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
            "runtime-env-agent-port", "metrics-export-port", "node-manager-port", "object-manager-port",
        )  # fmt: skip
        command = [
            *(
                "ray",
                "start",
                "--head",
                "--block",
                f"--num-cpus={self.cpus}",
                "--num-gpus=0",
                "--node-ip-address=127.0.0.1",
            ),
            *(f"--memory={2 << 30}", f"--object-store-memory={80 << 20}", f"--temp-dir={self.folder}/ray"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={self.port}", "--disable-usage-stats"),
            *(f"--{name}={port}" for name, port in zip(names, ports, strict=True)),
        ]
        with (self.folder / "ray.log").open("wb") as log:
            self.block = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        wait_for(self.answers, "the Jobs API answers")

    def join(self) -> subprocess.Popen[bytes]:
        """Start another node of two processors."""
        command = [
            *("ray", "start", f"--address=127.0.0.1:{self.gcs}", "--block", "--num-cpus=2", "--num-gpus=0"),
            *("--node-ip-address=127.0.0.1", f"--memory={2 << 30}", f"--object-store-memory={80 << 20}"),
            "--disable-usage-stats",
        ]
        with (self.folder / f"node{len(self.joined)}.log").open("wb") as log:
            self.joined.append(
                subprocess.Popen(
                    command, env=self.environment, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
                )
            )
        return self.joined[-1]

    def answers(self) -> bool:
        assert self.block is not None
        assert self.block.poll() is None, (self.folder / "ray.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
            found = self.run("ray", "job", "list", "--address", self.address)
            return found.returncode == 0
        return False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=PATIENCE, cwd=self.folder, check=False
        )

    def submit(self, spec: dict[str, Any]) -> tuple[str, subprocess.Popen[str]]:
        """Submit a spec with KubeRay's line; return the submission's id and the process that follows it."""
        Path(self.environment["TWINSTEP_SPEC"]).write_text(json.dumps(spec))
        (self.folder / "spool.jsonl").unlink(missing_ok=True)  # of the job before
        name = f"job-{next(self.numbers)}"
        line = f"ray job submit --address {self.address} --submission-id {name} -- {entrypoint()}"
        return name, subprocess.Popen(
            ["bash", "-c", line],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder,
        )  # fmt: skip

    def pids(self) -> list[int]:
        """The processes that are this cluster's, by a mark in their environment."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return found

    def ranks(self) -> dict[int, int]:
        """Rank → pid of the training processes."""
        found = {}
        for pid in self.pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if words[1:5] == [b"-m", b"twinstep", b"train", b"-"]:
                    variables = dict(
                        line.split(b"=", 1) for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if line
                    )
                    found[int(variables[b"RANK"])] = pid
        return found

    def end(self) -> None:
        """End all of it, whatever became of it."""
        for each in self.joined:
            each.terminate()
        if self.block is not None:
            self.block.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.block.wait(30)
        until = time.monotonic() + 10
        while (left := self.pids()) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        for each in (*self.joined, self.block):
            if each is not None:
                each.wait(10)
        assert self.pids() == []


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]


def wait_for(true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until, f"waited in vain until {what}"
        time.sleep(0.3)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running(cpus=2) as made:
        yield made


@contextlib.contextmanager
def running(*, cpus: int) -> Iterator[Cluster]:
    """Start a cluster whose head has so many processors, and end it."""
    pytest.importorskip("ray")
    pytest.importorskip("pandas", reason="Ray Train imports pandas")
    folder = Path(tempfile.mkdtemp(prefix="ts-ray-"))  # short: sockets are below it, and their paths have a limit
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        MARK: mark,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray's workers step back behind all else by default
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "45",
        "TWINSTEP_SPEC": str(folder / "job.json"),
        "TWINSTEP_PROCESSES": "2",
        "TWINSTEP_RUN_ID": "r" * 26,
        "TWINSTEP_RUN_DIR": str(folder),
        "TWINSTEP_API_URL": f"http://127.0.0.1:{free_ports(1)[0]}",
        "TWINSTEP_RUN_TOKEN": "nobody-asks",
    }
    made = Cluster(folder, mark, environment, free_ports(1)[0], cpus)
    try:
        made.start()
        yield made
    finally:
        made.end()
        shutil.rmtree(folder, ignore_errors=True)


def reports(cluster: Cluster) -> list[dict[str, Any]]:
    path = cluster.folder / "spool.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_two_ranks_train_to_the_end_and_rank_0_alone_reports(cluster: Cluster) -> None:
    _, following = cluster.submit(TINY)
    seen: dict[int, int] = {}
    wait_for(lambda: bool(seen.update(cluster.ranks())) or len(seen) == 2 or following.poll() is not None, "two ranks")
    said, _ = following.communicate(timeout=PATIENCE)
    assert following.returncode == 0, said
    assert sorted(seen) == [0, 1]
    assert "succeeded" in said
    found = reports(cluster)
    assert [each["seq"] for each in found] == list(range(1, len(found) + 1))
    started = [each for each in found if each.get("name") == "started"]
    assert [each["data"]["pid"] for each in started] == [seen[0]]
    assert [each["summary"]["steps"] for each in found if each["kind"] == "result"] == [4]


def test_the_first_rank_to_fail_is_named_and_takes_the_other_along(cluster: Cluster) -> None:
    _, following = cluster.submit({**TINY, "train": {"steps": 1_000_000}})
    wait_for(lambda: len(cluster.ranks()) == 2, "two ranks")
    os.kill(cluster.ranks()[1], signal.SIGKILL)
    said, _ = following.communicate(timeout=PATIENCE)
    assert following.returncode != 0
    assert "rank 1 of 2 failed first, with exit code 137" in said
    wait_for(lambda: cluster.ranks() == {}, "no rank is left")


def test_a_job_that_is_told_to_stop_saves_and_leaves(cluster: Cluster) -> None:
    place = cluster.folder / "checkpoints"
    name, following = cluster.submit({**TINY, "train": {"steps": 1_000_000}, "checkpoint": {"path": str(place)}})
    wait_for(lambda: any(each["kind"] == "metric" for each in reports(cluster)), "a step is done")
    assert cluster.run("ray", "job", "stop", "--address", cluster.address, name).returncode == 0
    said, _ = following.communicate(timeout=PATIENCE)
    assert "the run failed" not in said
    wait_for(lambda: cluster.ranks() == {}, "no rank is left")
    assert [path.name for path in place.glob("**/manifest.json")] == ["manifest.json"]
    assert cluster.run("ray", "job", "status", "--address", cluster.address, name).stdout.upper().count("STOPPED")


def test_a_node_that_drains_lets_its_ranks_save(cluster: Cluster) -> None:
    """The last one: it ends the cluster, as a pod that is preempted does."""
    place = cluster.folder / "before-the-end"
    _, following = cluster.submit({**TINY, "train": {"steps": 1_000_000}, "checkpoint": {"path": str(place)}})
    wait_for(lambda: any(each["kind"] == "metric" for each in reports(cluster)), "a step is done")
    assert cluster.block is not None
    cluster.block.terminate()
    following.communicate(timeout=PATIENCE)
    wait_for(lambda: cluster.ranks() == {}, "no rank is left")
    assert [path.name for path in place.glob("**/manifest.json")] == ["manifest.json"]


def test_ranks_whose_node_is_taken_away_start_again_on_the_next_one() -> None:
    """As on spot nodes: the head stays, a worker's pod is preempted, and KubeRay replaces it."""
    with running(cpus=0) as cluster:
        node = cluster.join()
        place = cluster.folder / "checkpoints"
        name, following = cluster.submit({**TINY, "train": {"steps": 1_000_000}, "checkpoint": {"path": str(place)}})
        wait_for(lambda: any(each["kind"] == "metric" for each in reports(cluster)), "a step is done")
        node.terminate()
        wait_for(lambda: cluster.ranks() == {}, "no rank is left")
        wait_for(lambda: node.poll() is not None, "the node is gone")
        assert following.poll() is None
        cluster.join()
        wait_for(lambda: any(each.get("name") == "resumed" for each in reports(cluster)), "ranks go on")
        resumed = next(each for each in reports(cluster) if each.get("name") == "resumed")
        assert resumed["reason"].startswith("the node of a rank was taken away; goes on after step ")
        assert (resumed["data"]["lost_steps"], resumed["data"]["restart"]) == (0, 1)
        assert cluster.run("ray", "job", "stop", "--address", cluster.address, name).returncode == 0
        said, _ = following.communicate(timeout=PATIENCE)
        assert "the run failed" not in said
