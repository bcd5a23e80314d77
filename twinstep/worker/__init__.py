"""What runs beside the accelerator: data, tables, models, compiler, training loop, in the order a step is built.

It meets the control plane only through the vocabulary (`twinstep.spec`) and HTTP, and imports nothing of it.
"""
