"""What a batch may be, and what is refused before anything is computed from it."""

import numpy as np
import pytest
import torch

from twinstep.spec.errors import DataError, SpecError
from twinstep.worker.embedding.sparsecore.inputs import (
    Coordinates,
    Dense,
    Ragged,
    hold_to_bounds,
    keyed,
    rows_of,
    sample_lists,
)
from twinstep.worker.embedding.sparsecore.preprocess import Policy, Preprocessor
from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Limits, Table
from twinstep.worker.embedding.sparsecore.stacking import plan_stacks

CORES = Cores(devices=1, per_device=2)


def preprocessor(rows=10, samples=4, combiner="sum", limit=64, **policy):
    table = Table(name="t", rows=rows, dim=8, combiner=combiner, limits=Limits(max_ids=limit, max_unique=limit))
    plan = plan_stacks([table], [Feature(name="f", table="t", samples=samples)], CORES)
    return Preprocessor(plan, policy=Policy(**policy), threads=1)


def triples(result, name="t"):
    """(stacked sample, source SparseCore, id) → gain."""
    mine, found = result.buffers[name], {}
    slots = mine.embedding_ids.shape[1]
    for core in range(2):
        start = 0
        for target in range(2):
            end = mine.row_pointers[0, core * 8 + target]
            for at in range(core * slots // 2 + start, core * slots // 2 + end):
                key = (core, int(mine.sample_ids[0, at]), int(mine.embedding_ids[0, at]) * 2 + target)
                found[key] = float(mine.gains[0, at])
            start = -(-int(end) // 8) * 8
    return found


def lists():
    return [[3, 1, 3], [], [9], [0, 2]]


FORMS = {
    "ragged": lambda: Ragged(np.array([3, 1, 3, 9, 0, 2]), np.array([3, 0, 1, 2])),
    "ragged torch": lambda: Ragged(torch.tensor([3, 1, 3, 9, 0, 2]), torch.tensor([3, 0, 1, 2])),
    "lists": lambda: sample_lists(lists()),
    "arrays of int64": lambda: sample_lists([np.array(each, np.int64) for each in lists()]),
    "dense": lambda: Dense(np.array([[3, 1, 3], [-1, -1, -1], [9, -1, -1], [0, 2, -1]], np.int32)),
    "coordinates": lambda: Coordinates([3, 0, 0, 3, 0, 2], [0, 3, 1, 2, 3, 9], 4),
    "keyed": lambda: keyed(["f"], torch.tensor([3, 1, 3, 9, 0, 2]), torch.tensor([3, 0, 1, 2]))["f"],
    "uint8": lambda: Ragged(np.array([3, 1, 3, 9, 0, 2], np.uint8), np.array([3, 0, 1, 2], np.uint8)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch_means_the_same(form):
    found = triples(preprocessor()({"f": FORMS[form]()}))
    assert found == {(0, 0, 3): 2.0, (0, 0, 1): 1.0, (1, 0, 9): 1.0, (1, 1, 0): 1.0, (1, 1, 2): 1.0}


def test_an_empty_feature_is_an_empty_feature():
    result = preprocessor()({"f": Ragged(np.zeros(0), np.zeros(4, np.int64))})
    assert triples(result) == {}
    assert not result.buffers["t"].row_pointers.any()
    assert triples(preprocessor()({"f": Dense(np.zeros((4, 0), np.int64))})) == {}


def test_keys_of_a_keyed_batch_are_told_apart():
    found = keyed(["a", "b"], [1, 2, 3], [1, 0, 1, 1], weights=[0.5, 1.5, 2.5])
    assert found["a"].ids.tolist() == [1]
    assert found["b"].ids.tolist() == [2, 3]
    assert found["b"].weights.tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Ragged([1.5, 2.0], [1, 1, 0, 0]), "ids of type float64"),
        (Ragged(np.array(["a"]), [1, 0, 0, 0]), "ids of type <U1"),
        (Ragged(np.array([None], object), [1, 0, 0, 0]), "ids of type object"),
        (Ragged([True, False], [1, 1, 0, 0]), "ids of type bool"),
        (Ragged(np.array([2**63], np.uint64), [1, 0, 0, 0]), "int64 can hold"),
        (Ragged([1, 2], [1, 2, 0, 0]), "add up to 3, and 2 ids"),
        (Ragged([1, 2], [3, -1, 0, 0]), "a length of -1"),
        (Ragged([1, 2], [1, 1]), "2 samples, and 4 are expected"),
        (Ragged([[1, 2]], [1, 1, 0, 0]), r"ids of shape \(1, 2\)"),
        (Ragged([1, 2], [1, 1, 0, 0], [1.0]), r"weights of shape \(1,\), and ids of shape \(2,\)"),
        (Ragged([1, 2], [1, 1, 0, 0], ["x", "y"]), "weights of type"),
        (Dense(np.zeros((4, 3), np.int32), np.zeros((4, 2), np.float32)), r"weights of shape \(4, 2\)"),
        (Dense(np.zeros((4, 3, 1), np.int32)), r"give \[samples, width\]"),
        (Coordinates([0, 4], [1, 2], 4), "samples 0 to 4, of 4"),
        (Coordinates([0], [1, 2], 4), "give one per id"),
        ([[1], [2], [3], [4]], "is a list"),
    ],
)
def test_what_does_not_fit_together_is_refused(given, says):
    with pytest.raises(DataError, match=says):
        preprocessor()({"f": given})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: sample_lists([[1], [1.5]]), "ids of type float64"),
        (lambda: sample_lists([[1, 2]], [[1.0]]), "2 ids and 1 weights"),
        (lambda: sample_lists([[1], [2]], [[1.0]]), "weights of 1 samples for 2"),
        (lambda: keyed(["a", "b"], [1], [1, 0, 0]), "3 lengths for 2 keys"),
        (lambda: keyed(["a"], [1], [2]), "add up to 2"),
        (lambda: keyed(["a"], [1], [1], [1.0, 2.0]), "2 weights for 1 ids"),
    ],
)
def test_lists_and_keys_that_do_not_fit_are_refused(make, says):
    with pytest.raises(DataError, match=says):
        make()


def test_a_batch_must_have_every_feature_and_no_other():
    with pytest.raises(DataError, match="no feature 'f'"):
        preprocessor()({})
    with pytest.raises(DataError, match="a feature 'g', which no table"):
        preprocessor()({"f": FORMS["lists"](), "g": FORMS["lists"]()})


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("bad", [10, -1, -7, 2**31 - 1])
def test_an_id_out_of_range_is_found_and_never_read_elsewhere(kind, bad):
    given = {"f": Ragged(np.array([3, bad, 1], kind), np.array([1, 2, 0, 0]))}
    with pytest.raises(DataError, match=f"1 ids that are no rows of table 't': the first is {bad}, in sample 1"):
        preprocessor()(given)
    dropped = preprocessor(id_bound_check="drop", combiner="mean")(given)
    assert triples(dropped) == {(0, 0, 3): 1.0, (0, 1, 1): 1.0}
    wrapped = preprocessor(id_bound_check="wrap")(given)
    assert triples(wrapped) == {(0, 0, 3): 1.0, (0, 1, bad % 10): 1.0, (0, 1, 1): 1.0} if bad % 10 != 1 else True
    assert dropped.statistics.outside == wrapped.statistics.outside == {"f": 1}


def test_an_id_past_int32_is_not_cut_to_32_bits():
    with pytest.raises(DataError, match=f"the first is {2**32 + 5}"):
        preprocessor()({"f": Ragged(np.array([2**32 + 5]), np.array([1, 0, 0, 0]))})


def test_weights_follow_the_ids_that_are_left():
    rows = rows_of("f", Dense([[5, 20], [21, 6]], [[1.0, 2.0], [3.0, 4.0]]), 2)
    left, count = hold_to_bounds("f", rows, "t", 10, "drop")
    assert count == 2
    assert (left.ids.tolist(), left.weights.tolist(), left.offsets.tolist()) == ([5, 6], [1.0, 4.0], [0, 1, 2])


def test_a_mean_of_weights_that_sum_to_nothing_is_nothing():
    result = preprocessor(combiner="mean")({"f": Ragged([1, 2], [2, 0, 0, 0], [1.0, -1.0])})
    assert triples(result) == {(0, 0, 1): 0.0, (0, 0, 2): 0.0}


def test_an_unknown_policy_is_refused():
    with pytest.raises(SpecError, match="id_bound_check is 'ignore'"):
        preprocessor(id_bound_check="ignore")
