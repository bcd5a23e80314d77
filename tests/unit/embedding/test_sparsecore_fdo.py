"""Limits from data and from feedback: what is computed, when it changes, and that it settles."""

import json

import numpy as np
import pytest

from twinstep.spec.errors import DataError, SpecError
from twinstep.worker.embedding.sparsecore.fdo import FdoPolicy, FileExchange, Record, Sketch, decide, topology_of
from twinstep.worker.embedding.sparsecore.inputs import Ragged
from twinstep.worker.embedding.sparsecore.limits import ladder, limits_from_batches
from twinstep.worker.embedding.sparsecore.preprocess import Preprocessor
from twinstep.worker.embedding.sparsecore.result import Statistics
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Table
from twinstep.worker.embedding.sparsecore.stacking import plan_stacks


def plan(devices=1, limits=None):
    tables = [Table(name=name, rows=50, dim=8, limits=limits) for name in "ab"]
    features = [Feature(name=name, table=name, samples=32) for name in "ab"]
    return plan_stacks(tables, features, Cores(devices=devices, per_device=2))


def batches(count, seed=0):
    rng = np.random.default_rng(seed)
    return [{name: Ragged(rng.integers(0, 50, 96), np.full(32, 3)) for name in "ab"} for _ in range(count)]


def statistics(ids, unique=None, required=None, name="a_b"):
    one = np.array([ids])
    return Statistics(
        {name: one}, {name: one if unique is None else np.array([unique])}, {name: np.array([required or ids])}, {}, {}
    )


def record(values, of=None):
    found = Record(topology_of(of or plan()))
    for value in values:
        found.add(statistics(value))
    return found


def test_limits_from_batches_are_the_most_of_sums_over_the_tables_of_a_stack():
    """By hand, from the ids: rotate, add the tables' counts per target, then take the most."""
    held = limits_from_batches(plan(), batches(3))
    most = 0
    for batch in batches(3):
        counts = np.zeros((2, 2), int)
        for turn, name in ((0, "a"), (2 % 2, "b")):
            for core in range(2):
                rows = batch[name].ids.reshape(32, 3)[core * 16 : (core + 1) * 16]
                for row in rows:
                    for each in set(row.tolist()):
                        counts[core, (each % 2 + turn) % 2] += 1
        most = max(most, counts.max())
    assert held.stacks[0].limits.max_ids == most
    for batch in batches(3):
        assert not any(Preprocessor(held, threads=1)(batch).statistics.dropped.values())


def test_a_buffer_is_never_larger_than_its_limits_can_need():
    few = [{name: Ragged(np.zeros(32, np.int32), np.ones(32, np.int64)) for name in "ab"}]
    for headroom in (1.0, 1.3, 4.0):
        stack = limits_from_batches(plan(), few, headroom=headroom).stacks[0]
        assert stack.buffer <= -(-stack.limits.max_ids // 8) * 8 * 2 * 2


def test_headroom_and_no_batches():
    tight, wide = limits_from_batches(plan(), batches(2)), limits_from_batches(plan(), batches(2), headroom=1.5)
    assert wide.stacks[0].limits.max_ids == round(tight.stacks[0].limits.max_ids * 1.5)
    with pytest.raises(DataError, match="no batch"):
        limits_from_batches(plan(), [])
    with pytest.raises(SpecError, match="a headroom of"):
        limits_from_batches(plan(), [], headroom=0.5)


def test_the_ladder_rises_in_eights_and_never_by_more_than_a_quarter():
    values = [ladder(value) for value in range(1, 5000)]
    assert values == sorted(values)
    assert all(step % 8 == 0 and step >= value for value, step in enumerate(values, 1))
    assert all(step <= max(1.25 * value + 8, 8) for value, step in enumerate(values, 1))


def test_a_run_whose_batches_stay_alike_stops_changing():
    current, changed, rng, seen = plan(), [], np.random.default_rng(0), Record(topology_of(plan()))
    for _ in range(20):
        for _ in range(50):
            seen.add(statistics(int(rng.normal(400, 20)), int(rng.normal(200, 10)), int(rng.normal(900, 30))))
        current, changes = decide(current, seen, FdoPolicy())
        changed.append(len(changes))
    assert changed == [1] + [0] * 19
    assert current.stacks[0].limits.max_ids >= 400


def test_limits_grow_at_once_and_fall_only_when_half_would_do():
    held = plan().with_limits({"a_b": Limits(max_ids=100, max_unique=100)}, {"a_b": 240})
    grown, (change,) = decide(held, record([130] * 8), FdoPolicy())
    assert grown.stacks[0].limits.max_ids == ladder(130 * 1.25)
    assert change.before == Limits(max_ids=100, max_unique=100)
    assert "8 batches asked for up to 130 ids" in change.reason
    assert decide(held, record([60] * 8), FdoPolicy())[1] == ()
    assert decide(held, record([10] * 8), FdoPolicy())[0].stacks[0].limits.max_ids == 16
    assert decide(held, record([10] * 8), FdoPolicy(shrink=0))[1] == ()
    assert decide(held, record([130] * 7), FdoPolicy())[1] == ()


def test_a_quantile_leaves_out_the_rare_batch():
    values = [100] * 99 + [5000]
    assert decide(plan(), record(values), FdoPolicy(quantile=0.95))[0].stacks[0].limits.max_ids <= 160
    assert decide(plan(), record(values), FdoPolicy())[0].stacks[0].limits.max_ids >= 5000


def test_a_record_stays_small_however_many_batches():
    rng = np.random.default_rng(1)
    found = record(rng.integers(1, 100_000, 3000).tolist())
    assert found.batches == 3000
    assert all(len(each.counts) < 80 for each in found.sketches["a_b"].values())


def test_hosts_merge_to_the_same_whatever_the_order(tmp_path):
    first, second = record([10, 20, 300]), record([40, 50])
    assert first.merged(second).to_json() == second.merged(first).to_json() == record([10, 20, 300, 40, 50]).to_json()
    FileExchange(tmp_path, 0, run="r").publish(first, boundary=100)
    exchange = FileExchange(tmp_path, 1, run="r")
    assert exchange.gather(first.topology, 2, boundary=100) is None
    exchange.publish(second, boundary=100)
    exchange.publish(second, boundary=100)
    merged = exchange.gather(first.topology, 2, boundary=100)
    assert merged.to_json() == first.merged(second).to_json()
    assert len(list(tmp_path.iterdir())) == 2


def test_hosts_merge_what_all_know_at_one_boundary_of_one_run_or_nothing(tmp_path):
    """A host that is ahead never decides by what another knew at the boundary before, or in another run."""
    hosts = [FileExchange(tmp_path, host, run="r") for host in (0, 1)]
    early, late = record([10]), record([10, 900])
    for host in hosts:
        host.publish(early, boundary=100)
    hosts[0].publish(late, boundary=200)
    assert hosts[0].gather(early.topology, 2, boundary=200) is None
    assert FileExchange(tmp_path, 0, run="another").gather(early.topology, 2, boundary=100) is None
    hosts[1].publish(late, boundary=200)
    found = {json.dumps(host.gather(early.topology, 2, boundary=200).to_json()) for host in hosts}
    assert found == {json.dumps(late.merged(late).to_json())}


def test_another_topology_starts_anew(tmp_path):
    one, two = plan(), plan(devices=2)
    exchange = FileExchange(tmp_path, 0, run="r")
    exchange.publish(record([500] * 20, one), boundary=1)
    assert exchange.gather(topology_of(two), 1, boundary=1) is None
    assert decide(two, record([500] * 20, one), FdoPolicy()) == (two, ())
    with pytest.raises(DataError, match="two topologies"):
        record([1], one).merged(record([1], two))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 9}', '{"format": 1, "topology": "x", "batches": 1, "stacks": 3}']
)
def test_a_file_that_is_no_record_is_named(tmp_path, text):
    exchange = FileExchange(tmp_path, 0, run="r")
    exchange.publish(record([1]), boundary=1)
    (written,) = tmp_path.iterdir()
    written.write_text(text)
    with pytest.raises(DataError, match="cannot be read"):
        exchange.gather(topology_of(plan()), 1, boundary=1)


def test_quantiles_are_within_a_step():
    sketch = Sketch()
    for value in range(1, 1001):
        sketch.add(value)
    for share in (0.1, 0.5, 0.9):
        assert share * 1000 <= sketch.quantile(share) <= share * 1000 * 1.25 + 8
    assert sketch.quantile(1.0) == 1000


@pytest.mark.parametrize("bad", [{"quantile": 0}, {"headroom": 0.9}, {"shrink": 1}])
def test_a_policy_that_means_nothing_is_refused(bad):
    with pytest.raises(SpecError):
        FdoPolicy(**bad)
