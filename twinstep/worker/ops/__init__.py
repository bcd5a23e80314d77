"""Operators of our own, each with a reference in plain ATen; the compiler lowers them its own way on each backend."""
