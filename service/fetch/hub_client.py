"""The hub by way of `huggingface_hub`, which is an extra and imported only here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from service.fetch.errors import FetchError
from service.fetch.hub import HubUnreachable

_T = TypeVar("_T")


class HuggingFace:
    """Asks the hub that the user's variables of `huggingface_hub` name."""

    def __init__(self, hub_dir: Path, token: str | None) -> None:
        """Uses the cache `hub_dir`; without a token the one of the user's login.

        Raises:
            HubUnreachable: the extra is not installed.
        """
        try:
            import huggingface_hub
        except ImportError:
            raise HubUnreachable("-hf needs the extra: pip install 'kvarts[hub]'") from None
        self._hub = huggingface_hub
        self._cache_dir = hub_dir
        self._token = token

    def list_files(self, repo: str) -> list[str]:
        """See `HubClient`."""
        api = self._hub.HfApi(token=self._token)
        return self._ask(repo, lambda: list(api.list_repo_files(repo)))

    def fetch(self, repo: str, file: str) -> Path:
        """See `HubClient`. The library shows progress, resumes and checks the size itself."""
        return self._ask(
            repo,
            lambda: Path(
                self._hub.hf_hub_download(repo, file, cache_dir=self._cache_dir, token=self._token)
            ),
        )

    def _ask(self, repo: str, question: Callable[[], _T]) -> _T:
        errors = self._hub.errors
        try:
            return question()
        except (errors.RepositoryNotFoundError, errors.GatedRepoError) as error:
            raise FetchError(
                f"{repo}: no such repository, or no access to it (--hf-token)"
            ) from error
        except errors.HFValidationError as error:
            raise FetchError(f"{repo}: {error}") from error
        # The library has changed its transport, and with it the exceptions of a dead network,
        # with its major versions; all of them mean that the cache must do.
        except Exception as error:
            raise HubUnreachable(
                f"the Hugging Face hub cannot be asked for {repo}: {error}"
            ) from error
