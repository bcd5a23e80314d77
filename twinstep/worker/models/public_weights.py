"""Weights of the public generative-recommenders `DlrmHSTU`, in and out: the same names, shapes and layouts.

`DLRMv3.from_generative_recommenders` and `to_generative_recommenders` call it. Parameter names and layouts are the
public ones already, so nothing is transposed; what is done here is to hold a state dict to what a configuration needs,
all of it, before anything is loaded. Pure: nothing is read or written.

Only the public model's GPU weights are meant by that: its time table is clamped to its last row (see `positional.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from twinstep.spec.errors import TrainError
from twinstep.worker.models.postprocessor import PERIODS, TimestampLayerNormPostprocessor

POSTPROCESSOR = "_hstu_transducer._output_postprocessor."
WIDENED = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of parameters that float32 holds exactly; the public tables are float16."""
WRAPPERS = ("module.", "_orig_mod.", "_dmp_wrapped_module.", "_hstu_model.")
"""What data-parallel and compiled wrappers put before every name."""
MOST_NAMED = 20  # faults written out; a wrong configuration has hundreds


def public_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the public model keeps and ours computes: seconds per unit and units per period."""
    if not any(isinstance(module, TimestampLayerNormPostprocessor) for module in model.modules()):
        return {}
    seconds, units = zip(*PERIODS, strict=True)
    return {
        f"{POSTPROCESSOR}_period_units": torch.tensor([seconds], dtype=torch.float32),
        f"{POSTPROCESSOR}_units_per_period": torch.tensor([units], dtype=torch.float32),
    }


def load_public(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Copy a public state dict into a model of ours; parameters are widened to float32 exactly.

    Args:
        state_dict: parameters and buffers by public name. Buffers may be missing (they follow from the configuration),
            but those there must be the configuration's.

    Raises:
        TrainError: keys are unknown, missing, of another shape or dtype, or a buffer has other values. All of them are
            named, with the nearest name there is; the model is as it was.
    """
    ours = dict(model.state_dict())
    buffers = dict(model.named_buffers()) | public_buffers(model)
    given = {str(name): value for name, value in state_dict.items()}
    expected = ours | buffers
    faults = [
        *_misnamed(given, expected, optional=set(buffers)),
        *_misshapen(given, {name: value for name, value in ours.items() if name not in buffers}),
        *_other_values(given, buffers),
    ]
    if faults:
        more = f"; and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
        raise TrainError(
            f"the state dict is not that of this configuration ({len(faults)} faults): "
            + "; ".join(faults[:MOST_NAMED])
            + more,
            remedy=_remedy(given, expected),
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(given[name])


def public_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights as a public state dict: copies, in the order of the model's own."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return state | public_buffers(model)


def _misnamed(given: Mapping[str, Any], expected: Mapping[str, Any], *, optional: set[str]) -> list[str]:
    """Return a line for each name that only one side has."""
    unknown = [name for name in given if name not in expected]
    missing = [name for name in expected if name not in given and name not in optional]
    lines = [f"{name} is unknown{_nearest(name, missing or expected)}" for name in unknown]
    return [*lines, *(f"{name} is missing{_nearest(name, unknown)}" for name in missing)]


def _nearest(name: str, options: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f" (nearest: {found[0]})" if found else ""


def _misshapen(given: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each parameter that is no tensor, of another shape, or of a dtype that float32 cannot hold."""
    lines = []
    for name, want in parameters.items():
        if name not in given:
            continue
        value = given[name]
        if not isinstance(value, Tensor):
            lines.append(f"{name} is a {type(value).__name__}, not a tensor")
        elif value.shape != want.shape:
            lines.append(f"{name} has the shape {list(value.shape)}, not {list(want.shape)}")
        elif value.dtype not in WIDENED:
            lines.append(f"{name} is {str(value.dtype).removeprefix('torch.')}, which float32 does not hold exactly")
    return lines


def _other_values(given: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each buffer that has not the values of the configuration."""
    lines = []
    for name, want in buffers.items():
        value = given.get(name)
        if value is not None and not (
            isinstance(value, Tensor) and torch.equal(value.cpu().to(want.dtype), want.cpu())
        ):
            shown = value.tolist() if isinstance(value, Tensor) else value
            lines.append(f"{name} is {str(shown)[:80]}, not {want.tolist()}")
    return lines


def _remedy(given: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    for prefix in WRAPPERS:
        if given and all(name.startswith(prefix) for name in given):
            return f"take the prefix {prefix!r} off every name"
    if not set(given) & set(expected):
        return "give the state dict of a DlrmHSTU itself: model.state_dict()"
    return "give the configuration that the weights were trained with: tables, features, layers and widths"
