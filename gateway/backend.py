"""Where the requests of one client go, and what was known of it when they came."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.facts import Facts
from gateway.service import Metadata, Service


@dataclass(frozen=True)
class Backend:
    """The service, what is known of it, and this client's credentials."""

    service: Service
    facts: Facts
    metadata: Metadata

    @property
    def vocabulary(self) -> str:
        """Whose token ids are meant; the service refuses those of another. "" where it is older."""
        return self.facts.model.vocabulary
