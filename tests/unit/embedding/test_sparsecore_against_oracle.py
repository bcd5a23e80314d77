"""Row pointers, ids, samples, gains, minibatches, statistics: bit for bit those of jax-tpu-embedding's compiled code.

It leaves what it does not write as the heap had it; that is masked there, and must be zero in ours.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench import sparsecore_oracle as oracle
from twinstep.worker.embedding.sparsecore.inputs import Ragged
from twinstep.worker.embedding.sparsecore.preprocess import Policy, Preprocessor
from twinstep.worker.embedding.sparsecore.spec import COMBINERS, Cores, Feature, Limits, Table
from twinstep.worker.embedding.sparsecore.stacking import Stacking, plan_stacks

QUIET = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def workloads(draw):
    cores = Cores(devices=draw(st.sampled_from([1, 2, 4, 8])), per_device=draw(st.sampled_from([2, 4])))
    combiner = draw(st.sampled_from(COMBINERS))
    count = draw(st.integers(1, 4))
    tables = [
        Table(name=f"t{n}", rows=draw(st.sampled_from([1, 3, 50, 1000, 100_000])), dim=8, combiner=combiner)
        for n in range(count)
    ]
    features = [
        Feature(name=f"f{n}", table=tables[n % count].name, samples=draw(st.integers(1, 6)) * cores.count)
        for n in range(count + draw(st.integers(0, 2)))
    ]
    how = draw(st.sampled_from([Stacking(), Stacking(disable_table_stacking=True), Stacking(rotation=1)]))
    seed = draw(st.integers(0, 2**32 - 1))
    longest, skewed = draw(st.sampled_from([1, 3, 40])), draw(st.booleans())
    weighted = draw(st.booleans())
    rng = np.random.default_rng(seed)
    batch = {}
    rows = {each.name: each.rows for each in tables}
    for each in features:
        lengths = rng.integers(0, longest + 1, each.samples)
        top = min(rows[each.table], 3) if skewed else rows[each.table]
        ids = rng.integers(0, top, lengths.sum())
        kind = np.int32 if each.name != "f0" else np.int64
        weights = rng.normal(1, 0.2, lengths.sum()).astype(np.float32) if weighted else None
        batch[each.name] = Ragged(ids.astype(kind), lengths, weights)
    return cores, tables, features, how, batch


def objects(feature, values):
    """Rows as the oracle takes them."""
    ends = np.cumsum(feature.lengths)[:-1]
    parts = np.split(values, ends)
    out = np.empty(len(parts), object)
    for number, part in enumerate(parts):
        out[number] = np.ascontiguousarray(part)
    return out


def ask_oracle(plan, tables, features, cores, how, batch, **options):
    specs = oracle.declare(tables, features)
    oracle.stack(specs, cores, how)
    oracle.set_limits(specs, plan)
    ids = [objects(batch[each.name], batch[each.name].ids.astype(np.int32)) for each in features]
    weighted = batch[features[0].name].weights is not None
    weights = [objects(batch[each.name], batch[each.name].weights) for each in features] if weighted else None
    return oracle.caller(specs, ids, weights, cores, **options)()


def same(mine, theirs):
    theirs = np.asarray(theirs).reshape(mine.shape)
    return bool(((mine == theirs) | (np.isnan(mine) & np.isnan(theirs))).all())


def compare(plan, ours, theirs, *, pooled):
    pointers, ids, samples, gains, minibatches, stats = theirs
    stats = oracle.statistics(stats)
    assert ours.minibatches == minibatches
    shards, per_device = plan.cores.count, plan.cores.per_device
    wide = max(shards, 8)
    for stack in plan.stacks:
        name, mine = stack.name, ours.buffers[stack.name]
        for key in ("max_ids", "max_unique", "required"):
            assert (np.asarray(stats[key][name]).reshape(-1) == getattr(ours.statistics, key)[name]).all(), key
        assert stats["dropped"][name] == ours.statistics.dropped[name]
        assert np.size(pointers[name]) == mine.row_pointers.size
        assert np.size(ids[name]) == mine.embedding_ids.size
        live = per_device * ours.minibatches * wide
        local, slots = mine.embedding_ids.shape
        given_pointers = np.asarray(pointers[name]).reshape(local, -1)
        assert (mine.row_pointers[:, :live] == given_pointers[:, :live]).all()
        assert not mine.row_pointers[:, live:].any()
        for device in range(local):
            last = mine.row_pointers[device, :live].reshape(per_device, -1)[:, shards - wide - 1]
            written = np.zeros(slots, bool)
            for core in range(per_device):
                start = 0 if pooled else core * slots // per_device
                written[start : start + -(-int(last[core]) // 8) * 8] = True
            for one, other in ((mine.embedding_ids, ids), (mine.sample_ids, samples), (mine.gains, gains)):
                other = np.asarray(other[name]).reshape(local, slots)
                assert same(one[device, written], other[device, written])
                assert not one[device, ~written].any()


def observed(plan, batch):
    generous = plan.with_limits({each.name: Limits(max_ids=100_000, max_unique=100_000) for each in plan.stacks})
    return Preprocessor(generous, threads=1)(batch).statistics


def limited(plan, statistics, share):
    limits = {
        each.name: Limits(
            max_ids=max(1, int(statistics.max_ids[each.name].max() * share)),
            max_unique=max(1, int(statistics.max_unique[each.name].max() * share)),
        )
        for each in plan.stacks
    }
    return plan.with_limits(limits)


@QUIET
@given(workloads())
def test_a_batch_within_its_limits(case):
    cores, tables, features, how, batch = case
    plan = plan_stacks(tables, features, cores, how)
    plan = limited(plan, observed(plan, batch), 1)
    theirs = ask_oracle(plan, tables, features, cores, how, batch)
    compare(plan, Preprocessor(plan, threads=2)(batch), theirs, pooled=False)


@QUIET
@given(workloads(), st.sampled_from([0.3, 0.7]))
def test_a_batch_from_which_limits_drop(case, share):
    cores, tables, features, how, batch = case
    plan = plan_stacks(tables, features, cores, how)
    plan = limited(plan, observed(plan, batch), share)
    theirs = ask_oracle(plan, tables, features, cores, how, batch, allow_id_dropping=True)
    compare(plan, Preprocessor(plan, policy=Policy(allow_id_dropping=True), threads=1)(batch), theirs, pooled=False)


@QUIET
@given(workloads(), st.sampled_from([1, 2, 5]))
def test_a_batch_that_is_larger_than_its_buffer(case, groups):
    cores, tables, features, how, batch = case
    plan = plan_stacks(tables, features, cores, how)
    plan = limited(plan, observed(plan, batch), 1)
    plan = plan.with_limits({}, {each.name: groups * 8 * cores.per_device for each in plan.stacks})
    plan = plan.with_limits(
        {},
        {
            each.name: min(each.buffer, -(-each.limits.max_ids // 8) * 8 * cores.count * cores.per_device)
            for each in plan.stacks
        },
    )
    theirs = ask_oracle(plan, tables, features, cores, how, batch, allow_id_dropping=True)
    compare(plan, Preprocessor(plan, policy=Policy(allow_id_dropping=True), threads=1)(batch), theirs, pooled=False)


@QUIET
@given(workloads(), st.sampled_from([0.2, 0.5, 0.9, 1]))
def test_minibatches_along_the_vocabulary(case, share):
    cores, tables, features, how, batch = case
    plan = plan_stacks(tables, features, cores, how)
    plan = limited(plan, observed(plan, batch), share)
    options = {"allow_id_dropping": True, "enable_minibatching": True}
    theirs = ask_oracle(plan, tables, features, cores, how, batch, **options)
    policy = Policy(allow_id_dropping=True, split="vocabulary")
    compare(plan, Preprocessor(plan, policy=policy, threads=1)(batch), theirs, pooled=True)


@pytest.mark.parametrize("local", [1, 2])
def test_one_host_of_several(local):
    cores = Cores(devices=4, per_device=4)
    tables, features = [Table(name="t", rows=500, dim=8)], [Feature(name="f", table="t", samples=160)]
    rng = np.random.default_rng(1)
    mine = 160 * local // 4
    lengths = rng.integers(0, 5, mine)
    batch = {"f": Ragged(rng.integers(0, 500, lengths.sum()).astype(np.int32), lengths)}
    plan = plan_stacks(tables, features, cores).with_limits({"t": Limits(max_ids=64, max_unique=64)})
    theirs = ask_oracle(plan, tables, features, cores, Stacking(), batch, local_devices=local)
    compare(plan, Preprocessor(plan, local_devices=local, threads=1)(batch), theirs, pooled=False)
