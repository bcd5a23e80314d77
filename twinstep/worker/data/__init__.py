"""From a dataset's events to token-budget batches: read, split by time, cut into samples, pack.

Doors: `datasets.load_dataset`, `loader.Loader`, `metrics.BinaryMetrics`. Nothing here knows a model or a compiler.
"""
