"""DLRMv3 by dataset: features, tasks and sizes of the public configurations, and of ours for MovieLens-100K. Pure.

`model.preset` of a job spec takes the sizes of a row where the spec gives none; `worker/models/registry.py` makes a
whole configuration of a row, into which public weights load; `twinstep models` lists the table. Numbers and names are
those of the public generative-recommenders configurations; the rows of tables follow from the data, not from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PresetName = Literal["movielens-1m", "movielens-20m", "kuairand-1k", "streaming", "ml-100k"]
PUBLIC_SIZES: Mapping[str, Any] = {
    "embedding_dim": 512,
    "transducer_dim": 512,
    "num_layers": 5,
    "num_heads": 4,
    "linear_dim": 128,
    "attention_dim": 128,
    "hidden_dim": 256,
    "head_hidden_dim": 512,
    "dropout": 0.1,
    "input_dropout": 0.2,
    "loss_weight": 0.2,
    "position_rows": 8192,
    "time_rows": 2049,
}
"""What all public configurations share."""
STARS = 5  # bits of an action word that holds a rating


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One dataset's DLRMv3."""

    dataset: str
    """The dataset's name in a job spec."""
    contextual: tuple[str, ...]
    """Features of a user, one slot each, in this order; each has a table of its own name."""
    item_features: tuple[str, ...]
    """Features of an event or candidate, the item's id first."""
    tasks: Mapping[str, int]
    """Binary tasks: which bits of a candidate's action word make its label 1; 0: its rating reaches the threshold."""
    regressions: tuple[str, ...] = ()
    """Tasks on a number, to be asked for by `data.tasks`."""
    action_bits: int = STARS
    """Bits of an event's action word; each has a row of the action table."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Values of `model` fields."""


def _public(**sizes: Any) -> Mapping[str, Any]:
    return {**PUBLIC_SIZES, **sizes}


_FEEDBACK = (
    "is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter",
)  # fmt: skip
PRESETS: Mapping[PresetName, Preset] = {
    "movielens-1m": Preset(
        dataset="ml-1m",
        contextual=("user_id", "sex", "age_group", "occupation", "zip_code"),
        item_features=("movie_id",),
        tasks={"rating": 0},
        sizes=_public(min_uih_length=20),
    ),
    "movielens-20m": Preset(
        dataset="ml-20m",
        contextual=("user_id",),
        item_features=("movie_id",),
        tasks={"rating": 0},
        sizes=_public(min_uih_length=20),
    ),
    "kuairand-1k": Preset(
        dataset="kuairand-1k",
        contextual=(
            "user_id", "user_active_degree", "follow_user_num_range", "fans_user_num_range", "friend_user_num_range",
            "register_days_range",
        ),
        item_features=("video_id",),
        tasks={name: 1 << bit for bit, name in enumerate(_FEEDBACK)},
        regressions=("watch_time",),
        action_bits=len(_FEEDBACK),
        sizes=_public(),
    ),
    "streaming": Preset(
        dataset="streaming",
        contextual=("user_id",),
        item_features=("item_id", "item_category_id"),
        tasks={"rating": 0},
        sizes=_public(min_uih_length=20, action_init_std=5.0),
    ),
    "ml-100k": Preset(
        dataset="ml-100k",
        contextual=("age", "gender", "occupation"),
        item_features=("item_id", "release_year", "genre"),
        tasks={"liked": 0},
        sizes={"embedding_dim": 32, "transducer_dim": 64, "num_layers": 2, "num_heads": 2},
    ),
}  # fmt: skip


def with_preset(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a spec's model with its preset's where it gives none; a wrong name changes nothing."""
    name = model.get("preset")
    preset = PRESETS.get(name) if isinstance(name, str) else None  # type: ignore[call-overload]
    return model if preset is None else {**preset.sizes, **model}


def presets_listing() -> list[dict[str, Any]]:
    """Return the table as plain data, for people and programs."""
    return [
        {
            "preset": name,
            "dataset": preset.dataset,
            "contextual": list(preset.contextual),
            "item_features": list(preset.item_features),
            "tasks": {**preset.tasks, **dict.fromkeys(preset.regressions, None)},
            "action_bits": preset.action_bits,
            "sizes": dict(preset.sizes),
        }
        for name, preset in PRESETS.items()
    ]
