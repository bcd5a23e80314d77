"""Checkpoints: a run's state in files that outlive it, by logical name and row, with a checksum over every byte.

Doors: `saver.Checkpoints` (save beside the run, restore, keep the last and the best) and `read.Reader` (any rows of one
checkpoint). Tensors come from `content.py`; where files lie is `place.py`'s; nothing here knows a spec or a backend.
"""
