"""`python -m service.fetch`: puts the model that the flags name into the cache, prints its path."""

from __future__ import annotations

import os
import sys

from service.command_line import service_command_line
from service.fetch import FetchError, ProgressLine, resolve_model


def main() -> int:
    """Fetches; returns the exit status."""
    options = service_command_line(sys.argv[1:], os.environ)
    try:
        path = resolve_model(
            options.model,
            say=lambda line: print(line, file=sys.stderr),
            progress=ProgressLine(sys.stderr),
        )
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
