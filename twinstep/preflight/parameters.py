"""Every tensor of a model by name and shape, from the spec alone: what `worker/models/` would build.

Held by test, over a grid of specs, to the very modules: names, shapes and order are theirs, so that what is counted
here is what is trained. Sources of the layers: see `worker/models/`.

# Letters: E table width, D token width, H heads, V value width, A query width, C contextual slots, F item features,
# J action bits, Q tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from twinstep.preflight.shapes import DataShape
from twinstep.spec.job import JobSpec
from twinstep.spec.model import DLRMSpec, DLRMv3Spec
from twinstep.spec.module import ModuleSpec
from twinstep.spec.table_names import module_name

ACTION_DIM = 8  # floats per action bit
MIN_POSITION_ROWS = 256
TIME_FEATURES = 4  # cos and sin of hour and weekday
TABLES = "_embedding_collection.embeddings."
MODULE = "module"  # stands for all parameters of a user's module outside its tables
Role = Literal["table", "parameter", "buffer"]
Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the model's state."""

    name: str
    shape: Shape
    role: Role
    itemsize: int = 4

    @property
    def count(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


def parameters(spec: JobSpec, shape: DataShape) -> tuple[Parameter, ...]:
    """Return parameters and buffers of the model that a spec asks for, tables first, in the model's order.

    Of a user's module there is a table for each that the data needs, and of the rest what the spec says, as one.
    """
    model = spec.model
    tables = [
        Parameter(f"{TABLES}{module_name(table.name)}.weight", (table.rows, model.embedding_dim), "table")
        for table in shape.tables
    ]
    if isinstance(model, ModuleSpec):
        rest = Parameter(MODULE, (model.dense_parameters or 0,), "parameter")
        return (*tables, rest) if rest.count else tuple(tables)
    named = _dlrm(model, shape) if isinstance(model, DLRMSpec) else _dlrmv3(model, spec, shape)
    dense = [Parameter(name, size, "parameter") for name, size in named]
    return (*tables, *dense, *_buffers(model, shape))


def _buffers(model: DLRMv3Spec | DLRMSpec, shape: DataShape) -> Iterator[Parameter]:
    if isinstance(model, DLRMv3Spec):
        name = "_hstu_transducer._input_preprocessor._action_encoder._combined_action_weights"
        yield Parameter(name, (shape.action_bits,), "buffer", 8)
    elif model.interaction == "dot":
        vectors = len(shape.bags) + 1
        yield Parameter("_interaction._pairs", (vectors * (vectors - 1) // 2,), "buffer", 8)


def _linear(name: str, inputs: int, outputs: int) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Named:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _mlp(name: str, inputs: int, hidden: int, outputs: int) -> Named:
    """Linear → SwishLayerNorm → Linear → LayerNorm."""
    yield from _linear(f"{name}.0", inputs, hidden)
    yield from _norm(f"{name}.1", hidden)
    yield from _linear(f"{name}.2", hidden, outputs)
    yield from _norm(f"{name}.3", outputs)


def position_rows(model: DLRMv3Spec, spec: JobSpec, shape: DataShape) -> int:
    """Return the rows of the position table: a power of two that holds the longest row, where the spec names none."""
    longest = len(shape.contextual) + spec.data.uih_len + 1
    return model.position_rows or max(MIN_POSITION_ROWS, 1 << (longest - 1).bit_length())


def _dlrmv3(model: DLRMv3Spec, spec: JobSpec, shape: DataShape) -> Named:
    dim, width, hidden = model.transducer_dim, model.embedding_dim, model.hidden_dim
    head_hidden = model.head_hidden_dim or hidden
    slots, features, bits = len(shape.contextual), len(shape.item_features), shape.action_bits
    positions = position_rows(model, spec, shape)
    at = "_hstu_transducer._input_preprocessor."
    if slots:
        yield f"{at}_batched_contextual_linear_weights", (slots, width, dim)
        yield f"{at}_batched_contextual_linear_bias", (slots, dim)
    yield from _mlp(f"{at}_content_embedding_mlp", width, hidden, dim)
    yield from _mlp(f"{at}_additional_embedding_mlp", width * (features - 1), hidden, dim)
    yield f"{at}_action_encoder._action_embedding_table", (bits, ACTION_DIM)
    yield f"{at}_action_encoder._target_action_embedding_table", (1, bits * ACTION_DIM)
    yield from _mlp(f"{at}_action_embedding_mlp", ACTION_DIM * bits, hidden, dim)
    at = "_hstu_transducer._positional_encoder."
    yield f"{at}_position_embeddings_weight", (positions, dim)
    yield f"{at}_timestamp_embeddings_weight", (model.time_rows, dim)
    for layer in range(model.num_layers):
        yield from _stu(f"_hstu_transducer._stu_module._stu_layers.{layer}.", model, positions)
    at = "_hstu_transducer._output_postprocessor."
    if model.postprocessor != "l2_norm":
        yield from _norm(f"{at}_layer_norm", dim)
    if model.postprocessor == "timestamp":
        yield from _linear(f"{at}_time_feature_combiner", dim + TIME_FEATURES, dim)
    yield from _mlp("_item_embedding_mlp", width * features, head_hidden, dim)
    yield from _linear("_multitask_module._prediction_module.0", dim, head_hidden)
    yield from _norm("_multitask_module._prediction_module.1", head_hidden)
    yield from _linear("_multitask_module._prediction_module.2", head_hidden, shape.tasks)


def _stu(at: str, model: DLRMv3Spec, positions: int) -> Named:
    dim, heads, values, queries = model.transducer_dim, model.num_heads, model.linear_dim, model.attention_dim
    normed = heads if model.group_norm else heads * values
    yield f"{at}_uvqk_weight", (dim, 2 * heads * (values + queries))
    yield f"{at}_uvqk_beta", (2 * heads * (values + queries),)
    yield f"{at}_input_norm_weight", (dim,)
    yield f"{at}_input_norm_bias", (dim,)
    yield f"{at}_output_weight", (3 * heads * values, dim)
    yield f"{at}_output_norm_weight", (normed,)
    yield f"{at}_output_norm_bias", (normed,)
    if model.relative_bias in ("time", "both"):
        yield f"{at}_relative_bias._time_bias_weight", (model.time_rows,)
    if model.relative_bias in ("position", "both"):
        yield f"{at}_relative_bias._position_bias_weight", (positions,)


def _dlrm(model: DLRMSpec, shape: DataShape) -> Named:
    width, vectors = model.embedding_dim, len(shape.bags) + 1
    yield from _relu_mlp("_bottom", (shape.dense, *model.bottom_dims, width))
    crossed = vectors * width
    if model.interaction == "dot":
        crossed = width + vectors * (vectors - 1) // 2
    else:
        for layer in range(model.num_cross_layers):
            yield f"_interaction._down.{layer}.weight", (model.cross_rank, crossed)
        for layer in range(model.num_cross_layers):
            yield from _linear(f"_interaction._up.{layer}", model.cross_rank, crossed)
    yield from _relu_mlp("_over", (crossed, *model.over_dims, shape.tasks))


def _relu_mlp(name: str, widths: tuple[int, ...]) -> Named:
    for index in range(len(widths) - 1):
        yield from _linear(f"{name}.{2 * index}", widths[index], widths[index + 1])
