"""Write what `twinstep render` makes of the cluster examples, one manifest each; a test fails when they drift.

.venv/bin/python manifests/generate.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from twinstep.platform.scheduler.render.render import render
from twinstep.platform.scheduler.validate.check import check
from twinstep.spec.parse import parse_spec

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples" / "clusters"
FOLDERS = {"tpu": HERE / "gke-tpu", "gpu": HERE / "gpu"}


def manifests() -> dict[Path, str]:
    """Return what each file of the folders holds."""
    found = {}
    for example in sorted(EXAMPLES.glob("*.yaml")):
        spec = parse_spec(example.read_bytes(), source=example.name)
        rendered = render(spec)
        check(rendered.objects)
        kind, _, rest = example.stem.partition("-")
        lead = f"# twinstep render examples/clusters/{example.name}\n"
        found[FOLDERS[kind] / f"{rest}.yaml"] = lead + rendered.yaml
    return found


def main(argv: list[str]) -> int:
    """Write the files, or with --check say which differ."""
    wanted = manifests()
    there = {path for folder in FOLDERS.values() for path in folder.glob("*.yaml")}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    gone = sorted(there - set(wanted))
    if "--check" in argv:
        for path in [*stale, *gone]:
            print(f"{path.relative_to(HERE.parent)} is not what its example renders to: run manifests/generate.py")
        return 1 if stale or gone else 0
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    for path in gone:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
