"""Tensors of the host as JAX's arrays, and back: what 32 bits cannot hold is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinstep.spec.errors import DataError

INT32 = torch.iinfo(torch.int32)


def to_jax(tensor: Tensor) -> jax.Array:
    """Copy to JAX. A copy always: donating memory that torch owns too would free it under torch's hands."""
    # Nobody writes to what JAX reads. Not jnp.array, which compiles a program for each shape only to copy.
    copied: jax.Array = jax.device_put(np.array(host_values(tensor)), may_alias=False)
    return copied


def host_values(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's memory as JAX may read it."""
    tensor = tensor.detach()
    if tensor.dtype in (torch.float64, torch.complex128):
        raise DataError(
            f"a {tensor.dtype} tensor of shape {list(tensor.shape)} would lose digits: XLA programs hold 32 bits",
            remedy="cast it to float32 (tensor.float(), module.float())",
        )
    if tensor.dtype is torch.int64 and tensor.numel():
        low, high = torch.aminmax(tensor)
        if low < INT32.min or high > INT32.max:
            raise DataError(
                f"an integer tensor of shape {list(tensor.shape)} holds {int(low)}…{int(high)}; "
                f"XLA programs hold integers in 32 bits",
                remedy=f"map ids and times into {INT32.min}…{INT32.max} (seconds, not milliseconds)",
            )
    if tensor.dtype is torch.bfloat16:
        return tensor.float().numpy().astype(jnp.bfloat16)
    found: npt.NDArray[Any] = tensor.numpy()
    return found


def to_torch(array: jax.Array, dtype: torch.dtype) -> Tensor:
    """Copy to a tensor of a dtype."""
    values = np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)
    return torch.from_numpy(np.array(values)).to(dtype)
