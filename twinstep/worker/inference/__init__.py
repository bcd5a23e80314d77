"""Experimental: a trained model taken out of its run (`export.py`), and candidates scored with it (`score.py`).

An export is a directory that stands alone: weights by logical name, the spec and schema they belong to, a checksum over
every byte. It is laid out as a checkpoint is (`worker/checkpoint/manifest.py`), without optimizers or random state.
"""
