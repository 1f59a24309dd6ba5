"""A model that is ready to serve, as the loader hands it over: the engine, its text side, facts.

The shapes here are what servicers need of a model and no more, so that a test can serve a fake.
They must not know a message or a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from engine.engine import Engine
from engine.slots.store import SlotStore
from engine.text.chat_families import find_format
from engine.text.chat_format import PLAIN, ChatFormat
from engine.text.grammar.matcher import GrammarCompiler
from engine.text.pairs import PairLayout
from engine.types import EventSink
from service.defaults import EmbeddingDefaults, GenerationDefaults
from service.reasoning_frame import framed


class Tokenizer(Protocol):
    """The model's tokenizer (`engine.text.tokenizer`)."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def add_bos(self) -> bool:
        """Whether BOS is added in front of text."""
        ...

    @property
    def eog_tokens(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ...

    @property
    def add_eos(self) -> bool:
        """Whether EOS is added behind text."""
        ...

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Turns text into token ids."""
        ...

    def piece(self, token_id: int, *, render_special: bool = False) -> bytes:
        """Returns the bytes of one token."""
        ...

    def decode(self, token_ids: Sequence[int], *, render_special: bool) -> bytes:
        """Turns token ids into bytes."""
        ...

    def prompt_text(self, token_ids: Sequence[int]) -> bytes:
        """Turns a whole prompt's ids into bytes, as it is echoed."""
        ...


class Template(Protocol):
    """The model's chat template (`engine.text.chat_template`)."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation.

        Raises:
            engine.errors.TemplateError: The template fails on these messages.
        """
        ...


@dataclass(frozen=True)
class ModelFacts:
    """What the model's file says of itself, for GetModel. Counts are tokens where not named.

    `vocab_type` is llama.cpp's number of the tokenizer family. `special_tokens` maps the field
    names of `kvarts.v1.SpecialTokens` to (id, text). `tool_use_template` is "" where the file has
    no second template; `chat_template` None where the model cannot chat; `chat_capabilities` maps
    the field names of `kvarts.v1.ChatTemplateCapabilities` to what trying the template showed.
    """

    architecture: str
    vocab_type: int
    context_train_tokens: int
    embedding_size: int
    num_layers: int
    num_params: int
    size_bytes: int
    name: str = ""
    ftype: str = ""
    special_tokens: Mapping[str, tuple[int, str]] = field(
        default_factory=dict[str, tuple[int, str]]
    )
    chat_template: str | None = None
    tool_use_template: str = ""
    chat_capabilities: Mapping[str, bool] = field(default_factory=dict[str, bool])
    has_infill_tokens: bool = False


@dataclass(frozen=True)
class ModelNames:
    """What the operator calls the model. `model_id` is the name that replies carry."""

    model_id: str
    path: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


def nothing_to_close() -> None:
    """Of a model whose memory goes with its objects."""


@dataclass(frozen=True)
class LoadedModel:
    """Everything that serving needs.

    `has_jinja`: any Jinja template is rendered, not only built-in formats. `device` is the backend:
    "cpu", "gpu" or "metal". `slot_store` are the saved slots, None where no folder was given.
    `embedding` is None where the server was not started for vectors. `pairs` says how a query and a
    document become one text. `vocabulary` is a digest of what token ids mean, "" where it is not
    known. `close` frees what the end of the engine leaves open.
    """

    engine: Engine
    tokenizer: Tokenizer
    template: Template | None
    names: ModelNames
    facts: ModelFacts
    defaults: GenerationDefaults
    is_unified: bool = True
    has_context_shift: bool = False
    has_jinja: bool = True
    device: str = "cpu"
    slot_store: SlotStore | None = None
    embedding: EmbeddingDefaults | None = None
    pairs: PairLayout = field(default_factory=PairLayout)
    vocabulary: str = ""
    close: Callable[[], None] = nothing_to_close

    @property
    def parses_chat(self) -> bool:
        """Whether a chat's answer is told apart into reasoning, content and calls."""
        return self.defaults.parses_chat and self.has_jinja

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How the model's family writes reasoning and tool calls, as far as they are read."""
        if not self.parses_chat:
            return PLAIN
        found = find_format((self.facts.chat_template or "") + self.facts.tool_use_template)
        if found.reasoning is None or self.template is None:
            return found
        return replace(found, reasoning=framed(found.reasoning, self.template))

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for this model's tokens."""
        return GrammarCompiler(self.tokenizer)


# Builds a model (blocking: called on a thread of its own). The engine that it returns reports to
# the given sink and is not yet started.
LoadModel = Callable[[EventSink], LoadedModel]
