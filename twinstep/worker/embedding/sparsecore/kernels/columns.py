"""Columns of the int64 tables that describe a batch to the kernels; an address of 0 means absent.

Plain numbers, since that is what a kernel can index with.
"""

from __future__ import annotations

# One row per feature of the batch.
F_IDS = 0  # address of its ids on this host
F_WIDE = 1  # 1 if they are int64, 0 if int32
F_OFFSETS = 2  # address of int64 [samples + 1], where each sample's ids start; 0: dense
F_WIDTH = 3  # ids per sample of a dense feature
F_WEIGHTS = 4  # address of float32 weights, one per id
F_RUN = 5  # samples of one SparseCore
F_BASE = 6  # where they start among the stacked samples of a SparseCore
F_ROWS = 7  # rows of its table: an id below 0, or from there on, is out of range
F_ROTATION = 8
F_ROW_OFFSET = 9
FEATURE_COLUMNS = 10

# One row per stack.
S_FIRST = 0  # its features are rows [first, last) of the features' table
S_LAST = 1
S_SHARD_ROWS = 2  # R: rows of a shard
S_KEY_BITS = 3  # bits of the key `shard · R + local row`
S_SAMPLES = 4  # B: stacked samples of a SparseCore
S_COMBINER = 5  # one of SUM, MEAN, SQRTN
S_WEIGHTED = 6
S_MAX_IDS = 7
S_MAX_UNIQUE = 8
S_SLOTS = 9  # slots of one device's buffers
S_POINTERS = 10  # address of int32 row pointers, [local devices, pointer count]
S_POINTER_COUNT = 11  # row pointers of a device
S_EMBEDDINGS = 12  # address of int32 embedding ids, [local devices, slots]
S_SAMPLE_IDS = 13  # address of int32 sample ids
S_GAINS = 14  # address of float32 gains
STACK_COLUMNS = 15

SUM, MEAN, SQRTN = 0, 1, 2

# One row per task: a stack on a local device's source SparseCore.
T_STACK = 0
T_DEVICE = 1  # local
T_CORE = 2
T_ENTRIES = 3  # ids that it has
T_KEPT = 4  # where its entries lie among those of all tasks
T_GAINS = 5  # where its gains lie: per sample, or per entry if weighted; none for an unweighted sum
T_SAMPLES = 6  # where its stacked samples lie, if weighted
T_BEGIN = 7  # slots [begin, end) of the device's buffers are its own
T_END = 8
T_ORIGIN = 9  # the slot that row pointers count from
T_STALE = 10  # slots before this one may hold what an earlier batch wrote
TASK_COLUMNS = 11

# What a task found; one row per task.
O_REQUIRED = 0  # slots, with every partition rounded up to ALIGN
O_DROPPED = 1  # ids dropped for any reason
O_OVERFLOW = 2  # entries dropped for want of slots
O_OUTSIDE = 3  # ids out of range; if any, nothing else was done
O_ENTRIES = 4  # entries before de-duplication
O_END = 5  # the slot after the last one written
FOUND_COLUMNS = 6

ALIGN = 8  # slots to which every partition is rounded up
MIN_PARTITIONS = 8  # row pointers of a SparseCore, at least
PADDING_ID = 2**31 - 1  # embedding and sample ids between partitions
