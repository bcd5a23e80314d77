"""Embedding tables: declared once, looked up by masked gather, updated by their own optimizer.

Doors: `collection.EmbeddingCollection`, `optim.build_optimizers`. Nothing here knows a model.
"""
