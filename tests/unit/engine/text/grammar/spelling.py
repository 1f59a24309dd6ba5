"""A vocabulary of bytes and a few longer tokens, and what a grammar says of whole texts in it."""

from __future__ import annotations

from engine.text.grammar.matcher import CompiledGrammar, GrammarCompiler

LONGER = ("ab", "aba", '":', "true", "é", "日本", " the", "</s", '{"')
CONTROL = ("<|tool|>", "<|think|>")
END = 256 + len(LONGER) + len(CONTROL)
TOOL = 256 + len(LONGER)


class SpellingTokenizer:
    """Tokens 0..255 are bytes, then `LONGER`, then `CONTROL` (hidden), last the end."""

    vocab_size = END + 1
    eog_tokens = frozenset({END})

    def piece(self, token_id: int, *, render_special: bool = False) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        if token_id < TOOL:
            return LONGER[token_id - 256].encode()
        if not render_special:
            return b""
        return CONTROL[token_id - TOOL].encode() if token_id < END else b"</s>"

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        del add_special
        if parse_special and text in CONTROL:
            return [TOOL + CONTROL.index(text)]
        return list(text.encode())


def compiled(grammar: str, *, shown: frozenset[int] = frozenset()) -> CompiledGrammar:
    """Compiles a grammar for the vocabulary."""
    return GrammarCompiler(SpellingTokenizer()).compile(grammar, shown=shown)


def matches(grammar: CompiledGrammar, text: str) -> bool:
    """Says whether a grammar matches a whole text."""
    state = grammar.begin()
    for value in text.encode():
        if not state.allows(value):
            return False
        state.accept(value)
    return state.is_complete
