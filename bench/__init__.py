"""Benchmarks: what Twinstep's claims of speed and quality are measured with.

`scripts/bench NAME` comes in at `__main__.py`; each benchmark is a file with `run` and `table`; `measure.py` holds the
statistics, `child.py` the processes that are compared. Nothing in `twinstep/` imports this.
"""
