"""A process of its own for each side of a comparison: it builds a subject, then answers calls on it, a line each.

Why processes: memory is then each side's own, a compile cache can be fresh, and sides that cannot live together
(torch.compile fails once torchax has registered its device) can still take turns. Benchmarks use `Child`; the
other end is `main`, started as `python -m bench.child MODULE:CLASS`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from twinstep.spec.errors import TwinstepError, UnavailableError
from twinstep.worker.train.environment import settle_threads

ROOT = Path(__file__).parents[1]
END_LIMIT = 20.0  # seconds a child may take to end once it is told to


class Child:
    """A subject in another process; `call` runs one of its methods there. A context manager that ends the process.

    Args:
        factory: `module:class`; the class is built in the child from `arguments`.
        arguments: JSON values.
        cache_dir: directory of Inductor's cache in the child.
    """

    def __init__(self, factory: str, arguments: Mapping[str, Any], *, cache_dir: Path | None = None) -> None:
        self._name = factory
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.child", factory],
            cwd=ROOT,
            env=environment(cache_dir),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send(arguments)

    def call(self, method: str, **arguments: Any) -> Any:
        """Run `subject.method(**arguments)` in the child and return what it returned, JSON values only.

        Raises:
            TwinstepError: the method raised one, or the child ended.
        """
        self._send({"method": method, "arguments": arguments})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "problem" in answer:
            raise TwinstepError(answer["problem"], remedy=answer["remedy"])
        return answer["value"]

    def close(self) -> None:
        """End the process: its input ends, and then it does; killed if it does not. Safe to call twice."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # it ended first
                stream.close()
        try:
            self._process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise self._ended()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _ended(self) -> TwinstepError:
        self.close()
        return UnavailableError(
            f"the process of {self._name} ended with code {self._process.returncode}",
            remedy="its last words stand above; mend that",
        )


def environment(cache_dir: Path | None) -> dict[str, str]:
    """Return a child's environment: this one's, less what would make it a run of a control plane."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TWINSTEP_")}
    settle_threads(kept)  # as a run has them: those that spin while another side works would slow it
    kept["JAX_PLATFORMS"] = "cpu"
    if cache_dir is not None:
        kept["TORCHINDUCTOR_CACHE_DIR"] = str(cache_dir)
    return kept


def need_cxx() -> None:
    """Raise unless the C++ compiler that Inductor calls is there, before minutes are spent on the other sides.

    Raises:
        UnavailableError: it is not.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UnavailableError(
            f"Inductor needs a C++ compiler, and {compiler} is not on PATH", remedy="install g++, or name one in CXX"
        )


def main(factory: str) -> None:
    """Build the subject and answer calls until the input ends."""
    # Libraries print to standard output; answers must not be mixed with that.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, _, name = factory.partition(":")
    arguments = sys.stdin.readline()
    if not arguments:
        return
    subject = None
    for line in sys.stdin:
        call = json.loads(line)
        try:
            if subject is None:  # within the try: an error of building it is an answer too
                subject = getattr(importlib.import_module(module), name)(**json.loads(arguments))
            answer = {"value": getattr(subject, call["method"])(**call["arguments"])}
        except TwinstepError as error:
            answer = {"problem": error.problem, "remedy": error.remedy}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)  # the parent says why
