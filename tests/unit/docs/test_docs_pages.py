"""Pages that are written from the code are fresh, and every link of every page leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import pytest

from twinstep.spec.errors import SpecError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import validate_spec
from twinstep.worker.compile import CompileEvent, CompileWarning
from twinstep.worker.data.metrics import BinaryMetrics
from twinstep.worker.data.squared_error import RegressionMetrics
from twinstep.worker.train.scores import Scores

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py as a module."""
    found = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def prose(path: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(path: Path) -> list[str]:
    """Where a page's links lead, but for those that leave the project."""
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    return [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def anchors(path: Path) -> set[str]:
    """The anchors GitHub gives a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().strip()
        found.add("".join(each for each in plain if each.isalnum() or each in " -_").replace(" ", "-"))
    return found


def test_pages_written_from_the_code_are_fresh(generate: ModuleType) -> None:
    stale = [name for name, page in generate.PAGES.items() if (ROOT / "docs/reference" / name).read_text() != page()]
    assert not stale, "run python docs/generate.py"


def test_the_generators_check_says_the_same() -> None:
    subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, check=True, timeout=60)


def test_every_field_of_a_spec_stands_on_its_page_with_a_meaning(generate: ModuleType) -> None:
    page = generate.job_spec_page()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert not [row for row in rows if row.endswith("| – |")]

    def paths(value: object, path: str) -> list[str]:
        if not isinstance(value, dict) or not value:
            return [path]
        return [each for key, below in value.items() for each in paths(below, f"{path}.{key}" if path else str(key))]

    missing = [path for path in paths(JobSpec(name="a").model_dump(), "") if f"| `{path}` |" not in page]
    assert not missing


@pytest.mark.parametrize(
    "spec",
    [
        {"data": {"uih_len": 8, "uih_budget": 9}},
        {"optimizers": {"dense": {"kind": "adam", "momentum": 0.9}}},
        {"optimizers": {"dense": {"kind": "sgd", "betas": [0.5, 0.9]}}},
        {"optimizers": {"sparse": {"kind": "sgd", "eps": 0.1}}},
    ],
)
def test_the_rules_between_fields_are_the_codes(spec: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        validate_spec({"name": "a", **spec})


def test_the_table_of_events_names_those_that_the_code_writes(generate: ModuleType) -> None:
    written = {name for kind in (CompileEvent, CompileWarning) for name in get_args(get_type_hints(kind)["name"])}
    for path in (ROOT / "twinstep/worker").rglob("*.py"):
        written |= set(re.findall(r'(?:\.event|\b_?tell)\(\s*"(\w+)"', path.read_text()))
    for path in (ROOT / "twinstep/platform/store").glob("*.py"):
        written |= set(re.findall(r'(?:\bname=|"name": )"(\w+)"', path.read_text()))
    written.discard("submits")  # the name of a thread
    loop = (ROOT / "twinstep/worker/train/loop.py").read_text()
    written |= set(re.findall(r'\b_event\(\s*"(\w+)"', loop))
    for path in ("train/saving.py", "checkpoint/saver.py"):
        source = (ROOT / "twinstep/worker" / path).read_text()
        written |= set(re.findall(r'"(checkpoint_\w+|random_state_differs)"', source))
    verbs = (ROOT / "twinstep/platform/scheduler/attempts.py").read_text()
    written |= set(re.findall(r'\bverb="(\w+)"', verbs))
    assert {row[0] for row in generate.EVENTS} == written


def test_the_table_of_metrics_names_those_that_the_loop_reports(generate: ModuleType) -> None:
    loop = (ROOT / "twinstep/worker/train/loop.py").read_text()
    told = loop[loop.index("def _tell") : loop.index("def _evaluate")]
    told += (ROOT / "twinstep/worker/data/meter.py").read_text()
    engine = (ROOT / "twinstep/worker/train/sparsecore.py").read_text()
    told += engine[engine.index("def _note") : engine.index("def batch_of")]
    listed = {row[0] for row in generate.METRICS}
    assert {name for name in listed if "/" not in name} == set(re.findall(r'^\s+"(\w+)":', told, re.MULTILINE))
    scores = Scores(tasks={"first": BinaryMetrics().compute(), "TASK": RegressionMetrics().compute()})
    assert {name for name in listed if name.startswith("eval/")} == {f"eval/{name}" for name in scores.values()}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    broken = []
    for target in links(path):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_every_page_of_the_docs_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        names = [target.partition("#")[0] for target in links(page)]
        waiting += [(page.parent / name).resolve() for name in names if name]
    assert not [str(page) for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in reached]
