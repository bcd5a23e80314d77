"""What a control plane is told once, when it starts: where its data lies, where it listens, how much it may run.

The command builds one Settings and hands it down; nothing else reads the environment or keeps settings of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from twinstep.spec.errors import UnavailableError

DEFAULT_PORT = 8765
DATABASE = "twinstep.db"  # the file in the data directory, where no other database is named


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """Return `TWINSTEP_DATA_DIR` where set, else the user's data directory by the XDG rule; absolute.

    Raises:
        UnavailableError: it begins with the home of nobody, or the working directory is gone.
    """
    if given := environ.get("TWINSTEP_DATA_DIR"):
        return _absolute(Path(given))
    return _absolute(Path(environ.get("XDG_DATA_HOME") or "~/.local/share") / "twinstep")


def _absolute(path: Path) -> Path:
    try:
        # Not resolved: where a link leads is the user's to change between two starts.
        return path.expanduser().absolute()
    except (RuntimeError, OSError) as error:  # "~nobody"; a working directory that was deleted
        raise UnavailableError(
            f"the data directory {path} leads nowhere: {error}",
            remedy="set TWINSTEP_DATA_DIR (or --data-dir) to an absolute path",
        ) from None


def _worker_command() -> tuple[str, ...]:
    return (sys.executable, "-m", "twinstep", "train")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSettings:
    """The Kubernetes cluster that TPU and GPU jobs run in, and how this control plane gets there."""

    kubeconfig: Path | None = None
    """File that says where it is; None with `in_cluster` alone."""
    context: str | None = None
    """Which of the file's contexts; None: its current one."""
    in_cluster: bool = False
    """The control plane is a pod of that cluster: its service account and the address it is told are used."""
    namespaces: tuple[str, ...] = ("default",)
    """Namespaces that jobs may name; nothing is looked at elsewhere."""
    api_url: str | None = None
    """Where workers reach this control plane from their pods; None: they report nowhere."""
    lease_namespace: str | None = None
    """Where replicas that share a database hold the Lease by which one of them leads; None: the first namespace."""
    crds: Path | None = None
    """Directory of the cluster's custom resource definitions, to check objects against before they are sent."""

    def __post_init__(self) -> None:
        if self.in_cluster and (self.kubeconfig or self.context):
            raise UnavailableError(
                "a control plane inside its cluster has no kubeconfig and no context",
                remedy="leave out --in-cluster, or the other two",
            )
        if not self.in_cluster and self.kubeconfig is None:
            raise UnavailableError("nothing says where the cluster is", remedy="give --kubeconfig or --in-cluster")
        if not self.namespaces:
            raise UnavailableError("no namespace is named: no job could run", remedy="--namespace default")
        if self.api_url is not None and urlsplit(self.api_url).scheme not in ("http", "https"):
            raise UnavailableError(
                f"{self.api_url!r} is not an address that workers can report to",
                remedy="give one of the form http://twinstep.twinstep.svc:8765",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one control plane."""

    data_dir: Path
    """Directory of the database and of every run's files; made (mode 0700) where missing.

    Made absolute, and `~` written out, here and once: supervisors and workers have working directories of their own.
    """
    database_url: str | None = field(default=None, repr=False)
    """URL of a PostgreSQL database that several control planes may share; None: SQLite in `data_dir`. May hold a
    password, so it is never printed."""
    host: str = "127.0.0.1"
    """Address to listen on; on any but loopback a token is asked for, and an admin's must be there at the start."""
    port: int = DEFAULT_PORT
    """TCP port; 0 takes a free one."""
    public_url: str | None = None
    """Where browsers reach it from afar, `https://…`: the ingress's, which also sees to TLS."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names that browsers reach it by."""
    no_login: bool = False
    """Ask for no token on loopback although there are some: whoever reaches the port is admin."""
    open_metrics: bool = False
    """Answer `/metrics` to anybody."""
    bootstrap_token_file: Path | None = None
    """File (of a Secret) with a token that is an admin's as long as it stands there."""
    modules: bool | None = None
    """Run jobs of `model.kind: module` on this machine, their submitters' own code, with the rights of whoever
    started it. None: where nobody but this machine reaches it."""
    max_parallel_runs: int = 1
    """Runs the local backend starts at once; others wait in the order they came. 0: this machine runs none."""
    reconcile_seconds: float = 0.5
    """Seconds between two looks at what runs; a submit or a cancel is looked at at once."""
    stream_seconds: float = 0.25
    """Seconds between two looks of a live stream."""
    cluster: ClusterSettings | None = None
    """Where TPU and GPU jobs run; None: nowhere, they are refused."""
    webhook_hosts: tuple[str, ...] = ()
    """Hosts that webhooks may name though they are not public, or not by https: an alert manager in the cluster."""
    worker_image: str | None = None
    """Container image of workers in a cluster, where a spec names none."""
    worker_command: tuple[str, ...] = field(default_factory=_worker_command)
    """Command of a worker, to which the path of its spec is added."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "data_dir", _absolute(self.data_dir))
        if self.no_login and not is_loopback(self.host):
            raise UnavailableError(
                f"host {self.host!r} is not a loopback address: without a login anybody would be admin there",
                remedy="leave --no-login out, or listen on 127.0.0.1",
            )
        if self.public_url is not None and not _is_origin(self.public_url):
            raise UnavailableError(
                f"public_url {self.public_url!r} is not where a control plane can be",
                remedy="give one of the form https://twinstep.example.com, without a path",
            )
        if not 0 <= self.port <= 65535:
            raise UnavailableError(f"port {self.port} is no TCP port", remedy="give a port from 1024 to 65535")
        if self.max_parallel_runs < 0:
            raise UnavailableError(f"max_parallel_runs is {self.max_parallel_runs}", remedy="give 0 or more")

    @property
    def runs_modules(self) -> bool:
        """Whether jobs of their submitters' own code run on this machine."""
        if self.modules is not None:
            return self.modules
        return is_loopback(self.host) and self.public_url is None and not self.allowed_hosts

    @property
    def url(self) -> str:
        """Where this control plane answers on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104  compared, not bound
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}"

    @property
    def hosts(self) -> frozenset[str]:
        """Names, beside those of loopback, that browsers may reach it by; in lower case, without port."""
        named = (self.host, urlsplit(self.public_url or "").hostname or "", *self.allowed_hosts)
        return frozenset(name.lower().strip("[]") for name in named if name)

    @property
    def secure_cookies(self) -> bool:
        """Whether browsers reach it by HTTPS, and are to send cookies by nothing else."""
        return (self.public_url or "").startswith("https://")

    @property
    def database(self) -> str:
        """SQLAlchemy URL of the database. May hold a password."""
        return self.database_url or f"sqlite:///{self.data_dir / DATABASE}"

    @property
    def runs_dir(self) -> Path:
        """Directory with one directory per run."""
        return self.data_dir / "runs"


def _is_origin(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and parts.path in ("", "/")
        )
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Say whether `host` names this machine's loopback interface; no name but localhost is looked up."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
