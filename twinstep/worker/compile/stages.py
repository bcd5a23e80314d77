"""Which stage of the step each op of a graph belongs to: forward, backward or update; its module; whose gradient it is.

Graph passes ask: what lives from forward to backward, which reads of a parameter are the update's, what a parameter's
gradient was before a clip. A trace runs the step's Python in order, so all of it is known while it runs, and travels
with the nodes through the second trace.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

Stage = Literal["forward", "backward", "update"]
_ORDER: dict[Stage, int] = {"forward": 0, "backward": 1, "update": 2}


class Stages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the stage and the region of each op that is traced while it is entered.

    An op is the backward pass's where autograd's engine runs it; the update's in `optimizer.step()`, and after a
    backward pass where no gradient is recorded (clipping, an update by hand); else the forward pass's. Its region is
    the path of the module whose forward, or whose backward, it is; of an optimizer's step the optimizer's name.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._names = {id(optimizer): name for name, optimizer in optimizers.items()}
        self._modules: list[str] = []
        self._optimizers: list[str] = []
        self._regions: dict[int, str] = {}
        """Region by the sequence number of the autograd node that a forward op made."""
        self._went_back = False
        self._hooks: list[Any] = []

    def __enter__(self) -> Any:
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(lambda *_: self._leave(self._modules), always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(lambda *_: self._leave(self._optimizers)),
        ]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        outer = self._modules[-1] if self._modules else ""
        self._modules.append(self._paths.get(id(module), outer))

    def _enter_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self._optimizers.append(self._names.get(id(optimizer), ""))

    @staticmethod
    def _leave(stack: list[str]) -> None:
        if stack:
            stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        now = self._now()
        with fx_traceback.annotate({"stage": now, "region": self._region(now)}):
            return func(*args, **(kwargs or {}))

    def _now(self) -> Stage:
        if torch._C._current_graph_task_id() >= 0:
            self._went_back = True
            return "backward"
        return "update" if self._optimizers or (self._went_back and not torch.is_grad_enabled()) else "forward"

    def _region(self, now: Stage) -> str:
        if now == "backward":
            node = torch._C._current_autograd_node()
            return self._regions.get(node._sequence_nr(), "") if node is not None else ""
        if self._optimizers:
            return self._optimizers[-1]
        region = self._modules[-1] if self._modules else ""
        if now == "forward":
            # Autograd made this op's node just before it came here; what that node runs backward is the module's too.
            self._regions.setdefault(torch._C._autograd._get_sequence_nr() - 1, region)
        return region


class Gradients:
    """Notes which value of the trace is whose gradient when the backward pass ends."""

    def __init__(self) -> None:
        self._nodes: dict[str, fx.Node] = {}

    def watch(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Note the gradient of each of `parameters`, leaves of the trace, whenever the backward pass adds to it."""
        for name, parameter in zip(names, parameters, strict=False):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._noter(name))  # type: ignore[no-untyped-call]

    def _noter(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            if parameter.grad is not None and (node := _node_of(parameter.grad)) is not None:
                self._nodes[name] = node

        return note

    def mark(self) -> None:
        """Write the names into the nodes' notes."""
        for name, node in self._nodes.items():
            _add_gradients(node, (name,))


def _add_gradients(node: fx.Node, names: tuple[str, ...]) -> None:
    noted = node.meta.get("custom", {})
    node.meta["custom"] = {**noted, "gradients": (*noted.get("gradients", ()), *names)}


def _node_of(tensor: Tensor) -> fx.Node | None:
    """Return the node that made a tensor of the trace now going on."""
    if torch._is_functional_tensor(tensor):
        torch._functionalize_sync(tensor)
        tensor = torch._from_functional_tensor(tensor)
    mode = get_proxy_mode()
    found: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if found is None else found.proxy.node


class KeepNotes(fx.Interpreter):
    """Runs the first trace so that a trace of the run has its notes too."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; where it is a gradient, so is what it made: the last of several ops, or one before it."""
        noted = n.meta.get("custom", {})
        gradients = noted.get("gradients", ())
        if not gradients:
            return super().run_node(n)
        n.meta["custom"] = {name: value for name, value in noted.items() if name != "gradients"}
        result = super().run_node(n)
        if isinstance(result, Tensor) and (made := _node_of(result)) is not None:
            _add_gradients(made, gradients)
        return result


def fill_stages(graph: fx.GraphModule) -> None:
    """Give nodes that a pass put before another, and that say nothing, that one's notes; for the first trace."""
    noted: dict[str, Any] = {}
    for node in reversed(graph.graph.nodes):
        if node.op == "call_function":
            noted = node.meta.setdefault("custom", noted) or noted
            noted = {name: value for name, value in noted.items() if name != "gradients"}


_NOTES = ("stage", "region", "gradients", "place", "by")


def keep_stages(graph: fx.GraphModule) -> None:
    """Write `node.meta["stage"]`, and region and gradients, from what the trace noted; drop whatever else it did."""
    for node in graph.graph.nodes:
        noted = node.meta.get("custom", {})
        node.meta = {name: node.meta[name] for name in ("val", "tensor_meta") if name in node.meta}
        node.meta.update({name: noted[name] for name in _NOTES if noted.get(name)})


def region(node: fx.Node) -> str:
    """Return the path of the module, or the name of the optimizer, that a node belongs to; empty where unknown."""
    return str(node.meta.get("region", ""))


def place(node: fx.Node | None) -> str:
    """Return ` at FILE:LINE: source` of the user's code that a node comes from; empty where unknown."""
    file, line = ("", 0) if node is None else node.meta.get("place", ("", 0))
    return f" at {file}:{line}: {linecache.getline(file, line).strip()}" if file else ""


def gradients(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the parameters whose `.grad` a node's value is when the backward pass ends."""
    return tuple(node.meta.get("gradients", ()))


def hand_over(node: fx.Node, successor: fx.Node) -> None:
    """Let `successor` be the gradient that `node` is: a pass calls it where it puts another value in a node's place."""
    if names := gradients(node):
        successor.meta["gradients"] = (*gradients(successor), *names)
        del node.meta["gradients"]


def stage(node: fx.Node) -> Stage:
    """Return a node's stage; of one that a pass made and did not say, the latest of what it reads."""
    if "stage" not in node.meta:
        read: list[Stage] = [stage(each) for each in node.all_input_nodes]
        node.meta["stage"] = max(read, key=_ORDER.__getitem__, default="forward")
    noted: Stage = node.meta["stage"]
    return noted
