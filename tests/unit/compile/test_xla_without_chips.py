"""On a host without TPU chips JAX is not let ask libtpu, which prints a page of errors first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from twinstep.spec.machine import has_tpu_chips
from twinstep.worker.compile.lower import xla

CODE = """
from torch import nn, optim, zeros
import torch, twinstep
model = nn.Linear(2, 1)
def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    return loss
twinstep.compile(step, model, optim.SGD(model.parameters(), lr=0.1), zeros(4, 2), target="xla")(zeros(4, 2))
"""


@pytest.mark.skipif(has_tpu_chips(), reason="this host has TPU chips")
def test_a_step_compiled_by_hand_for_xla_says_nothing_of_tpus() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    root = str(Path(__file__).parents[3])
    found = subprocess.run(
        [sys.executable, "-c", CODE], env={**environment, "PYTHONPATH": root}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""


@pytest.mark.parametrize(("asked", "chips", "expected"), [
    (None, False, "cpu"), ("", False, "cpu"), (None, True, None), ("tpu,cpu", False, "tpu,cpu"),
])  # fmt: skip
def test_only_where_nobody_asked_and_no_chip_is_there(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, chips: bool, expected: str | None
) -> None:
    before = jax.config.jax_platforms
    monkeypatch.setattr(xla, "has_tpu_chips", lambda: chips)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    try:
        jax.config.update("jax_platforms", asked)
        xla.leave_out_absent_tpus()
        assert jax.config.jax_platforms == expected
    finally:
        jax.config.update("jax_platforms", before)
