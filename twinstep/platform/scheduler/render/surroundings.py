"""What stands beside the workload: the spec as a ConfigMap, a service account without rights, a network policy."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from twinstep.platform.scheduler.render import pods
from twinstep.platform.scheduler.render.context import DOMAIN, RenderContext
from twinstep.spec.job import JobSpec

METADATA_SERVER = "169.254.169.254/32"  # Google's, for workload identity and what a TPU host asks of it

Object = dict[str, Any]


def spec_map(spec: JobSpec, context: RenderContext) -> Object:
    """Return the ConfigMap with the spec as JSON; immutable: a run's spec never changes."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": pods.metadata(context.spec_map, context),
        "immutable": True,
        "data": {"job.json": spec.model_dump_json(indent=2) + "\n"},
    }


def service_account(context: RenderContext) -> Object:
    """Return the run's own service account, which may do nothing."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": pods.metadata(context.name, context),
        "automountServiceAccountToken": False,
    }


def network_policy(context: RenderContext, *, ray: bool) -> Object:
    """Return the policy that closes the run off: its pods talk to each other, ask DNS, storage and the control plane.

    With Ray, KubeRay's operator may ask the dashboard how the job is.
    """
    own = {"podSelector": {"matchLabels": {f"{DOMAIN}/run-name": context.name}}}
    ingress: list[Object] = [{"from": [own]}]
    if ray:
        operator = {
            "namespaceSelector": {},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
        }
        ingress.append({"from": [operator], "ports": [{"protocol": "TCP", "port": 8265}]})
    egress: list[Object] = [
        {"to": [own]},
        {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]},
        {"ports": [{"protocol": "TCP", "port": 443}]},
        {
            "to": [{"ipBlock": {"cidr": METADATA_SERVER}}],
            "ports": [{"protocol": "TCP", "port": 80}, {"protocol": "TCP", "port": 988}],
        },
    ]
    if context.api_url is not None:
        where = urlsplit(context.api_url)
        port = where.port or (443 if where.scheme == "https" else 80)
        if port != 443:
            egress.append({"ports": [{"protocol": "TCP", "port": port}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": pods.metadata(context.name, context),
        "spec": {
            "podSelector": own["podSelector"],
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }
