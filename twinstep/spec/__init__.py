"""The vocabulary both halves share: a job's spec, its states, what workers report, and the error tree.

Everything here is frozen data or a pure function of it. Nothing of Twinstep's is imported from outside this package.
"""
