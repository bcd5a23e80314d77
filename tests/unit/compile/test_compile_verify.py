"""The graph is verified after each pass: a pass that breaks it, in any way the rules know, is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from twinstep.spec.errors import CompileError
from twinstep.worker.compile.passes.context import PassContext
from twinstep.worker.compile.passes.table import Pass, run_passes
from twinstep.worker.compile.passes.verify import check_all

aten = torch.ops.aten
CONTEXT = PassContext(slots=(), num_rates=0, num_batch=2, backend="inductor")


def graph() -> fx.GraphModule:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(x @ y)
        return hidden.sum(dim=0), hidden.t() * 2.0

    made = make_fx(torch.func.functionalize(function), tracing_mode="fake")
    found: fx.GraphModule = made(torch.randn(4, 3), torch.randn(3, 5))
    return found


def node(graph: fx.GraphModule, target: Any) -> fx.Node:
    return next(each for each in graph.graph.nodes if each.target is target)


def malformed(g: fx.GraphModule) -> None:
    """A node before what it reads."""
    node(g, aten.mm.default).append(node(g, aten.mm.default))
    node(g, aten.relu.default).append(node(g, aten.mm.default))


def one_input_more(g: fx.GraphModule) -> None:
    with g.graph.inserting_before(node(g, aten.mm.default)):
        g.graph.placeholder("more")


def inputs_swapped(g: fx.GraphModule) -> None:
    x, y = [each for each in g.graph.nodes if each.op == "placeholder"]
    y.append(x)


def an_inputs_dtype(g: fx.GraphModule) -> None:
    x = next(iter(g.graph.nodes))
    x.meta["val"] = x.meta["val"].to(torch.bfloat16)


def one_output_less(g: fx.GraphModule) -> None:
    output = g.graph.output_node()
    output.args = (output.args[0][:1],)  # type: ignore[index]


def outputs_swapped(g: fx.GraphModule) -> None:
    output = g.graph.output_node()
    output.args = (tuple(reversed(output.args[0])),)  # type: ignore[arg-type]


def an_outputs_dtype(g: fx.GraphModule) -> None:
    total = node(g, aten.sum.dim_IntList)
    total.kwargs = {"dtype": torch.float64}
    total.meta["val"] = total.meta["val"].double()


def mutates(g: fx.GraphModule) -> None:
    relu = node(g, aten.relu.default)
    relu.target = aten.relu_.default


def says_nothing(g: fx.GraphModule) -> None:
    relu = node(g, aten.relu.default)
    with g.graph.inserting_after(relu):
        again = g.graph.call_function(aten.relu.default, (relu,))
    relu.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def says_another_shape(g: fx.GraphModule) -> None:
    relu = node(g, aten.relu.default)
    relu.meta["val"] = relu.meta["val"].new_empty((4, 1))


def says_another_dtype(g: fx.GraphModule) -> None:
    relu = node(g, aten.relu.default)
    relu.meta["val"] = relu.meta["val"].to(torch.bfloat16)


def arguments_that_do_not_fit(g: fx.GraphModule) -> None:
    product = node(g, aten.mm.default)
    product.args = tuple(reversed(product.args))


def a_users_value_goes_stale(g: fx.GraphModule) -> None:
    """`(4, 3) @ (3, 5)` becomes `(4, 3) @ (3, 4)`, rightly said of the product and of nothing after it."""
    x, y = [each for each in g.graph.nodes if each.op == "placeholder"]
    product = node(g, aten.mm.default)
    with g.graph.inserting_before(product):
        part = g.graph.call_function(aten.slice.Tensor, (y, 1, 0, 4))
    part.meta["val"] = y.meta["val"][:, :4]
    product.args = (x, part)
    product.meta["val"] = product.meta["val"][:, :4]


BROKEN: dict[Callable[[fx.GraphModule], None], str] = {
    malformed: "is malformed",
    one_input_more: "takes 3 inputs, not 2",
    inputs_swapped: "as input 0",
    an_inputs_dtype: r"takes x_1 \[4, 3\] bfloat16 as input 0, where it took x_1 \[4, 3\] float32",
    one_output_less: "gives 1 outputs, not 2",
    outputs_swapped: r"gives \[5, 4\] float32 as output 0",
    an_outputs_dtype: r"gives \[5\] float64 as output 0",
    mutates: "writes to a tensor: relu = aten.relu_",
    says_nothing: "meta\\['val'\\] is missing",
    says_another_shape: r"says relu \[4, 1\] float32, but aten.relu.default gives \[4, 5\] float32",
    says_another_dtype: "says relu .* bfloat16",
    arguments_that_do_not_fit: "which its arguments do not fit",
    a_users_value_goes_stale: r"says relu \[4, 5\] float32, but aten.relu.default gives \[4, 4\] float32",
}


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda each: each.__name__)
def test_a_pass_that_breaks_the_graph_is_named(breaks: Callable[[fx.GraphModule], None]) -> None:
    def run(g: fx.GraphModule, _: PassContext) -> int:
        breaks(g)
        return 1

    fine = Pass("fine", lambda *_: 0, keeps_bits=True, why="")
    broken = Pass("the_broken_one", run, keeps_bits=True, why="")
    with pytest.raises(CompileError, match=BROKEN[breaks]) as caught:
        run_passes(graph(), (fine, broken, fine), CONTEXT)
    assert "the_broken_one" in caught.value.problem


def test_a_right_pass_passes_and_unread_inputs_are_allowed() -> None:
    def run(g: fx.GraphModule, _: PassContext) -> int:
        product = node(g, aten.mm.default)
        with g.graph.inserting_before(product):
            ones = g.graph.call_function(aten.full_like.default, (product.args[0], 1.0))
        ones.meta["val"] = product.args[0].meta["val"].clone()  # type: ignore[union-attr]
        product.replace_input_with(product.args[0], ones)  # type: ignore[arg-type]
        return 1

    made = graph()
    run_passes(made, (Pass("right", run, keeps_bits=False, why=""),), CONTEXT)
    check_all(made, "right")
