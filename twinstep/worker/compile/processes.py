"""Several processes of one JAX program: joined before the first array is made."""

from __future__ import annotations

import ctypes

from twinstep.spec.errors import UnavailableError


def join(coordinator: str, *, rank: int, count: int, seconds: float) -> None:
    """Let this process be one of `count`; must come before anything is computed with JAX.

    Off TPUs JAX must not look for a cluster itself: it would ask Kubernetes, which pods may not, and count the pods of
    one slice as all there are.

    Raises:
        UnavailableError: the others do not come within `seconds`.
    """
    import jax

    on_tpu = "tpu" in (getattr(jax.config, "jax_platforms", None) or "")
    if not on_tpu:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=count,
            process_id=rank,
            cluster_detection_method=None if on_tpu else "deactivate",
            initialization_timeout=int(seconds),
        )
    except Exception as error:
        raise UnavailableError(
            f"process {rank} of {count} does not reach the others at {coordinator}: {error}",
            remedy="see that all of the run's processes are up and reach process 0's port",
        ) from error


def leave() -> None:
    """Part from the other processes; their end is waited for."""
    import jax

    jax.distributed.shutdown()  # type: ignore[no-untyped-call]


def abandon() -> None:
    """Leave without waiting for the others, now or at exit: after a failure they may never come.

    JAX's own shutdown waits for all of them, five minutes by default, and where one does not come it ends this process
    by SIGABRT, whose exit code then hides why it failed. It runs at exit as well, and when its client is collected.
    """
    from jax._src.distributed import global_state

    for held in (global_state.client, global_state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # never collected
    global_state.client = global_state.service = None
