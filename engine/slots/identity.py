"""Who a loaded model is: its fingerprint, hashed in the background while the model already serves.

The hash takes a bounded share of one core, more while somebody waits for it, and is kept on disk
for the next start. Until it is there a slot can be refused, never accepted. Knows no slot.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass

from engine.gguf.header import TensorInfo
from engine.gguf.stamp import FileStamp
from engine.slots.errors import IdentityPending, ModelFileChanged
from engine.slots.fingerprint import Traits, WeightsDigest, digest_contents
from engine.slots.hash_cache import HashCache

_log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
# Of one core, and while a save or a restore waits.
_SHARE = 0.25
_URGENT_SHARE = 0.75


@dataclass(frozen=True)
class ModelSource:
    """The files of a loaded model, by shard, and where its tensors lie in them.

    `stamps` are the files as they were when the model was read.
    """

    stamps: tuple[FileStamp, ...]
    tensors: tuple[TensorInfo, ...]


class Identity:
    """The identity of one loaded model. Any thread may call its methods."""

    def __init__(
        self,
        traits: Traits,
        weights: WeightsDigest,
        source: ModelSource,
        cache: HashCache | None = None,
        *,
        model_name: str = "",
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes an identity whose hash has not begun; without a cache each start hashes anew."""
        self.traits = traits
        self.model_name = model_name
        self._weights = weights
        self._source = source
        self._cache = cache
        self._sleep = sleep
        self._clock = clock
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._is_stopped = False
        self._done: Future[str] = Future()
        # A running future cannot be cancelled by one of those who wait for it.
        self._done.set_running_or_notify_cancel()

    @property
    def num_waiting(self) -> int:
        """Callers that wait for the fingerprint now."""
        return self._num_waiting

    def start(self) -> None:
        """Begins to hash, on a thread of its own."""
        threading.Thread(target=self.run, name="identity", daemon=True).start()

    def stop(self) -> None:
        """Ends the hash early; who waits then, or later, is told that the identity is pending."""
        self._is_stopped = True

    def run(self) -> None:
        """Hashes on this thread; afterwards `fingerprint` answers at once."""
        try:
            self._done.set_result(self._weights.fingerprint(self._content()))
        except (ModelFileChanged, IdentityPending) as error:
            self._done.set_exception(error)
            if isinstance(error, ModelFileChanged):
                _log.error("%s", error)
        except Exception as error:
            # Nobody foresaw it, but whoever waits must not wait for ever.
            self._done.set_exception(error)
            _log.error("the model was not hashed", exc_info=error)

    def refusal(self) -> ModelFileChanged | None:
        """Returns why slots cannot be had at all, None while nothing speaks against them."""
        error = self._done.exception() if self._done.done() else None
        return error if isinstance(error, ModelFileChanged) else None

    def known(self) -> str | None:
        """Returns the fingerprint if it is there already."""
        is_known = self._done.done() and self._done.exception() is None
        return self._done.result() if is_known else None

    @contextmanager
    def waiting(self) -> Generator[Future[str]]:
        """Yields the fingerprint to come, which is hurried up meanwhile; it cannot be cancelled.

        The future raises as `fingerprint`.
        """
        with self._lock:
            self._num_waiting += 1
        try:
            yield self._done
        finally:
            with self._lock:
                self._num_waiting -= 1

    def fingerprint(self, timeout_s: float | None = None) -> str:
        """Waits for the fingerprint; None waits as long as it takes.

        Raises:
            IdentityPending: It was not there in time.
            ModelFileChanged: The file is not the one that was loaded, or cannot be read.
            Exception: Whatever else ended the hash.
        """
        with self.waiting() as done:
            try:
                return done.result(timeout_s)
            except FutureTimeout:
                raise IdentityPending from None

    def _content(self) -> str:
        stamps = self._source.stamps
        known = self._cache.load(stamps) if self._cache else None
        if known is not None:
            self._check_unchanged()
            return known
        contents: dict[str, bytes] = {}
        for shard_id, stamp in enumerate(stamps):
            contents |= self._hash_shard(stamp, shard_id)
        content = digest_contents(contents)
        self._keep(stamps, content)
        return content

    def _keep(self, stamps: Sequence[FileStamp], content: str) -> None:
        if self._cache is None:
            return
        try:
            self._cache.store(stamps, content)
        except OSError as error:
            # A read-only home costs a hash at each start, not the start.
            _log.warning("the model's hash is not kept: %s", error)

    def _check_unchanged(self) -> None:
        for stamp in self._source.stamps:
            os.close(_open(stamp))

    def _hash_shard(self, stamp: FileStamp, shard_id: int) -> dict[str, bytes]:
        descriptor = _open(stamp)
        try:
            tensors = [info for info in self._source.tensors if info.shard_id == shard_id]
            digests = {info.name: self._hash_tensor(descriptor, info) for info in tensors}
            # A write while it was read would mix two checkpoints in one hash.
            _check(stamp, descriptor)
            return digests
        except OSError as error:
            raise _unreadable(stamp, error) from error
        finally:
            os.close(descriptor)

    def _hash_tensor(self, descriptor: int, info: TensorInfo) -> bytes:
        digest = hashlib.sha256()
        offset, end = info.offset, info.offset + info.nbytes
        while offset < end:
            if self._is_stopped:
                raise IdentityPending
            began_s = self._clock()
            data = os.pread(descriptor, min(_PIECE_BYTES, end - offset), offset)
            if not data:
                raise ModelFileChanged(f"tensor {info.name!r} ends early in the file")
            digest.update(data)
            offset += len(data)
            self._rest(self._clock() - began_s)
        return digest.digest()

    def _rest(self, worked_s: float) -> None:
        share = _URGENT_SHARE if self._num_waiting else _SHARE
        self._sleep(worked_s * (1 - share) / share)


def _open(stamp: FileStamp) -> int:
    """Opens a file that must still be the one that was loaded.

    Raises:
        ModelFileChanged: It is not, or cannot be opened.
    """
    try:
        descriptor = os.open(stamp.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(stamp, error) from error
    try:
        _check(stamp, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(stamp: FileStamp, descriptor: int) -> None:
    if FileStamp.of(stamp.path, descriptor) != stamp:
        name = os.path.basename(stamp.path)
        raise ModelFileChanged(f"the model file {name!r} changed after it was loaded")


def _unreadable(stamp: FileStamp, error: OSError) -> ModelFileChanged:
    name = os.path.basename(stamp.path)
    return ModelFileChanged(f"the model file {name!r} cannot be read: {error.strerror}")
