"""What must be quick, compiled by numba: gather ids, sort them, write buffers. `columns` is the tables they share."""
