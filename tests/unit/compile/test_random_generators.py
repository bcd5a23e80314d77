"""Where random numbers stand, for a checkpoint: a GPU's generator too. No GPU is here, so its part is a stand-in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.generators import set_torch_random_state, torch_random_state

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A GPU's generator: one state of 16 bytes, as CUDA's is."""
    held = [torch.arange(16, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: held[0].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: held.__setitem__(0, state))
    return held


def test_both_generators_go_on_from_where_they_stood(gpu: list[Tensor]) -> None:
    state, before = torch_random_state(GPU), gpu[0].clone()
    first = torch.rand(8)
    gpu[0] = torch.zeros(16, dtype=torch.uint8)
    set_torch_random_state(state, GPU)
    assert torch.equal(torch.rand(8), first)
    assert torch.equal(gpu[0], before)


def test_a_state_of_another_kind_of_device_sets_what_both_have(gpu: list[Tensor]) -> None:
    of_gpu, of_cpu = torch_random_state(GPU), torch_random_state(CPU)
    assert torch.equal(of_cpu, torch.get_rng_state())
    first = torch.rand(8)
    gpu[0] = torch.zeros(16, dtype=torch.uint8)
    for state, device in ((of_gpu, CPU), (of_cpu, GPU)):
        set_torch_random_state(state, device)
        assert torch.equal(torch.rand(8), first)
        assert not gpu[0].any()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_step_compiler_asks_where_its_model_is(
    backend: str, gpu: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    compiler = StepCompiler(lambda model, batch: model(batch), model, backend=backend)  # type: ignore[arg-type]
    assert len(compiler.random_state()) == len(torch.get_rng_state())
    for room in ("step_compiler", "lower.inductor"):
        monkeypatch.setattr(f"twinstep.worker.compile.{room}.device_of", lambda tensors: GPU)
    state = compiler.random_state()
    assert state[-16:].tolist() == list(range(16))
    gpu[0] = torch.zeros(16, dtype=torch.uint8)
    compiler.set_random_state(state)
    assert gpu[0].tolist() == list(range(16))
