"""A batch over its limits, split: forward and update come to what the unsplit batch comes to, exactly, in small dense
matrices that follow the buffers; and what no split can help is refused."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinstep.spec.errors import DataError, SpecError
from twinstep.worker.embedding.sparsecore.inputs import Ragged
from twinstep.worker.embedding.sparsecore.minibatches import minibatch_of_bucket
from twinstep.worker.embedding.sparsecore.preprocess import Policy, Preprocessor
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Table
from twinstep.worker.embedding.sparsecore.stacking import plan_stacks


def decode(stack, buffers, minibatches):
    """The dense gains of each minibatch, [M, source SparseCores · B, stacked columns], as a SparseCore reads them."""
    cores = stack.cores
    wide, local = max(cores.count, 8), buffers.embedding_ids.shape[0]
    per_core = stack.samples_per_core
    found = np.zeros((minibatches, local * cores.per_device * per_core, stack.rows), np.float32)
    pooled = buffers.row_pointers.shape[1] > wide * cores.per_device
    slots = buffers.embedding_ids.shape[1]
    for device in range(local):
        position = 0
        for core in range(cores.per_device):
            base = 0 if pooled else core * slots // cores.per_device
            position = position if pooled else 0
            for minibatch in range(minibatches):
                at = (core * minibatches + minibatch) * wide
                for target in range(cores.count):
                    end = int(buffers.row_pointers[device, at + target])
                    span = slice(base + position, base + end)
                    rows = (device * cores.per_device + core) * per_core + buffers.sample_ids[device, span]
                    columns = target * stack.rows_per_shard + buffers.embedding_ids[device, span]
                    np.add.at(found[minibatch], (rows, columns), buffers.gains[device, span])
                    position = -(-end // 8) * 8
    return found


@st.composite
def cases(draw):
    cores = Cores(devices=draw(st.sampled_from([1, 2, 3])), per_device=draw(st.sampled_from([1, 2, 4])))
    combiner = draw(st.sampled_from(["sum", "mean", "sqrtn"]))
    tables = [Table(name=n, rows=draw(st.integers(1, 60)), dim=8, combiner=combiner) for n in "ab"]
    features = [Feature(name=n, table=n, samples=draw(st.integers(1, 5)) * cores.count) for n in "ab"]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weighted, batch = draw(st.booleans()), {}
    for table, feature in zip(tables, features, strict=True):
        lengths = rng.integers(0, 12, feature.samples)
        weights = rng.integers(1, 5, lengths.sum()).astype(np.float32) if weighted else None
        batch[feature.name] = Ragged(rng.integers(0, table.rows, lengths.sum()), lengths, weights)
    return plan_stacks(tables, features, cores), batch


def with_limits(plan, ids, unique):
    return plan.with_limits({each.name: Limits(max_ids=ids, max_unique=unique) for each in plan.stacks})


def whole(plan, batch):
    result = Preprocessor(with_limits(plan, 10_000, 10_000), threads=1)(batch)
    return {each.name: decode(each, result.buffers[each.name], 1)[0] for each in plan.stacks}, result


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from(["samples", "vocabulary"]), st.integers(1, 40), st.integers(1, 40))
def test_a_split_batch_is_the_same_batch(case, split, ids, unique):
    plan, batch = case
    dense, full = whole(plan, batch)
    held = with_limits(plan, ids, unique)
    try:
        result = Preprocessor(held, policy=Policy(split=split), threads=1)(batch)
    except DataError as error:  # limits that no split can help
        if "alone" in str(error) or "one bucket" in str(error):
            return
        raise
    for stack in plan.stacks:
        parts = np.concatenate([decode(stack, each[stack.name], result.minibatches) for each in result.blocks])
        assert (parts.sum(axis=0) == dense[stack.name]).all()  # each entry is in one part, so nothing is rounded
        if result.split == "samples":  # forward: each sample is in one block
            assert ((parts != 0).any(axis=2).sum(axis=0) <= 1).all()
        else:  # one update per row: each row is in one minibatch
            assert ((parts != 0).any(axis=1).sum(axis=0) <= 1).all()
        gradients = np.random.default_rng(0).integers(-8, 8, (dense[stack.name].shape[0], 3)).astype(np.float32)
        together = sum(part.T @ gradients for part in parts)
        assert np.allclose(together, dense[stack.name].T @ gradients, rtol=1e-5, atol=1e-5)
        assert (result.statistics.max_ids[stack.name] == full.statistics.max_ids[stack.name]).all()
    assert not any(result.statistics.dropped.values())


def test_a_batch_ten_times_over_its_limit_keeps_its_buffers():
    cores = Cores(devices=1, per_device=4)
    plan = plan_stacks([Table(name="t", rows=100, dim=8)], [Feature(name="f", table="t", samples=640)], cores)
    rng = np.random.default_rng(3)
    batch = {"f": Ragged(rng.integers(0, 100, 640 * 4), np.full(640, 4))}
    dense, full = whole(plan, batch)
    limit = -(-int(full.statistics.max_ids["t"].max()) // 10)
    held = with_limits(plan, limit, limit)
    result = Preprocessor(held, policy=Policy(split="samples"), threads=2)(batch)
    assert len(result.blocks) >= 10
    assert {each["t"].embedding_ids.shape for each in result.blocks} == {(1, -(-limit // 8) * 8 * 4 * 4)}
    parts = np.concatenate([decode(plan.stacks[0], each["t"], 1) for each in result.blocks])
    assert (parts.sum(axis=0) == dense["t"]).all()


def test_one_hot_id_of_many_samples_is_split_along_samples_and_not_along_the_vocabulary():
    plan = plan_stacks(
        [Table(name="t", rows=100, dim=8)], [Feature(name="f", table="t", samples=64)], Cores(devices=1, per_device=2)
    )
    plan, batch = with_limits(plan, 8, 8), {"f": Ragged(np.zeros(64, np.int32), np.ones(64, np.int32))}
    with pytest.raises(
        DataError, match=r"32 ids, 1 of them different, of partition 0 in one bucket.*split along samples"
    ):
        Preprocessor(plan, policy=Policy(split="vocabulary"), threads=1)(batch)
    assert len(Preprocessor(plan, policy=Policy(split="samples"), threads=1)(batch).blocks) == 4
    with pytest.raises(
        DataError, match=r"stack 't' .tables 't'., SparseCore 0 .* asks for 32 ids of partition 0, and 8"
    ):
        Preprocessor(plan, threads=1)(batch)


def test_a_sample_that_no_limit_can_hold_is_refused():
    plan = plan_stacks(
        [Table(name="t", rows=100, dim=8)], [Feature(name="f", table="t", samples=4)], Cores(devices=1, per_device=2)
    )
    batch = {"f": Ragged(np.arange(0, 40, 2), [20, 0, 0, 0])}
    with pytest.raises(DataError, match="stacked sample 0 alone asks for more of one partition"):
        Preprocessor(with_limits(plan, 8, 8), policy=Policy(split="samples"), threads=1)(batch)


def test_a_buffer_that_is_too_small_is_refused_and_named():
    plan = plan_stacks(
        [Table(name="t", rows=100, dim=8)], [Feature(name="f", table="t", samples=64)], Cores(devices=1, per_device=2)
    )
    batch = {"f": Ragged(np.arange(64), np.ones(64, np.int32))}
    small = with_limits(plan, 64, 64).with_limits({}, {"t": 16})
    with pytest.raises(DataError, match=r"needs 32 slots, a device's buffer has 16 .fix: give it a buffer of 64 slots"):
        Preprocessor(small, threads=1)(batch)


def test_a_buffer_larger_than_limits_can_need_is_cut_with_a_warning(caplog):
    plan = plan_stacks(
        [Table(name="t", rows=100, dim=8)], [Feature(name="f", table="t", samples=64)], Cores(devices=1, per_device=2)
    )
    batch = {"f": Ragged(np.arange(64), np.ones(64, np.int32))}
    large = with_limits(plan, 16, 16).with_limits({}, {"t": 100_000})
    assert Preprocessor(large, threads=1)(batch).buffers["t"].embedding_ids.shape == (1, 64)
    assert "asks for 100000 slots" in caplog.text


def test_hosts_agree_on_a_split_and_number_their_questions():
    plan = plan_stacks(
        [Table(name="t", rows=100, dim=8)], [Feature(name="f", table="t", samples=64)], Cores(devices=2, per_device=2)
    )
    plan, batch = with_limits(plan, 32, 32), {"f": Ragged(np.arange(32), np.ones(32, np.int32))}
    with pytest.raises(SpecError, match="hosts must agree"):
        Preprocessor(plan, local_devices=1, policy=Policy(split="vocabulary"))
    asked = []

    def agree(number, bits):
        asked.append((number, bits))
        return bits | (1 if number % 2 == 0 else 1 << 62)  # another host needs one split, in the middle

    hosts = Preprocessor(plan, local_devices=1, policy=Policy(split="vocabulary"), threads=1, agree=agree)
    results = [hosts(batch) for _ in range(3)]
    assert [number for number, _ in asked] == [2, 3, 4, 5, 6, 7]
    assert {each.minibatches for each in results} == {2}
    assert minibatch_of_bucket(1 << 62).tolist() == [0] * 32 + [1] * 32


def test_a_plan_without_limits_and_devices_that_are_not_there_are_refused():
    plan = plan_stacks(
        [Table(name="t", rows=100, dim=8)], [Feature(name="f", table="t", samples=64)], Cores(devices=1, per_device=2)
    )
    with pytest.raises(SpecError, match="stack 't' has no limits"):
        Preprocessor(plan)
    with pytest.raises(SpecError, match="2 local devices of 1"):
        Preprocessor(with_limits(plan, 8, 8), local_devices=2)
    with pytest.raises(SpecError, match="0 threads"):
        Preprocessor(with_limits(plan, 8, 8), threads=0)
