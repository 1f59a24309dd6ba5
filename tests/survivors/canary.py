"""Loads damaged models in a process whose fresh memory is all one byte, and shows what comes out.

`test_canary` runs it. The C library fills what it hands out with a byte, tells nobody, and what
somebody reads before it was written shows as runs of that byte. Arguments: a folder to work in, and
the bytes to fill memory with, each as a number; everything is done once for each of them.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import EngineError, ModelFileError
from engine.loading import load_engine
from engine.requests import Request, SamplingParams
from engine.slots.store import SlotStore
from engine.types import Chunk, EngineConfig, Event, Failed, Finished
from tests.slot_stores import save_wish
from tests.survivors.damage import make_mutant
from tests.survivors.programs import KeptPrograms
from tests.survivors.seeds import Seed, write_seeds

_M_PERTURB = -6
SEED = "olmoe"
NUM_SURVIVORS = 8
_SLOT = "a.slot"
_PROMPT = tuple(range(5, 45))


def main() -> None:
    """Writes what came out, for each byte, as JSON."""
    folder, *fills = sys.argv[1:]
    logging.disable(logging.ERROR)
    seed = write_seeds(Path(folder))[SEED]
    programs = KeptPrograms()
    found: list[dict[str, Any]] = []
    with programs.used():
        _try(seed.data, Path(folder))  # compiled before memory is filled
        for fill in map(int, fills):
            ctypes.CDLL(None).mallopt(_M_PERTURB, fill ^ 0xFF)  # glibc fills with the complement
            found.append(_run(seed, Path(folder), fill))
    print(json.dumps(found))


def _run(seed: Seed, folder: Path, fill: int) -> dict[str, Any]:
    sizes = (3000, 60_000, 5_000_000)
    shown = [bool((np.empty(size, np.uint8) == fill).all()) for size in sizes]
    refusals = [_refusal(data, folder) for data in _cut(seed)]
    numbers = (number for number in range(10_000) if number % 3)
    tried = (_try(make_mutant(seed, number), folder) for number in numbers)
    survivors = list(islice((one for one in tried if one is not None), NUM_SURVIVORS))
    return {"is_filled": all(shown), "refusals": refusals, "survivors": survivors}


def _cut(seed: Seed) -> Iterator[bytes]:
    """The file, shorter: its tensors, the last of them or all, lie past its end."""
    places = {len(seed.data) // 2, seed.tensors[0][0], seed.tensors[0][0] // 3}
    for first, last in seed.tensors:
        places |= {first + 1, last - 1}
    for place in sorted(places):
        yield seed.data[:place]


def _refusal(data: bytes, folder: Path) -> str:
    path = folder / "cut.gguf"
    path.write_bytes(data)
    try:
        load_engine(path, _config(), lambda events: None)
    except ModelFileError as error:
        return str(error)
    raise AssertionError(f"a file of {len(data)} bytes loaded, whose tensors end behind that")


def _config() -> EngineConfig:
    return EngineConfig(256, num_slots=1, chunk_tokens=16, device="cpu", host_cache_bytes=0)


def _try(data: bytes, folder: Path) -> dict[str, Any] | None:
    """What a model says to a prompt, all its words' log-probabilities, and its slot's file."""
    path = folder / "mutant.gguf"
    path.write_bytes(data)
    events: list[tuple[str, Event]] = []
    try:
        loaded = load_engine(path, _config(), events.extend)
    except EngineError:
        return None
    engine, vocab_size = loaded.engine, loaded.spec.vocab_size
    try:
        greedy = SamplingParams(temperature=0.0)
        request = Request(
            "r", _PROMPT, greedy, max_tokens=3, ignore_eos=True, top_logprobs=vocab_size
        )
        engine.submit(request)
        while not events or not isinstance(events[-1][1], Finished | Failed):
            engine.step()
        if isinstance(events[-1][1], Failed):
            return None
        loaded.identity.run()
        store = SlotStore(
            str(folder),
            loaded.identity,
            vocab_size=vocab_size,
            context_tokens=loaded.plan.slot_context_tokens,
        )
        wish = save_wish(store, 0, _SLOT)
        engine.transfer_slot(wish)
        while not wish.done.done():
            engine.step()
        wish.done.result()
    finally:
        engine.stop()
        loaded.runner.close()
    chunks = [event for _, event in events if isinstance(event, Chunk)]
    return {
        "answer": "".join(chunk.text for chunk in chunks),
        "logprobs": [repr(chunk.logprobs) for chunk in chunks],
        "slot": (folder / _SLOT).read_bytes().hex(),
    }


if __name__ == "__main__":
    main()
