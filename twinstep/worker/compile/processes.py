"""Several processes of one JAX program: joined before the first array is made."""

from __future__ import annotations

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
