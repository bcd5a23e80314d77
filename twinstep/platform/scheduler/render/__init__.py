"""From a JobSpec to Kubernetes objects, and their check before anything is sent. Pure: no clock, no network, no chance.

`render.py` is the door; `jobset.py` (TPU) and `rayjob.py` (GPU) make the workload out of the parts in `pods.py` and
`surroundings.py`; `names.py` keeps every derived name within its budget; `quota.py` is for an admin's queues.
"""
