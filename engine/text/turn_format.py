"""A chat format as data: what stands around each message, by its role. No template engine.

Source: what llama.cpp's `llm_chat_apply_template` writes, whose formats this can describe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase

SYSTEM = "system"
USER = "user"
ASSISTANT = "assistant"

# C's whitespace and letters in the "C" locale; Python's know more of both.
_BLANKS = " \t\n\v\f\r"
_UPPER = str.maketrans(ascii_lowercase, ascii_uppercase)


@dataclass(frozen=True)
class Turn:
    """What stands around a message.

    Attributes:
        before: in front; `{role}`, `{Role}` and `{ROLE}` in it are the message's role as it is,
            capitalised, and in capitals.
        after: behind.
        is_trimmed: the content's blanks at both ends are left out.
        takes_system: a system text that is on hold comes in front of the content.
        ends_exchange: the next message begins a new exchange.
    """

    before: str = ""
    after: str = ""
    is_trimmed: bool = False
    takes_system: bool = False
    ends_exchange: bool = False

    def content(self, text: str) -> str:
        """Returns a message's content as it is shown."""
        return text.strip(_BLANKS) if self.is_trimmed else text

    def write(self, role: str, text: str, held: str = "") -> str:
        """Returns a message; `held` stands in front of its content."""
        upper = role.translate(_UPPER)
        named = self.before.format(role=role, Role=upper[:1] + role[1:], ROLE=upper)
        return f"{named}{held}{self.content(text)}{self.after}"


@dataclass(frozen=True)
class TurnFormat:
    """A chat format.

    Attributes:
        turns: how the messages of a role are written.
        otherwise: how all others are; None leaves them out.
        generation: opens the assistant's turn, where one is asked for.
        opening: comes first of all.
        first_system: how a system message is written if it is the first message.
        default_system: stands in for that message where there is none.
        is_default_kept: it also does where there is no message at all.
        separator: between messages.
        exchange: opens an exchange of messages; `opening` has opened the first, if it is not empty.
        holds_system: system messages wait for a turn that takes them: their contents, and once
            behind them what `turns` puts behind a system message.
        reply: opens the assistant's turn behind a last message of the user, asked for or not.
    """

    turns: Mapping[str, Turn]
    otherwise: Turn | None = None
    generation: str = ""
    opening: str = ""
    first_system: Turn | None = None
    default_system: str = ""
    is_default_kept: bool = False
    separator: str = ""
    exchange: str = ""
    holds_system: bool = False
    reply: str = ""

    def write(
        self, messages: Iterable[tuple[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Returns the prompt for (role, content) pairs. Both end at a NUL, as C's strings do."""
        cut = [(role.partition("\0")[0], text.partition("\0")[0]) for role, text in messages]
        parts = [self.opening, self._default(cut), *self._written(cut)]
        if cut and cut[-1][0] == USER:
            parts.append(self.reply)
        if add_generation_prompt:
            parts.append(self.generation)
        return "".join(parts)

    def _default(self, messages: Sequence[tuple[str, str]]) -> str:
        if not messages:
            return self.default_system if self.is_default_kept else ""
        return "" if messages[0][0] == SYSTEM else self.default_system

    def _written(self, messages: Sequence[tuple[str, str]]) -> Iterable[str]:
        is_open, held = bool(self.opening), ""
        for position, (role, text) in enumerate(messages):
            turn = self._turn(position, role)
            if turn is None:
                continue
            if self.holds_system and role == SYSTEM:
                held += turn.content(text)
                continue
            if position:
                yield self.separator
            if not is_open:
                yield self.exchange
            is_open = not turn.ends_exchange
            if held and turn.takes_system:
                yield turn.write(role, text, held + self.turns[SYSTEM].after)
                held = ""
            else:
                yield turn.write(role, text)

    def _turn(self, position: int, role: str) -> Turn | None:
        if position == 0 and role == SYSTEM and self.first_system:
            return self.first_system
        return self.turns.get(role, self.otherwise)
