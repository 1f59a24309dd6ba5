"""Random commands about adapters on a recorded model: every reply is its solo run."""

from __future__ import annotations

import random

from engine.loading import load_engine
from engine.types import EngineConfig
from tests.accept.models import Models
from tests.accept.outcome import Failure
from tests.adapter_runs.replies import Replies
from tests.adapter_runs.walk import Walk

MODEL = "stories260K.gguf"
ADAPTERS = ("lora-stories-all-r8.gguf", "lora-stories-attn-r4.gguf", "lora-stories-ffn-r8.gguf")
NUM_COMMANDS = 400


def check_adapter_walk(models: Models) -> str:
    """Walks; returns what happened.

    Raises:
        Failure: A program was compiled while it served.
        AssertionError: A reply is not its solo run, or something is not given back.
    """
    config = EngineConfig(
        context_tokens=256, num_slots=4, chunk_tokens=32, max_adapters=2, max_adapter_rank=8
    )
    replies = Replies()
    loaded = load_engine(models.find(MODEL).path, config, replies.take)
    rng = random.Random(7)
    prompts = [tuple(rng.choices(range(3, 500), k=length)) for length in (1, 9, 40, 90)]
    contents = [loaded.engine.adapters.read(models.find(name).path) for name in ADAPTERS]
    compiles = loaded.runner.compiles
    walk = Walk(loaded.engine, replies, contents, prompts, seed=6)
    walk.run(NUM_COMMANDS)
    walk.judge()
    if loaded.runner.compiles != compiles:
        raise Failure(f"{loaded.runner.compiles - compiles} programs were compiled")
    return f"{NUM_COMMANDS} commands: {dict(walk.seen)}"
