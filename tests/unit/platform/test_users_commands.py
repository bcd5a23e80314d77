"""The command with tokens: log in, make and revoke them, projects and members, and where a token is kept."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinstep.cli.app import run
from twinstep.cli.credentials import credentials_file
from twinstep.platform.settings import Settings
from twinstep.platform.store.store import Store
from twinstep.spec.roles import Role

DATABASES = ("sqlite",)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Any]:
    """Run a command line, with a home of its own; return its exit code, output and errors."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("TWINSTEP_TOKEN", "TWINSTEP_TOKEN_FILE", "TWINSTEP_URL", "TWINSTEP_PROJECT"):
        monkeypatch.delenv(name, raising=False)

    def said(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = run(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return said


@pytest.fixture
def at(live: Any, monkeypatch: pytest.MonkeyPatch, say: Any) -> str:
    url = live.plane.settings.url
    monkeypatch.setenv("TWINSTEP_URL", url)
    return url


def test_the_first_token_is_made_offline_and_logs_in(live, at, say) -> None:
    directory = str(live.plane.settings.data_dir)
    assert say("ls")[0] == 0
    code, out, err = say("token", "create", "ada", "--offline", "--data-dir", directory)
    assert (code, "first token must be an admin's" in err) == (2, True)
    code, secret, err = say("token", "create", "ada", "--admin", "--offline", "--data-dir", directory)
    assert (code, secret.startswith("tsp_"), len(secret.split())) == (0, True, 1)
    assert "shown this once" in err
    live.plane.service.accounts.look_again()
    code, _, err = say("ls")
    assert (code, "no token came with the request" in err, "twinstep login" in err) == (2, True, True)
    code, out, err = say("login", stdin="tsp_" + "x" * 43 + "\n")
    assert (code, "wrong, revoked or expired" in err) == (2, True)
    assert not credentials_file({"XDG_CONFIG_HOME": str(live.plane.settings.data_dir)}).exists()
    code, out, err = say("login", at, stdin=secret)
    assert (code, f"logged in to {at} as ada" in out, err) == (0, True, "")
    assert secret.strip() not in out
    assert say("ls")[0] == 0
    assert say("logout")[0] == 0
    assert say("ls")[0] == 2


def test_a_kept_token_is_its_owners_alone_and_for_its_control_plane_alone(live, at, say, admin, tmp_path) -> None:
    assert say("login", stdin=admin)[0] == 0
    path = credentials_file({"XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == {at: admin}
    assert say("ls", "--url", at.replace("127.0.0.1", "localhost"))[0] == 2
    path.chmod(0o640)
    code, _, err = say("ls")
    assert (code, "others can read the token" in err, "chmod 600" in err) == (2, True, True)


def test_a_token_comes_from_the_file_named_else_the_environment(live, at, say, admin, tmp_path, monkeypatch) -> None:
    path = tmp_path / "token"
    path.write_text(f"{admin}\n")
    path.chmod(0o644)
    assert "others can read the token" in say("--token-file", str(path), "ls")[2]
    path.chmod(0o400)
    assert say("--token-file", str(path), "ls")[0] == 0
    assert say("ls")[0] == 2
    monkeypatch.setenv("TWINSTEP_TOKEN_FILE", str(path))
    assert say("ls")[0] == 0
    monkeypatch.setenv("TWINSTEP_TOKEN", "tsp_" + "x" * 43)
    assert say("ls")[0] == 2
    assert say("--token-file", str(path), "ls")[0] == 0
    for text in ("", "two words", "caf\u00e9", "a\nb"):
        path.chmod(0o600)
        path.write_text(text)
        code, _, err = say("--token-file", str(path), "ls")
        assert (code, "does not hold a token" in err) == (2, True), text
    assert "cannot be read" in say("--token-file", str(tmp_path / "none"), "ls")[2]


def test_tokens_projects_members_and_the_audit_log_by_the_command(live, at, say, admin, tmp_path) -> None:
    assert say("login", stdin=admin)[0] == 0

    def told(*argv: str) -> Any:
        code, out, err = say(*argv, "--json")
        assert code == 0, err
        return json.loads(out)

    assert told("project", "create", "team", "--queue", "team-q")["project"]["namespace"] == "team"
    assert told("member", "add", "team", "bob", "--role", "submitter")["member"] == {"user": "bob", "role": "submitter"}
    made = told("token", "create", "bob", "--days", "1")
    assert [each["user"] for each in told("token", "list")["tokens"]] == ["bob", "root"]
    assert told("member", "list", "team")["members"] == [{"user": "bob", "role": "submitter"}]
    assert [each["name"] for each in told("project", "list")["projects"]] == ["default", "team"]

    spec = tmp_path / "spec.yaml"
    spec.write_text("name: sleeps\nkubernetes: {security: host-network}\n")
    assert say("login", stdin=made["secret"])[0] == 0
    job = told("submit", str(spec), "--project", "team")["job"]
    assert (job["project"], job["submitted_by"]) == ("team", "bob")
    assert [each["id"] for each in told("ls", "--project", "team")["jobs"]] == [job["id"]]
    code, out, _ = say("ls", "--project", "default", "--json")  # there, but none of bob's
    assert (code, json.loads(out)["error"]["code"]) == (2, "not_found")
    assert "yours are: team" in json.loads(out)["error"]["remedy"]
    code, out, _ = say("token", "list", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "forbidden")

    assert say("login", stdin=admin)[0] == 0
    code, out, _ = say("audit")
    assert code == 0
    line = next(line for line in out.splitlines() if "job.submit" in line)
    assert all(word in line for word in ("bob", job["id"], "team", "done", "security: host-network"))
    (refused,) = told("audit", "--refused")["audit"]
    assert (refused["actor"], refused["outcome"]) == ("bob", "refused")
    for argv in (
        ("token", "list"),
        ("project", "list"),
        ("member", "list", "team"),
        ("member", "remove", "team", "bob"),
        ("token", "revoke", made["token"]["id"]),
    ):
        code, out, err = say(*argv)
        assert (code, bool(out), err) == (0, True, ""), argv
    assert say("login", stdin=made["secret"])[0] == 2


def test_words_are_never_a_path(live, at, say, admin) -> None:
    assert say("login", stdin=admin)[0] == 0
    for name in ("..", "../../v1/tokens", "a/b", "a?b", "a#b", "\u00e9"):
        code, _, err = say("token", "revoke", name)
        assert code == 2
        assert "there is no token" in err or "nothing at" in err, (name, err)
    code, _, err = say("member", "add", "default", "../x")
    assert code == 2


def test_an_offline_token_needs_no_control_plane_and_says_so(tmp_path: Path, say) -> None:
    directory = tmp_path / "new"
    code, out, err = say("token", "create", "root", "--admin", "--offline", "--data-dir", str(directory), "--json")
    assert code == 0, err
    made = json.loads(out)
    assert (made["token"]["role"], made["token"]["everywhere"], made["token"]["created_by"]) == ("admin", True, "user")
    store = Store(Settings(data_dir=directory).database)
    with store.database.read() as connection:
        (line,) = connection.exec_driver_sql("SELECT actor, action, outcome FROM audit").all()
    assert tuple(line) == ("user", "token.create", "done")
    store.close()
    code, _, err = say("token", "create", "root", "--data-dir", str(directory))
    assert (code, "--offline" in err) == (2, True)
    code, _, err = say("token", "create", "a b", "--admin", "--offline", "--data-dir", str(directory))
    assert (code, "name" in err) == (2, True)
    assert say("token", "new")[1].startswith("tsp_")


def test_a_worker_is_not_told_a_users_token_nor_the_databases_password(live, monkeypatch, wait) -> None:
    for name in ("TWINSTEP_TOKEN", "TWINSTEP_TOKEN_FILE", "TWINSTEP_BOOTSTRAP_TOKEN_FILE", "TWINSTEP_DATABASE_URL"):
        monkeypatch.setenv(name, "a-secret-of-the-users")
    job = live.submit("sleeps")
    live.when(job["id"], "starting", "running")
    path = live.run_dir(job) / "supervisor.json"
    told = wait(lambda: path.exists() and (found := json.loads(path.read_text())).get("worker") and found)
    for pid in (told["pid"], told["worker"]["pid"]):
        assert b"a-secret-of-the-users" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_roles_are_words_the_command_knows(say) -> None:
    code, _, err = say("member", "add", "p", "u", "--role", "king")
    assert code == 2
    assert all(role in err for role in Role)
