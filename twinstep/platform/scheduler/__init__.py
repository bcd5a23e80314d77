"""What becomes of a run: decide, start, watch, stop; and the service that pages and routes call.

This file stays empty of code: the supervisor of a run imports it and must start in milliseconds.
"""
