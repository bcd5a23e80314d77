"""A worker that needs no tensors: it does what its job's name says. Run as `stand_in_worker.py SPEC`.

reports-N: N metric records, every third one in the spool only; then a result. sleeps: until told to stop.
stubborn: does not listen to SIGTERM, and has a child that does not either. crashes: exit code 3. shouts: bytes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

RUN_DIR = Path(os.environ["TWINSTEP_RUN_DIR"])
SUMMARY = {
    "backend": "eager",
    "steps": 1,
    "examples": 1,
    "examples_per_s": 1.0,
    "compile_s": 0.0,
    "train_s": 1.0,
    "eval_s": 0.0,
    "final_loss": 0.5,
    "auc": None,
    "ne": None,
    "eval_examples": 0,
}


class Reporter:
    def __init__(self) -> None:
        self.seq = 0
        self.spool = (RUN_DIR / "spool.jsonl").open("a")

    def record(self, **fields: Any) -> dict[str, Any]:
        self.seq += 1
        record = {"seq": self.seq, "time": time.time(), **fields}
        self.spool.write(json.dumps(record) + "\n")
        self.spool.flush()
        return record

    def send(self, records: list[dict[str, Any]]) -> None:
        request = urllib.request.Request(  # noqa: S310  loopback
            f"{os.environ['TWINSTEP_API_URL']}/v1/runs/{os.environ['TWINSTEP_RUN_ID']}/reports",
            data=json.dumps({"records": records}).encode(),
            headers={
                "Content-Type": "application/json",
                "Authorization": f"Bearer {os.environ['TWINSTEP_RUN_TOKEN']}",
            },
        )
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=2).read()
        except (urllib.error.URLError, OSError) as error:
            print("not sent:", error)


def reports(count: int) -> None:
    reporter = Reporter()
    for step in range(1, count + 1):
        record = reporter.record(kind="metric", step=step, values={"loss": 1 / step})
        if step % 3:
            reporter.send([record])
        time.sleep(0.02)
    reporter.record(kind="result", summary=SUMMARY)


def main() -> None:
    name = json.loads(Path(sys.argv[-1]).read_text())["name"]
    with (RUN_DIR / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    if name.startswith("reports-"):
        reports(int(name.removeprefix("reports-")))
    elif name == "sleeps":
        time.sleep(600)
    elif name == "stubborn":
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", deaf])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (RUN_DIR / "child").write_text(str(child.pid))
        time.sleep(600)
    elif name == "crashes":
        print("Traceback: the tables do not fit\n----\n", flush=True)
        sys.exit(3)
    elif name == "leaves-a-child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (RUN_DIR / "child").write_text(str(child.pid))
    elif name == "shouts":
        sys.stdout.buffer.write(b"caf\xc3\xa9 \xff\xfe\n" + os.environ["TWINSTEP_RUN_TOKEN"].encode() + b"\nhalf a li")


main()
