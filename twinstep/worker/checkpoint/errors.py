"""What a checkpoint can be to blame for."""

from __future__ import annotations

from twinstep.spec.errors import SpecError, TrainError


class DamagedError(TrainError):
    """A checkpoint is not whole: a file is missing or short, or its bytes are not those that were written."""

    code = "checkpoint_damaged"


class ForeignError(TrainError):
    """A checkpoint is as it was written, by a version whose format this one does not read."""

    code = "checkpoint_foreign"


class MisfitError(SpecError):
    """A checkpoint is whole, and of another model, other data or other optimizers than the spec asks for."""

    code = "checkpoint_misfit"


class TakenError(TrainError):
    """Another process writes checkpoints to this place."""

    code = "checkpoint_taken"
