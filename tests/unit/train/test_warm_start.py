"""What a start waits for: a run whose program is on disk imports nothing that only a compile, or a score, asks for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LATER = ("torch._dynamo", "torch._inductor", "sympy", "torchax", "networkx", "sklearn", "scipy", "pandas")
START = f"""
import gc, json, sys
from twinstep.spec.parse import validate_spec
from twinstep.worker.train import _without_collecting

spec = validate_spec(json.loads(sys.argv[1]))
with _without_collecting():
    assert not gc.isenabled()
    from twinstep.worker.train.loop import build_model, build_optimizers, load_dataset
    from twinstep.worker.compile.step_compiler import StepCompiler
assert gc.isenabled() and gc.get_freeze_count() > 10_000
model = build_model(spec, load_dataset(spec.data).schema)
compiler = StepCompiler(lambda *_: None, model, build_optimizers(spec.optimizers, model), backend="xla")
compiler.push()
print([name for name in {LATER!r} if name in sys.modules])
"""


@pytest.mark.parametrize("sparse", ["adam", "rowwise_adagrad"])
def test_a_start_imports_nothing_that_a_warm_one_can_do_without(sparse: str) -> None:
    data = {"dataset": "synthetic", "synthetic_events": 500}
    spec = json.dumps({"name": "warm", "data": data, "optimizers": {"sparse": {"kind": sparse}}})
    done = subprocess.run([sys.executable, "-c", START, spec], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
