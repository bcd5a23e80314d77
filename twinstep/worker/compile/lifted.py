"""The state that was lifted out of model and optimizers, with the backend that holds it between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import nn

from twinstep.worker.compile.annotate import Spread
from twinstep.worker.compile.around import Around
from twinstep.worker.compile.inputs import check_pieces
from twinstep.worker.compile.lower.loading import loading
from twinstep.worker.compile.program import Backend
from twinstep.worker.compile.state import Optimizers, TrainState, as_mapping
from twinstep.worker.compile.up_to_date import let_go

BackendName = Literal["inductor", "xla", "eager"]


@dataclass(frozen=True, slots=True)
class Lifted:
    """State and backend: what all programs of a StepCompiler share."""

    state: TrainState
    backend: Backend
    written: set[int] = field(default_factory=set)
    """Slots of integers that some program writes: what ids are made of may have moved since the last pull."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: Optimizers,
        name: BackendName,
        *,
        cache_dir: Path | None,
        in_place: bool,
        spread: Spread,
        values: bool = True,
        gradients: frozenset[str] | None = None,
        around: Around | None = None,
    ) -> Lifted:
        """Lift the state, for a backend by name; without `values` it may be on the meta device, and nothing can run.

        `gradients` is TrainState's.
        """
        check_pieces(model, optimizer, name, values=values)
        let_go(model, as_mapping(optimizer).values())
        state = TrainState(model, optimizer, gradients)
        # Each backend's stack takes seconds to import, so only the one asked for is.
        with loading(name):
            if name == "inductor":
                from twinstep.worker.compile.lower.inductor import InductorBackend
            else:
                from twinstep.worker.compile.lower.xla import XlaBackend
        if name == "inductor":
            return cls(state, InductorBackend(state, cache_dir=cache_dir and cache_dir / "inductor", in_place=in_place))
        place = cache_dir and cache_dir / "xla"
        where = spread if values else None
        backend = XlaBackend(state, cache_dir=place, in_place=in_place, spread=where, around=around)
        backend.take_up()
        return cls(state, backend)
