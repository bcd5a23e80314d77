"""What Ray Train does before ranks start: it finds an address and a port of rank 0's host, and tells them all.

Ray's own backend for torch joins each worker to a process group and takes a share of its GPU. Here the ranks are
processes below the workers, and join each other themselves.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import ray.util
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from twinstep.worker.train.launch import keep_port

_HELD: list[socket.socket] = []


class RankBackend(Backend):
    """Sets MASTER_ADDR and MASTER_PORT in every worker."""

    share_cuda_visible_devices = True  # all GPUs of a host, of which LOCAL_RANK is a rank's own

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Tell all workers where rank 0 will listen."""
        address, port = worker_group.execute_single(0, _place)
        worker_group.execute(_set_place, address, port)


class RankConfig(TorchConfig):
    """TorchTrainer's configuration, with the backend above."""

    @property
    def backend_cls(self) -> type[RankBackend]:
        """The backend."""
        return RankBackend

    @property
    def train_func_context(self) -> Any:
        """Nothing around a rank: Ray's own context would open its GPU in the worker as well."""
        return contextlib.nullcontext


def rank_config() -> RankConfig:
    """Return the configuration for TorchTrainer."""
    return RankConfig(backend="gloo")


def _place() -> tuple[str, int]:
    """Return this host's address in the cluster and a port that is free, and kept so for rank 0 while this one runs."""
    held = keep_port("")
    while _HELD:  # of a group that was started before in this worker
        _HELD.pop().close()
    _HELD.append(held)
    return ray.util.get_node_ip_address(), held.getsockname()[1]  # type: ignore[no-untyped-call]


def _set_place(address: str, port: int) -> None:
    os.environ["MASTER_ADDR"] = address
    os.environ["MASTER_PORT"] = str(port)
