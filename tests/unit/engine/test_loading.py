from __future__ import annotations

import gc
import queue
import re
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from engine.errors import EngineError, InvalidField, ModelFileError, UnsupportedModel
from engine.loading import Loaded, LoadProgress, load_engine
from engine.requests import Request, SamplingParams
from engine.text.stream import TextStream
from engine.types import Chunk, EngineConfig, Event, Failed, Finished
from tests.families import FAMILIES, write_family
from tests.ggufs import (
    TinyLlama,
    add_llama_keys,
    add_tokenizer,
    bpe_tokenizer,
    close,
    encode,
    llama_tensors,
    spm_tokenizer,
    write_gguf,
    write_llama,
)
from tests.numerics.reference import ReferenceDecoder

MODEL = TinyLlama(num_layers=2, ggml_type=Type.Q8_0)
CONFIG = EngineConfig(256, num_slots=1, chunk_tokens=16, kv_dtype="f32")
GREEDY = SamplingParams(temperature=0.0)


class Inbox:
    """Events of a started engine, to be waited for."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()

    def __call__(self, events: Sequence[tuple[str, Event]]) -> None:
        for _, event in events:
            self.events.put(event)

    def until_finished(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        while not isinstance(event := self.events.get(timeout=60), Finished):
            assert not isinstance(event, Failed), event.error
            if isinstance(event, Chunk):
                chunks.append(event)
        return chunks


def generate(loaded: Loaded, inbox: Inbox, prompt: Sequence[int], count: int) -> list[Chunk]:
    loaded.engine.submit(
        Request("r", tuple(prompt), sampling=GREEDY, max_tokens=count, ignore_eos=True)
    )
    return inbox.until_finished()


@pytest.mark.parametrize("is_split", [False, True], ids=["one-file-spm", "split-bpe"])
def test_a_file_answers_as_the_definition_does(tmp_path: Path, is_split: bool) -> None:
    model = replace(MODEL, tokenizer="bpe" if is_split else "spm")
    whole = path = write_llama(tmp_path / "m.gguf", model)
    if is_split:
        write_llama(tmp_path / "s.gguf", model, split_max_tensors=9)
        path = sorted(tmp_path.glob("s-*.gguf"))[1]
    calls: list[LoadProgress] = []
    inbox = Inbox()
    loaded = load_engine(path, CONFIG, inbox, progress=calls.append)
    loaded.engine.start()
    tokenizer = loaded.tokenizer
    prompt = tokenizer.encode("the little day", add_special=True, parse_special=False)
    assert (prompt[0] == tokenizer.bos_token) == tokenizer.add_bos
    chunks = generate(loaded, inbox, prompt, 12)
    loaded.engine.stop()
    expected = ReferenceDecoder(whole).greedy(prompt, 12, tokenizer.eog_tokens)
    assert [chunk.token_id for chunk in chunks] == expected
    stream = TextStream(())
    texts = [stream.push(tokenizer.piece(token_id)).text for token_id in expected]
    assert [chunk.text for chunk in chunks] == texts
    assert any(texts)

    assert loaded.facts.architecture == loaded.spec.architecture == "llama"
    assert loaded.facts.name == "tiny llama"
    assert loaded.plan.slot_context_tokens == 256
    weights = [call for call in calls if call.stage == "weights"]
    programs = [call for call in calls if call.stage == "compile"]
    assert weights + programs == calls, "weights first, then programs"
    assert [call.done for call in weights] == sorted(call.done for call in weights)
    assert weights[-1].done == weights[-1].total > 0
    total = len(programs)
    assert total >= 2, "steps with and without a chunk"
    assert [(c.done, c.total) for c in programs] == [(n, total) for n in range(1, total + 1)]

    engine = weakref.ref(loaded.engine)
    del loaded
    gc.collect()
    assert engine() is None, "a model that was dropped stays in memory"


# What cannot be loaded; nothing of it is compiled.


def refuse(path: Path, error: type[EngineError], message: str, **changes: Any) -> None:
    config = replace(CONFIG, **changes)
    calls: list[LoadProgress] = []
    with pytest.raises(error, match=message):
        load_engine(path, config, Inbox(), progress=calls.append)
    assert not [call for call in calls if call.stage == "compile"]


def test_a_file_that_is_not_there_or_not_one_is_damage(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    refuse(tmp_path / "nope.gguf", ModelFileError, r"nope\.gguf: cannot be read: No such file")
    refuse(tmp_path / "text.gguf", ModelFileError, r"text\.gguf: ")


def test_a_file_that_was_cut_is_damage(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", MODEL)
    path.write_bytes(path.read_bytes()[:-1000])
    refuse(path, ModelFileError, r"m\.gguf: ")


def test_a_shard_that_is_missing_is_damage(tmp_path: Path) -> None:
    write_llama(tmp_path / "s.gguf", MODEL, split_max_tensors=9)
    first, second, *_ = sorted(tmp_path.glob("s-*.gguf"))
    second.unlink()
    refuse(first, ModelFileError, re.escape(f"{second.name}: cannot be read"))


def test_a_compile_cache_that_cannot_be_made_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    # The load goes on, to the next thing that is wrong.
    refuse(tmp_path / "nope.gguf", ModelFileError, "nope", compile_cache=str(tmp_path / "file"))
    (record,) = caplog.records
    assert record.getMessage().startswith("compiled programs are not kept: ")


def test_an_unknown_architecture_is_not_supported(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "gpt9"})
    refuse(path, UnsupportedModel, "general.architecture 'gpt9' is not supported")


def test_an_unknown_tokenizer_is_not_supported(tmp_path: Path) -> None:
    path = write_with(tmp_path, {"tokenizer.ggml.pre": "klingon"})
    with pytest.raises(UnsupportedModel, match="klingon"):
        load_engine(path, CONFIG, Inbox())


def write_with(folder: Path, keys: dict[str, str]) -> Path:
    """A BPE model with string keys of its own."""
    model, tokenizer = TinyLlama(num_layers=1, tokenizer="bpe"), bpe_tokenizer()
    writer = GGUFWriter(folder / "m.gguf", "llama")
    add_llama_keys(writer, model)
    add_tokenizer(writer, tokenizer)
    for key, value in keys.items():
        writer.kv_data[0].pop(key, None)
        writer.add_string(key, value)
    for name, (values, ggml_type) in llama_tensors(model, tokenizer).items():
        writer.add_tensor(name, encode(values, ggml_type), raw_dtype=ggml_type)
    close(writer)
    return folder / "m.gguf"


def test_the_embedding_must_have_a_row_for_each_token(tmp_path: Path) -> None:
    tokenizer = spm_tokenizer()
    num_tokens = len(tokenizer.tokens)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    add_llama_keys(writer, MODEL)
    add_tokenizer(writer, tokenizer)
    for name, (values, _) in llama_tensors(MODEL, tokenizer).items():
        if name in ("token_embd.weight", "output.weight"):
            values = np.concatenate([values, values[:2]])
        writer.add_tensor(name, values, raw_dtype=Type.F32)
    close(writer)
    refuse(
        tmp_path / "m.gguf",
        UnsupportedModel,
        f"the tokenizer has {num_tokens} tokens, the embedding {num_tokens + 2}",
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"num_slots": 0}, "num_slots"), ({"kv_dtype": "q8_0"}, "kv_dtype"), ({"kv_pages": 1}, "kv_")],
)
def test_a_size_out_of_range_names_its_field(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    refuse(write_llama(tmp_path / "m.gguf", MODEL), InvalidField, field, **changes)


def test_pools_that_memory_cannot_hold_are_a_size_out_of_range(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", MODEL)
    refuse(path, InvalidField, "context_tokens: .* memory is out", kv_pages=2**30)


def test_banks_that_do_not_fit_beside_weights_and_pools_are_refused_with_the_numbers(
    tmp_path: Path,
) -> None:
    """Before they are made: 256 adapters of rank 512 for a model of a few hundred kilobytes."""
    path = write_llama(tmp_path / "m.gguf", TinyLlama())
    message = r"max_adapters: 256 adapters of rank 512 need \d{10} bytes, \d+ of 209715200 are left"
    changes = {"max_adapters": 256, "max_adapter_rank": 512, "memory_budget": 200 << 20}
    refuse(path, InvalidField, message, **changes)


def test_a_shift_that_the_model_cannot_do_is_refused(tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", FAMILIES["gemma3"])
    message = r"context_shift.*keys of gemma3 cannot be moved"
    refuse(path, InvalidField, message, context_shift=True)
