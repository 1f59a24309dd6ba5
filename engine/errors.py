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


def lower_camel(name: str) -> str:
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
        return {lower_camel(f.name): str(getattr(self, f.name)) for f in fields(self)}


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
class VocabularyChanged(EngineError):
    """Token ids of another model than the one that is served; both are digests, in hex."""

    asked: str
    served: str

    reason: ClassVar[str] = "VOCABULARY_CHANGED"
    template: ClassVar[str] = (
        "the token ids are of the vocabulary {asked}, the model that is served has {served}: "
        "tokenize anew"
    )


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


__all__ = [
    "BadGrammar",
    "BadSchema",
    "BatchOverflow",
    "ContextOverflow",
    "DeadlineExceeded",
    "DuplicateRequest",
    "EngineError",
    "EngineFault",
    "GrammarDeadEnd",
    "InvalidField",
    "KvPagesExhausted",
    "ModelFileError",
    "ModelLoading",
    "NoSuchAdapter",
    "NoSuchSlot",
    "NotSupported",
    "QueueFull",
    "ShuttingDown",
    "SlotBusy",
    "SlotContentNotFound",
    "TemplateError",
    "TokenNotInVocab",
    "UnsupportedModel",
    "VocabularyChanged",
]
