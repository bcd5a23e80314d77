"""Preflight: what a spec would take of each device, and how fast it could be, before anything is built or queued.

`check.py:preflight` is the door for the control plane and the command, `sharding.py:plan_tables` the planner of tables.
Pure arithmetic over a JobSpec: no file is read, no tensor library imported; an answer takes milliseconds.
"""
