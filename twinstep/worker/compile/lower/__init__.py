"""Stage 5, lower: what turns a captured step into a program, one module a backend."""
