"""Models as plain `nn.Module`s: static shapes, no control flow on data, no backend named.

Door: `registry.build_model`. The compiler and these modules never import each other.

DLRMv3 follows the public generative-recommenders code number by number (tests compare both), save where that code
depends on the machine or on padding:

- hour, weekday and age buckets are computed in integers, where float32 falls differently on each backend;
- an age beyond the time table takes its last row, as the public GPU kernel does (its CPU kernel takes row D - 1);
- N, which divides attention, is a value of the batch and not the width it happens to be padded to;
- candidates carry weights, so that empty slots count for nothing.
"""
