"""Range checks of every request field, before anything reaches the engine.

The RPC is strict: nothing is clamped and nothing has a silent default. All faults of a request
are collected and reported together, each naming field, value and limit. This module only looks;
turning messages into engine types is `service.convert`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvarts.v1 import (
    common_pb2,
    embedding_pb2,
    generation_pb2,
    lora_pb2,
    model_pb2,
    rebuild_pb2,
    slot_pb2,
    tokenization_pb2,
)

from engine.adapters.start import MAX_ADAPTERS
from engine.errors import ContextOverflow, InvalidField, TokenNotInVocab, VocabularyChanged
from service import telemetry
from service.faults import Faults, shown
from service.loaded import LoadedModel
from service.off_loop import in_pieces
from service.validate_sampling import MAX_INT32, check_sampling

MAX_STOPS = 256
MAX_STOP_BYTES = 4096
# Each costs microseconds per token, in which the others get none.
MAX_TOP_LOGPROBS = 1024
MAX_ANNOTATION_BYTES = 4096
MAX_PRESERVED_TOKENS = 65_536
MAX_TRIGGERS = 256
MAX_INPUTS = 2048
MAX_PAGE_SIZE = 1000
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4096
MAX_VOCABULARY_BYTES = 64
_FILENAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,255}(?<!\.)")


@dataclass(frozen=True)
class Limits:
    """What bounds the fields of a request to a loaded model."""

    num_slots: int
    vocab_size: int
    context_tokens: int


def limits_of(model: LoadedModel) -> Limits:
    """Returns the limits of a model that is served."""
    slots = model.engine.snapshot().slots
    return Limits(
        num_slots=len(slots),
        vocab_size=model.tokenizer.vocab_size,
        context_tokens=slots[0].context_tokens,
    )


def check_vocabulary(asked: str, model: LoadedModel) -> None:
    """Checks that the ids of a request, if it says whose they are, are those of the model.

    Raises:
        InvalidField: What is asked for is no vocabulary's digest.
        VocabularyChanged: It is another model's.
    """
    if len(asked.encode()) > MAX_VOCABULARY_BYTES:
        raise InvalidField("vocabulary", f"has more than {MAX_VOCABULARY_BYTES} bytes")
    if asked and asked != model.vocabulary:
        raise VocabularyChanged(asked, model.vocabulary)


def check_group(group: generation_pb2.CallGroup, limits: Limits) -> None:
    """Checks what a call says of the group that it is of.

    Raises:
        InvalidField: One field is out of range.
        InvalidFields: Several are.
    """
    faults = Faults()
    if not telemetry.is_request_id(group.id):
        faults.add("group.id", f"{shown(group.id)} is not 1 to 36 printable ASCII characters")
    faults.number("group.num_calls", group.num_calls, low=2, high=limits.num_slots)
    faults.number("group.index", group.index, low=0, high=max(0, group.num_calls - 1))
    faults.raise_if_any()


def check_request_id(faults: Faults, request_id: str) -> None:
    """An id of a caller: empty, or 1 to 36 printable ASCII characters without spaces."""
    if request_id and not telemetry.is_request_id(request_id):
        faults.add("request_id", f"{shown(request_id)} is not 1 to 36 printable ASCII characters")


def check_generate(request: generation_pb2.GenerateRequest, limits: Limits) -> None:
    """Checks everything of a generation that needs no tokenizer; the engine checks its length.

    Raises:
        InvalidField: One field is out of range.
        InvalidFields: Several are.
        TokenNotInVocab: A token id at or past the end of the vocabulary.
    """
    faults = Faults()
    check_request_id(faults, request.request_id)
    if request.WhichOneof("prompt") is None:
        faults.add("prompt", "missing: one of text, tokens, chat is required")
    check_sampling(faults, request.sampling, limits.vocab_size)
    _check_budget(faults, request, limits)
    _check_texts(faults, request)
    _check_constraint(faults, request)
    check_adapters(faults, "adapters", request.adapters)
    if request.HasField("chat"):
        check_chat(faults, "chat", request.chat)
    faults.raise_if_any()
    check_vocab(request.preserved_tokens, limits.vocab_size)
    check_vocab(request.sampling.logit_bias, limits.vocab_size)
    # Of eight million ids none is looked at: that would hold the event loop up for a second. The
    # engine refuses them for their number, and takes note of whose turn that was.
    if len(request.tokens.ids) < limits.context_tokens:
        check_vocab(request.tokens.ids, limits.vocab_size)
    check_vocab((trigger.token_id for trigger in request.grammar_triggers), limits.vocab_size)


def check_prompt(tokens: Sequence[int], limits: Limits) -> None:
    """Checks token ids given as a prompt.

    Raises:
        ContextOverflow: They leave no room for one more in a slot's context.
        TokenNotInVocab: An id at or past the end of the vocabulary.
    """
    if len(tokens) >= limits.context_tokens:
        raise ContextOverflow(prompt_tokens=len(tokens), context_tokens=limits.context_tokens)
    check_vocab(tokens, limits.vocab_size)


def check_vocab(tokens: Iterable[int], vocab_size: int) -> None:
    """Checks token ids against the vocabulary.

    Raises:
        TokenNotInVocab: The largest id is at or past its end.
    """
    largest = max(tokens, default=0)
    if largest >= vocab_size:
        raise TokenNotInVocab(token_id=largest, vocab_size=vocab_size)


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    for piece in in_pieces(ids):
        check_vocab(piece, vocab_size)


def check_adapters(faults: Faults, field: str, adapters: common_pb2.AdapterScales) -> None:
    """A set names each adapter once, with a finite scale; ids are looked up by the engine."""
    if len(adapters.scales) > MAX_ADAPTERS:
        faults.size(f"{field}.scales", len(adapters.scales), MAX_ADAPTERS, "adapters")
        return
    seen: set[int] = set()
    for i, entry in enumerate(adapters.scales):
        if not entry.HasField("adapter_id"):
            faults.add(f"{field}.scales[{i}].adapter_id", "missing")
        elif entry.adapter_id in seen:
            faults.add(f"{field}.scales[{i}].adapter_id", f"{entry.adapter_id} is named twice")
        if not entry.HasField("scale"):
            faults.add(f"{field}.scales[{i}].scale", "missing")
        else:
            faults.number(f"{field}.scales[{i}].scale", entry.scale)
        seen.add(entry.adapter_id)


def check_chat(faults: Faults, field: str, chat: common_pb2.ChatPrompt) -> None:
    """The shape of a conversation; whether the template takes it is the template's to say."""
    for i, message in enumerate(chat.messages):
        name = f"{field}.messages[{i}]"
        if not message.role:
            faults.add(f"{name}.role", "missing")
        if message.WhichOneof("body") is None and not message.tool_calls:
            faults.add(f"{name}.content", "missing, and there are no tool_calls")
        for j, part in enumerate(message.parts.parts):
            if part.WhichOneof("part") is None:
                faults.add(f"{name}.parts.parts[{j}]", "empty: text is required")
        for j, call in enumerate(message.tool_calls):
            if not call.name:
                faults.add(f"{name}.tool_calls[{j}].name", "missing")
    _check_tools(faults, field, chat)
    faults.known(
        f"{field}.final_message",
        chat.final_message,
        common_pb2.FinalMessage.values(),
        may_be_unset=True,
    )
    continues = chat.final_message > common_pb2.FINAL_MESSAGE_CLOSED
    if continues and chat.HasField("add_generation_prompt") and chat.add_generation_prompt:
        faults.add(
            f"{field}.add_generation_prompt", "true together with a final_message that continues"
        )


def _check_budget(faults: Faults, request: generation_pb2.GenerateRequest, limits: Limits) -> None:
    faults.number("max_tokens", request.max_tokens, low=0, high=MAX_INT32)
    most = min(MAX_TOP_LOGPROBS, limits.vocab_size)
    faults.number("top_logprobs", request.top_logprobs, low=0, high=most)
    faults.number("num_samples", request.num_samples, low=0, high=limits.num_slots)
    faults.number("n_keep", request.n_keep, low=-1, high=MAX_INT32)
    faults.number("n_discard", request.n_discard, low=0, high=MAX_INT32)
    faults.number("n_cache_reuse", request.n_cache_reuse, low=0, high=MAX_INT32)
    faults.number("n_indent", request.n_indent, low=0, high=MAX_INT32)
    if request.HasField("time_limit"):
        faults.duration("time_limit", request.time_limit)
    if request.HasField("slot_id") and request.num_samples > 1:
        faults.add("slot_id", "names one slot, but num_samples asks for several")


def _check_texts(faults: Faults, request: generation_pb2.GenerateRequest) -> None:
    faults.size("stop", len(request.stop), MAX_STOPS, "texts")
    for i, stop in enumerate(request.stop[:MAX_STOPS]):
        faults.size(f"stop[{i}]", len(stop.encode()), MAX_STOP_BYTES, "bytes")
    faults.size("annotation", len(request.annotation.encode()), MAX_ANNOTATION_BYTES, "bytes")
    faults.size("preserved_tokens", len(request.preserved_tokens), MAX_PRESERVED_TOKENS, "tokens")


def _check_constraint(faults: Faults, request: generation_pb2.GenerateRequest) -> None:
    if request.grammar_lazy and not (request.grammar or request.json_schema):
        faults.add("grammar_lazy", "true without a grammar or a json_schema")
    if request.grammar_lazy and not request.grammar_triggers:
        faults.add("grammar_triggers", "empty, but grammar_lazy needs at least one")
    for i, trigger in enumerate(request.grammar_triggers[:MAX_TRIGGERS]):
        if trigger.WhichOneof("trigger") is None:
            faults.add(f"grammar_triggers[{i}]", "empty")
    faults.size("grammar_triggers", len(request.grammar_triggers), MAX_TRIGGERS, "triggers")
    reasoning = request.reasoning
    faults.known(
        "reasoning.format",
        reasoning.format,
        generation_pb2.ReasoningFormat.values(),
        may_be_unset=True,
    )
    faults.number("reasoning.budget_tokens", reasoning.budget_tokens, low=-1, high=MAX_INT32)
    texts = {"start_tag": reasoning.start_tag, "budget_message": reasoning.budget_message}
    faults.size("reasoning.end_tags", len(reasoning.end_tags), MAX_STOPS, "texts")
    for i, tag in enumerate(reasoning.end_tags[:MAX_STOPS]):
        texts[f"end_tags[{i}]"] = tag
        if not tag:
            faults.add(f"reasoning.end_tags[{i}]", "empty")
    for name, text in texts.items():
        faults.size(f"reasoning.{name}", len(text.encode()), MAX_STOP_BYTES, "bytes")


def _check_tools(faults: Faults, field: str, chat: common_pb2.ChatPrompt) -> None:
    faults.known(
        f"{field}.tool_choice",
        chat.tool_choice,
        common_pb2.ToolChoice.values(),
        may_be_unset=True,
    )
    names: set[str] = set()
    for i, tool in enumerate(chat.tools):
        if not tool.name:
            faults.add(f"{field}.tools[{i}].name", "missing")
        elif tool.name in names:
            faults.add(f"{field}.tools[{i}].name", f"{shown(tool.name)} is named twice")
        names.add(tool.name)
    if chat.tool_choice == common_pb2.TOOL_CHOICE_REQUIRED and not chat.tools:
        faults.add(f"{field}.tool_choice", "REQUIRED without tools")


def check_tokenize(request: tokenization_pb2.TokenizeRequest, vocab_size: int) -> None:
    """Checks a text, or a mixed prompt, that is to be tokenised.

    Raises:
        InvalidField: No input, or an empty part.
        InvalidFields: Several empty parts.
        TokenNotInVocab: A token id at or past the end of the vocabulary.
    """
    faults = Faults()
    if request.WhichOneof("input") is None:
        faults.add("input", "missing: one of text, mixed is required")
    for i, part in enumerate(request.mixed.parts):
        if part.WhichOneof("part") is None:
            faults.add(f"mixed.parts[{i}]", "empty: one of text, tokens is required")
    faults.raise_if_any()
    for part in request.mixed.parts:
        _check_ids(part.tokens.ids, vocab_size)


def check_template(request: tokenization_pb2.ApplyChatTemplateRequest) -> None:
    """Checks a conversation that is to be rendered.

    Raises:
        InvalidField: One fault.
        InvalidFields: Several.
    """
    faults = Faults()
    if not request.HasField("chat"):
        faults.add("chat", "missing")
    check_chat(faults, "chat", request.chat)
    faults.raise_if_any()


def check_embed(request: embedding_pb2.EmbedRequest, limits: Limits) -> None:
    """Checks inputs that are to be embedded.

    Raises:
        InvalidField: One field is out of range.
        InvalidFields: Several are.
        TokenNotInVocab: A token id at or past the end of the vocabulary.
    """
    faults = Faults()
    check_request_id(faults, request.request_id)
    faults.number("inputs", len(request.inputs), low=1, high=MAX_INPUTS)
    for i, entry in enumerate(request.inputs[:MAX_INPUTS]):
        if entry.WhichOneof("input") is None:
            faults.add(f"inputs[{i}]", "empty: one of text, tokens, pair is required")
    faults.known("pooling", request.pooling, embedding_pb2.Pooling.values(), may_be_unset=True)
    faults.number("norm", request.norm, low=-1, high=MAX_INT32)
    check_adapters(faults, "adapters", request.adapters)
    faults.raise_if_any()
    for entry in request.inputs:
        _check_ids(entry.tokens.ids, limits.vocab_size)


def check_slot_id(
    faults: Faults,
    request: slot_pb2.SaveSlotRequest | slot_pb2.RestoreSlotRequest | slot_pb2.EraseSlotRequest,
) -> None:
    """A slot must be named: 0 is a slot, so nothing may stand for it."""
    if not request.HasField("slot_id"):
        faults.add("slot_id", "missing")


def check_filename(faults: Faults, field: str, filename: str) -> None:
    """One path component of safe characters, no leading or trailing dot, no `..`."""
    if _FILENAME.fullmatch(filename) is None or ".." in filename:
        faults.add(
            field,
            f"{shown(filename)} is not 1 to 255 of A-Z a-z 0-9 . _ - without leading or trailing "
            "dot or double dots",
        )


def check_save(request: slot_pb2.SaveSlotRequest, limits: Limits) -> None:
    """Checks which slot to save, where, and the prompt to warm.

    Raises:
        InvalidField: One fault.
        InvalidFields: Several.
        TokenNotInVocab: A token id at or past the end of the vocabulary.
        ContextOverflow: More prompt tokens than a slot's context holds.
    """
    faults = Faults()
    check_slot_id(faults, request)
    check_filename(faults, "filename", request.filename)
    check_request_id(faults, request.request_id)
    check_adapters(faults, "adapters", request.adapters)
    if request.HasField("adapters") and request.WhichOneof("prompt") is None:
        faults.add("adapters", "present without a prompt")
    if request.HasField("chat"):
        check_chat(faults, "chat", request.chat)
    if request.HasField("tokens") and not request.tokens.ids:
        faults.add("tokens.ids", "a prompt of no tokens")
    faults.raise_if_any()
    check_prompt(request.tokens.ids, limits)


def check_page(request: slot_pb2.ListSlotFilesRequest) -> None:
    """Checks which page of the list of files is asked for.

    Raises:
        InvalidField: One fault.
        InvalidFields: Several.
    """
    faults = Faults()
    faults.number("page_size", request.page_size, low=0, high=MAX_PAGE_SIZE)
    if request.page_token:
        check_filename(faults, "page_token", request.page_token)
    faults.raise_if_any()


def check_load_adapter(request: lora_pb2.LoadAdapterRequest) -> None:
    """Checks which adapter to load.

    Raises:
        InvalidField: One fault.
        InvalidFields: Several.
    """
    faults = Faults()
    faults.number("name", len(request.name.encode()), low=1, high=MAX_NAME_BYTES)
    if not request.path or "\0" in request.path:
        faults.add("path", "missing" if not request.path else "holds a NUL")
    faults.size("path", len(request.path.encode()), MAX_PATH_BYTES, "bytes")
    faults.number("scale", request.scale)
    faults.raise_if_any()


def check_load_model(request: model_pb2.LoadModelRequest) -> None:
    """Checks which model to load; whether it can be is the loader's to say.

    Raises:
        InvalidField: One fault.
        InvalidFields: Several.
    """
    faults = Faults()
    if not request.path or "\0" in request.path:
        faults.add("path", "missing" if not request.path else "holds a NUL")
    faults.size("path", len(request.path.encode()), MAX_PATH_BYTES, "bytes")
    faults.duration("drain_timeout", request.drain_timeout, may_be_zero=True)
    faults.raise_if_any()


def check_rebuild(request: rebuild_pb2.RebuildRequest) -> None:
    """Checks that some pool is to be resized; the sizes themselves are arithmetic's to judge.

    Raises:
        InvalidField: One fault.
        InvalidFields: Several.
    """
    faults = Faults()
    if not request.target.ListFields():
        faults.add("target", "empty: at least one pool is required")
    faults.duration("drain_timeout", request.drain_timeout, may_be_zero=True)
    check_request_id(faults, request.request_id)
    faults.raise_if_any()
