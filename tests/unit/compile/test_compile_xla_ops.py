"""Ops that torchax lacks, forward and backward, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twinstep.spec.errors import CompileError
from twinstep.worker.compile import StepCompiler


def image(x: Tensor) -> Tensor:
    return x.reshape(2, 2, 4, 4)


def heads(x: Tensor) -> Tensor:
    return x.reshape(1, 2, 4, 8)


KERNEL = torch.linspace(-0.3, 0.4, 54).reshape(3, 2, 3, 3)
BIAS = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
IDS = torch.tensor([2, 0, 2, 3, 1, 1, 0, 3])

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu, selu, softshrink": lambda x: F.elu(x, 0.7) + F.selu(x) + F.softshrink(x, 0.3),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "searchsorted": lambda x: x * torch.searchsorted(torch.arange(4.0) - 2, x.detach(), right=True),
    "conv2d": lambda x: F.conv2d(image(x), KERNEL, torch.ones(3), stride=2, padding=1, dilation=1),
    "conv2d in groups": lambda x: F.conv2d(image(x), KERNEL[:2, :1], groups=2, dilation=(1, 1)),
    "conv1d": lambda x: F.conv1d(x.reshape(2, 4, 8), torch.linspace(-1, 1, 24).reshape(2, 4, 3), dilation=2),
    "conv_transpose1d": lambda x: F.conv_transpose1d(
        x.reshape(2, 4, 8), torch.linspace(-1, 1, 24).reshape(4, 2, 3), torch.ones(2), stride=2, output_padding=1
    ),
    "conv_transpose2d in groups": lambda x: F.conv_transpose2d(
        image(x), KERNEL[:2, :2], stride=(2, 1), padding=(1, 2), groups=2, dilation=(1, 2)
    ),
    "conv_transpose2d's kernel": lambda x: F.conv_transpose2d(
        torch.linspace(-1, 1, 36).reshape(1, 4, 3, 3), x.reshape(4, 4, 2, 2), stride=3, padding=1, output_padding=(1, 2)
    ),
    "weight_norm": lambda x: torch._weight_norm(x.reshape(4, 2, 8), torch.linspace(1, 2, 4).reshape(4, 1, 1), 0),
    "weight_norm of columns": lambda x: torch._weight_norm(x.detach() + 1, x[:1], 1),
    "bags by maximum": lambda x: F.embedding_bag(IDS, x, torch.tensor([0, 3, 3, 5]), mode="max"),
    "bags by maximum, padded": lambda x: F.embedding_bag(
        IDS, x, torch.tensor([0, 2, 4, 8]), mode="max", include_last_offset=True, padding_idx=1
    ),
    "bags by maximum, equal rows": lambda x: F.embedding_bag(IDS.reshape(2, 4), x - x.detach(), mode="max"),
    "bags with weights": lambda x: F.embedding_bag(
        IDS, x, torch.tensor([0, 3, 3, 5]), mode="sum", per_sample_weights=torch.linspace(-1, 1, 8)
    ),
    "avg_pool2d": lambda x: F.avg_pool2d(image(x), 3, stride=2, padding=1, count_include_pad=False),
    "avg_pool2d, padded": lambda x: F.avg_pool2d(image(x), (2, 3), padding=(1, 1)),
    "max_pool2d": lambda x: F.max_pool2d(image(x), 3, stride=2, padding=1),
    "max_pool2d, equal numbers": lambda x: F.max_pool2d(F.relu(image(x) - 0.5), (2, 3), stride=1),
    "max_pool2d, one channel": lambda x: F.max_pool2d(x.reshape(4, 1, 4, 4), 2),
    "max_pool1d": lambda x: F.max_pool1d(x.reshape(2, 4, 8), 3, stride=2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(image(x), (3, 2)),
    "nearest": lambda x: F.interpolate(image(x), size=(7, 3)),
    "nearest by a factor": lambda x: F.interpolate(image(x), scale_factor=1.7),
    "bilinear": lambda x: F.interpolate(image(x), size=(7, 3), mode="bilinear", align_corners=False),
    "bilinear by corners": lambda x: F.interpolate(image(x), scale_factor=2, mode="bilinear", align_corners=True),
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x).flip(2), heads(x), is_causal=True),
    "attention with a bias": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), attn_mask=BIAS),
}


def run(backend: Any, op: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(4, 16))

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = op(model.weight * x)
        loss = (out * torch.linspace(0.1, 1.0, out.numel()).reshape(out.shape)).sum()
        loss.backward()
        optimizer.step()
        return loss

    compiler = StepCompiler(step, model, torch.optim.SGD(model.parameters(), lr=0.1), backend=backend)
    loss = float(compiler(torch.full((4, 16), 1.5)))
    return loss, model.state_dict()["weight"].clone()


@pytest.mark.parametrize("name", OPS)
def test_ops_that_torchax_lacks_follow_eager_forward_and_backward(name: str) -> None:
    torch.testing.assert_close(run("xla", OPS[name]), run("eager", OPS[name]), rtol=1e-4, atol=1e-5)


def test_a_case_that_is_not_written_is_refused() -> None:
    for pool in (F.avg_pool2d, F.max_pool2d):
        with pytest.raises(CompileError, match="ceil_mode"):
            run("xla", lambda x, pool=pool: pool(image(x), 3, stride=2, ceil_mode=True))
