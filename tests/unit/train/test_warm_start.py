"""What a start waits for: a run whose program is on disk imports nothing that only a compile, or a score, asks for.

And what it leaves to later runs of its process.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest

from twinstep.worker.train import _without_collecting

LATER = ("torch._dynamo", "torch._inductor", "sympy", "torchax", "networkx", "sklearn", "scipy", "pandas", "pyarrow")
LATER += tuple(f"twinstep.worker.compile.{each}" for each in ("capture", "passes", "aot", "parity.run", "explain"))
LATER += ("httpx",)
START = f"""
import gc, json, sys
from twinstep.spec.parse import validate_spec
from twinstep.worker.train import _without_collecting

spec = validate_spec(json.loads(sys.argv[1]))
with _without_collecting('twinstep.worker.train.loop'):
    assert not gc.isenabled()
    from twinstep.worker.train.loop import load_dataset
    from twinstep.worker.embedding.optim import build_optimizers
    from twinstep.worker.models.registry import build_model
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


def test_a_second_run_in_a_process_keeps_nothing_of_the_first_for_good() -> None:
    before = gc.get_freeze_count()
    with _without_collecting("json", "gc"):
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_imports_leave_collection_off_where_it_was_off_and_keep_no_garbage() -> None:
    code = """
import gc, weakref
from twinstep.worker.train import _without_collecting
class Run: pass
first = Run()
first.itself, left = first, weakref.ref(first)
gc.disable()
del first
with _without_collecting("not.here.yet"):
    pass
assert left() is None, "it would stay for good"
assert not gc.isenabled() and gc.get_freeze_count()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
