"""What a job asks of its SparseCores' compiler and runtime, and the libtpu flags that say it: one table.

The control plane renders `libtpu_arguments` into the environment of the job's pods (`LIBTPU_INIT_ARGS`). Each flag's
name is one that libtpu 0.0.42.1 knows. Ids out of range and values that are not finite are checked by the host and the
portable path as well, on any machine; libtpu 0.0.42.1 has no flag for a bound check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from twinstep.spec.base import Spec
from twinstep.spec.topology import TPUS

GENERATIONS = tuple(name for name, tpu in TPUS.items() if tpu.usable_sparse_cores)
"""Generations whose SparseCores can be programmed."""


class SparseCoreFlags(Spec):
    """Switches of the SparseCore compiler and runtime; the default of each is libtpu's own."""

    detect_nan: StrictBool = False
    """Stop a program at the first value that is no number; slows it down."""
    assert_level: Literal["none", "bounds"] = "none"
    """`bounds`: programs check each address they form; slows them down."""
    sanitize_buffers: StrictBool = False
    """Fill buffers with marks and report what is read before it was written; for hunting faults only."""
    verify_launch_ids: StrictBool = False
    """All cores check that they run the same program; finds hosts that have come apart."""
    serialized_tables: Annotated[StrictInt, Field(ge=0, le=1024)] = 0
    """Tables of a step that are worked on one after the other, so that their HBM stack is shared."""
    max_ids_file: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^/[^\x00-\x20\x7f-\x9f]*$")] | None = (
        None
    )
    """File on every host with the limits of each table, from recorded statistics; null: the limits in the program."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One libtpu flag and the field that sets it."""

    field: str
    name: str
    value: Callable[[Any], str] = str
    """The flag's text for a value of the field that is not the default."""


def _yes(value: Any) -> str:
    return "true" if value else "false"


FLAGS = (
    Flag("detect_nan", "xla_sc_detect_nan", _yes),
    Flag("assert_level", "xla_sc_assert_level"),
    Flag("sanitize_buffers", "xla_sc_poison_buffers", _yes),
    Flag("verify_launch_ids", "xla_tpu_verify_launch_id_across_cores", _yes),
    Flag("serialized_tables", "xla_sc_num_serialized_tables_to_optimize_hbm"),
    Flag("max_ids_file", "xla_sparse_core_max_ids_file"),
)
"""Each field of `SparseCoreFlags` has at least one row."""


def libtpu_arguments(flags: SparseCoreFlags) -> str:
    """Return the flags that differ from libtpu's defaults, as one text; empty where none does."""
    defaults = SparseCoreFlags()
    return " ".join(
        f"--{flag.name}={flag.value(getattr(flags, flag.field))}"
        for flag in FLAGS
        if getattr(flags, flag.field) != getattr(defaults, flag.field)
    )
