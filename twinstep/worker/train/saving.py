"""A run's checkpoints as its spec wants them: when one is due, what goes into it beside tensors, going on from one."""

from __future__ import annotations

import os
import platform as machine
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twinstep.spec.base import Spec
from twinstep.spec.errors import Fault, SpecError
from twinstep.spec.job import CheckpointSpec, JobSpec
from twinstep.worker.checkpoint.content import RANDOM, live_tensors
from twinstep.worker.checkpoint.crew import Crew
from twinstep.worker.checkpoint.errors import MisfitError
from twinstep.worker.checkpoint.keep import Keep
from twinstep.worker.checkpoint.manifest import Manifest
from twinstep.worker.checkpoint.place import LocalPlace, UriPlace
from twinstep.worker.checkpoint.saver import Checkpoints
from twinstep.worker.checkpoint.shares import Held
from twinstep.worker.train.engines import Stepper
from twinstep.worker.train.environment import PLACE, named_place
from twinstep.worker.train.versions import software_versions

ATTEMPT = "TWINSTEP_ATTEMPT"
MAY_CHANGE = frozenset(
    {"data.batch_size", "data.uih_budget", "data.path", "data.cache_dir", "data.on_bad_row"}
    | {"data.prefetch", "data.loader_workers", "data.eval_candidates"}
    | {"model.preset", "model.action_init_std", "model.source", "model.dense_parameters"}
)
"""Fields of model and data that a run may go on with otherwise: how much at once, where files lie, how it began and is
scored."""
_KIND = re.compile(r"optimizers\.\w+\.kind$")
SCORES = ("auc", "ne", "log_loss")


def place_of(spec: CheckpointSpec) -> str | None:
    """Return where checkpoints go, None for nowhere.

    Raises:
        SpecError: some are wanted, and there is no place for them.
    """
    where = named_place(spec)
    if where is None and spec.periodic:
        raise SpecError(
            "checkpoints are wanted, and checkpoint.path names no place for them",
            remedy="checkpoint: {path: DIRECTORY}, or submit the job to a control plane, which has one",
        )
    return where


class Saving:
    """Saves one run's state, and brings a saved one back.

    Args:
        tell: reports an event and shows it.

    Raises:
        TakenError: another process writes to the same place.
        UnavailableError: the place cannot be written.
    """

    def __init__(
        self,
        spec: JobSpec,
        where: str | Path,
        *,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        stepper: Stepper,
        tell: Callable[[str, str, dict[str, Any]], None],
    ) -> None:
        self._spec, self._tell = spec, tell
        self._model, self._optimizers, self._stepper = model, optimizers, stepper
        wanted = spec.checkpoint
        run = os.environ.get("TWINSTEP_RUN_ID")
        self._checkpoints = Checkpoints(
            where,
            keep=Keep(last=wanted.keep_last, best=wanted.keep_best, metric=wanted.best_by),
            owner=f"{f'run {run}' if run else 'twinstep train'} on {machine.node()} (process {os.getpid()})",
            lineage=os.environ.get(PLACE, ""),
            attempt=_number(os.environ.get(ATTEMPT)),
            only_finite=only_finite(spec),
        )
        self.key = ""
        """Digest of the newest CompileKey, to be put into checkpoints."""
        self._saved_step = -1
        self._saved_at = time.monotonic()

    def join(self, crew: Crew) -> None:
        """Let each process of the run write rows of its own from now on."""
        self._checkpoints.crew = crew

    @property
    def place(self) -> LocalPlace | UriPlace:
        """Where checkpoints lie."""
        return self._checkpoints.place

    @property
    def last_good(self) -> int | None:
        """Step of the newest checkpoint that is whole."""
        return self._checkpoints.last_step

    @property
    def kept(self) -> tuple[str, int | None]:
        """Where checkpoints lie, and the step of the newest that is whole."""
        return self.place.url, self.last_good

    def restore(self) -> Manifest | None:
        """Bring back the newest state that is whole, tensors and random numbers; None: there is none.

        Raises:
            MisfitError: it is of another model, other data or other optimizers; nothing was changed.
            DamagedError: there are checkpoints, and none is whole.
        """
        found = self._checkpoints.restore(
            self._model, self._optimizers, fits=lambda manifest: check_same_job(self._spec, manifest)
        )
        self.look()
        if found is None:
            return None
        manifest, values = found
        self.take(manifest, values)
        return manifest

    def find(self) -> str | None:
        """Return the name of the newest checkpoint that is whole, for processes that each read their own rows of it.

        Raises:
            MisfitError, DamagedError: as `restore`.
        """
        name = self._checkpoints.find(
            self._model, self._optimizers, fits=lambda manifest: check_same_job(self._spec, manifest)
        )
        self.look()
        return name

    def take(self, manifest: Manifest, values: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint, whose tensors the live model has or knows where to read."""
        self._stepper_takes(values)
        self._stepper.go_on_after(manifest.about.get("compiled_for", {}))
        self._saved_step = manifest.step

    def _stepper_takes(self, values: Mapping[str, Tensor]) -> None:
        name = random_name(self._spec)
        self._stepper.push()
        if name in values:
            self._stepper.set_random_state(values[name].clone())
        elif getattr(self._spec.model, "dropout", 0.0) > 0:
            text = "the checkpoint is another backend's: dropout goes on with other masks"
            self._tell("random_state_differs", text, {})

    def due(self, step: int, *, scored: bool = False, ends: bool = False) -> bool:
        """Say whether the state after `step` is to be saved now; `scored`: it was evaluated; `ends`: it is the last."""
        wanted = self._spec.checkpoint
        if step == self._saved_step or step == 0:
            return False
        if ends and wanted.at_end:
            return True
        by_steps = wanted.every_steps is not None and step % wanted.every_steps == 0
        by_time = wanted.every_seconds is not None and time.monotonic() - self._saved_at >= wanted.every_seconds
        by_score = scored and wanted.keep_best > 0
        if by_time and not (by_steps or by_score) and self._checkpoints.busy:
            return False  # the disk is slower than the clock: the next step asks again
        return by_steps or by_time or by_score

    def save(
        self,
        step: int,
        about: dict[str, Any],
        *,
        scores: Mapping[str, float | None] | None = None,
        held: Held | None = None,
    ) -> None:
        """Copy the state after `step`, and let it be written beside the run.

        Args:
            held: of what no process has whole, who has which rows; the live state is up to date then.
        """
        told = {name: float(value) for name, value in (scores or {}).items() if name in SCORES and value is not None}
        if held is None:
            self._stepper.pull()
        tensors = run_tensors(self._spec, self._model, self._optimizers, self._stepper)
        self._checkpoints.save(tensors, step=step, about=self._about(about), scores=told, held=held or {})
        self._saved_step, self._saved_at = step, time.monotonic()

    def finish(self) -> None:
        """Wait for what is being written."""
        self._checkpoints.finish()

    def wants_last(self, step: int, *, within: float) -> bool:
        """Wait for what is being written; say whether the state after `step`, the last one, is to be saved yet."""
        return self._checkpoints.finish(within) and step not in (0, self._checkpoints.last_step)

    def has_last(self, step: int, *, within: float) -> bool:
        """Wait for what is being written; say whether the newest checkpoint is the one of `step`."""
        self._checkpoints.finish(max(0.0, within))
        self.look()
        return step in (0, self._checkpoints.last_step)

    def save_last(self, step: int, about: dict[str, Any], *, within: float) -> bool:
        """Save the state after `step` where it is not saved yet, and wait until it is written, for so many seconds.

        Returns:
            Whether the newest checkpoint is the one of `step`.
        """
        ends = time.monotonic() + within
        if self.wants_last(step, within=within):
            self.save(step, about)
        return self.has_last(step, within=ends - time.monotonic())

    def _about(self, more: dict[str, Any]) -> dict[str, Any]:
        return {
            "spec": self._spec.model_dump(mode="json"),
            "versions": software_versions(),
            "compile_key": self.key,
            "compiled_for": self._stepper.compiled_for(),
            "host": machine.node(),
            **more,
        }

    def look(self) -> None:
        """Report what happened beside the run."""
        for note in self._checkpoints.notes():
            self._tell(note.name, note.reason, note.data)

    def close(self) -> None:
        """Wait for what is being written, report it, and let others write there."""
        self._checkpoints.close()
        self.look()

    def give_up(self) -> None:
        """Let others write there without waiting for what is being written, which will not count."""
        self._checkpoints.give_up()
        self.look()


def check_same_job(spec: JobSpec, manifest: Manifest) -> None:
    """Hold what a checkpoint was trained as against a spec: tensors may have equal shapes and another meaning.

    Raises:
        MisfitError: the model, the data or the kind of an optimizer differs; each field is named in `faults`.
    """
    before = manifest.about.get("spec")
    if not isinstance(before, Mapping):
        return
    faults = [
        fault
        for fault in _changed(spec, before, "")
        if fault.field.startswith(("model.", "data.")) or _KIND.match(fault.field)
    ]
    if faults:
        told = ", ".join(f"{fault.field} {fault.problem}" for fault in faults)
        raise MisfitError(
            f"the checkpoint of step {manifest.step} is of another job than the spec: {told}",
            remedy="undo the change of the spec, or give another checkpoint.path to start anew",
            faults=tuple(faults),
        )


def _changed(spec: Spec, before: Mapping[str, Any], path: str) -> Iterator[Fault]:
    """Yield the fields that differ, of those that the version which wrote `before` knew too."""
    now = spec.model_dump(mode="json")
    for name in type(spec).model_fields:
        field, value = f"{path}{name}", getattr(spec, name)
        if name not in before or field in MAY_CHANGE:
            continue
        if isinstance(value, Spec) and isinstance(before[name], Mapping):
            yield from _changed(value, before[name], f"{field}.")
        elif now[name] != before[name]:
            given, allowed = repr(now[name])[:120], repr(before[name])[:120]
            yield Fault(field=field, problem=f"is {given}, in the checkpoint {allowed}", given=given, allowed=allowed)


def begins(step: int, total: int) -> str:
    """Return from where a run goes on that has done `step` steps of `total`, in words."""
    if step >= total:
        return f"all {total} steps are done already: it is evaluated again, and nothing else is done"
    return f"goes on after step {step} of {total}" if step else "starts from the beginning"


def last_words(step: int, kept: tuple[str, int | None] | None) -> str:
    """Return what to say where a run was told to stop after `step`.

    Args:
        kept: where its checkpoints lie, and the step of the newest; None: it has no place for any.
    """
    if kept is None:
        return f"stopped after step {step}; nothing is saved, since checkpoint.path names no place"
    where, newest = kept
    if newest is None:
        return f"stopped after step {step}; nothing is saved yet in {where}: started again, it begins anew"
    vain = f", and does {step - newest} steps again" if step > newest else ""
    return f"stopped after step {step}; step {newest} is saved in {where}: started again, it goes on from there{vain}"


def only_finite(spec: JobSpec) -> bool:
    """Say whether a state with NaN or infinity in it is not to be saved."""
    return spec.debug.stop_on_nonfinite or spec.train.on_nan != "stop"


def random_name(spec: JobSpec) -> str:
    """Return the path of the random state that a spec's backend draws from."""
    return f"{RANDOM}{'xla' if spec.compile.backend == 'xla' else 'torch'}"


def run_tensors(
    spec: JobSpec, model: nn.Module, optimizers: Mapping[str, Optimizer], stepper: Stepper
) -> dict[str, Tensor]:
    """Return a run's state by path: its live tensors, as they are, and its random generator's."""
    return live_tensors(model, optimizers) | {random_name(spec): stepper.random_state()}


def restore_random(stepper: Stepper, spec: JobSpec, values: Mapping[str, Tensor]) -> None:
    """Let a stepper draw on from where a snapshot of its own was taken."""
    stepper.set_random_state(torch.clone(values[random_name(spec)]))


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
