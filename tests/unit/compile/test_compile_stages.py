"""Each op of a captured step knows its stage: forward, backward or update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.capture import capture
from twinstep.worker.compile.stages import stage
from twinstep.worker.compile.strategies import resolve


def captured(step: Any, model: nn.Module, optimizer: Any, batch: Any, strategies: Any = ()) -> Any:
    compiler = StepCompiler(step, model, optimizer, backend="inductor", strategies=strategies)
    lifted: Any = compiler._lifted
    table = lifted.backend.decompositions()
    return capture(step, lifted.state, optimizer, batch, table, backend="inductor", strategies=resolve(strategies))


def test_reads_of_a_parameter_are_told_apart_by_stage() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() + 0.01 * model[2].weight.square().sum()  # type: ignore[index, operator, union-attr]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    found = captured(step, model, torch.optim.Adagrad(model.parameters(), lr=0.1, weight_decay=0.1), torch.ones(2, 4))
    nodes = list(found.graph.graph.nodes)
    weight = next(node for node, slot in zip(nodes, found.context.slots, strict=False) if slot.name == "2.weight")
    assert {stage(user) for user in weight.users} == {"forward", "backward", "update"}
    by_stage = {each: [n for n in nodes if n.op == "call_function" and stage(n) == each] for each in ORDER}
    assert [sum("mm" in str(n.target) for n in by_stage[each]) for each in ORDER] == [2, 3, 0]
    assert not any("sqrt" in str(n.target) for n in by_stage["forward"] + by_stage["backward"])
    for node in nodes:  # nothing is read before its stage
        if node.op == "call_function":
            read = [stage(each) for each in node.all_input_nodes if each.op == "call_function"]
            assert all(ORDER.index(each) <= ORDER.index(stage(node)) for each in read)


ORDER = ("forward", "backward", "update")
