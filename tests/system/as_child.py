"""Become another Python program with SIGINT as it is by default: `as_child.py [--file-size BYTES] ARGUMENT…`.

A shell without job control starts what it puts in the background with SIGINT ignored, and children inherit that. What
a test changes of a child is changed here, after the exec: a `preexec_fn` would fork a process that JAX made threads in.
"""

import os
import resource
import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
arguments = sys.argv[1:]
if arguments[0] == "--file-size":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(arguments[1]), int(arguments[1])))
    arguments = arguments[2:]
os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606
