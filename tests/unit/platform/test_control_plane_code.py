"""The control plane and the command say each thing once: one name for one thing, nothing twice, nothing unread."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest

import twinstep
from twinstep.platform.settings import Settings
from twinstep.platform.store.tables import Base
from twinstep.spec.report import ReportAck, ReportBatch

PACKAGE = Path(twinstep.__file__).parent
FILES = sorted(
    path
    for part in ("spec", "platform", "cli")
    for path in (PACKAGE / part).rglob("*.py")
    if "migrations" not in path.parts
)
TREES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in FILES}


def test_no_two_public_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for place, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(place)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_function_and_no_table_is_written_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for place, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                said, name = "\n".join(ast.unparse(line) for line in body), node.name
            elif isinstance(node, ast.Assign) and len(ast.unparse(node.value)) > 60:
                said, name = ast.unparse(node.value), ast.unparse(node.targets[0])
            else:
                continue
            if len(said) > 60:
                places[said].append(f"{place}:{name}")
    assert [found for found in places.values() if len(found) > 1] == []


def words(*, without: str) -> set[str]:
    return {word for path in FILES if path.name != without for word in re.findall(r"\w+", path.read_text())}


@pytest.mark.parametrize("table", sorted(Base.metadata.tables))
def test_every_column_is_used_somewhere(table: str) -> None:
    used = words(without="tables.py")
    assert [column.name for column in Base.metadata.tables[table].columns if column.name not in used] == []


def test_every_setting_is_used_somewhere() -> None:
    used = words(without="settings.py")
    assert [setting.name for setting in fields(Settings) if setting.name not in used] == []


def test_the_worker_reads_all_that_a_report_is_answered_with() -> None:
    sends = (PACKAGE / "worker" / "train" / "report.py").read_text()
    assert [name for model in (ReportAck, ReportBatch) for name in model.model_fields if name not in sends] == []
