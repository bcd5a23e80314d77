"""The control plane: takes jobs, keeps them, starts their runs, shows them. Knows no tensor and imports no worker.

This file stays empty of code: the supervisor of a run imports it and must start in milliseconds.
"""
