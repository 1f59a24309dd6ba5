"""The engine's typed failures: one class per cause, each holding every number of its message.

The engine raises these; only the service translates them to a status. `reason` is the name of the
`kvarts.v1.ErrorReason` value without its prefix, and `metadata()` gives, in lowerCamel, every
variable of the message, so that a client never has to parse text. This module knows no transport.

Example:
    >>> str(ContextOverflow(prompt_tokens=900, context_tokens=512))
    'the prompt has 900 tokens, more than fit in a context of 512 tokens'
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar


def _lower_camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


# Exceptions cannot be frozen: the interpreter sets __traceback__ on them. eq=False keeps them
# hashable by identity, which the traceback and logging machinery expects.
@dataclass(eq=False)
class EngineError(Exception):
    """A failure that a caller can act on; fields are its metadata, `template` formats them."""

    reason: ClassVar[str] = "INTERNAL"
    template: ClassVar[str] = "internal error"

    def __str__(self) -> str:
        return self.template.format(**{f.name: getattr(self, f.name) for f in fields(self)})

    def metadata(self) -> dict[str, str]:
        """Returns every variable of the message, keys in lowerCamel."""
        return {_lower_camel(f.name): str(getattr(self, f.name)) for f in fields(self)}


@dataclass(eq=False)
class InvalidField(EngineError):
    """A field of a request is missing, malformed or out of range."""

    field: str
    description: str

    reason: ClassVar[str] = "INVALID_FIELD"
    template: ClassVar[str] = "{field}: {description}"


@dataclass(eq=False)
class ContextOverflow(EngineError):
    """The prompt does not fit in the slot's context (a prompt is never truncated)."""

    prompt_tokens: int
    context_tokens: int

    reason: ClassVar[str] = "CONTEXT_OVERFLOW"
    template: ClassVar[str] = (
        "the prompt has {prompt_tokens} tokens, more than fit in a context of "
        "{context_tokens} tokens"
    )


@dataclass(eq=False)
class BadGrammar(EngineError):
    """A grammar that cannot be parsed or compiled; `line` counts from 1, 0 where it has none."""

    line: int
    detail: str

    reason: ClassVar[str] = "BAD_GRAMMAR"

    def __str__(self) -> str:
        where = f"grammar, line {self.line}" if self.line else "grammar"
        return f"{where}: {self.detail}"


@dataclass(eq=False)
class BadSchema(EngineError):
    """A JSON schema that cannot be honoured. `path` is a JSON pointer behind #."""

    path: str
    detail: str

    reason: ClassVar[str] = "BAD_GRAMMAR"
    template: ClassVar[str] = "JSON schema error at {path}: {detail}"


@dataclass(eq=False)
class GrammarDeadEnd(EngineError):
    """No text that the grammar allows can follow what was generated."""

    piece: str
    token_id: int

    reason: ClassVar[str] = "GRAMMAR_DEAD_END"
    template: ClassVar[str] = "the grammar allows nothing after {piece!r} (token {token_id})"


@dataclass(eq=False)
class BatchOverflow(EngineError):
    """An input whose vector needs all of its tokens in one step, and is longer than one."""

    tokens: int
    batch_tokens: int

    reason: ClassVar[str] = "BATCH_OVERFLOW"
    template: ClassVar[str] = (
        "input ({tokens} tokens) is too large to process. increase the physical batch size "
        "(current batch size: {batch_tokens})"
    )


@dataclass(eq=False)
class TokenNotInVocab(EngineError):
    """A token id at or past the end of the vocabulary."""

    token_id: int
    vocab_size: int

    reason: ClassVar[str] = "TOKEN_NOT_IN_VOCAB"
    template: ClassVar[str] = "token id {token_id} is not in the vocabulary of {vocab_size} tokens"


@dataclass(eq=False)
class QueueFull(EngineError):
    """The admission queue holds as many requests (or bytes) as it may."""

    queued: int
    limit: int

    reason: ClassVar[str] = "QUEUE_FULL"
    template: ClassVar[str] = "the queue is full: {queued} queued, limit {limit}"


@dataclass(eq=False)
class KvPagesExhausted(EngineError):
    """The KV pool cannot hold this request even alone."""

    needed: int
    free: int

    reason: ClassVar[str] = "KV_PAGES_EXHAUSTED"
    template: ClassVar[str] = "the request needs {needed} KV pages, {free} can be had"


@dataclass(eq=False)
class DuplicateRequest(EngineError):
    """A request with this id is queued or running."""

    request_id: str

    reason: ClassVar[str] = "DUPLICATE_REQUEST"
    template: ClassVar[str] = "request id {request_id!r} is already in flight"


@dataclass(eq=False)
class NotSupported(EngineError):
    """A feature that this model or this build does not have."""

    feature: str

    reason: ClassVar[str] = "NOT_SUPPORTED"
    template: ClassVar[str] = "not supported: {feature}"


@dataclass(eq=False)
class NoSuchSlot(EngineError):
    """A slot id at or past the slot count."""

    slot_id: int
    slot_count: int

    reason: ClassVar[str] = "NO_SUCH_SLOT"
    template: ClassVar[str] = "slot_id {slot_id}: there are {slot_count} slots"


@dataclass(eq=False)
class SlotBusy(EngineError):
    """The slot serves a request and the caller asked not to wait."""

    slot_id: int
    request_id: str

    reason: ClassVar[str] = "SLOT_BUSY"
    template: ClassVar[str] = "slot {slot_id} is busy with request {request_id!r}"


@dataclass(eq=False)
class SlotContentNotFound(EngineError):
    """The slot's content is another tenant's, which must look like no content at all."""

    slot_id: int

    reason: ClassVar[str] = "SLOT_CONTENT_NOT_FOUND"
    template: ClassVar[str] = "slot {slot_id} holds nothing of this caller's"


@dataclass(eq=False)
class SlotFileNotFound(EngineError):
    """There is no saved slot of this name."""

    filename: str

    reason: ClassVar[str] = "SLOT_FILE_NOT_FOUND"
    template: ClassVar[str] = "there is no slot file {filename!r}"


@dataclass(eq=False)
class SlotFileMismatch(EngineError):
    """A whole slot file whose state this model cannot continue; `field` says what differs."""

    field: str
    expected: str
    found: str

    reason: ClassVar[str] = "SLOT_FILE_MISMATCH"
    template: ClassVar[str] = "the slot file has other {field}: {found}, here {expected}"


@dataclass(eq=False)
class SlotFileCorrupt(EngineError):
    """A slot file that is damaged, cut, or none at all."""

    filename: str
    detail: str

    reason: ClassVar[str] = "SLOT_FILE_CORRUPT"
    template: ClassVar[str] = "slot file {filename!r}: {detail}"


@dataclass(eq=False)
class SlotContextTooSmall(EngineError):
    """A saved slot holds more tokens than a slot of this server can."""

    tokens: int
    context_tokens: int

    reason: ClassVar[str] = "SLOT_CONTEXT_TOO_SMALL"
    template: ClassVar[str] = (
        "the slot file holds {tokens} tokens, more than fit in a context of {context_tokens} tokens"
    )


@dataclass(eq=False)
class DiskFull(EngineError):
    """A slot file could not be written for want of room; what was there before is still there."""

    filename: str

    reason: ClassVar[str] = "DISK_FULL"
    template: ClassVar[str] = "no room for slot file {filename!r}"


@dataclass(eq=False)
class SlotIo(EngineError):
    """A slot file, or the folder of them, could not be read or written."""

    filename: str
    errno: int
    detail: str

    reason: ClassVar[str] = "SLOT_IO"
    template: ClassVar[str] = "slot file {filename!r}: {detail} (errno {errno})"


@dataclass(eq=False)
class IdentityPending(EngineError):
    """The fingerprint of the model's weights was not ready within the deadline."""

    reason: ClassVar[str] = "IDENTITY_PENDING"
    template: ClassVar[str] = "the model's fingerprint is still being computed"


@dataclass(eq=False)
class ModelFileChanged(EngineError):
    """The model's file is not the one that was loaded, so that nobody can say what it holds."""

    detail: str

    reason: ClassVar[str] = "MODEL_FILE_CHANGED"
    template: ClassVar[str] = "slots cannot be saved or restored: {detail}"


@dataclass(eq=False)
class NoSuchAdapter(EngineError):
    """An adapter id that is not loaded."""

    adapter_id: int

    reason: ClassVar[str] = "NO_SUCH_ADAPTER"
    template: ClassVar[str] = "adapter id {adapter_id} is not loaded"


@dataclass(eq=False)
class DeadlineExceeded(EngineError):
    """The request's deadline passed while it was queued or running."""

    deadline_s: float

    reason: ClassVar[str] = "DEADLINE"
    template: ClassVar[str] = "the deadline of {deadline_s:.3f} s passed"


@dataclass(eq=False)
class ModelLoading(EngineError):
    """The model is still being loaded."""

    reason: ClassVar[str] = "MODEL_LOADING"
    template: ClassVar[str] = "the model is loading"


@dataclass(eq=False)
class ShuttingDown(EngineError):
    """The server has begun to stop and takes no new work."""

    reason: ClassVar[str] = "SHUTTING_DOWN"
    template: ClassVar[str] = "the server is shutting down"


@dataclass(eq=False)
class EngineFault(EngineError):
    """A device fault or a non-finite result, which ends one request alone."""

    error_id: str

    reason: ClassVar[str] = "ENGINE_FAULT"
    template: ClassVar[str] = "the engine failed on this request (error {error_id})"


@dataclass(eq=False)
class ModelFileError(EngineError):
    """A GGUF file that is damaged, hostile or not understood."""

    path: str
    detail: str

    reason: ClassVar[str] = "MODEL_FILE_INVALID"
    template: ClassVar[str] = "{path}: {detail}"


@dataclass(eq=False)
class UnsupportedModel(EngineError):
    """A well-formed model that this build cannot run as it is meant to be run."""

    path: str
    detail: str

    reason: ClassVar[str] = "MODEL_NOT_SUPPORTED"
    template: ClassVar[str] = "{path}: {detail}"


@dataclass(eq=False)
class TemplateError(EngineError):
    """A chat template that cannot be parsed, or fails or runs away on these messages."""

    detail: str

    reason: ClassVar[str] = "INVALID_FIELD"
    template: ClassVar[str] = "chat template: {detail}"


@dataclass(eq=False)
class PoolsBusy(EngineError):
    """A rebuild needs an idle engine and no drain was asked for, or the drain ran out of time."""

    cause: str
    active_requests: int

    reason: ClassVar[str] = "POOLS_BUSY"
    template: ClassVar[str] = "the pools are in use ({cause}): {active_requests} requests run"


@dataclass(eq=False)
class NoSuchPool(EngineError):
    """A rebuild names pools that this model has none of."""

    pools: tuple[str, ...]
    architecture: str

    reason: ClassVar[str] = "NO_SUCH_POOL"

    def __str__(self) -> str:
        return f"a {self.architecture} model has no pool {' and no pool '.join(self.pools)}"

    def metadata(self) -> dict[str, str]:
        """Returns the names, comma-separated, and the architecture."""
        return {"pool": ",".join(self.pools), "architecture": self.architecture}


@dataclass(eq=False)
class BelowFloor(EngineError):
    """Sizes below the floors of their pools, as (pool, requested, floor)."""

    violations: tuple[tuple[str, int, int], ...]

    reason: ClassVar[str] = "BELOW_FLOOR"

    def __str__(self) -> str:
        return "; ".join(
            f"{pool}: {requested} is below the floor of {floor}"
            for pool, requested, floor in self.violations
        )

    def metadata(self) -> dict[str, str]:
        """Returns pools, sizes and floors, each comma-separated in the same order."""
        names = ("pool", "requested", "floor")
        columns = zip(*self.violations, strict=True)
        return {
            name: ",".join(map(str, column)) for name, column in zip(names, columns, strict=True)
        }


@dataclass(eq=False)
class TooLarge(EngineError):
    """Sizes that do not fit the budget, which is negative when the fixed part alone exceeds it.

    `sizes` are all of the target as (pool, units). `above` are those past the last unit that is of
    use, as (pool, requested, most).
    """

    needed_bytes: int
    budget_bytes: int
    fixed_bytes: int
    sizes: tuple[tuple[str, int], ...]
    above: tuple[tuple[str, int, int], ...] = ()

    reason: ClassVar[str] = "TOO_LARGE"

    def __str__(self) -> str:
        sizes = ", ".join(f"{pool} {size}" for pool, size in self.sizes)
        limits = "".join(
            f"; {pool}: {requested} is above {most}, where all is resident"
            for pool, requested, most in self.above
        )
        return (
            f"{sizes}: {self.needed_bytes} bytes are needed, the budget is {self.budget_bytes} "
            f"({self.fixed_bytes} bytes are fixed){limits}"
        )

    def metadata(self) -> dict[str, str]:
        """Returns the bytes, and each pool's size under its name."""
        numbers = {
            "neededBytes": str(self.needed_bytes),
            "budgetBytes": str(self.budget_bytes),
            "fixedBytes": str(self.fixed_bytes),
        }
        return numbers | {_lower_camel(pool): str(size) for pool, size in self.sizes}


@dataclass(eq=False)
class RebuildRolledBack(EngineError):
    """A stage of a rebuild failed; everything is as it was."""

    stage: str

    reason: ClassVar[str] = "REBUILD_ROLLED_BACK"
    template: ClassVar[str] = "the rebuild failed in stage {stage} and was undone"


@dataclass(eq=False)
class RebuildFailed(EngineError):
    """A stage of a rebuild failed and could not be undone: nothing is served any more."""

    stage: str

    reason: ClassVar[str] = "REBUILD_FAILED"
    template: ClassVar[str] = "the rebuild failed in stage {stage} and could not be undone"


__all__ = [
    "BadGrammar",
    "BadSchema",
    "BatchOverflow",
    "BelowFloor",
    "ContextOverflow",
    "DeadlineExceeded",
    "DiskFull",
    "DuplicateRequest",
    "EngineError",
    "EngineFault",
    "GrammarDeadEnd",
    "IdentityPending",
    "InvalidField",
    "KvPagesExhausted",
    "ModelFileChanged",
    "ModelFileError",
    "ModelLoading",
    "NoSuchAdapter",
    "NoSuchPool",
    "NoSuchSlot",
    "NotSupported",
    "PoolsBusy",
    "QueueFull",
    "RebuildFailed",
    "RebuildRolledBack",
    "ShuttingDown",
    "SlotBusy",
    "SlotContentNotFound",
    "SlotContextTooSmall",
    "SlotFileCorrupt",
    "SlotFileMismatch",
    "SlotFileNotFound",
    "SlotIo",
    "TemplateError",
    "TokenNotInVocab",
    "TooLarge",
    "UnsupportedModel",
]
