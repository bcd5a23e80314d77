"""What is said where the packages of a backend do not load."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from collections.abc import Iterator

from twinstep.spec.errors import CompileError


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """Say which versions are tested where a backend's packages do not load, as after an upgrade of one of them."""
    try:
        yield
    except Exception as error:  # an import raises whatever the imported code does
        packages = ("torch", "torchax", "jax") if name == "xla" else ("torch",)
        wanted: list[str] = []
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from its source, not installed
            wanted = [line.split(";")[0].strip() for line in importlib.metadata.requires("twinstep") or ()]
        tested = [each for each in wanted if re.split(r"[<>=\[ ]", each)[0] in packages]
        raise CompileError(
            f"the packages of the {name} backend do not load: {type(error).__name__}: {error}",
            remedy=f"install the tested versions: {', '.join(tested) or 'see locks/full.txt'}",
        ) from error
