"""Commands about clusters that need none: topologies, render."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from twinstep.cli.here import JsonOpt, SpecArg
from twinstep.cli.output import console, one_line, plain_table, print_json
from twinstep.cli.specfile import read_spec
from twinstep.spec.errors import NotFoundError
from twinstep.spec.topology import GPUS, TPUS

_COUNTED = ("pods", "devices")


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("topologies")(topologies)
    app.command("render")(render)


def _accelerators(incomplete: str) -> list[str]:
    """Return the accelerators that a name may become, for a shell to complete."""
    return [name for name in (*TPUS, *GPUS) if name.startswith(incomplete)]


def topologies(
    generation: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Only this TPU generation or GPU model: v5p, h100.", autocompletion=_accelerators
        ),
    ] = None,
    up_to: Annotated[int, typer.Option("--up-to", min=1, help="Leave out slices of more chips.")] = 256,
    as_json: JsonOpt = False,
) -> int:
    """List accelerators, and for TPUs the slices a job can ask for: chips, hosts, processes, devices."""
    from twinstep.spec.catalogue import catalogue

    found = catalogue(up_to=up_to)
    names = [each["name"] for each in (*found["tpus"], *found["gpus"])]
    if generation is not None:
        if generation not in names:
            raise NotFoundError(f"no accelerator is called {generation!r}", remedy=f"one of {', '.join(names)}")
        found = {kind: [each for each in rows if each["name"] == generation] for kind, rows in found.items()}
    if as_json:
        print_json(found)
        return 0
    screen = console()
    for tpu in found["tpus"]:
        cores = f"{tpu['sparse_cores_per_chip']} SparseCores" if tpu["sparse_cores_per_chip"] else "no SparseCores"
        screen.print(
            f"{tpu['name']} ({tpu['label']}): per chip {tpu['hbm_gib']} GiB HBM, {cores}, "
            f"{tpu['devices_per_chip']} JAX device{'s' if tpu['devices_per_chip'] > 1 else ''}"
        )
        screen.print(_slices(tpu["slices"]))
        if tpu["max_chips"] > up_to:
            screen.print(f"larger ones, of up to {tpu['max_chips']:,} chips, with --up-to {tpu['max_chips']}")
        screen.print()
    if found["gpus"]:
        table = plain_table("GPU", "label", "machine", "GPUs a node", "GiB", right=("GPUs a node", "GiB"))
        for gpu in found["gpus"]:
            table.add_row(*(str(gpu[key]) for key in ("name", "label", "machine_type", "per_node", "memory_gib")))
        screen.print(table)
    return 0


def _slices(rows: list[dict[str, Any]]) -> Any:
    heads = ("topology", "chips", "chips/host", "machine", "hosts", "JAX devices", "ring")
    table = plain_table(*heads, right=("chips", "chips/host", "hosts", "JAX devices"))
    for row in rows:
        keys = ("topology", "chips", "chips_per_host", "machine_type", "hosts", "devices")
        table.add_row(*(str(row[key]) for key in keys), " ".join("yes" if ring else "no" for ring in row["wraps"]))
    return table


def render(
    spec_path: SpecArg,
    image: Annotated[
        str | None, typer.Option("--image", metavar="REF", help="Worker image where the spec names none.")
    ] = None,
    crds: Annotated[
        Path | None,
        typer.Option("--crds", metavar="DIR", help="Check against the custom resource definitions in this directory."),
    ] = None,
    quota: Annotated[
        bool,
        typer.Option("--quota", help="Print the queues that an admin applies once so that the job is admitted."),
    ] = False,
    as_json: JsonOpt = False,
) -> int:
    """Print the Kubernetes objects of a job, checked as the cluster would; pipe them to kubectl apply -f -."""
    spec = read_spec(spec_path)
    from twinstep.platform.scheduler.render.quota import quota as queues
    from twinstep.platform.scheduler.render.render import render as render_spec
    from twinstep.platform.scheduler.validate.check import check
    from twinstep.platform.scheduler.validate.schemas import CustomResources
    from twinstep.spec.text import dump_manifests

    found = render_spec(spec, default_image=image)
    objects = queues(spec, found) if quota else found.objects
    check(objects, None if crds is None else CustomResources(crds))
    if as_json:
        print_json({"objects": objects, "numbers": found.numbers, "warnings": found.warnings})
        return 0
    sys.stdout.write(dump_manifests(objects))
    # Standard output is the manifest alone: a reader of it is kubectl.
    pods = ", ".join(f"{found.numbers[each]} {each[:-1] if found.numbers[each] == 1 else each}" for each in _COUNTED)
    print(f"{found.numbers['kind']} {found.name}: {pods}", file=sys.stderr)
    for warning in found.warnings:
        print(f"warning: {one_line(warning)}", file=sys.stderr)
    return 0
