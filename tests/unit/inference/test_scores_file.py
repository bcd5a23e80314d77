"""The file of scores gets its name whole, and only where nobody else's has it by then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from twinstep.spec.errors import ConflictError
from twinstep.worker.inference.score import FORMATS, _written


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
@pytest.mark.parametrize("ending", FORMATS)
def test_of_two_that_score_into_one_file_the_quicker_stays_whole(
    ending: str, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise PermissionError("no hard links here")

    if not links:
        monkeypatch.setattr(os, "link", none)
    out = tmp_path / f"scores{ending}"
    alone = b""

    def both() -> None:
        nonlocal alone
        with _written(out) as slow:
            slow(pa.table({"slow": [1] * 1000}))
            with _written(out) as quick:
                quick(pa.table({"quick": [1, 2]}))
            alone = out.read_bytes()
            slow(pa.table({"slow": [1] * 1000}))

    with pytest.raises(ConflictError, match="is there already"):
        both()
    assert out.read_bytes() == alone
    assert b"quick" in alone
    assert list(tmp_path.iterdir()) == [out]
