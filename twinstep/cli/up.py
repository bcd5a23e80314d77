"""The command that is a control plane: up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinstep.spec.errors import UnavailableError

if TYPE_CHECKING:
    from twinstep.platform.settings import ClusterSettings, Settings

PortOpt = Annotated[
    int | None, typer.Option("--port", "-p", min=0, max=65535, help="TCP port on loopback; 0 takes a free one.")
]
DataDirOpt = Annotated[
    str | None,
    typer.Option("--data-dir", metavar="DIR", help="Where jobs are kept; else TWINSTEP_DATA_DIR, else ~/.local/share."),
]
DatabaseOpt = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        help="postgresql://USER@HOST/NAME instead of SQLite; else TWINSTEP_DATABASE_URL, which ps does not show.",
    ),
]
ParallelOpt = Annotated[
    int, typer.Option("--max-parallel", min=0, help="Runs at once on this machine; others wait. 0: none runs here.")
]
KubeconfigOpt = Annotated[
    str | None, typer.Option("--kubeconfig", metavar="FILE", help="Run TPU and GPU jobs in the cluster of this file.")
]
ContextOpt = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig; else its current one.")
]
InClusterOpt = Annotated[
    bool, typer.Option("--in-cluster", help="Run TPU and GPU jobs in the cluster this is a pod of.")
]
NamespaceOpt = Annotated[
    list[str] | None,
    typer.Option("--namespace", metavar="NAME", help="Namespace that jobs may name; give it once each."),
]
WorkersUrlOpt = Annotated[
    str | None, typer.Option("--workers-url", metavar="URL", help="Where pods reach this control plane.")
]
ImageOpt = Annotated[str | None, typer.Option("--image", metavar="REF", help="Worker image where a spec names none.")]
CrdsOpt = Annotated[
    str | None, typer.Option("--crds", metavar="DIR", help="Custom resource definitions to check jobs against.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("up")(up)
    app.command("migrate")(migrate)


HostOpt = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; off loopback a token is asked for.")
]
PublicUrlOpt = Annotated[
    str | None,
    typer.Option("--public-url", metavar="URL", help="Browsers' https address of it; else TWINSTEP_PUBLIC_URL."),
]
AllowedHostOpt = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", metavar="NAME", help="A further name browsers reach it by; may be given again."),
]
ModulesOpt = Annotated[
    bool | None,
    typer.Option(
        "--modules/--no-modules",
        help="Run users' own code (model.kind: module) on this machine; by default where no other machine reaches it.",
    ),
]
NoLoginOpt = Annotated[bool, typer.Option("--no-login", help="Ask for no token on loopback although there are some.")]
OpenMetricsOpt = Annotated[bool, typer.Option("--open-metrics", help="Answer /metrics to anybody.")]


def up(
    port: PortOpt = None,
    data_dir: DataDirOpt = None,
    database_url: DatabaseOpt = None,
    max_parallel: ParallelOpt = 1,
    kubeconfig: KubeconfigOpt = None,
    context: ContextOpt = None,
    in_cluster: InClusterOpt = False,
    namespaces: NamespaceOpt = None,
    workers_url: WorkersUrlOpt = None,
    image: ImageOpt = None,
    crds: CrdsOpt = None,
    host: HostOpt = "127.0.0.1",
    public_url: PublicUrlOpt = None,
    allowed_hosts: AllowedHostOpt = None,
    no_login: NoLoginOpt = False,
    open_metrics: OpenMetricsOpt = False,
    modules: ModulesOpt = None,
) -> int:
    """Start a control plane here: REST API, dashboard, runs of this machine and of a cluster.

    Ctrl-C ends it; runs go on.
    """
    from twinstep.platform import logs
    from twinstep.platform.server import serve
    from twinstep.platform.settings import DEFAULT_PORT, Settings, default_data_dir

    logs.set_up(os.environ, in_cluster=in_cluster)
    settings = Settings(
        data_dir=Path(data_dir) if data_dir else default_data_dir(os.environ),
        database_url=database_url or os.environ.get("TWINSTEP_DATABASE_URL") or None,
        port=DEFAULT_PORT if port is None else port,
        max_parallel_runs=max_parallel,
        cluster=_cluster(kubeconfig, context, in_cluster, namespaces, workers_url, crds),
        worker_image=image or os.environ.get("TWINSTEP_WORKER_IMAGE") or None,
        host=host,
        public_url=public_url or os.environ.get("TWINSTEP_PUBLIC_URL") or None,
        allowed_hosts=tuple(allowed_hosts or ()),
        no_login=no_login,
        open_metrics=open_metrics,
        modules=modules,
        bootstrap_token_file=Path(file) if (file := os.environ.get("TWINSTEP_BOOTSTRAP_TOKEN_FILE")) else None,
        webhook_hosts=tuple((os.environ.get("TWINSTEP_WEBHOOK_HOSTS") or "").replace(",", " ").split()),
    )

    def ready(url: str) -> None:
        print(f"control plane ready: {url}\ndata in {settings.data_dir}; Ctrl-C ends it, runs go on", flush=True)

    serve(settings, on_ready=ready)
    return 0


def stored_at(data_dir: str | None, database_url: str | None) -> Settings:
    """Return settings that say where a control plane keeps what it knows, for commands that go there themselves."""
    from twinstep.platform.settings import Settings, default_data_dir

    return Settings(
        data_dir=Path(data_dir) if data_dir else default_data_dir(os.environ),
        database_url=database_url or os.environ.get("TWINSTEP_DATABASE_URL") or None,
    )


def _cluster(
    kubeconfig: str | None,
    context: str | None,
    in_cluster: bool,
    namespaces: list[str] | None,
    workers_url: str | None,
    crds: str | None,
) -> ClusterSettings | None:
    """Return the cluster that the options name; None where they name none."""
    from twinstep.platform.settings import ClusterSettings

    namespaces = namespaces or [name for name in os.environ.get("TWINSTEP_NAMESPACES", "").split(",") if name]
    if kubeconfig or context or in_cluster:
        usual = os.environ.get("KUBECONFIG", "").split(os.pathsep)[0] or "~/.kube/config"
        return ClusterSettings(
            kubeconfig=None if in_cluster and not kubeconfig else Path(kubeconfig or usual).expanduser(),
            context=context,
            in_cluster=in_cluster,
            namespaces=tuple(namespaces or ("default",)),
            api_url=workers_url or os.environ.get("TWINSTEP_WORKERS_URL") or None,
            lease_namespace=os.environ.get("POD_NAMESPACE") if in_cluster else None,
            crds=Path(crds) if crds else None,
        )
    if namespaces or workers_url or crds:
        raise UnavailableError(
            "--namespace, --workers-url and --crds are for a control plane with a cluster",
            remedy="add --kubeconfig FILE, --context NAME or --in-cluster",
        )
    return None


def migrate(data_dir: DataDirOpt = None, database_url: DatabaseOpt = None) -> int:
    """Bring the database's tables up to date, and end. `up` does it too; this is for rolling out replicas."""
    from twinstep.platform.store.database import Database

    database = Database(stored_at(data_dir, database_url).database)
    print(f"the tables of {database.where} are up to date", flush=True)
    database.close()
    return 0
