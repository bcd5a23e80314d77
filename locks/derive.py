"""Write the lock of each image from the full lock: what its roots need, by the metadata of what is installed here.

.venv/bin/python locks/derive.py [--check]

A test fails when they drift. The environment must be that of the full lock (scripts/setup).
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
COMMAND = ("httpx", "pydantic", "pyyaml", "rich", "typer")  # what `twinstep train` needs of the command


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """What goes into an image, beside twinstep."""

    roots: tuple[str, ...] = ()
    """Names of distributions."""
    extras: tuple[str, ...] = ()
    """Of pyproject.toml."""
    without: tuple[str, ...] = ()
    """Names that no requirement brings in: others of the image do their work, or nothing calls them there."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Name → the name of the distribution that stands for it, at the same version."""
    further: tuple[str, ...] = ()
    """Lines that the full lock has not."""


# What torch's CUDA build names and its CPU build does not. Where torch moves, ask pip anew, from an index whose torch
# is the CUDA build: pip install --dry-run --report FILE torch==NEW
CUDA_OF = "torch==2.13.0"
CUDA = (
    "cuda-bindings==13.5.0",
    "cuda-pathfinder==1.9.1",
    "cuda-toolkit==13.0.3.0",
    "nvidia-cublas==13.1.1.3",
    "nvidia-cuda-cupti==13.0.85",
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cudnn-cu13==9.20.0.48",
    "nvidia-cufft==12.0.0.61",
    "nvidia-cufile==1.15.1.6",
    "nvidia-curand==10.4.0.35",
    "nvidia-cusolver==12.0.4.66",
    "nvidia-cusparse==12.6.3.3",
    "nvidia-cusparselt-cu13==0.8.1",
    "nvidia-nccl-cu13==2.29.7",
    "nvidia-nvjitlink==13.5.37",
    "nvidia-nvshmem-cu13==3.4.5",
    "nvidia-nvtx==13.0.85",
    "triton==3.7.1",
)

IMAGES = {
    "worker-gpu": Image(
        roots=COMMAND,
        extras=("worker", "data", "gpu", "ray"),
        without=("jax", "torchax", "fbgemm-gpu"),
        instead={"fbgemm-gpu-cpu": "fbgemm-gpu"},
        further=CUDA,
    ),
    "worker-tpu": Image(roots=COMMAND, extras=("worker", "data", "aot", "sparsecore")),
}
# Their own requirements are left out: see pyproject.toml.
LEAVES = ("recbole",)


def lock(name: str) -> list[str]:
    """Return the lines that the lock of an image holds."""
    image = IMAGES[name]
    pinned = _pinned()
    found = sorted(_closure(image))
    missing = [each for each in found if each not in pinned]
    if missing:
        raise SystemExit(f"locks/full.txt lacks {', '.join(missing)}, which {name} needs")
    if image.further and pinned["torch"] != CUDA_OF:
        raise SystemExit(f"CUDA's packages here are those of {CUDA_OF}, the full lock has {pinned['torch']}")
    lines = [f"{image.instead.get(each, each)}=={pinned[each].partition('==')[2]}" for each in found]
    return sorted({*lines, *image.further})


def _pinned() -> dict[str, str]:
    lines = (HERE / "full.txt").read_text().split()
    return {line.partition("==")[0]: line for line in lines}


def _closure(image: Image) -> set[str]:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    wanted = [*image.roots, *(line for extra in image.extras for line in project["optional-dependencies"][extra])]
    found: set[str] = set()
    todo = [Requirement(each) for each in wanted]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        each = todo.pop()
        name = canonicalize_name(each.name)
        key = (name, frozenset(each.extras))
        if name in image.without or key in seen:
            continue
        seen.add(key)
        found.add(name)
        if name not in LEAVES:
            todo.extend(_requirements(name, each.extras))
    return found


def _requirements(name: str, extras: set[str]) -> Iterator[Requirement]:
    try:
        lines = requires(name) or ()
    except PackageNotFoundError:
        raise SystemExit(f"{name} is not installed here: scripts/setup") from None
    for line in lines:
        each = Requirement(line)
        environments = [{**default_environment(), "extra": extra} for extra in ("", *extras)]
        if each.marker is None or any(each.marker.evaluate(one) for one in environments):
            yield each


def main(argv: list[str]) -> int:
    """Write the locks, or with --check say which differ."""
    texts = {HERE / f"{name}.txt": "\n".join(lock(name)) + "\n" for name in IMAGES}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.name} is stale" if "--check" in argv else f"wrote {path.name}")
        if "--check" not in argv:
            path.write_text(texts[path])
    return 1 if stale and "--check" in argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
