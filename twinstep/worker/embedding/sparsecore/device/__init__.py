"""What runs on devices: lookups, updates, the pipelined step. The second door to JAX, beside the compiler.

Everything works on plain arrays inside `shard_map`, over the buffers that the host made. `engine.Engine` is the door.
"""
