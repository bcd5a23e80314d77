"""Stage 4, transform: graph passes, one file a subject; `table.py` is their declared order."""
