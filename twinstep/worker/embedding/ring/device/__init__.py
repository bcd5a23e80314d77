"""What chips of a ring do with rows: the only files of the ring that import JAX."""
