"""Libraries built at first use: kept on disk, rebuilt where torn, made by several processes at once, or not at all."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twinstep.worker.ops import hstu_kernel, native
from twinstep.worker.ops.hstu_attention import AttentionRule, reference

needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")
SOURCE = 'extern "C" int answer() { return ANSWER; }'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def ask(path: Path) -> int:
    return int(native.load(path).answer())


@needs_compiler
def test_a_library_is_built_once_and_another_for_each_change(own_cache: Path, source: Path) -> None:
    one = native.build(source, flags=["-DANSWER=1"])
    stamp = one.stat().st_mtime_ns
    assert native.build(source, flags=["-DANSWER=1"]) == one
    assert one.stat().st_mtime_ns == stamp
    two = native.build(source, flags=["-DANSWER=2"])
    assert (ask(one), ask(two)) == (1, 2)
    source.write_text(SOURCE + "\n")
    assert native.build(source, flags=["-DANSWER=1"]) not in (one, two)
    header = source.with_suffix(".h")
    header.write_text("1")
    first = native.build(source, flags=["-DANSWER=1"], reads=[header])
    header.write_text("2")
    assert native.build(source, flags=["-DANSWER=1"], reads=[header]) != first
    assert sorted(path.suffix for path in own_cache.iterdir()) == [".so"] * 5


@needs_compiler
@pytest.mark.parametrize("harm", ["torn", "empty", "foreign"])
def test_a_harmed_library_is_built_again(own_cache: Path, source: Path, harm: str) -> None:
    path = native.build(source, flags=["-DANSWER=7"])
    content = path.read_bytes()
    path.write_bytes({"torn": content[: len(content) // 2], "empty": b"", "foreign": b"x" + content[1:]}[harm])
    assert not native.whole(path)
    assert native.build(source, flags=["-DANSWER=7"]) == path
    assert native.whole(path)
    assert ask(path) == 7


@needs_compiler
def test_several_processes_may_build_the_same_library(own_cache: Path, source: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from twinstep.worker.ops import native\n"
        "path = native.build(Path(sys.argv[1]), flags=['-DANSWER=3']); print(native.load(path).answer())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in running] == ["3"] * 3
    assert len(list(own_cache.iterdir())) == 1


def test_without_a_compiler_attention_runs_the_reference_and_says_so_once(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    q = torch.randn(2, 5, 1, 4)
    rest = (torch.tensor([3, 2]), torch.tensor([2, 0]), torch.tensor(5.0))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = torch.ops.twinstep.hstu_attention(q, q, q, *rest, 2, 0, 0, True, 0, 0.5)
    assert torch.equal(out, reference(q, q, q, *rest, AttentionRule(2), 0.5))
    assert [record.message for record in caplog.records if "no C++ compiler" in record.message] != []
    assert len([record for record in caplog.records if record.name == hstu_kernel.LOG.name]) == 1


@needs_compiler
def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(own_cache: Path, source: Path) -> None:
    source.write_text("this is no C++")
    with pytest.raises(native.BuildError, match=r"failed on answer\.cpp: .*error"):
        native.build(source)
    assert list(own_cache.iterdir()) == []


@needs_compiler
@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_an_error(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(closed))
    with pytest.raises(native.BuildError, match="cannot build"):
        native.build(source)
