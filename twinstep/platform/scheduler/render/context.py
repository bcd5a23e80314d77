"""What a render knows beside the spec: which run it is for, and what the control plane was set up with."""

from __future__ import annotations

from dataclasses import dataclass, field

DOMAIN = "twinstep.dev"
"""Prefix of our labels and annotations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderContext:
    """Surroundings of one run's objects."""

    name: str
    """Of the workload and of everything beside it."""
    namespace: str
    title: str
    """The job's name as its user wrote it, kept in an annotation."""
    image: str
    """Of the worker."""
    run_id: str = ""
    """Empty where no control plane follows the run (`twinstep render`)."""
    job_id: str = ""
    attempt: int = 1
    api_url: str | None = None
    """Where workers report; None: nowhere."""
    deadline_seconds: int | None = None
    """After which Kubernetes ends the workload; None where a control plane does, which leaves out what a run waits."""
    labels: dict[str, str] = field(default_factory=dict)
    """On every object and pod."""

    @property
    def token_secret(self) -> str:
        """Name of the Secret that holds the run's token; made beside the objects, never part of them."""
        return f"{self.name}-token"

    @property
    def spec_map(self) -> str:
        """Name of the ConfigMap that holds the spec."""
        return f"{self.name}-spec"
