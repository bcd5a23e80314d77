"""What a page tells a reader to type works: Python blocks run, whole specs are valid, commands and options exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from twinstep.cli.app import app
from twinstep.spec.parse import parse_spec

ROOT = Path(__file__).parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\S*)(?: +(\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
NOT_ALL = ("|", ">", "&&", "2>", "…")
"""Words at which a command of ours ends on a page."""


def blocks(path: Path, language: str) -> list[tuple[str, str]]:
    """Mark and text of a page's code blocks of one language."""
    return [(mark, text) for kind, mark, text in BLOCK.findall(path.read_text()) if kind == language]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [each for each in PAGES if blocks(each, "python")], ids=name_of)
def test_python_blocks_run_in_order(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    assert all(mark == "runs" for mark, _ in blocks(path, "python")), "mark it `python runs`"
    script.write_text("\n".join(text for _, text in blocks(path, "python")))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("path", [each for each in PAGES if blocks(each, "yaml")], ids=name_of)
def test_yaml_blocks_that_are_whole_specs_are_valid(path: Path) -> None:
    whole = [text for _, text in blocks(path, "yaml") if re.search(r"^name:", text, re.MULTILINE)]
    for text in whole:
        parse_spec(text)
    assert whole


def test_the_examples_are_valid() -> None:
    found = sorted((ROOT / "examples").glob("*.yaml"))
    assert found
    for path in found:
        parse_spec(path.read_bytes())


def commands(path: Path) -> list[list[str]]:
    """Words after `twinstep` of every command on a page: lines at a prompt, and code within sentences."""
    text = path.read_text()
    typed = [line[2:] for _, block in blocks(path, "console") for line in block.splitlines() if line.startswith("$ ")]
    typed += re.findall(r"`((?:\S+/)?twinstep [^`\n]+)`", BLOCK.sub("", text))
    found = []
    for line in typed:
        words = shlex.split(line, comments=True)
        if words and words[0].rpartition("/")[2] == "twinstep":
            end = next((index for index, word in enumerate(words) if word in NOT_ALL), len(words))
            found.append(words[1:end])
    return found


def complaint(words: list[str]) -> str:
    """What the command line says against these words; "" where nothing. Runs nothing."""
    try:
        COMMANDS[words[0]].make_context(words[0], words[1:])
    except typer.Exit:  # --help
        return ""
    except typer.TyperException as error:
        return error.format_message()
    return ""


@pytest.mark.parametrize("path", [each for each in PAGES if commands(each)], ids=name_of)
def test_every_command_on_a_page_exists_with_its_options(path: Path) -> None:
    for words in commands(path):
        if words[0].isupper() or words[0].startswith("-"):  # `twinstep COMMAND --help`, `twinstep --version`
            continue
        assert words[0] in COMMANDS, words
        # Within a sentence a command may be named without what it takes; a wrong option is wrong everywhere.
        said = complaint(words)
        assert not said or "Missing argument" in said or "requires an argument" in said, (words, said)


def test_every_script_a_page_names_is_there() -> None:
    for path in PAGES:
        for name in re.findall(r"\bscripts/[\w-]+", path.read_text()):
            assert (ROOT / name).exists(), (path, name)
