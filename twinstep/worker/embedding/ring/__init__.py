"""Tables whose rows lie on the chips of a ring: ids and partial rows are passed around it, and no chip holds a table.

`plan.py` says where rows lie; `device/` does the work, and is the only part that knows JAX.
"""
