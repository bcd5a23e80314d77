"""The house keeps its rules: sizes, layers, the trap of a package named platform, and pages that stay true."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import twinstep
from twinstep.spec.errors import TwinstepError

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "twinstep"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts)
MAX_FILE, MAX_FUNCTION = 500, 60


def tracked() -> list[Path]:
    """Every file git tracks; a copy without git has nothing to check here."""
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in found.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short_and_modules_open_with_what_they_do(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= MAX_FILE
    tree = ast.parse(source)
    if source.strip():
        assert ast.get_docstring(tree), "a module opens with what it does"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = ast.get_docstring(node) or ""
            length = (node.end_lineno or 0) - node.lineno + 1 - body.count("\n")
            assert length <= MAX_FUNCTION, f"{node.name} has {length} lines"


def test_no_link_is_tracked() -> None:
    """One that stands for an ignored folder, an environment say, puts that folder away wherever it is checked out."""
    found = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a git checkout")
    assert [line for line in found.stdout.splitlines() if line.startswith("120000")] == []


def test_nothing_is_named_platform_where_it_would_hide_the_standard_library() -> None:
    clashes = [
        path
        for path in tracked()
        if path.stem == "platform" or any(part == "platform" for part in path.parent.relative_to(ROOT).parts[:1])
    ]
    assert not clashes
    assert not list((ROOT / "tests").rglob("__init__.py")), "a package under tests/ could take the name platform"


def test_the_standard_platform_module_is_found_beside_ours() -> None:
    code = (
        "import platform, twinstep.platform; print(platform.machine(), platform.__file__, twinstep.platform.__file__)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    machine, standard, ours = found.split()
    assert machine
    assert standard != ours


def test_the_control_plane_and_the_vocabulary_load_without_torch_and_jax() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'jax', 'torchax', 'numpy', 'sklearn'): sys.modules[name] = None\n"
        "import twinstep.platform.server, twinstep.cli, twinstep.spec.parse, twinstep.preflight.planning\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_worker_loads_without_the_web_and_database_stack() -> None:
    code = (
        "import sys\n"
        "for name in ('fastapi', 'starlette', 'uvicorn', 'nicegui', 'sqlalchemy'): sys.modules[name] = None\n"
        "import twinstep.worker.train.run, twinstep.worker.compile.lower.inductor\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_locks_pin_plain_names_and_name_no_host() -> None:
    for lock in ("full", "control-plane"):
        lines = (ROOT / "locks" / f"{lock}.txt").read_text().splitlines()
        assert lines == sorted(lines)
        assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][A-Za-z0-9.]*", line) for line in lines)
    full = set((ROOT / "locks/full.txt").read_text().splitlines())
    assert set((ROOT / "locks/control-plane.txt").read_text().splitlines()) <= full


def test_every_direct_dependency_is_in_the_lock_and_on_the_page_of_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    names = {re.split(r"[<>=\[ ]", each)[0] for each in wanted}
    locked = {line.split("==")[0] for line in (ROOT / "locks/full.txt").read_text().splitlines()}
    page = (ROOT / "docs/dependencies.md").read_text()
    assert names <= locked
    assert not [name for name in names if not name.startswith("types-") and name not in page]


def test_the_architecture_page_names_what_is_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    for path in re.findall(r"`((?:spec|preflight|platform|worker|cli)/[\w/]*(?:\.py)?)(?::(\w+))?`", page):
        assert (PACKAGE / path[0]).exists(), path[0]
        if path[1]:
            module = importlib.import_module("twinstep." + path[0].removesuffix(".py").replace("/", "."))
            assert hasattr(module, path[1]), path


def test_the_changelogs_newest_version_is_the_codes() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == twinstep.__version__
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == twinstep.__version__


def test_every_error_has_a_code_of_its_own() -> None:
    def tree(kind: type[TwinstepError]) -> list[type[TwinstepError]]:
        return [kind, *(each for child in kind.__subclasses__() for each in tree(child))]

    kinds = [kind for kind in tree(TwinstepError) if kind.__module__ == "twinstep.spec.errors"]
    assert len({kind.code for kind in kinds}) == len(kinds)
    page = sys.modules["twinstep.spec.errors"].__doc__ or ""
    assert not [kind.__name__ for kind in kinds if kind.__name__ not in page]


def test_every_script_is_executable_and_says_what_it_is() -> None:
    for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci/run", ROOT / "bench/gpu.sh"]:
        assert path.stat().st_mode & 0o111, path
        assert path.read_text().startswith("#!/usr/bin/env bash\n# "), path
