"""Runs `twinstep train SPEC` for several run directories in one process: importing torch takes longer than a run.

`train_here.py DIR...`: each DIR has a spec.yaml; its exit code, output and errors go to DIR/ended.json.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from twinstep.cli import main

for each in map(Path, sys.argv[1:]):
    os.environ["TWINSTEP_RUN_DIR"] = str(each)
    sys.argv = ["twinstep", "train", str(each / "spec.yaml")]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    (each / "ended.json").write_text(json.dumps({"code": code, "out": out.getvalue(), "err": err.getvalue()}))
