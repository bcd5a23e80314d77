"""What is read out of compiled programs, and what the process that compiles says when it cannot."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from twinstep.preflight.check import preflight
from twinstep.spec.errors import CompileError, SpecError, UnavailableError
from twinstep.spec.job import JobSpec
from twinstep.spec.slices import parse_slice
from twinstep.worker.compile import aot
from twinstep.worker.compile.aot import batch_dimension, check_divides
from twinstep.worker.compile.aot_report import AotReport, HbmBytes, Traffic
from twinstep.worker.compile.hlo import Collective, parse_hlo, with_entry
from twinstep.worker.compile.lower.tpu_traffic import traffic
from twinstep.worker.train import ahead

SPEC = JobSpec.model_validate(
    {
        "name": "small",
        "model": {
            "embedding_dim": 16,
            "transducer_dim": 32,
            "num_layers": 1,
            "num_heads": 2,
            "linear_dim": 16,
            "attention_dim": 16,
            "hidden_dim": 32,
        },
        "data": {
            "dataset": "synthetic",
            "synthetic_events": 1000,
            "batch_size": 8,
            "uih_len": 16,
            "num_candidates": 4,
            "rows": {"item_id": 32 << 20},
        },
        "accelerator": {"kind": "tpu", "generation": "v5p", "topology": "2x2x1"},
    }
)

# The shape of what libtpu prints, cut to what is read.
PROGRAM = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %state = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %reduced = f32[8,128]{1,0:T(8,128)} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%next, %reduced)
}

%condition (state.1: (s32[], f32[8,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %state.1 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT, metadata={op_name="while/cond/lt"}
}

ENTRY %main (p: f32[8,128], q: f32[4,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  %q = f32[4,128]{1,0:T(4,128)} parameter(1)
  %start = s32[] constant(0)
  %gather = (f32[4,128]{1,0}, f32[8,128]{1,0}) all-gather-start(%q), dimensions={0}, replica_groups={{0,1}}
  %gathered = f32[8,128]{1,0} all-gather-done(%gather)
  %permute = (bf16[2,128]{1,0}, bf16[2,128]{1,0}, u32[], u32[]) collective-permute-start(%gathered)
  %tuple = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%start, %p)
  %loop = (s32[], f32[8,128]{1,0:T(8,128)}) while(%tuple), condition=%condition, body=%body
  ROOT %done = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


def report(**changes: Any) -> AotReport:
    made = AotReport(
        topology="v5p:2x2x1",
        devices=4,
        effort="full",
        key="0123456789abcdef",
        hbm=HbmBytes(arguments=100, outputs=90, alias=80, temp=30, code=7),
        state_bytes=75,
        sharded=("parameter:t.weight",),
        flops=1e9,
        bytes_accessed=1e8,
        traffic=(Traffic(kind="products", bytes=90, hbm_bytes=80),),
        optimal_seconds=0.001,
        unestimated=0,
        collectives=(Collective(kind="all-reduce", count=3, bytes=4096),),
        nodes=100,
        capture_seconds=1.0,
        lower_seconds=1.0,
        compile_seconds=2.0,
        versions=(("jax", "0.10.2"),),
        passes=(("drop_dead", 4),),
    )
    return dataclasses.replace(made, **changes)


def test_collectives_are_counted_as_often_as_their_loop_turns() -> None:
    found = {each.kind: each for each in parse_hlo(PROGRAM).collectives()}
    assert found["all-reduce"] == Collective(kind="all-reduce", count=5, bytes=5 * 8 * 128 * 4)
    assert found["all-gather"] == Collective(kind="all-gather", count=1, bytes=8 * 128 * 4)
    assert found["collective-permute"] == Collective(kind="collective-permute", count=1, bytes=2 * 128 * 2)


def test_a_loop_of_unknown_length_counts_once_and_a_noted_count_is_taken() -> None:
    unknown = parse_hlo(PROGRAM.replace("direction=LT", "direction=NE"))
    assert [loop.trips for loop in unknown.loops()] == [None]
    assert {each.kind: each.count for each in unknown.collectives()}["all-reduce"] == 1
    noted = PROGRAM.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert {each.kind: each.count for each in parse_hlo(noted).collectives()}["all-reduce"] == 7


def test_a_loops_body_becomes_a_program_that_xla_can_analyse() -> None:
    part = parse_hlo(with_entry(PROGRAM, "%body"))
    assert part.entry == "%body"
    assert {each.kind: each.count for each in part.collectives()} == {"all-reduce": 1}


def test_what_hosts_send_between_slices_is_counted_with_its_bytes() -> None:
    text = """HloModule jit_step, is_scheduled=true

ENTRY %main (p: f32[1,128]) -> f32[1,128] {
  %p = f32[1,128]{1,0:T(1,128)} parameter(0)
  %t = token[] after-all()
  %send = (f32[1,128]{1,0:T(1,128)}, u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}
  %callback = (f32[8]{0:T(128)}, u32[], token[]) send(%p, %t), channel_id=3, is_host_transfer=true
  ROOT %out = f32[1,128]{1,0:T(1,128)} copy(%p)
}
"""  # noqa: E501
    (found,) = parse_hlo(text).collectives()
    assert (found.kind, found.count, found.bytes) == ("between-slices", 1, 512)


def test_a_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no entry"):
        parse_hlo("nothing")


def test_a_report_survives_json() -> None:
    made = report()
    assert made.hbm.peak == 147
    assert AotReport.from_json(json.loads(json.dumps(made.as_json()))) == made


def test_batch_leaves_are_cut_along_the_first_dimension_that_holds_the_batch() -> None:
    sizes = {(2, 8 * 16): 1, (8 * 16,): 0, (8, 16): 0, (1, 8, 4): 1, (): None, (3,): None, (0, 8): 1}
    assert {shape: batch_dimension(torch.empty(shape, device="meta"), 8) for shape in sizes} == sizes


def test_a_batch_that_does_not_divide_names_sizes_that_do() -> None:
    with pytest.raises(CompileError, match=r"batch of 1000 .* 128 devices.*896 or 1024"):
        check_divides(1000, parse_slice("v5p:4x4x8"))
    with pytest.raises(CompileError, match="batch_size to 128"):
        check_divides(3, parse_slice("v5p:4x4x8"))


def test_without_libtpu_the_remedy_is_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"twinstep\[worker,aot\]"):
        aot.need_libtpu()


def test_a_spec_without_a_tpu_is_asked_for_a_topology() -> None:
    with pytest.raises(SpecError, match="--topology"):
        ahead.slice_name(SPEC.model_copy(update={"accelerator": JobSpec(name="x").accelerator}))
    assert ahead.slice_name(SPEC) == "v5p:2x2x1"


def test_the_process_answers_with_a_report_or_with_its_own_error() -> None:
    made = report()
    assert ahead.read_answer("noise\n" + json.dumps({"report": made.as_json()}) + "\n", "", 0) == made
    told = json.dumps({"problem": "the step needs 112G of HBM", "remedy": "take more chips", "code": "compile_failed"})
    with pytest.raises(CompileError, match="112G"):
        ahead.read_answer(told, "", 0)


@pytest.mark.parametrize("out", ["", "not json", "[1]", "{}"])
def test_a_process_that_ends_without_a_word_is_an_error_with_its_last_lines(out: str) -> None:
    with pytest.raises(UnavailableError, match=r"code -6 .*multi-process lockfile"):
        ahead.read_answer(out, "first\nABORTED: libtpu multi-process lockfile\n", -6)


def test_a_compiler_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(ahead, "need_libtpu", lambda: None)
    with pytest.raises(CompileError, match=r"longer than 0\.2 seconds"):
        ahead.compile_spec(SPEC, time_limit=0.2)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_small_step_compiles_for_a_slice_with_its_state_donated_and_few_collectives(tmp_path: Path) -> None:
    kept = {"compile": SPEC.compile.model_copy(update={"cache_dir": str(tmp_path)})}
    spec = SPEC.model_copy(update={**kept, "embedding": SPEC.embedding.model_copy(update={"engine": "dense"})})
    found = ahead.compile_spec(spec, effort="quick", keep=True)
    assert found.kept is not None
    assert Path(found.kept).is_relative_to(tmp_path)
    assert preflight(spec).hbm == pytest.approx(found.hbm.peak, rel=0.1)
    assert found.devices == 4
    # 32 Mi rows of 16 floats, 2 GiB: on meta, spread over the devices, beside the optimizer's sum of each row.
    assert found.sharded == (
        "parameter:_embedding_collection.embeddings.item_id.weight",
        "optimizer:sparse/sum/_embedding_collection.embeddings.item_id.weight",
    )
    assert found.state_bytes >= (32 << 20) * 17 // 4 * 4
    # What is donated is the state, each tensor padded to whole tiles.
    assert found.state_bytes <= found.hbm.alias <= found.state_bytes + 2**20
    assert found.hbm.alias <= found.hbm.outputs <= found.hbm.arguments + 2**16
    kinds = {each.kind: each.count for each in found.collectives}
    assert kinds["all-reduce"] >= 1  # gradients of what is on every device
    assert sum(kinds.values()) <= 20
    assert found.flops > 0
    assert 2**20 < found.bytes_accessed < found.state_bytes  # of the table, only the rows that the batch names


# A fusion from HBM into VMEM, a copy back, and a kernel of ours: as a compiled program's text has them.
MOVES = """HloModule jit_step, is_scheduled=true

%fused (a: f32[64,128], b: f32[128,128]) -> f32[64,128] {
  %a = f32[64,128]{1,0:T(8,128)} parameter(0)
  %b = f32[128,128]{1,0:T(8,128)} parameter(1)
  ROOT %product = f32[64,128]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf
}

ENTRY %main (p: f32[64,128], q: f32[128,128]) -> f32[64,128] {
  %p = f32[64,128]{1,0:T(8,128)} parameter(0)
  %q = f32[128,128]{1,0:T(8,128)} parameter(1)
  %mixed = f32[64,128]{1,0:T(8,128)S(1)} fusion(%p, %q), kind=kOutput, calls=%fused, metadata={op_name="dot"}
  %start = (f32[64,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%mixed)
  %back = f32[64,128]{1,0:T(8,128)} copy-done(%start)
  ROOT %out = f32[64,128]{1,0:T(8,128)} custom-call(%back), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/fused_layer/pallas_call"}, backend_config={"custom_call_config":{"body":"","cost_estimate":{"flops":"1","transcendentals":"0","bytes_accessed":"77777"}}}
}
"""  # noqa: E501


def test_bytes_are_told_by_kind_of_work_as_the_compiler_counts_and_as_they_cross_hbm() -> None:
    x, weight = 64 * 128 * 4, 128 * 128 * 4
    found = {each.kind: (each.bytes, each.hbm_bytes) for each in traffic(MOVES)}
    assert found == {
        "products": (2 * x + weight, x + weight),  # its result stays in VMEM
        "moves to and from VMEM": (4 * x, x),
        "kernel fused_layer": (77777, 77777),
    }


def test_bytes_within_a_loop_count_as_often_as_it_turns() -> None:
    (found,) = [each for each in traffic(PROGRAM) if each.kind == "collectives"]
    once = 8 * 128 * 4
    assert found.bytes >= 5 * 2 * once
