"""Kernels against the machine: bytes read a second at one row, multiplications at many.

The ceilings are measured beside them: a read of as many bytes by as many threads, and XLA's
product of f32 matrices. Integer kernels may pass the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.bench.figures import Figure
from tests.bench.setting import OWN, Setting

_LEAST_SHARE = 0.6
_MANY_ROWS = 512


def measure(setting: Setting) -> Iterator[Figure]:
    """Every model's decode, its matrices and its attention."""
    for model in setting.models:
        setting.say(f"roofline: {model.name}")
        with setting.engines(model, peer=False) as engines:
            engine = engines[OWN]
            decode_bytes = engine.ask(do="weight_bytes")

            def turn(engine: Any = engine, decode_bytes: int = decode_bytes) -> dict[str, float]:
                return {
                    "read": engine.ask(do="read_rate", bytes=decode_bytes),
                    "product": engine.ask(do="f32_product_rate", rows=_MANY_ROWS),
                    "decode": decode_bytes * engine.ask(do="decode", rows=1, steps=64),
                    "attention": engine.ask(do="attention_rate"),
                    **engine.ask(do="matrix_rates", rows=_MANY_ROWS),
                }

            values = setting.alternate({OWN: turn})[OWN]
        title = model.name
        read, product = values.pop("read"), values.pop("product")
        yield Figure("roofline", f"{title}: measured read", "GB/s", read / 1e9)
        share = values.pop("decode") / read
        name = f"{title}: weights of a decode, 1 stream, over the measured read"
        yield Figure("roofline", name, "share", share, None, _LEAST_SHARE, False)
        yield Figure("roofline", f"{title}: measured f32 product", "GMAC/s", product / 1e9)
        for kernel, rate in values.items():
            # The peer's column is the ceiling's here: the ratio is the share of it.
            is_read = not kernel.endswith(f"{_MANY_ROWS} rows")
            unit, ceiling = ("GB/s", read) if is_read else ("GMAC/s", product)
            yield Figure("roofline", f"{title}: {kernel}", unit, rate / 1e9, ceiling / 1e9)
