"""jax-tpu-embedding's stacking and preprocessing over our declarations: oracle of tests, peer of `preprocess`.

Only this file speaks its API. It runs on a host without a TPU; what needs one is never called.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax_tpu_embedding.sparsecore.lib.core import pybind_input_preprocessing as compiled
from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec, table_stacking

from twinstep.worker.embedding.sparsecore.spec import Cores, Feature, Table
from twinstep.worker.embedding.sparsecore.stacking import Stacking, StackPlan

DEFAULT_LIMIT = 256  # its own default of both limits


def declare(tables: Sequence[Table], features: Sequence[Feature]) -> list[Any]:
    """Return its FeatureSpecs, in our order."""
    made = {each.name: _table(each) for each in tables}
    return [
        embedding_spec.FeatureSpec(
            name=each.name,
            table_spec=made[each.table],
            input_shape=(each.samples, 1),
            output_shape=(each.samples, made[each.table].embedding_dim),
        )
        for each in features
    ]


def _table(table: Table) -> Any:
    limits = table.limits
    return embedding_spec.TableSpec(
        name=table.name,
        vocabulary_size=table.rows,
        embedding_dim=table.dim,
        initializer=lambda key, shape: np.zeros(shape, np.float32),
        optimizer=embedding_spec.SGDOptimizerSpec(learning_rate=0.1),
        combiner=table.combiner,
        max_ids_per_partition=limits.max_ids if limits else DEFAULT_LIMIT,
        max_unique_ids_per_partition=limits.max_unique if limits else DEFAULT_LIMIT,
    )


def stack(specs: list[Any], cores: Cores, how: Stacking) -> None:
    """Let it stack its specs, in place, as `how` says."""
    if how.groups is not None:
        for group in how.groups:
            table_stacking.stack_tables(specs, list(group), cores.devices, cores.per_device, rotation=how.rotation)
    elif not how.disable_table_stacking:
        table_stacking.auto_stack_tables(
            specs, cores.devices, cores.per_device, how.rotation, activation_mem_bytes_limit=how.activation_limit
        )
    _prepare(specs, cores)


def _prepare(specs: list[Any], cores: Cores) -> None:
    """Its own preparation; it knows 2 and 4 SparseCores per device only, and we ask for others too."""
    kept = embedding._get_num_sc_per_device
    embedding._get_num_sc_per_device = lambda given: given
    try:
        embedding.prepare_feature_specs_for_training(specs, cores.devices, cores.per_device)
    finally:
        embedding._get_num_sc_per_device = kept


def set_limits(specs: list[Any], plan: StackPlan) -> None:
    """Give its stacks the limits, and buffer sizes, of ours."""
    for spec in specs:
        stacked = spec.table_spec.stacked_table_spec
        ours = plan.stack(stacked.stack_name)
        assert ours.limits is not None
        spec.table_spec.stacked_table_spec = dataclasses.replace(
            stacked,
            max_ids_per_partition=ours.limits.max_ids,
            max_unique_ids_per_partition=ours.limits.max_unique,
            suggested_coo_buffer_size_per_device=ours.buffer,
        )


def caller(
    specs: list[Any],
    ids: Sequence[Any],
    weights: Sequence[Any] | None,
    cores: Cores,
    **options: Any,
) -> Callable[[], tuple[Any, ...]]:
    """Return a call of its compiled preprocessing.

    It gives row pointers, embedding ids, sample ids and gains by stack, the number of minibatches, and statistics.
    Arrays of rows are object arrays of int32 arrays. `options`: allow_id_dropping, enable_minibatching, local_devices.
    """
    local = options.pop("local_devices", cores.devices)
    given, weighted = list(ids), None if weights is None else list(weights)
    numbers = itertools.count(1)
    if options.get("enable_minibatching") and local < cores.devices:  # it asks its hosts, of which there is one here
        node = compiled.MinibatchingNode(0, 1, [], 0)
        options["all_reduce_interface"] = node.get_all_reduce_interface()

    def call() -> tuple[Any, ...]:
        options["batch_number"] = next(numbers)  # a number that comes again ends the process
        found: tuple[Any, ...] = compiled.preprocess_sparse_dense_matmul_input(
            given, weighted, specs, local, cores.devices, num_sc_per_device=cores.per_device, **options
        )
        return found

    return call


def coordinate_caller(
    specs: list[Any], ragged: Sequence[tuple[Any, Any]], cores: Cores, **options: Any
) -> Callable[[], tuple[Any, ...]]:
    """Return a call as above for ragged features, (int32 ids, lengths) each, as coordinates, its quickest form."""
    local = options.pop("local_devices", cores.devices)
    indices, values, shapes = [], [], []
    for ids, lengths in ragged:
        ends = np.cumsum(lengths)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        within = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
        indices.append(np.ascontiguousarray(np.stack([rows, within], axis=1), np.int64))
        values.append(ids)
        shapes.append(np.array([len(lengths), max(int(np.max(lengths, initial=0)), 1)], np.int64))

    def call() -> tuple[Any, ...]:
        found: tuple[Any, ...] = compiled.preprocess_sparse_dense_matmul_sparse_coo_input(
            indices, values, shapes, specs, local, cores.devices, num_sc_per_device=cores.per_device, **options
        )
        return found

    return call


def statistics(stats: Any) -> dict[str, Mapping[str, Any]]:
    """Return its statistics by our names, by stack."""
    return {
        "max_ids": stats.max_ids_per_partition,
        "max_unique": stats.max_unique_ids_per_partition,
        "required": stats.required_buffer_sizes,
        "dropped": stats.dropped_id_count,
    }
