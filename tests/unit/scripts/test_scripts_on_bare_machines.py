"""What the scripts say on machines that lack something: a browser, venv, a compiler."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

ROOT = Path(__file__).parents[3]


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def copied(name: str, to: Path) -> Path:
    (to / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / name, to / name)
    return to / name


@pytest.mark.parametrize("code", [0, 3])
def test_ci_says_last_that_browser_tests_were_skipped_and_why(tmp_path: Path, code: int) -> None:
    script(tmp_path / "scripts/test", f"echo 'tests ran'; exit {code}")
    script(tmp_path / "bin/apt-get", "echo 'E: no network today' >&2; exit 100")
    script(tmp_path / "bin/id", "echo 0")
    found = subprocess.run(
        [copied(".ci/run", tmp_path)],
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TWINSTEP_CHROMIUM": str(tmp_path / "chromium")},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert found.returncode == code
    said = found.stdout.splitlines()
    assert said[:2] == ["ci: Chromium could not be installed:", "ci:   E: no network today"]
    assert said[-2] == "tests ran"
    assert said[-1].startswith("ci: browser tests skipped")


def test_ci_without_root_says_why_it_installs_nothing(tmp_path: Path) -> None:
    script(tmp_path / "scripts/test", "exit 0")
    script(tmp_path / "bin/id", "echo 1000")
    found = subprocess.run(
        [copied(".ci/run", tmp_path)],
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TWINSTEP_CHROMIUM": str(tmp_path / "chromium")},
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert "root and apt-get" in found.stdout
    assert "browser tests skipped" in found.stdout


def test_ci_with_a_browser_says_nothing_of_it(tmp_path: Path) -> None:
    script(tmp_path / "scripts/test", "echo 'tests ran'")
    browser = script(tmp_path / "chromium", "")
    found = subprocess.run(
        [copied(".ci/run", tmp_path)],
        env={"PATH": os.environ["PATH"], "TWINSTEP_CHROMIUM": str(browser)},
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert found.stdout == "tests ran\n"


@pytest.mark.parametrize("lacking", ["venv", "ensurepip"])
def test_setup_without_venv_says_what_to_install_and_removes_nothing(tmp_path: Path, lacking: str) -> None:
    python = script(
        tmp_path / "python",
        f'for each in "$@"; do [[ "$each" != *{lacking}* ]] || exit 1; done; exec {sys.executable} "$@"',
    )
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks/full.txt").write_text("")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/mine").write_text("kept")
    found = subprocess.run(
        [copied("scripts/setup", tmp_path)],
        env={"PATH": os.environ["PATH"], "PYTHON": str(python)},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert found.returncode != 0
    assert "apt-get install python3-venv" in found.stderr
    assert "PYTHON" in found.stderr
    assert (tmp_path / ".venv/mine").read_text() == "kept"


def test_the_demo_leaves_out_inductor_where_it_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.spec_from_file_location("demo", ROOT / "examples/demo.py")
    assert found is not None
    assert found.loader is not None
    demo = importlib.util.module_from_spec(found)
    found.loader.exec_module(demo)
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    said = io.StringIO()
    assert demo.usable_backends(Console(file=said, width=80)) == ("xla",)
    assert "needs a C++ compiler, and /nonexistent/c++ is not here" in said.getvalue()
    assert "apt-get install g++" in said.getvalue()


def test_tests_that_need_inductor_are_skipped_with_the_reason_where_it_cannot_compile(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('backend', ['inductor', 'xla'])\ndef test_a(backend): pass\n\n"
        "@pytest.mark.inductor\ndef test_b(): pass\n"
    )
    shutil.copy(ROOT / "tests/conftest.py", tmp_path / "conftest.py")
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path],
        env=os.environ | {"CXX": "/nonexistent/c++"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "1 passed, 2 skipped" in found.stdout
    assert "needs a C++ compiler" in found.stdout
