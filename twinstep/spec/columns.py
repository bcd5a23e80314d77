"""Which columns of a user's own files say who did what and when: `data.columns`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from twinstep.spec.base import MAX_TABLES, FieldName, Spec, TableName

MAX_ACTIONS = 31  # bits of an action word: what fits int32 and is not negative


class ColumnsSpec(Spec):
    """Columns of the files of `dataset: parquet`; other datasets ignore them."""

    user: FieldName = "user_id"
    """Who: whole number or text."""
    item: Annotated[TableName, Field(validate_default=True)] = "item_id"
    """What: whole number or text; the first item feature, and the name of its table."""
    time: FieldName = "timestamp"
    """When: a timestamp, or a whole number of `time_unit` since 1970."""
    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of a time that is a whole number."""
    time_order: Literal["any", "rising"] = "any"
    """`rising`: a row earlier than any before it is a bad one; `any`: rows are sorted by time."""
    rating: FieldName | None = "rating"
    """A number; gives the task `liked` by `data.label_threshold`."""
    actions: Annotated[tuple[FieldName, ...], Field(max_length=MAX_ACTIONS, validate_default=True)] = ()
    """Columns of 0 and 1 (or booleans): column i is bit i of the action word, and a task of its own."""
    watch: FieldName | None = None
    """Seconds watched; gives the regression `watch_time`, for `data.tasks` to ask for."""
    user_features: Annotated[tuple[TableName, ...], Field(max_length=MAX_TABLES // 2, validate_default=True)] = ()
    """Ids that describe the user, one table each; none: the user's own id."""
    item_features: Annotated[tuple[TableName, ...], Field(max_length=MAX_TABLES // 2)] = ()
    """Further ids that describe the item, one table each: other ones than the user's."""

    @field_validator("item")
    @classmethod
    def _not_the_user(cls, value: str, info: ValidationInfo) -> str:
        if value == info.data.get("user"):
            said = {"allowed": "another column than the user's", "nearest": "item" if value == "item_id" else "item_id"}
            raise PydanticCustomError("between_fields", "is the user's column too", said)
        return value

    @field_validator("user_features", "item_features")
    @classmethod
    def _features_are_apart(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """Each feature has a table of its own name, which cannot be numbered by users and by items."""
        user, taken = info.data.get("user") or "", [info.data.get("item")]
        if info.field_name == "user_features" and not value and "." in user:
            said = {"name": user, "allowed": "at least one column without dots", "nearest": ["user_id"]}
            raise PydanticCustomError("between_fields", "is empty, and {name} has a dot, which no table may", said)
        if info.field_name == "item_features":
            taken += info.data.get("user_features") or (info.data.get("user"),)
        apart = [name for name in dict.fromkeys(value) if name not in taken]
        if len(apart) < len(value):
            clash = next((name for name in value if name in taken), None)
            problem = "names one twice" if clash is None else "names {name}, which is a feature already"
            others = ", ".join(str(name) for name in taken if name is not None)
            said = {"name": clash, "allowed": f"each once, none of {others}", "nearest": apart}
            raise PydanticCustomError("between_fields", problem, said)
        return value

    @field_validator("actions")
    @classmethod
    def _something_to_predict(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not value and info.data.get("rating", "") is None:
            said = {"allowed": "at least one column, where rating is null", "nearest": ["is_click"]}
            raise PydanticCustomError("between_fields", "is empty, and rating is null: nothing to predict", said)
        if len(set(value)) < len(value):
            said = {"allowed": "each once", "nearest": list(dict.fromkeys(value))}
            raise PydanticCustomError("between_fields", "names one twice", said)
        if "liked" in value and info.data.get("rating") is not None:
            others = [name for name in value if name != "liked"]
            said = {"allowed": "other columns, or rating: null", "nearest": others}
            raise PydanticCustomError("between_fields", "names liked, which is the task of the rating", said)
        return value

    @field_validator("watch")
    @classmethod
    def _watch_time_is_free(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and "watch_time" in info.data.get("actions", ()):
            said = {"allowed": "null, or no watch_time among the actions", "nearest": None}
            raise PydanticCustomError("between_fields", "gives the task watch_time, which an action is", said)
        return value

    @property
    def id_names(self) -> tuple[str, ...]:
        """Columns of ids, each once."""
        return tuple(dict.fromkeys((self.user, self.item, *self.user_features, *self.item_features)))

    @property
    def names(self) -> tuple[str, ...]:
        """All columns to read, each once."""
        others = (self.time, self.rating, self.watch, *self.actions)
        return tuple(dict.fromkeys((*self.id_names, *(name for name in others if name is not None))))
