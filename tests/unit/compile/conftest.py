"""What tests of TPU kernels share: graphs run as JAX, and programs that need a process with the compiler's settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SLICES = ["v5p:2x2x1", "v6e:2x2", "v7x:2x2x1"]
"""One of each generation."""
_BEGIN = """
import os
import sys
from twinstep.worker.compile.aot import ENVIRONMENT
os.environ.update(ENVIRONMENT)
import torch
import twinstep
sys.path.insert(0, {folder!r})
"""


@pytest.fixture
def same_numbers() -> Callable[..., None]:
    """Hold a graph with kernels, run as JAX, to the captured graph that it was."""
    import jax.numpy as jnp
    import numpy as np
    import torchax

    from twinstep.worker.compile.lower.xla_ops import JaxInterpreter

    def hold(graph: Any, captured: Any, *, rtol: float = 2e-4, atol: float = 2e-5) -> None:
        torchax.default_env()  # fills the table of ops
        arrays = [jnp.asarray(each.numpy()) for each in captured.example]
        got = JaxInterpreter(graph).run(*arrays)
        for name, (mine, want) in enumerate(zip(got, captured.graph(*captured.example), strict=True)):
            np.testing.assert_allclose(np.asarray(mine), want.numpy(), rtol=rtol, atol=atol, err_msg=str(name))

    return hold


@pytest.fixture
def compiles_for_each_generation() -> Callable[[str], None]:
    """Run a program that compiles ahead of time for every slice of `topologies`, in a process of its own."""

    def run(program: str) -> None:
        begin = _BEGIN.format(folder=str(HERE)) + f"topologies = {SLICES!r}\n"
        done = subprocess.run(
            [sys.executable, "-c", f"{begin}{program}print('compiled')"],
            capture_output=True,
            text=True,
            timeout=280,
            cwd=HERE.parents[2],
            env={**os.environ, "PYTHONPATH": str(HERE.parents[2])},
            check=False,
        )
        assert done.stdout.strip().endswith("compiled"), done.stderr[-2000:]

    return run
