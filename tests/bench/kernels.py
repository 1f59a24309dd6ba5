"""Our kernels one by one, and what the machine can do at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from engine.gguf.layouts import Layout
from engine.kernels import flow
from engine.kernels.qmatmul import MatrixStack, qmatmul
from engine.loading import Loaded

_REPEATS = 5
_PIECES = 64


def read_rate(num_bytes: int, threads: int) -> float:
    """Bytes per second of reading so many, the best of the reductions that numpy has."""
    source = np.ones(num_bytes // 4, np.float32)

    def best_of(view: np.ndarray[Any, Any], reduce: Callable[[Any], Any]) -> float:
        parts = np.array_split(view, _PIECES)
        with ThreadPoolExecutor(threads) as pool:
            return min(_timed(lambda: list(pool.map(reduce, parts))) for _ in range(_REPEATS))

    times = (
        best_of(source, np.max),
        best_of(source.view(np.int8), np.max),
        best_of(source.view(np.int64), np.bitwise_or.reduce),
    )
    return source.nbytes / min(times)


def f32_product_rate(rows: int) -> float:
    """Multiplications per second of XLA's product of f32 matrices."""
    x, w = jnp.ones((rows, 1024)), jnp.ones((1024, 1024))
    return rows * 1024 * 1024 / _best(jax.jit(_product), x, w)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def matrix_rates(loaded: Loaded, rows: int) -> dict[str, float]:
    """Of every matrix of a layer, over all layers: bytes per second at one row, then products."""
    arena = loaded.weights.arena
    rates: dict[str, float] = {}
    stacks = {k: v for k, v in loaded.weights.runs[0].items() if isinstance(v, MatrixStack)}
    for name, stack in stacks.items():
        multiply = jax.jit(_product_over_layers)
        num_layers = stack.kind.shape[0]
        one, many = (jnp.ones((n, stack.cols)) for n in (1, rows))
        title = f"{name} {stack.rows}x{stack.cols} {'/'.join(_name(x) for x in stack.layouts)}"
        one_s = _best(multiply, arena, stack, one)
        rates[f"{title}, 1 row"] = _stack_bytes(stack) / one_s
        many_s = _best(multiply, arena, stack, many)
        rates[f"{title}, {rows} rows"] = num_layers * rows * stack.rows * stack.cols / many_s
    return rates


def _product_over_layers(arena: jax.Array, stack: MatrixStack, x: jax.Array) -> jax.Array:
    """Products of one input with all matrices of a stack, one after the other."""

    def layer(total: jax.Array, own: MatrixStack) -> jax.Array:
        # A value that hangs on the last product, so that no two of them overlap.
        return qmatmul(arena, own, x + 0.0 * total)[:1, :1]

    return flow.scan(layer, jnp.zeros((1, 1)), stack)


def _stack_bytes(stack: MatrixStack) -> int:
    kinds = cast("list[int]", np.asarray(stack.kind).tolist())
    return sum(stack.layouts[kind].nbytes(stack.rows, stack.cols) for kind in kinds)


def _name(layout: Layout) -> str:
    return f"{layout.kind}x{layout.group}" if layout.group else layout.dtype or layout.kind


def _best(program: Callable[..., jax.Array], *arguments: Any) -> float:
    """Seconds of the fastest of a few calls, the first left out."""

    def call() -> None:
        program(*arguments).block_until_ready()

    call()
    return min(_timed(call) for _ in range(_REPEATS))


def _timed(run: Callable[[], Any]) -> float:
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s
