"""Every known class of defect of step compilers, and every trap of capture and lowering, has a test; here is which.

The tests below the map are those that stand in no other file.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinstep.spec.errors import CaptureError, CompileError
from twinstep.worker.compile import StepCompiler

BACKENDS = ("inductor", "xla")
TESTS = Path(__file__).parents[1]

TRAPS: dict[str, tuple[str, ...]] = {
    # Classes of defect that other compilers had.
    "a step count or learning rate frozen into the program": ("test_every_optimizer_with_a_schedule_follows_eager",),
    "a first step that is special": (
        "test_the_first_step_is_not_dampened_and_all_others_are",
        "test_a_checkpoint_from_before_the_first_step_still_knows_it",
    ),
    "swapped or aliased state": (
        "test_swapped_and_returned_state_holds_the_values_eager_gives",
        "test_state_that_moves_from_one_buffer_to_another_arrives_before_it_is_overwritten",
    ),
    "reinplacing over a live value": ("test_a_scatter_into_state_that_is_then_overwritten_is_returned_as_it_was",),
    "random numbers frozen or leaked": (
        "test_dropout_draws_a_new_mask_at_every_step",
        "test_masks_go_on_where_a_setting_changes_at_every_step",
        "test_masks_differ_after_a_retrace_and_come_again_from_a_kept_state",
    ),
    "64-bit integers cut": (
        "test_an_integer_that_xla_would_cut_is_refused",
        "test_integers_come_back_as_wide_as_they_were",
    ),
    "a program used for another configuration": (
        "test_two_steps_of_the_same_shapes_do_not_answer_for_each_other",
        "test_a_change_in_any_field_of_the_key_misses_and_has_a_reason",
        "test_an_entry_of_another_key_under_this_ones_name_is_a_miss",
    ),
    "a wrong dtype or a donated buffer accepted": (
        "test_a_runner_refuses_other_structures_shapes_and_dtypes_and_keeps_the_state",
        "test_a_state_that_was_lost_with_a_failed_step_is_named_and_taken_again_by_push",
    ),
    "an upgrade that breaks an import": ("test_packages_that_do_not_load_are_named_with_the_tested_versions",),
    "gradients scaled by the number of devices": (
        "test_eight_devices_give_one_devices_numbers",
        "test_two_ranks_learn_what_one_process_learns_from_the_joint_batch",
    ),
    "tied, unused, frozen or empty parameters": (
        "test_every_optimizer_with_a_schedule_follows_eager",
        "test_unused_and_frozen_parameters_stay_bit_equal",
        "test_tied_tables_are_updated_once_and_empty_parameters_stay",
    ),
    "an input pipeline that reads again, races or over-draws": (
        "test_no_more_than_depth_and_one_are_drawn_ahead",
        "test_items_come_in_order_and_the_end_stays_the_end",
    ),
    # Capture: optimizers.
    "numbers that optimizers read out of tensors": (
        "test_every_optimizer_of_torch_follows_eager_or_is_refused",
        "test_a_number_is_read_when_it_is_read_and_not_when_it_is_used",
    ),
    "foreach and fused optimizers": ("test_foreach_and_fused_optimizers_follow_eager",),
    "state made at the first step": ("test_making_optimizer_state_moves_nothing",),
    "gradients of the step before": (
        "test_gradients_that_add_up_over_steps_and_ones_that_are_zeroed_in_place_follow_eager",
        "test_any_order_of_steps_follows_eager",
        "test_leftovers_of_eager_steps_count_where_zero_grad_stands_at_the_end",
        "test_gradients_that_no_optimizer_takes_are_refused",
    ),
    "several backward passes in a step, and clipping": ("test_micro_batches_in_one_step_and_clipping_follow_eager",),
    # Capture: control flow and hidden inputs.
    "if, while, assert, int(), item() and print on a tensor": (
        "test_what_one_graph_cannot_hold_is_named_and_changes_nothing",
        "test_values_that_python_reads_are_refused_with_the_users_line",
    ),
    "shapes that depend on data": ("test_a_shape_that_depends_on_data_is_refused_with_the_users_line",),
    "Python's random numbers, counters and clock": (
        "test_what_python_would_do_once_only_is_refused",
        "test_a_clock_read_in_the_step_is_refused",
    ),
    "a tensor outside the model that the step writes to": ("test_a_write_to_a_tensor_outside_the_model_is_refused",),
    "tensors that the step closes over": ("test_a_tensor_that_the_step_closes_over_is_an_input",),
    # Lowering.
    "ops that torchax lacks": ("test_ops_that_torchax_lacks_follow_eager_forward_and_backward",),
    "ops of torchax that are wrong": ("test_ops_whose_lowering_is_wrong_are_refused",),
    "a factor beside a matrix product that Inductor forgets": (
        "test_weight_decay_beside_a_matrix_product_keeps_its_factor",
    ),
    "no check of dtypes at the call": ("test_a_runner_refuses_other_structures_shapes_and_dtypes_and_keeps_the_state",),
    "masks that are not eager's under one seed": ("test_inductor_draws_eagers_masks_under_one_seed",),
    "float64 that XLA would round": ("test_digits_that_xla_would_lose_are_refused",),
    "a recomputed value that the backend merges again": ("test_the_backend_does_not_undo_the_saving",),
    "ids out of range": (
        "test_an_id_that_names_no_row_is_an_error_with_the_leaf_and_changes_nothing",
        "test_a_step_takes_the_ids_that_eager_takes_and_no_others",
        "test_an_id_outside_of_the_table_writes_to_no_row",
    ),
    "gradients that are rounding and nothing else": (
        "test_noise_allows_next_to_nothing_where_gradients_are_ordinary_and_nothing_where_there_are_none",
    ),
    "donated state that is used again": ("test_state_that_is_gone_is_refused_instead_of_crashing_the_process",),
    "a recurrent layer after another, through oneDNN": ("test_recurrent_layers_follow_eager_one_after_the_other",),
    "hours of the day in float32": ("test_hours_and_weekdays_turn_over_at_the_whole_second",),
    "a batch that the mesh does not divide": ("test_a_batch_that_does_not_divide_names_sizes_that_do",),
    "a table gathered by a collective": ("test_tables_and_their_state_are_split_by_rows_and_never_gathered",),
    "a torn or foreign entry of the cache": ("test_a_torn_entry_is_a_miss_wherever_it_was_torn",),
}
"""Tests by what they hold off."""


def test_the_map_names_tests_that_are_there() -> None:
    found = {
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert not [name for names in TRAPS.values() for name in names if name not in found]
    assert all(TRAPS.values())


def square_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def linear(size: int = 3) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(size, size)


def follow(backend: str, model: nn.Module, optimizer: Any, step: Any, batches: list[Any], **options: Any) -> Any:
    compiler = StepCompiler(step, model, optimizer, backend=backend, **options)  # type: ignore[arg-type]
    outputs = [compiler(batch) for batch in batches]
    return outputs, {name: value.clone() for name, value in model.state_dict().items()}


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("rows", torch.arange(12.0).reshape(4, 3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scatter_into_state_that_is_then_overwritten_is_returned_as_it_was(backend: str) -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        (model.weight * x[0]).sum().backward()
        optimizer.step()
        old = model.rows.clone()
        written = model.rows.index_copy(0, torch.tensor([1, 3]), x)
        model.rows.copy_(written.flip(0) * 2)
        return {"written": written, "old": old, "row": written[1]}

    batches = [torch.full((2, 3), float(index)) for index in (7, 8, 9)]
    found = {}
    for each in ("eager", backend):
        model = Memory()
        found[each] = follow(each, model, torch.optim.SGD([model.weight], lr=0.1), step, batches)
    torch.testing.assert_close(found[backend], found["eager"])


def masked(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    kept: Tensor = model[0](x)
    optimizer.zero_grad()
    model[1](kept).sum().backward()
    optimizer.step()
    return kept


def dropper(backend: str) -> StepCompiler:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return StepCompiler(masked, model, optimizer, backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_differ_after_a_retrace_and_come_again_from_a_kept_state(backend: str) -> None:
    compiler = dropper(backend)
    one, two = torch.ones(64), torch.ones(2, 64)
    first = compiler(one)
    other = compiler(two)  # another shape: traced anew
    assert not torch.equal(first, other[0])
    kept = compiler.random_state().clone()
    after = [compiler(one) for _ in range(2)]
    assert not torch.equal(after[0], after[1])
    compiler.set_random_state(kept)
    torch.testing.assert_close([compiler(one) for _ in range(2)], after, rtol=0, atol=0)


@pytest.mark.inductor
def test_inductor_draws_eagers_masks_under_one_seed() -> None:
    found = []
    for backend in ("eager", "inductor"):
        compiler = dropper(backend)
        compiler.program(torch.ones(64))
        torch.manual_seed(5)
        found.append([compiler(torch.ones(64)) for _ in range(3)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_integers_come_back_as_wide_as_they_were() -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> dict[str, Tensor]:
        loss = square_step(model, optimizer, x.float())
        return {"loss": loss, "top": x.argmax(dim=1), "sum": x.sum(), "flag": x > 1, "small": x.to(torch.int32)}

    x = torch.tensor([[1, 2, 3], [6, 5, 4]])
    found = [
        follow(b, m, torch.optim.SGD(m.parameters(), lr=0.1), step, [x])[0][0]
        for b in ("eager", "xla")
        for m in [linear()]
    ]
    assert {k: v.dtype for k, v in found[0].items()} == {k: v.dtype for k, v in found[1].items()}
    torch.testing.assert_close(found[1], found[0])


def test_packages_that_do_not_load_are_named_with_the_tested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("twinstep.worker.compile.lower.xla")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchax", None)
    model = linear()
    with pytest.raises(CompileError, match="packages of the xla backend do not load") as caught:
        StepCompiler(square_step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla")(torch.ones(2, 3))
    assert "torchax==" in caught.value.remedy or "locks/full.txt" in caught.value.remedy


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Embedding(5, 4), nn.Embedding(5, 4)
        self.two.weight = self.one.weight
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.one(ids) * self.two(ids.flip(0)) + self.empty.sum()


@pytest.mark.parametrize("strategies", [(), None], ids=["plain", "defaults"])
def test_tied_tables_are_updated_once_and_empty_parameters_stay(strategies: Any) -> None:
    found = []
    for backend in ("eager", "xla"):
        model = Tied()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        found.append(
            follow(backend, model, optimizer, square_step, [torch.tensor([0, 1, 1])] * 3, strategies=strategies)
        )
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert found[1][1]["empty"].shape == (0, 4)


@pytest.mark.parametrize("kind", ["Adam", "SGD", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("switch", ["foreach", "fused"])
def test_foreach_and_fused_optimizers_follow_eager(kind: str, switch: str) -> None:
    if (kind, switch) == ("RMSprop", "fused"):
        pytest.skip("torch has none")
    found = []
    for backend in ("eager", "xla"):
        model = linear()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **{switch: True})
        found.append(follow(backend, model, optimizer, square_step, [torch.ones(2, 3)] * 3))
        assert optimizer.param_groups[0][switch] is True
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_gradients_that_no_optimizer_takes_are_refused() -> None:
    def backward_only(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with pytest.raises(CaptureError, match="no optimizer that takes them"):
        StepCompiler(backward_only, linear(), None, backend="xla")(torch.ones(2, 3))


def by_norm(parameters: Any) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.05)


def by_value(parameters: Any) -> None:
    nn.utils.clip_grad_value_(parameters, 0.01)


@pytest.mark.parametrize(("backend", "clip"), [("xla", by_norm), ("xla", by_value), ("inductor", by_norm)])
def test_micro_batches_in_one_step_and_clipping_follow_eager(backend: str, clip: Any) -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in x.chunk(3):
            loss = model(part).square().mean() / 3
            loss.backward()
            total = total + loss.detach()
        clip(model.parameters())
        optimizer.step()
        return total

    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    found = []
    for each in ("eager", backend):
        model = linear()
        found.append(follow(each, model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), step, [x] * 3))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def as_list(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    return square_step(model, optimizer, x * x[0].tolist()[0])


def as_array(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    return square_step(model, optimizer, x * float(x.numpy()[0, 0]))


def as_size(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    return square_step(model, optimizer, x[: int(x.sum())])


def asserted(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    if not bool((x > 0).all()):  # an assert, which pytest would rewrite
        raise AssertionError
    return square_step(model, optimizer, x)


def judged(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = square_step(model, optimizer, x)
    if loss.item() > 1e9:
        raise RuntimeError
    return loss


def printed(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = square_step(model, optimizer, x)
    print(loss)
    return loss


def formatted(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = square_step(model, optimizer, x)
    f"the loss is {loss:.3f}"
    return loss


def logged(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = square_step(model, optimizer, x)
    with contextlib.suppress(Exception):  # as a logger does with what goes wrong in it
        str(loss)
    return loss


READERS = [as_list, as_array, as_size, asserted, judged, printed, formatted, logged]


@pytest.mark.parametrize("step", READERS, ids=lambda each: each.__name__)
def test_values_that_python_reads_are_refused_with_the_users_line(step: Any) -> None:
    model = linear()
    with pytest.raises(CaptureError) as caught:
        StepCompiler(step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla")(torch.ones(4, 3))
    assert Path(__file__).name in caught.value.problem
    if step in (printed, formatted, logged):
        assert "text of it" in caught.value.problem
        assert "loss" in caught.value.problem  # the user's line
    assert caught.value.remedy


def test_a_clock_read_in_the_step_is_refused() -> None:
    def decayed(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        return square_step(model, optimizer, x * (time.monotonic() % 10))

    model, clock = linear(), time.monotonic
    with pytest.raises(CaptureError, match=r"reads the clock.*monotonic\(\) at .*test_compile_trap_map.py"):
        StepCompiler(decayed, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla")(torch.ones(4, 3))
    assert time.monotonic is clock


def test_a_write_to_a_tensor_outside_the_model_is_refused() -> None:
    outside = torch.zeros(3)

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        outside.add_(x[0])
        return square_step(model, optimizer, x + outside)

    model = linear()
    with pytest.raises(CaptureError, match=r"writes to a tensor of shape \[3\] that is not the model's"):
        StepCompiler(step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend="xla")(torch.ones(4, 3))
    assert torch.equal(outside, torch.zeros(3))
