"""What the TPU compiler says when it refuses is told in plain words, with the limit to change."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from twinstep.spec.errors import UnavailableError
from twinstep.worker.compile import aot
from twinstep.worker.compile.lower.tpu_words import REFUSALS, in_plain_words

SAID = {
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 112.30G of "
    "95.74G hbm. Exceeded hbm capacity by 16.56G.": (
        "112.30G of HBM on each device of v5p:2x2x1, which has 95.74G",
        "chips",
    ),
    "INTERNAL: Gather operand too large: 700000 words": ("activations of its samples", "data.batch_size"),
    "Fixed size allocations (612352 bytes) do not fit in TileSpmem": ("TileSpmem", "max_unique"),
    "No viable logical replica count for the embedding table": ("no split", "embedding.limits"),
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space spmem": ("SPMEM", "embedding.limits"),
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. It should not be possible": (
        "VMEM",
        "fused_attention",
    ),
    "the HBM stack size exceeds what is left": ("HBM stack", "serialized_tables"),
}


@pytest.mark.parametrize("message", SAID)
def test_a_refusal_names_what_broke_and_what_to_change(message: str) -> None:
    found = in_plain_words(message, "v5p:2x2x1")
    assert found is not None
    problem, remedy = found
    assert SAID[message][0] in problem
    assert SAID[message][1] in remedy
    assert "v5p:2x2x1" in problem


def test_every_row_is_known_by_a_message_and_others_are_passed_on() -> None:
    assert len(SAID) == len(REFUSALS)
    assert in_plain_words("INVALID_ARGUMENT: something else", "v5p:2x2x1") is None


def test_a_libtpu_of_another_version_than_jax_wants_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert aot.wanted_libtpu(['libtpu==0.0.42.* ; extra == "tpu"', "numpy>=2"]) == "0.0.42.*"
    assert aot.wanted_libtpu(["numpy>=2"]) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ['libtpu==0.0.42.*; extra == "tpu"'])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.17" if name == "libtpu" else "0.10.2")
    with pytest.raises(UnavailableError, match=r"libtpu 0\.0\.17 .* jax 0\.10\.2 is made for libtpu 0\.0\.42"):
        aot.need_libtpu()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.42.1")
    aot.need_libtpu()
