"""Tokenizer goldens: the same ids, both ways, from model files and from bare vocabularies."""

from __future__ import annotations

import lzma
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import UnsupportedModel
from engine.gguf.facts import read_facts
from engine.gguf.reader import GgufFile
from engine.gguf.vocab import read_vocab
from engine.text.load import load_tokenizer
from engine.text.tokenizer import Tokenizer
from tests.accept.models import Models
from tests.accept.outcome import Failure, Unsupported

# Source: llama.cpp, tests/test-tokenizer-0.cpp.
_SEPARATOR = "\n__ggml_vocab_test__\n"


def check_tokenize(golden: Mapping[str, Any], models: Models) -> str:
    """Checks rows of text, ids with either flag on or off, and the text that they become again.

    Returns:
        How many rows those are.

    Raises:
        Unsupported: the vocabulary is not one that this build reads.
        Failure: ids or text differ.
    """
    tokenizer = _open(models.find(golden["model"]).path)
    for number, row in enumerate(golden["rows"]):
        for special in (False, True):
            for parse in (False, True):
                key = f"special{special:d}_parse{parse:d}"
                ids = tokenizer.encode(row["text"], add_special=special, parse_special=parse)
                _expect(f"row {number}, {key}", ids, row[f"ids_{key}"])
                expected = row.get(f"detokenized_{key}")
                if expected is not None:
                    text = tokenizer.decode(ids, render_special=True).decode("utf-8", "replace")
                    _expect(f"row {number}, {key}, back to text", text, expected)
    return f"{len(golden['rows'])} rows"


def check_vocab(packed: Path) -> str:
    """Checks a packed vocabulary against the texts and ids beside it; returns how many those are.

    Raises:
        Unsupported: the vocabulary is not one that this build reads.
        Failure: the ids of a text differ.
    """
    stem = packed.with_suffix("")
    # As bytes, because reading text would turn \r\n into \n. A separator ends each text.
    *texts, rest = stem.with_name(f"{stem.name}.inp").read_bytes().decode().split(_SEPARATOR)
    if rest:
        texts.append(rest)
    lines = stem.with_name(f"{stem.name}.out").read_bytes().decode().splitlines()
    if len(texts) != len(lines):
        raise Failure(f"{len(texts)} texts and {len(lines)} lines of ids")
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / stem.name
        plain.write_bytes(lzma.decompress(packed.read_bytes()))
        tokenizer = _open(plain)
    for number, (text, line) in enumerate(zip(texts, lines, strict=True)):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        _expect(f"text {number}", ids, [int(word) for word in line.split()])
    return f"{len(texts)} texts"


def _open(path: Path) -> Tokenizer:
    try:
        with GgufFile.open(path) as file:
            facts = read_facts(file)
            return load_tokenizer(
                read_vocab(file.metadata),
                model_name=facts.name,
                architecture=facts.architecture,
            )
    except UnsupportedModel as error:
        raise Unsupported(str(error)) from error


def _expect(where: str, got: object, expected: object) -> None:
    if got != expected:
        raise Failure(f"{where}: {got!r:.200}, expected {expected!r:.200}")
