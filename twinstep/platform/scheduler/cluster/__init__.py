"""Runs in a Kubernetes cluster: what is seen there, as evidence, and what it says of a run. Pure; asks no cluster."""
