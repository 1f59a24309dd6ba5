"""The file of API keys: one a line, `#` starts a comment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from service.keys import KeyRing
from service.reload import ReloadRefused, Watched

MAX_KEY_FILE_BYTES = 1 << 20


class BadKeyFile(Exception):
    """A file that no key can be read from; the message says why and shows no line of it."""


@dataclass(frozen=True)
class KeyFile:
    """Where keys are read from, and those that stand beside it on the command line."""

    path: str
    beside: tuple[str, ...] = field(default=(), repr=False)

    def read(self) -> tuple[str, ...]:
        """Returns all keys, those of the command line first.

        Raises:
            BadKeyFile: The file cannot be read or holds no key.
        """
        found = [line for line in _lines(self.path) if line and not line.startswith("#")]
        if not found:
            # An emptied file must not open the service to everybody.
            raise BadKeyFile("holds no key")
        return tuple(dict.fromkeys((*self.beside, *found)))

    def watched(self, ring: KeyRing) -> Watched:
        """The file, for `service.reload`; what it holds goes to `ring`."""

        def renew() -> Callable[[], None]:
            try:
                keys = self.read()
            except BadKeyFile as error:
                raise ReloadRefused(f"{self.path}: {error}") from error
            return lambda: ring.replace(keys)

        return Watched("api_keys", (self.path,), renew)


def _lines(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise BadKeyFile(error.strerror or "cannot be read") from None
    if len(raw) > MAX_KEY_FILE_BYTES:
        raise BadKeyFile(f"is larger than {MAX_KEY_FILE_BYTES} bytes")
    try:
        return [line.strip() for line in raw.decode().splitlines()]
    except UnicodeDecodeError:
        raise BadKeyFile("is not UTF-8") from None
