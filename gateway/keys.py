"""The keys that open the routes, of the command line and of a file that is read again.

Only digests are kept and compared: equal lengths give the comparison nothing to leak.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence

from gateway.flag_values import keys_of_file
from gateway.options import GatewayOptions
from gateway.reload import Watched


class Keys:
    """The keys in force; none at all leaves every route open."""

    def __init__(self, options: GatewayOptions) -> None:
        """Reads the file of keys.

        Raises:
            OSError, ValueError: It cannot be read, or holds no key.
        """
        self._named = options.api_keys
        self._file = options.api_key_file
        self._digests = self._read()

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self._digests

    def knows(self, key: str) -> bool:
        """Whether a key is one of them."""
        digest = _digest(key)
        is_known = False
        for known in self._digests:
            # Every key is compared, so that the time taken tells nothing about the list.
            is_known |= hmac.compare_digest(digest, known)
        return is_known

    @property
    def watched(self) -> Sequence[Watched]:
        """The file, for `gateway.reload`."""
        return [Watched("api_keys", (self._file,), self._renew)] if self._file else []

    def _renew(self) -> Callable[[], None]:
        found = self._read()

        def put_in_force() -> None:
            self._digests = found

        return put_in_force

    def _read(self) -> tuple[bytes, ...]:
        filed = keys_of_file(self._file) if self._file else ()
        return tuple(_digest(key) for key in dict.fromkeys((*self._named, *filed)))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
