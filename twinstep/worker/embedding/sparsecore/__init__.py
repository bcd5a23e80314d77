"""Embedding tables for SparseCores: what lies where, and the buffers that a step reads.

Doors: `spec` declares tables and features, `stacking.plan_stacks` lays them out. Nothing here knows a model.
"""
