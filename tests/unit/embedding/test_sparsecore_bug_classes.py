"""Every class of bug that other SparseCore stacks had, and that can touch preprocessing, has a test; here is which.

The numbers are those of a survey of such bugs. Tests that stand in no other file stand below.
"""

import ast
from pathlib import Path

import numpy as np
import pytest

from twinstep.spec.errors import DataError, SpecError
from twinstep.worker.embedding.sparsecore.fdo import FdoPolicy, Record, decide, topology_of
from twinstep.worker.embedding.sparsecore.inputs import Coordinates, Dense, Ragged, sample_lists
from twinstep.worker.embedding.sparsecore.kernels import run as kernels
from twinstep.worker.embedding.sparsecore.preprocess import Policy, Preprocessor
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Table
from twinstep.worker.embedding.sparsecore.stacking import plan_stacks

TESTS = Path(__file__).parent

CLASSES = {
    "1: int64 rows read as pairs of int32": (
        "test_rows_of_int64_are_converted_and_never_read_as_bytes",
        "test_every_form_of_a_batch_means_the_same",
    ),
    "2: coordinates in no order put every id on one sample": ("test_coordinates_in_any_order_are_put_in_order",),
    "3: weights of another shape read past the buffer": ("test_what_does_not_fit_together_is_refused",),
    "4: an id past its table trains the next table of the stack": (
        "test_an_id_past_its_table_never_reaches_the_next_table_of_the_stack",
        "test_an_id_out_of_range_is_found_and_never_read_elsewhere",
    ),
    "5: the padding id looks up row 0": ("test_a_padded_cell_is_no_id_and_minus_one_elsewhere_is_refused",),
    "6: int64 and float ids wrap or are cut": (
        "test_an_id_past_int32_is_not_cut_to_32_bits",
        "test_what_does_not_fit_together_is_refused",
    ),
    "7: a limit that does not hold ends the process": (
        "test_one_hot_id_of_many_samples_is_split_along_samples_and_not_along_the_vocabulary",
    ),
    "8: a full buffer drops although dropping is off": ("test_a_buffer_that_is_too_small_is_refused_and_named",),
    "9: a buffer over the theoretical size ends the process": (
        "test_a_buffer_larger_than_limits_can_need_is_cut_with_a_warning",
    ),
    "10: a batch that does not divide ends the process": ("test_what_cannot_be_laid_out_is_refused",),
    "11: SparseCores that are no power of two": (
        "test_any_number_of_sparse_cores_preprocesses",
        "test_a_split_batch_is_the_same_batch",
    ),
    "12: a weighted mean of weights that sum to 0 is infinite": (
        "test_a_mean_of_weights_that_sum_to_nothing_is_nothing",
    ),
    "14: limits of tables are lost where they are stacked": (
        "test_limits_of_a_stack_are_the_sums_of_its_tables_unless_one_has_none",
        "test_limits_from_batches_are_the_most_of_sums_over_the_tables_of_a_stack",
    ),
    "15: tails of buffers hold what the heap held": (
        "test_what_nothing_was_written_to_is_zero_and_a_batch_gives_the_same_bytes_again",
        "test_a_batch_within_its_limits",
    ),
    "16: feedback grows without end and fails when devices change": (
        "test_a_record_stays_small_however_many_batches",
        "test_another_topology_starts_anew",
    ),
    "16b: a batch number that comes again ends the process": (
        "test_hosts_agree_on_a_split_and_number_their_questions",
    ),
    "17: a mean ignores weights, and an empty bag is not a number": (
        "test_a_mean_heeds_weights_and_an_empty_sample_has_no_gain",
    ),
    "18: training applies weights that another path drops": ("test_weights_arrive_by_every_form",),
    "20: a host with fewer batches": ("test_an_empty_batch_is_a_batch",),
    "22: int32 overflows over 2^31 elements": (
        "test_tables_of_two_gigarows_are_counted_in_python_integers",
        "test_the_last_row_of_a_table_near_two_gigarows_has_its_place",
    ),
    "23: bounds checks that are off by one, or silent": (
        "test_the_first_and_last_row_are_in_bounds_and_the_next_is_not",
        "test_an_id_out_of_range_is_found_and_never_read_elsewhere",
    ),
    "26: feedback does nothing for stacked tables": ("test_feedback_reaches_the_limits_of_a_stack",),
}
ELSEWHERE = {
    "13: tables of one stack start alike": (
        "test_tables_alike_do_not_start_alike",
        "test_first_values_depend_on_no_plan",
    ),
    "19: a second epoch trains nothing": ("test_each_epoch_shows_every_training_event_once_in_another_order",),
    "21: what an optimizer keeps is named by the plan": (
        "test_tables_and_slots_move_between_meshes_and_stackings",
        "test_a_run_goes_on_bit_for_bit_and_moves_between_engines_and_stacks",
    ),
    "24: tables are missing from the plan": (
        "test_every_row_of_every_table_has_a_place_of_its_own",
        "test_what_cannot_be_laid_out_is_refused",
    ),
    "25: tables of a TPU take no memory": (
        "test_padding_is_counted_by_the_documented_multiples",
        "test_the_memory_model_holds_against_the_compiler",
        "test_the_model_is_never_under_the_compilers_report_and_little_over",
    ),
}
"""Classes of what runs on a device, in a loader, in a checkpoint or in preflight, and the tests of those."""


def test_every_class_has_tests_that_are_there():
    there = set()
    for path in TESTS.parent.rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        there |= {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    named = {name for names in (CLASSES | ELSEWHERE).values() for name in names}
    assert named <= there, named - there
    numbers = {each.partition(":")[0] for each in CLASSES | ELSEWHERE}
    assert numbers == {str(each) for each in range(1, 27)} | {"16b"}


def plan(rows=64, samples=4, tables=("a", "b"), cores=None, combiner="sum", limit=64):
    cores = cores or Cores(devices=1, per_device=2)
    limits = Limits(max_ids=limit, max_unique=limit)
    return plan_stacks(
        [Table(name=name, rows=rows, dim=8, combiner=combiner, limits=limits) for name in tables],
        [Feature(name=name, table=name, samples=samples) for name in tables],
        cores,
    )


def seen(of, result):
    """(table, sample of the feature, id) → gain, as a SparseCore reads the buffers."""
    found = {}
    for stack in of.stacks:
        mine, cores = result.buffers[stack.name], of.cores
        wide, slots = max(cores.count, 8), mine.embedding_ids.shape[1]
        for source in range(cores.count):
            device, core = divmod(source, cores.per_device)
            start = 0
            for target in range(cores.count):
                end = int(mine.row_pointers[device, core * wide + target])
                for at in range(core * slots // cores.per_device + start, core * slots // cores.per_device + end):
                    local, stacked = int(mine.embedding_ids[device, at]), int(mine.sample_ids[device, at])
                    place = next(p for p in reversed(stack.placements) if p.row_offset <= local)
                    feature = next(f for f in reversed(stack.features) if f.row_offset // cores.count <= stacked)
                    run = feature.feature.samples // cores.count
                    sample = source * run + stacked - feature.row_offset // cores.count
                    row = int(place.logical(np.array(target), np.array(local)))
                    found[place.table.name, sample, row] = float(mine.gains[device, at])
                start = -(-end // 8) * 8
    return found


def nothing(samples=4):
    return Ragged(np.zeros(0, np.int32), np.zeros(samples, np.int64))


def test_rows_of_int64_are_converted_and_never_read_as_bytes():
    of = plan(rows=400)
    rows = np.empty(4, object)
    rows[:] = [np.array([100, 200, 300], np.int64), *(np.zeros(0, np.int64) for _ in range(3))]
    result = Preprocessor(of, threads=1)({"a": sample_lists(rows), "b": nothing()})
    assert seen(of, result) == {("a", 0, 100): 1.0, ("a", 0, 200): 1.0, ("a", 0, 300): 1.0}


def test_coordinates_in_any_order_are_put_in_order():
    of = plan()
    result = Preprocessor(of, threads=1)({"a": Coordinates([3, 0, 1, 2], [13, 10, 11, 12], 4), "b": nothing()})
    assert seen(of, result) == {("a", n, 10 + n): 1.0 for n in range(4)}


def test_an_id_past_its_table_never_reaches_the_next_table_of_the_stack():
    of = plan()
    given = {"a": Ragged([69], [1, 0, 0, 0]), "b": nothing()}
    with pytest.raises(
        DataError, match="feature 'a' has 1 ids that are no rows of table 'a': the first is 69, in sample 0"
    ):
        Preprocessor(of, threads=1)(given)
    dropped = Preprocessor(of, threads=1, policy=Policy(id_bound_check="drop"))(given)
    assert seen(of, dropped) == {}
    wrapped = Preprocessor(of, threads=1, policy=Policy(id_bound_check="wrap"))(given)
    assert seen(of, wrapped) == {("a", 0, 5): 1.0}


def test_a_padded_cell_is_no_id_and_minus_one_elsewhere_is_refused():
    of = plan(tables=("a",))
    result = Preprocessor(of, threads=1)({"a": Dense([[-1, 4], [4, -1], [-1, -1], [0, 1]])})
    assert seen(of, result) == {("a", 0, 4): 1.0, ("a", 1, 4): 1.0, ("a", 3, 0): 1.0, ("a", 3, 1): 1.0}
    with pytest.raises(DataError, match="the first is -1"):
        Preprocessor(of, threads=1)({"a": Dense([[-1, 4], [4, 2], [3, 3], [0, 1]], padding=None)})


@pytest.mark.parametrize(("devices", "per_device"), [(3, 1), (3, 4), (5, 2), (192, 1), (1, 7), (16, 4)])
def test_any_number_of_sparse_cores_preprocesses(devices, per_device):
    cores = Cores(devices=devices, per_device=per_device)
    of = plan(rows=1000, samples=2 * cores.count, cores=cores)
    rng = np.random.default_rng(0)
    ids = {name: rng.integers(0, 1000, 2 * cores.count) for name in "ab"}
    result = Preprocessor(of, threads=1)({name: Dense(each, padding=None) for name, each in ids.items()})
    want = {(name, sample, int(row)): 1.0 for name, each in ids.items() for sample, row in enumerate(each)}
    assert seen(of, result) == want


def test_what_nothing_was_written_to_is_zero_and_a_batch_gives_the_same_bytes_again():
    of = plan(limit=4096)
    batch = {"a": Ragged([3, 3, 5], [2, 1, 0, 0]), "b": nothing()}
    make = Preprocessor(of, threads=1)
    bytes_of = []
    for _ in range(3):
        mine = make(batch).buffers["a_b"]
        half = mine.embedding_ids.shape[1] // 2
        assert not mine.embedding_ids[0, half:].any()
        assert not mine.gains[0, half:].any()
        bytes_of.append([each.tobytes() for each in (mine.embedding_ids, mine.sample_ids, mine.gains)])
        np.full(100_000, 7).sum()  # the heap is used in between
    assert bytes_of[0] == bytes_of[1] == bytes_of[2]


def test_a_mean_heeds_weights_and_an_empty_sample_has_no_gain():
    of = plan(tables=("a",), combiner="mean")
    result = Preprocessor(of, threads=1)({"a": Ragged([1, 2, 3], [2, 0, 1, 0], [1.0, 3.0, 5.0])})
    assert seen(of, result) == {("a", 0, 1): 0.25, ("a", 0, 2): 0.75, ("a", 2, 3): 1.0}


def test_weights_arrive_by_every_form():
    of = plan(tables=("a",))
    forms = [
        Ragged([1, 2], [1, 1, 0, 0], [0.5, 2.0]),
        Coordinates([1, 0], [2, 1], 4, [2.0, 0.5]),
        Dense([[1], [2], [-1], [-1]], [[0.5], [2.0], [9.0], [9.0]]),
        sample_lists([[1], [2], [], []], [[0.5], [2.0], [], []]),
    ]
    for each in forms:
        assert seen(of, Preprocessor(of, threads=1)({"a": each})) == {("a", 0, 1): 0.5, ("a", 1, 2): 2.0}


def test_an_empty_batch_is_a_batch():
    of = plan()
    for split in ("none", "samples", "vocabulary"):
        result = Preprocessor(of, threads=1, policy=Policy(split=split))({"a": nothing(), "b": nothing()})
        assert (result.minibatches, len(result.blocks)) == (1, 1)
        assert not result.buffers["a_b"].row_pointers.any()


def test_the_last_row_of_a_table_near_two_gigarows_has_its_place():
    rows = 2**31 - 200
    of = plan(rows=rows, tables=("a",))
    result = Preprocessor(of, threads=1)({"a": Ragged([rows - 1, 0], [1, 1, 0, 0])})
    assert seen(of, result) == {("a", 0, rows - 1): 1.0, ("a", 1, 0): 1.0}
    with pytest.raises(SpecError, match="ids are int32"):
        plan(rows=rows)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_the_first_and_last_row_are_in_bounds_and_the_next_is_not(kind):
    of = plan()
    for row in (0, 63):
        given = {"a": Ragged(np.array([row], kind), [0, 0, 0, 1]), "b": nothing()}
        assert seen(of, Preprocessor(of, threads=1)(given)) == {("a", 3, row): 1.0}
    for row in (-1, 64):
        with pytest.raises(DataError, match=f"the first is {row}, in sample 3"):
            Preprocessor(of, threads=1)({"a": Ragged(np.array([row], kind), [0, 0, 0, 1]), "b": nothing()})


def test_feedback_reaches_the_limits_of_a_stack():
    of, seen_by = plan(), Record(topology_of(plan()))
    make = Preprocessor(of, threads=1)
    for _ in range(8):
        batch = {name: Ragged(np.arange(60), [15] * 4) for name in "ab"}
        seen_by.add(make(batch).statistics)
    after, (change,) = decide(of, seen_by, FdoPolicy())
    assert change.stack == "a_b"
    assert after.stacks[0].limits != of.stacks[0].limits


def test_no_batch_compiles_anything_once_its_kernels_are_there():
    of = plan(limit=8)
    for split in ("samples", "vocabulary"):
        make = Preprocessor(of, threads=1, policy=Policy(split=split))
        for lengths in ([20, 0, 0, 0], [5, 5, 5, 5], [1, 0, 0, 0]):
            count = sum(lengths)
            for kind in (np.int32, np.int64):
                for weights in (None, np.ones(count)):
                    make({"a": Ragged(np.arange(count, dtype=kind), lengths, weights), "b": nothing()})
    doors = [each for name, each in vars(kernels).items() if name.startswith("run_")]
    assert all(len(each.signatures) <= 1 for each in doors)
