"""Where torch's own random generators stand: the CPU's, and behind it a GPU's where a program's state is on one."""

from __future__ import annotations

import torch
from torch import Tensor


def torch_random_state(device: torch.device) -> Tensor:
    """Return where the generators stand that steps with state on `device` draw from: uint8, on the host."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else state


def set_torch_random_state(state: Tensor, device: torch.device) -> None:
    """Go on from what `torch_random_state` gave; where only one of both was on a GPU, the GPU's part stays as it is."""
    own = len(torch.get_rng_state())
    torch.set_rng_state(state[:own].clone())
    if device.type == "cuda" and len(state) > own:
        torch.cuda.set_rng_state(state[own:].clone(), device)
