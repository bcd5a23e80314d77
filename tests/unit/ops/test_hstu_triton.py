"""The CUDA kernels of HSTU attention without a GPU: run by Triton's interpreter, and compiled for a Hopper GPU.

The first shows what they compute, the second that they fit that GPU; neither that they are right or fast on it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
SHARED_BYTES = 227 << 10  # that a program may have of a multiprocessor of an H100 or H200

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def run(*words: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_interpreter_comes_to_what_the_reference_says() -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton_child.py"))
    assert "passed" in run(*words, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_the_kernels_compile_for_a_hopper_gpu_and_fit_it(tmp_path: Path) -> None:
    out = run("-W", "ignore", str(HERE / "triton_compile_child.py"), TRITON_CACHE_DIR=str(tmp_path))
    found = json.loads(out.splitlines()[-1])
    assert len(found) == 6
    assert all(0 < each["shared_bytes"] <= SHARED_BYTES and each["cubin_bytes"] for each in found.values())
