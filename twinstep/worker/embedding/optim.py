"""The two optimizers of a step: real `torch.optim` classes, and row-wise Adagrad for tables.

`train/` builds them from the spec; the compiler captures their `step()` with the rest.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from twinstep.spec.optimizers import DenseOptimizerSpec, OptimizersSpec, SparseOptimizerSpec
from twinstep.worker.embedding.collection import EmbeddingTable


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one float32 sum per row: sum += mean(g²) over the row, w -= lr · g / (sqrt(sum) + eps).

    The rule of FBGEMM's exact row-wise Adagrad. A row whose gradient is zero keeps its bits. Weight decay, if any,
    is added to the gradient of rows with a gradient only, so that an unused row keeps its bits still.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float | Tensor = 1e-2, eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for param in group["params"]:
                assert param.dim() == 2, "row-wise Adagrad is for tables, [rows, dim]"  # noqa: S101
                self.state[param]["sum"] = torch.zeros(param.shape[0], 1, dtype=torch.float32, device=param.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every table that has a gradient; no value is read on the host."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = param.grad
                if group["weight_decay"]:
                    used = (grad != 0).any(dim=1, keepdim=True)
                    grad = torch.where(used, grad + group["weight_decay"] * param, 0.0)
                total = self.state[param]["sum"]
                total.add_(grad.square().mean(dim=1, keepdim=True))
                param.sub_(group["lr"] * grad / (total.sqrt() + group["eps"]))
        return loss


def split_parameters(
    model: nn.Module,
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Return (dense, tables): parameters by name, in the model's order; each parameter once."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, EmbeddingTable)}
    named = list(model.named_parameters())
    return (
        [(name, param) for name, param in named if id(param) not in tables],
        [(name, param) for name, param in named if id(param) in tables],
    )


def build_optimizers(spec: OptimizersSpec, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers "dense" and "sparse" over a model's parameters, as `spec` asks; none over no parameter."""
    dense, tables = ([param for _, param in part] for part in split_parameters(model))
    return {
        name: build_optimizer(asked, params)
        for name, asked, params in (("dense", spec.dense, dense), ("sparse", spec.sparse, tables))
        if params
    }


def build_optimizer(
    spec: DenseOptimizerSpec | SparseOptimizerSpec, params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return one optimizer over parameters, as its spec asks."""
    with _without_dynamo():
        return OPTIMIZERS[spec.kind](params, spec)


@contextlib.contextmanager
def _without_dynamo() -> Iterator[None]:
    """Let an optimizer be made without torch._dynamo, which it imports, in two seconds, only to be hidden from it."""
    hidden = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)  # what torch._disable_dynamo hides
    mark = "__dynamo_disable"  # where it keeps what it calls
    if hidden is None or "torch._dynamo" in sys.modules or hasattr(hidden, mark):
        yield
        return
    setattr(hidden, mark, hidden)
    try:
        yield
    finally:
        delattr(hidden, mark)


def _sgd(params: list[nn.Parameter], spec: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay, foreach=False)


def _adam(params: list[nn.Parameter], spec: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, foreach=False
    )


def _adamw(params: list[nn.Parameter], spec: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, foreach=False
    )


def _adagrad(params: list[nn.Parameter], spec: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=spec.lr, eps=spec.eps, weight_decay=spec.weight_decay, foreach=False)


def _rowwise_adagrad(params: list[nn.Parameter], spec: Any) -> torch.optim.Optimizer:
    return RowWiseAdagrad(params, lr=spec.lr, eps=spec.eps, weight_decay=spec.weight_decay)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], Any], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
}
