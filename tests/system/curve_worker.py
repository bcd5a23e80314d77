"""A worker without tensors, on the real reporter: its job's name says what becomes of it. `curve_worker.py SPEC`.

good…: trains 60 steps and ends well. slow…: trains until told to stop. bad…: fails at step 7. evil…: ends well, and
everything it says tries to be markup or to steer a terminal.
"""

from __future__ import annotations

import json
import math
import random
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from twinstep.spec.report import BaselineScore, RunSummary
from twinstep.worker.train.environment import RunContext
from twinstep.worker.train.report import make_reporter

EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>`${window.hacked=3}`\\u001b[2J\x1b[31mred'
STEPS = 60
TOKENS = {"real_tokens": 1400.0, "dummy_tokens": 40.0, "events_cut": 3.0}


def stop(number: int, frame: FrameType | None) -> None:
    sys.exit(143)


def main() -> None:
    signal.signal(signal.SIGTERM, stop)
    name = json.loads(Path(sys.argv[-1]).read_text())["name"]
    say = EVIL if name.startswith("evil") else ""
    dice, reporter = random.Random(3), make_reporter(RunContext.from_environment())
    total = 100_000 if name.startswith("slow") else STEPS
    try:
        print(f"worker of {name} {say}", flush=True)
        print("no line ends here: \u2028 \u2029 \x85 \x0b \x0c \x1c, nor does the text: \U0001f389", flush=True)
        reporter.progress("compiling", 0, total, examples_per_s=None, eta_s=None)
        reporter.event("compiled", f"first program: 2.5 s on eager {say}", {"step": 0, "seconds": 2.5})
        for step in range(1, total + 1):
            time.sleep(0.1 if name.startswith("slow") else 0.01)
            if name.startswith("bad") and step == 7:
                raise ValueError("the loss of step 7 is nan")
            loss = 0.4 + 0.3 * math.exp(-step / 20) + dice.gauss(0, 0.01)
            reporter.metric(step, {"loss": loss, "examples_per_s": 900 + dice.gauss(0, 20), f"x{say}": 1.0, **TOKENS})
            spent = {"step": 0.8 * step, "compile": 3.75, "input_wait": 0.1 * step, f"x{say}": 5.0}
            told = {"tokens_per_s": 7200.0, "goodput": 0.72, "chip_hours": 0.5, "time_s": spent}
            reporter.progress("training", step, total, examples_per_s=905.5, eta_s=(total - step) * 0.01, **told)
            print(f"step {step} loss {loss:.4f} {say}", flush=True)
            if step % 20 == 0:
                auc, ne = 0.75 - 0.2 * math.exp(-step / 20), 0.92 + 0.1 * math.exp(-step / 20)
                reporter.metric(step, {"eval/auc": auc, "eval/ne": ne})
                reporter.event(
                    f"evaluated{say[:20]}", f"step {step}: auc {auc:.4f} {say}", {"step": step, "seconds": 0.2}
                )
            if step == 25:
                shown = {"compute": 0.06, "host_input": 0.03, "idle": 0.01, f"x{say}": 1.0}
                data = {"first": 20, "last": 24, "time_s": shown, "directory": f"/data/profile{say}"}
                reporter.event("profiled", f"steps 20 to 24 {say}", data)
            if step == 30:
                reporter.event("recompiled", f"batch_size 32 → 64 {say}", {"step": step, "seconds": 1.25})
        reporter.result(
            RunSummary(
                backend=f"eager{say}",
                steps=total,
                examples=total * 30,
                examples_per_s=905.5,
                compile_s=3.75,
                train_s=2.0,
                eval_s=0.6,
                final_loss=loss,
                auc=0.7401,
                ne=0.925,
                eval_examples=2000,
                baselines={f"item_mean{say}": BaselineScore(auc=0.7012), "popularity": BaselineScore(auc=0.6011)},
                parameters=123_456,
                versions={"python": f"3{say}"},
                tokens=total * 240,
                tokens_per_s=7200.0,
                goodput=0.8,
                chip_hours=0.5,
                time_s={"step": 80.0, "compile": 15.0, "other": 5.0},
            )
        )
        reporter.progress("done", total, total, examples_per_s=905.5, eta_s=0.0)
    except ValueError as error:
        reporter.event("failed", f"{error} {say}")
        print(f"error: {error}", flush=True)
        sys.exit(1)
    finally:
        reporter.close()


main()
