"""Whether an adapter fits a model: names, shapes, ranks and values, before anything is attached.

Both file readers ask here, so that a GGUF and a peft folder are refused in the same words.

Example:
    model = TargetModel("llama", 32000, {"blk.0.attn_q.weight": (64, 64)})
    check_pair("a.gguf", model, 64, "blk.0.attn_q.weight", down_shape=(4, 64), up_shape=(64, 4))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.adapters.capacity import Shape
from engine.adapters.content import EMBEDDING, AdapterContent, Pair, all_finite
from engine.adapters.errors import AdapterFileInvalid, AdapterMismatch, RankTooLarge

# Looked for at every admission; an instruction's worth of tokens is some tens.
MAX_INVOCATION_TOKENS = 1024


@dataclass(frozen=True)
class TargetModel:
    """What of a model an adapter must fit.

    `matrices` are (rows, cols) by full tensor name, stacks of experts (experts, rows, cols), which
    are refused where there is no room for them (`takes_experts`).
    """

    architecture: str
    vocab_size: int
    matrices: Mapping[str, Shape]
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    takes_experts: bool = True


def check_pair(
    path: str,
    model: TargetModel,
    max_rank: int,
    name: str,
    *,
    down_shape: tuple[int, ...],
    up_shape: tuple[int, ...],
) -> int:
    """Checks the shapes of one pair as files have them: down [rank, cols], up [rows, rank].

    Of the token embedding down is [vocabulary, rank] and up [width, rank]; of a stack both have the
    number of experts in front.

    Returns:
        The rank.

    Raises:
        AdapterMismatch: The model has no such weight, or a shape does not fit it.
        RankTooLarge: The rank is above `max_rank`.
    """
    shape = model.matrices.get(name)
    if shape is None:
        expected = f"a weight of this {model.architecture} model"
        raise AdapterMismatch(path, name, expected, "no such weight in it")
    *experts, rows, cols = shape
    if experts and not model.takes_experts:
        expected = "a server with room for adapters of experts (--lora-experts)"
        raise AdapterMismatch(path, name, expected, "one without")
    if len(down_shape) != len(shape) or len(up_shape) != len(shape):
        found = f"{len(down_shape)} and {len(up_shape)} dimensions"
        raise AdapterMismatch(path, name, f"{len(shape)} dimensions in each half", found)
    rank = up_shape[-1]
    if name == EMBEDDING:
        expected_down, expected_up = (rows, rank), (cols, rank)
    else:
        expected_down, expected_up = (*experts, rank, cols), (*experts, rows, rank)
    for suffix, expected, found in (
        ("lora_a", expected_down, down_shape),
        ("lora_b", expected_up, up_shape),
    ):
        if expected != found:
            raise AdapterMismatch(path, f"{name}.{suffix}", _shown(expected), _shown(found))
    if rank < 1:
        raise AdapterMismatch(path, name, "a rank of at least 1", f"rank {rank}")
    if rank > max_rank:
        raise RankTooLarge(path, name, rank, max_rank)
    return rank


def check_values(path: str, name: str, pair: Pair) -> None:
    """Checks that a pair changes its weight by finite numbers.

    Raises:
        AdapterFileInvalid: A value is NaN or infinite.
    """
    for suffix, values in (("lora_a", pair.down), ("lora_b", pair.up)):
        if not all_finite(values, pair.number):
            raise AdapterFileInvalid(path, f"{name}.{suffix} has a value that is not finite")


def check_whole(path: str, model: TargetModel, content: AdapterContent) -> None:
    """Checks what is not about one weight.

    Raises:
        AdapterFileInvalid: There is nothing in it, or too many invocation tokens.
        AdapterMismatch: An invocation token is not in the model's vocabulary.
    """
    if not content.pairs:
        raise AdapterFileInvalid(path, "has no pair of lora_a and lora_b tensors")
    tokens = content.facts.invocation_tokens
    if len(tokens) > MAX_INVOCATION_TOKENS:
        raise AdapterFileInvalid(
            path, f"has {len(tokens)} invocation tokens, at most {MAX_INVOCATION_TOKENS} are taken"
        )
    for token_id in tokens:
        if not 0 <= token_id < model.vocab_size:
            expected = f"tokens of a vocabulary of {model.vocab_size}"
            raise AdapterMismatch(path, "alora.invocation_tokens", expected, f"token {token_id}")


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
