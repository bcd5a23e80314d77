"""The edge to an API server, over real HTTP from a server that answers by script: errors, lost answers, credentials."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml

from twinstep.platform.scheduler.cluster.kinds import KINDS, rules
from twinstep.platform.scheduler.cluster.kube import KubeCluster
from twinstep.platform.scheduler.cluster.kube_api import Access, KubeApi, RefusedError
from twinstep.platform.scheduler.cluster.port import WorkloadRef
from twinstep.platform.scheduler.cluster.watch import Watcher
from twinstep.spec.errors import ConflictError, SpecError, UnavailableError

CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m", "namespace": "n"}, "data": {}}


@dataclass
class Asked:
    """One request, as it came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, Any]


@dataclass
class Scripted:
    """An API server that does what a test says, and remembers what it was asked."""

    url: str
    answer: Callable[[Asked], Answer] = lambda asked: (200, {})
    asked: list[Asked] = field(default_factory=list)


def status(code: int, message: str, reason: str = "", **details: Any) -> Answer:
    return code, {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}


@pytest.fixture
def server() -> Iterator[Scripted]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _take(self) -> None:
            split = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked = Asked(
                self.command,
                split.path,
                dict(parse_qsl(split.query)),
                {name.lower(): value for name, value in self.headers.items()},
                body,
            )
            scripted.asked.append(asked)
            code, content = scripted.answer(asked)
            if code == 0:  # the server stored it, and its answer never came
                self.close_connection = True
                return
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _take

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        scripted = Scripted(f"http://127.0.0.1:{http.server_address[1]}")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield scripted
        http.shutdown()
        thread.join()


def kubeconfig(path: Path, url: str, user: str = "first") -> Path:
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": user}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )
    return path


@pytest.fixture
def api(server: Scripted, tmp_path: Path) -> Iterator[KubeApi]:
    api = KubeApi(Access(kubeconfig=kubeconfig(tmp_path / "config", server.url)))
    yield api
    api.close()


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_a_server_in_trouble_is_asked_once_and_told_of(api: KubeApi, server: Scripted, code: int) -> None:
    server.answer = lambda asked: status(code, "too much to do")
    with pytest.raises(UnavailableError, match=f"answered {code} to patch configmaps: too much to do.*tried again"):
        api.apply(CONFIG_MAP, force=True)
    assert len(server.asked) == 1
    assert api.counts.errors == {str(code): 1}


def test_an_answer_that_never_comes_is_not_asked_for_again(api: KubeApi, server: Scripted) -> None:
    server.answer = lambda asked: (0, b"")
    for ask in (lambda: api.create(CONFIG_MAP), lambda: api.get("ConfigMap", "n", "m")):
        with pytest.raises(UnavailableError, match="cannot be reached"):
            ask()
    assert [asked.method for asked in server.asked] == ["POST", "GET"]
    assert api.counts.errors == {"connection": 2}


def test_half_an_answer_is_no_answer(api: KubeApi, server: Scripted) -> None:
    server.answer = lambda asked: (200, b'{"metadata": {"na')
    with pytest.raises(UnavailableError, match="cut off"):
        api.get("ConfigMap", "n", "m")


@pytest.mark.parametrize("code", [400, 422])
def test_a_refused_object_names_the_fields(api: KubeApi, server: Scripted, code: int) -> None:
    causes = [{"field": "spec.replicas", "message": "must be at least 0", "reason": "FieldValueInvalid"}]
    server.answer = lambda asked: status(code, "JobSet is invalid", causes=causes)
    with pytest.raises(SpecError, match="JobSet is invalid") as caught:
        api.apply(CONFIG_MAP, force=True)
    assert caught.value.faults[0].field == "spec.replicas"
    assert caught.value.faults[0].problem == "must be at least 0"


def test_a_missing_right_is_named_by_verb_resource_and_namespace(api: KubeApi, server: Scripted) -> None:
    server.answer = lambda asked: status(403, 'jobsets is forbidden: User "x" cannot list', "Forbidden")
    with pytest.raises(RefusedError, match=r"list jobsets\.jobset\.x-k8s\.io in all namespaces") as caught:
        api.list("JobSet", None, {})
    assert caught.value.remedy.startswith("allow its role the verb list on jobsets.jobset.x-k8s.io")
    with pytest.raises(RefusedError, match="in namespace team-a"):
        api.get("JobSet", "team-a", "x")


def test_a_conflict_is_one_whatever_its_words(api: KubeApi, server: Scripted) -> None:
    server.answer = lambda asked: status(409, "Object Already Exists")
    with pytest.raises(ConflictError):
        api.create(CONFIG_MAP)
    assert api.delete("JobSet", "n", "x", uid="1") is False  # another one has the name by now


def test_new_credentials_are_read_when_the_old_ones_are_refused(
    api: KubeApi, server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinstep.platform.scheduler.cluster.kube_api.RELOAD_S", 0.0)
    server.answer = lambda asked: (
        (200, {"ok": 1}) if asked.headers["authorization"] == "Bearer second" else status(401, "Unauthorized")
    )
    with pytest.raises(RefusedError, match="does not know this control plane's credentials"):
        api.create(CONFIG_MAP)
    kubeconfig(tmp_path / "config", server.url, "second")
    assert api.create(CONFIG_MAP) == {"ok": 1}
    assert [asked.headers["authorization"] for asked in server.asked][-2:] == ["Bearer first", "Bearer second"]


def test_a_secret_of_the_configuration_is_in_no_message(api: KubeApi, server: Scripted) -> None:
    server.answer = lambda asked: status(401, "Unauthorized")
    with pytest.raises(RefusedError) as caught:
        api.get("ConfigMap", "n", "m")
    assert "first" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "context"), [(None, None), ("", None), ("{", None), ("a: 1", None), (yaml.safe_dump({}), "x")]
)
def test_a_kubeconfig_that_is_none_is_refused_in_words(tmp_path: Path, text: str | None, context: str | None) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnavailableError, match=r"configuration in .* cannot be used"):
        KubeApi(Access(kubeconfig=path, context=context))


def test_a_context_that_is_not_there_is_refused_in_words(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", "http://127.0.0.1:1")
    with pytest.raises(UnavailableError, match="nowhere"):
        KubeApi(Access(kubeconfig=path, context="nowhere"))


def test_outside_a_pod_there_is_no_service_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UnavailableError, match="service account"):
        KubeApi(Access(in_cluster=True))


@pytest.mark.parametrize("code", [403, 409, 422, 503])
def test_a_workload_whose_labels_cannot_be_put_back_is_followed_by_its_uid(
    api: KubeApi, server: Scripted, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    stripped = {"metadata": {"name": "a", "namespace": "n", "uid": "uid-1", "labels": {}}, "spec": {}, "status": {}}

    def answer(asked: Asked) -> Answer:
        if asked.method == "PATCH":
            return status(code, "no labels here")
        return 200, stripped if asked.path.endswith("/jobsets/a") else {"items": []}

    server.answer = answer
    cluster = KubeCluster(api, cast(Watcher, None))
    for _ in range(2):
        found = cluster.confirm("run-1", WorkloadRef(kind="JobSet", namespace="n", name="a", uid="uid-1"))
        assert found.workload is not None
    assert [asked.method for asked in server.asked].count("PATCH") == 2
    assert [each for each in caplog.messages if "cannot be put back" in each and "no labels here" in each] != []
    assert sum("cannot be put back" in each for each in caplog.messages) == 1, "told once"


def test_a_verb_that_no_role_allows_is_never_asked(api: KubeApi, server: Scripted) -> None:
    with pytest.raises(ValueError, match="get secrets"):
        api.get("Secret", "n", "x")
    assert server.asked == []


def test_requests_are_as_kubernetes_wants_them(api: KubeApi, server: Scripted) -> None:
    api.apply(CONFIG_MAP, force=True)
    api.merge("JobSet", "n", "x", {"spec": {"suspend": True}})
    api.delete_all("Secret", "n", selector="twinstep.dev/run=r")
    applied, merged, swept = server.asked
    assert applied.headers["content-type"] == "application/apply-patch+yaml"
    assert applied.query == {"fieldManager": "twinstep", "force": "true", "fieldValidation": "Strict"}
    assert json.loads(applied.body) == CONFIG_MAP
    assert (merged.method, merged.path) == ("PATCH", "/apis/jobset.x-k8s.io/v1alpha2/namespaces/n/jobsets/x")
    assert merged.headers["content-type"] == "application/merge-patch+json"
    assert (swept.method, swept.query) == ("DELETE", {"labelSelector": "twinstep.dev/run=r"})


def test_every_kind_is_asked_for_by_its_own_path() -> None:
    assert KINDS["Pod"].path() == "/api/v1/pods"
    assert KINDS["Pod"].path("n", "p", "log") == "/api/v1/namespaces/n/pods/p/log"
    assert KINDS["Workload"].path("n") == "/apis/kueue.x-k8s.io/v1beta2/namespaces/n/workloads"


def test_the_role_reads_no_secret() -> None:
    (secret,) = rules("Secret")
    assert not {"get", "list", "watch"} & set(secret["verbs"])
    assert all("*" not in word for rule in rules() for words in rule.values() for word in words)
