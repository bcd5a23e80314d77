"""Which stage of the step each op of a graph belongs to: forward, backward or update.

Graph passes ask: what lives from forward to backward, which reads of a parameter are the update's. A trace runs the
step's Python in order, so the stage is known while it runs, and travels with the nodes through the second trace.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

Stage = Literal["forward", "backward", "update"]
_ORDER: dict[Stage, int] = {"forward": 0, "backward": 1, "update": 2}


class Stages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the stage of each op that is traced while it is entered.

    An op is the backward pass's where autograd's engine runs it; the update's in `optimizer.step()`, and after a
    backward pass where no gradient is recorded (clipping, an update by hand); else the forward pass's.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._depth = 0
        self._went_back = False
        self._hooks: list[Any] = []

    def __enter__(self) -> Any:
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._count(1)),
            register_optimizer_step_post_hook(lambda *_: self._count(-1)),
        ]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _count(self, change: int) -> None:
        self._depth += change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with fx_traceback.annotate({"stage": self._now()}):
            return func(*args, **(kwargs or {}))

    def _now(self) -> Stage:
        if torch._C._current_graph_task_id() >= 0:
            self._went_back = True
            return "backward"
        return "update" if self._depth or (self._went_back and not torch.is_grad_enabled()) else "forward"


def fill_stages(graph: fx.GraphModule) -> None:
    """Give nodes that a pass put before another, and that say nothing, that one's stage; for the first trace."""
    noted: dict[str, Any] = {}
    for node in reversed(graph.graph.nodes):
        if node.op == "call_function":
            noted = node.meta.setdefault("custom", noted) or noted


def keep_stages(graph: fx.GraphModule) -> None:
    """Write `node.meta["stage"]` from what the trace noted; drop whatever else it did."""
    for node in graph.graph.nodes:
        noted = node.meta.get("custom", {}).get("stage")
        node.meta = {name: node.meta[name] for name in ("val", "tensor_meta") if name in node.meta}
        if noted:
            node.meta["stage"] = noted


def stage(node: fx.Node) -> Stage:
    """Return a node's stage; of one that a pass made and did not say, the latest of what it reads."""
    if "stage" not in node.meta:
        read: list[Stage] = [stage(each) for each in node.all_input_nodes]
        node.meta["stage"] = max(read, key=_ORDER.__getitem__, default="forward")
    noted: Stage = node.meta["stage"]
    return noted
