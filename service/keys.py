"""The API keys that a server knows, and how a presented one is judged.

Only digests are kept and compared: equal lengths give the comparison nothing to leak, and every
key is compared whatever the others answered, so the time taken tells nothing about the list.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Access(Enum):
    """What a call may do."""

    NONE = "none"
    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True)
class Grant:
    """The judgement of one call. `tenant` is "" unless the server knows several keys.

    `owns_all`: the admin key, where there is one beside the users', acts on every tenant's content.
    """

    access: Access
    tenant: str = ""
    owns_all: bool = False


class KeyRing:
    """The keys of a server; with none at all every call is an admin's.

    With several keys each key is a tenant, named by its digest, so that what one key's requests
    leave behind is never another's to reuse. An admin key alone leaves ordinary calls open, also to
    a key that nobody knows: OpenAI's clients always send one.
    `own_key` opens what any key opens and is nobody's: the own gateway reads facts by it.
    """

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        admin_key: str | None = None,
        own_key: str | None = None,
    ) -> None:
        self._users = tuple(_digest(key) for key in api_keys)
        self._admin = _digest(admin_key) if admin_key is not None else None
        self._own = _digest(own_key) if own_key is not None else None
        self._has_tenants = self._is_shared(self._users)

    @property
    def is_open(self) -> bool:
        """Whether no key is asked of any call."""
        return not self._users and self._admin is None

    def replace(self, api_keys: Sequence[str]) -> None:
        """Puts other keys in the place of the users'; calls that were let in go on.

        Whoever was a tenant stays one, or what it left behind would become the remaining key's.
        """
        users = tuple(_digest(key) for key in api_keys)
        # First: a call is judged on any thread, and a new key must not be nobody's tenant.
        self._has_tenants = self._has_tenants or self._is_shared(users)
        self._users = users

    def _is_shared(self, users: Sequence[bytes]) -> bool:
        return len(users) + (self._admin is not None) > 1

    def judge(self, presented: str | None) -> Grant:
        """Judges a key; None is a call without one."""
        if self.is_open:
            return Grant(Access.ADMIN)
        if presented is None:
            return Grant(Access.NONE if self._users else Access.USER)
        digest = _digest(presented)
        is_user = is_own = self._own is not None and hmac.compare_digest(digest, self._own)
        for known in self._users:
            is_user |= hmac.compare_digest(digest, known)
        is_admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        if not (is_user or is_admin):
            return Grant(Access.NONE if self._users else Access.USER)
        if is_admin:
            return Grant(Access.ADMIN, self._tenant(digest), owns_all=True)
        if is_own:
            return Grant(Access.USER)
        if self._admin is None:
            return Grant(Access.ADMIN, self._tenant(digest))
        return Grant(Access.USER, self._tenant(digest))

    def _tenant(self, digest: bytes) -> str:
        return digest.hex()[:16] if self._has_tenants else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
