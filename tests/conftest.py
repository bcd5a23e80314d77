"""Settings all tests share: they must stand in the environment before torch and jax are imported."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["JAX_PLATFORMS"] = "cpu"
# A test that starts processes must not find a control plane or a run of the person who runs the tests.
for name in [
    name
    for name in os.environ
    if name.startswith("TWINSTEP_") and name not in ("TWINSTEP_SHARED", "TWINSTEP_CHROMIUM", "TWINSTEP_KEEP_PICTURE")
]:
    del os.environ[name]
