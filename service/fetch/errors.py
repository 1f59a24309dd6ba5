"""The one failure of finding or fetching a model."""

from __future__ import annotations


class FetchError(Exception):
    """The model cannot be had; the message says why and what would help."""
