"""The REST API under /v1: routes, problem details, live streams. Decides nothing; asks scheduler/service.py."""

from twinstep.platform.api.app import create_app

__all__ = ["create_app"]
