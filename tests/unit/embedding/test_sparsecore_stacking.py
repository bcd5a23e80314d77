"""Table and feature stacking: the layout of jax-tpu-embedding, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import sparsecore_oracle as oracle
from twinstep.spec.errors import SpecError
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Quantization, Table
from twinstep.worker.embedding.sparsecore.stacking import Stacking, column_transform, plan_stacks

CORES = Cores(devices=2, per_device=4)


def table(name="t", rows=100, dim=16, **more):
    return Table(name=name, rows=rows, dim=dim, **more)


def feature(name="f", of="t", samples=64):
    return Feature(name=name, table=of, samples=samples)


@st.composite
def declared(draw):
    devices, per_device = draw(st.sampled_from([1, 2, 3, 8])), draw(st.sampled_from([1, 2, 4]))
    cores = Cores(devices=devices, per_device=per_device)
    tables = [
        table(f"t{n}" * draw(st.sampled_from([1, 9])), draw(st.integers(1, 5000)), draw(st.sampled_from([8, 9, 16, 5])))
        for n in range(draw(st.integers(1, 6)))
    ]
    of = [each.name for each in tables] + draw(st.lists(st.sampled_from([each.name for each in tables]), max_size=4))
    features = [
        feature(f"f{n}{name}", name, draw(st.integers(1, 40)) * cores.count)
        for n, name in enumerate(draw(st.permutations(of)))
    ]
    names = [each.name for each in tables]
    how = draw(
        st.sampled_from(
            [
                Stacking(pack_narrow=False),
                Stacking(pack_narrow=False, activation_limit=4096),
                Stacking(pack_narrow=False, disable_table_stacking=True),
                Stacking(pack_narrow=False, rotation=3),
                Stacking(pack_narrow=False, groups=(tuple(names[: len(names) // 2 + 1]),)),
            ]
        )
    )
    return tables, features, cores, how


@settings(max_examples=60)
@given(declared())
def test_the_layout_is_that_of_jax_tpu_embedding(case):
    tables, features, cores, how = case
    specs = oracle.declare(tables, features)
    oracle.stack(specs, cores, how)
    plan = plan_stacks(tables, features, cores, how)
    assert {each.table_spec.stacked_table_spec.stack_name for each in specs} == {each.name for each in plan.stacks}
    for spec in specs:
        theirs, setting = spec.table_spec.stacked_table_spec, spec.table_spec.setting_in_stack
        stack, place = plan.of_feature(spec.name)
        _, placement = plan.of_table(spec.table_spec.name)
        assert stack.name == theirs.stack_name
        assert (stack.rows, stack.stored_dim, stack.samples) == (
            theirs.stack_vocab_size,
            theirs.stack_embedding_dim,
            theirs.total_sample_count,
        )
        assert (placement.padded_rows, placement.row_offset, placement.rotation) == (
            setting.padded_vocab_size,
            setting.row_offset_in_shard,
            setting.shard_rotation,
        )
        assert place.row_offset == spec.id_transformation.row_offset


@settings(max_examples=40)
@given(declared())
def test_every_row_of_every_table_has_a_place_of_its_own(case):
    tables, features, cores, how = case
    plan = plan_stacks(tables, features, cores, how)
    for stack in plan.stacks:
        taken = []
        for placement in stack.placements:
            ids = np.arange(placement.table.rows)
            shard, local = placement.locate(ids)
            assert (placement.logical(shard, local) == ids).all()
            assert (column_transform(placement, ids) == local * cores.count + shard).all()
            assert local.max() < stack.rows_per_shard
            taken.append(shard * stack.rows_per_shard + local)
        taken = np.concatenate(taken)
        assert len(np.unique(taken)) == len(taken)


@pytest.mark.parametrize("dim", range(1, 8))
def test_a_narrow_table_wastes_less_than_a_quarter(dim):
    tables = [table("a", 100_000, dim), table("b", 70_000, dim)]
    plan = plan_stacks(tables, [feature("a", "a"), feature("b", "b")], CORES)
    (stack,) = plan.stacks
    assert stack.pack * dim <= stack.stored_dim
    assert all(stack.waste(each) < 0.25 for each in stack.placements)
    assert stack.rows_per_shard % stack.pack == 0
    assert all(each.row_offset % stack.pack == 0 for each in stack.placements)
    assert stack.stored_bytes == sum(map(stack.table_bytes, stack.placements))
    padded = plan_stacks(tables, [feature("a", "a"), feature("b", "b")], CORES, Stacking(pack_narrow=False)).stacks[0]
    assert padded.waste(padded.placements[0]) == pytest.approx(1 - dim / 8, abs=0.01)


def test_limits_of_a_stack_are_the_sums_of_its_tables_unless_one_has_none():
    tables = [table("a", limits=Limits(max_ids=7, max_unique=5)), table("b", limits=Limits(max_ids=9, max_unique=6))]
    features = [feature("a", "a"), feature("b", "b")]
    plan = plan_stacks(tables, features, CORES)
    assert plan.stacks[0].limits == Limits(max_ids=16, max_unique=11)
    assert plan_stacks([tables[0], table("b")], features, CORES).stacks[0].limits is None
    changed = plan.with_limits({"a_b": Limits(max_ids=3, max_unique=2)})
    assert changed.stack("a_b").limits == Limits(max_ids=3, max_unique=2)
    with pytest.raises(SpecError, match="'a', which is no stack"):
        plan.with_limits({"a": Limits(max_ids=3, max_unique=2)})


def test_a_buffer_can_be_sized_by_ids_per_sample():
    plan = plan_stacks([table()], [feature()], CORES, Stacking(max_ids_per_chip_per_sample=5))
    assert plan.stacks[0].buffer == 5 * 64 // 2


def test_tables_of_two_gigarows_are_counted_in_python_integers():
    wide = plan_stacks([table(rows=67_108_864, dim=32)], [feature()], CORES).stacks[0]
    assert wide.stored_bytes == 67_108_864 * 32 * 4
    with pytest.raises(SpecError, match="ids are int32"):
        plan_stacks([table(rows=2**31)], [feature()], CORES)


@pytest.mark.parametrize(
    ("tables", "features", "how", "says"),
    [
        ([table()], [feature(of="u")], Stacking(), "reads the table 'u', which is not declared"),
        ([table(), table("u")], [feature()], Stacking(), "no feature reads the table 'u'"),
        ([table(), table()], [feature()], Stacking(), "two tables are named 't'"),
        ([table()], [feature(), feature()], Stacking(), "two features are named 'f'"),
        ([table()], [feature(samples=6)], Stacking(), "6 samples, which do not divide by 8 SparseCores .fix: .* to 8"),
        ([table()], [feature()], Stacking(groups=(("t", "v"),)), "names the table 'v'"),
        ([table()], [feature()], Stacking(groups=(("t",), ("t",))), "is in two stacks"),
        ([table()], [feature()], Stacking(groups=((),)), "a stack without tables"),
        (
            [table("a", optimizer="sgd"), table("b", optimizer="adam")],
            [feature("a", "a"), feature("b", "b")],
            Stacking(groups=(("a", "b"),)),
            "differ in their optimizer: sgd and adam",
        ),
        (
            [table("a"), table("b", combiner="mean")],
            [feature("a", "a"), feature("b", "b")],
            Stacking(groups=(("a", "b"),)),
            "differ in their combiner",
        ),
        (
            [table("a"), table("b"), table("a_b")],
            [feature(name, name) for name in ("a", "b", "a_b")],
            Stacking(groups=(("a", "b"),)),
            "two stacks are named 'a_b'",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused(tables, features, how, says):
    with pytest.raises(SpecError, match=says):
        plan_stacks(tables, features, CORES, how)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: table(rows=0), "'t' has 0 rows"),
        (lambda: table(dim=0), "'t' has 0 columns"),
        (lambda: table(combiner="max"), "combiner 'max'"),
        (lambda: table(name=""), "without a name"),
        (lambda: feature(samples=0), "0 samples"),
        (lambda: Limits(max_ids=0, max_unique=1), "can never hold one sample"),
        (lambda: Cores(devices=0, per_device=4), "0 devices"),
        (lambda: Quantization(num_buckets=1, low=0, high=1), "1 values"),
        (lambda: Quantization(num_buckets=4, low=1, high=1), "from 1 to 1"),
    ],
)
def test_a_bad_declaration_is_refused(make, says):
    with pytest.raises(SpecError, match=says):
        make()


def test_unlike_tables_are_never_stacked_automatically():
    tables = [
        table("a"),
        table("b", combiner="mean"),
        table("c", optimizer="adam"),
        table("d", quantization=Quantization(num_buckets=4, low=0, high=1)),
        table("e", dim=24),
        table("g"),
    ]
    plan = plan_stacks(tables, [feature(each.name, each.name) for each in tables], CORES)
    assert [each.name for each in plan.stacks] == ["a_g", "b", "c", "d", "e"]
