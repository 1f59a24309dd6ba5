"""What became of one golden file."""

from __future__ import annotations


class Unsupported(Exception):
    """This build does not do what the file needs; the message says what that is."""


class Failure(Exception):
    """The file is supported and its answers are not met; the message says where and by how much."""
