"""How a TPU lays arrays out, and which tables a step copies: held to what the TPU compiler says of small programs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinstep.preflight.tiles import is_copied, tiled_bytes
from twinstep.worker.compile.aot import ENVIRONMENT

HERE = Path(__file__).parent
ROWS = 1 << 20
WIDTHS = (20, 56, 64, 128)


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
def test_tables_take_the_bytes_and_the_copies_that_the_compiler_makes() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "table_copies_child.py"), "v5p:2x2x1", *map(str, WIDTHS)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {int(width): each for width, each in json.loads(done.stdout.splitlines()[-1]).items()}
    for width in WIDTHS:
        assert found[width]["alias"] == pytest.approx(tiled_bytes((ROWS, width)), abs=4096), width
        copy = ROWS * (width + -width % 128) * 4 if is_copied(width) else 0
        assert found[width]["temp"] == pytest.approx(copy, abs=16 << 20), width


def test_only_widths_of_half_a_row_of_lanes_or_more_are_copied() -> None:
    copied = [width for width in (1, 8, 63, 64, 100, 127, 128, 129, 192, 256) if is_copied(width)]
    assert copied == [64, 100, 127, 129, 192]
