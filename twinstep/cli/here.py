"""Commands that need no control plane: train, validate, schema."""

from __future__ import annotations

import enum
import sys
from typing import Annotated

import typer

from twinstep.cli.output import console, print_json, summary_table
from twinstep.cli.specfile import read_spec
from twinstep.spec.errors import UnavailableError

SpecArg = Annotated[str, typer.Argument(metavar="SPEC", help="A job spec in YAML or JSON; - reads standard input.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print JSON, errors included, for programs to read.")]


class Lowered(enum.Enum):
    """Backends that compile."""

    INDUCTOR = "inductor"
    XLA = "xla"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("train")(train)
    app.command("validate")(validate)
    app.command("schema")(schema)


def train(
    spec_path: SpecArg,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", metavar="N", min=1, max=64, help="Processes to divide it over; else runtime.processes."
        ),
    ] = None,
    as_json: JsonOpt = False,
) -> int:
    """Run a job spec on this machine, without a control plane."""
    spec = read_spec(spec_path)
    from twinstep.worker.train import is_first, processes_of, run_divided, run_spec
    from twinstep.worker.train.output import giving_up

    # With --json, standard output is for the one result alone.
    screen = console(stderr=as_json)
    count = processes_of(spec, processes)
    if count > 1:
        return run_divided(spec, processes=count, as_json=as_json)
    try:
        summary = run_spec(spec, console=screen, quiet=as_json, ends_process=True)
    except ModuleNotFoundError as error:  # torch and the rest are imported inside
        raise needs_worker("training", error) from None
    if not is_first():  # rank 0 says it for all
        return 0
    with giving_up(sys.stdout):  # the run is done, whether or not anybody reads of it
        if as_json:
            print_json({"summary": summary.model_dump(mode="json")})
        else:
            with screen.capture() as shown:
                screen.print(summary_table(summary.model_dump(mode="json")))
            sys.stdout.write(shown.get())
        sys.stdout.flush()
    return 0


def validate(spec_path: SpecArg, as_json: JsonOpt = False) -> int:
    """Check a job spec: say ok, or name each field to mend."""
    spec = read_spec(spec_path)
    if as_json:
        print_json({"ok": True, "spec": spec.model_dump(mode="json")})
    else:
        print(f"ok: {spec.name} ({spec.model.kind} on {spec.data.dataset}, {spec.compile.backend})")
    return 0


def needs_worker(what: str, error: ModuleNotFoundError) -> Exception:
    """Return what to raise where a package is missing: the user's lack, unless the package is our own."""
    if error.name is None or error.name.split(".")[0] == "twinstep":
        return error
    return UnavailableError(
        f"{what} needs the package {error.name}, which is not installed here",
        remedy="pip install 'twinstep[worker,data]', or submit the job to a control plane that has them",
    )


def schema() -> int:
    """Print the JSON Schema of a job spec."""
    import json

    from twinstep.spec.parse import spec_json_schema

    print(json.dumps(spec_json_schema(), indent=2))
    return 0
