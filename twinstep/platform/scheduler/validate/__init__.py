"""Rendered objects checked before anything is sent: the API server's own schemas and rules, applied here.

`check.py` is the door. `schemas.py` are custom resources' schemas (CRDs) and the core's, strict: unknown fields, types,
doubled keys, ranges. `rules.py` mirrors by hand what CRDs say in CEL and what webhooks check in code.
"""
