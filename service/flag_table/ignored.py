"""Flags of llama-server that are taken and do nothing, because results cannot depend on them.

Each row says why. Their values are not looked at.
"""

from __future__ import annotations

from service.flag_values import SWITCH, TEXT, Kind
from service.flags import Flag, Verdict

_THREADS = "the thread pool is XLA's; -t sets its size"
_OFFLOAD = "a model is placed on one device as a whole"
_MEMORY = "weights are mapped, then held once in memory"
_CHECKPOINTS = "checkpoints of windows are kept at ends of prompts and answers while pages last"
_COSMETIC = "the form of the log is --log-format's"
_PROJECTOR = "only text is taken"


def _ignored(
    note: str,
    *names: str,
    off: tuple[str, ...] = (),
    variable: str | None = None,
    kind: Kind = TEXT,
) -> Flag:
    return Flag(
        names,
        kind,
        dest="ignored",
        off_names=off,
        verdict=Verdict.IGNORE,
        note=note,
        variable=variable,
    )


def _switch(note: str, *names: str, off: tuple[str, ...] = (), variable: str | None = None) -> Flag:
    return _ignored(note, *names, off=off, variable=variable, kind=SWITCH)


IGNORED = (
    _ignored(_THREADS, "-tb", "--threads-batch"),
    _ignored(_THREADS, "-C", "--cpu-mask"),
    _ignored(_THREADS, "-Cr", "--cpu-range"),
    _ignored(_THREADS, "--cpu-strict"),
    _ignored(_THREADS, "--prio"),
    _ignored(_THREADS, "--poll"),
    _ignored(_THREADS, "-Cb", "--cpu-mask-batch"),
    _ignored(_THREADS, "-Crb", "--cpu-range-batch"),
    _ignored(_THREADS, "--cpu-strict-batch"),
    _ignored(_THREADS, "--prio-batch"),
    _ignored(_THREADS, "--poll-batch"),
    _ignored(
        "the gateway is asynchronous and needs no threads",
        "--threads-http",
        variable="LLAMA_ARG_THREADS_HTTP",
    ),
    _ignored(_OFFLOAD, "-ngl", "--gpu-layers", "--n-gpu-layers", variable="LLAMA_ARG_N_GPU_LAYERS"),
    _ignored(_OFFLOAD, "-sm", "--split-mode", variable="LLAMA_ARG_SPLIT_MODE"),
    _ignored(_OFFLOAD, "-ts", "--tensor-split", variable="LLAMA_ARG_TENSOR_SPLIT"),
    _ignored(_OFFLOAD, "-mg", "--main-gpu", variable="LLAMA_ARG_MAIN_GPU"),
    _ignored(_OFFLOAD, "-fit", "--fit", variable="LLAMA_ARG_FIT"),
    _ignored(_OFFLOAD, "-fitt", "--fit-target", variable="LLAMA_ARG_FIT_TARGET"),
    _ignored(_OFFLOAD, "-fitc", "--fit-ctx", variable="LLAMA_ARG_FIT_CTX"),
    _switch(_OFFLOAD, "-cmoe", "--cpu-moe", variable="LLAMA_ARG_CPU_MOE"),
    _ignored(_OFFLOAD, "-ncmoe", "--n-cpu-moe", variable="LLAMA_ARG_N_CPU_MOE"),
    _ignored(_OFFLOAD, "-ncffn", "--n-cpu-ffn", variable="LLAMA_ARG_N_CPU_FFN"),
    _switch(
        _OFFLOAD,
        "-kvo",
        "--kv-offload",
        off=("-nkvo", "--no-kv-offload"),
        variable="LLAMA_ARG_KV_OFFLOAD",
    ),
    _switch(_OFFLOAD, "--op-offload", off=("--no-op-offload",)),
    _switch(_OFFLOAD, "--no-host", variable="LLAMA_ARG_NO_HOST"),
    _ignored(
        "there is one attention, the exact one",
        "-fa",
        "--flash-attn",
        variable="LLAMA_ARG_FLASH_ATTN",
    ),
    _switch(
        "weights are laid out for the device at load",
        "--repack",
        off=("-nr", "--no-repack"),
        variable="LLAMA_ARG_REPACK",
    ),
    _ignored(_MEMORY, "-lm", "--load-mode", variable="LLAMA_ARG_LOAD_MODE"),
    _ignored(_MEMORY, "-lzm", "--lazy-mode", variable="LLAMA_ARG_LAZY_MODE"),
    _ignored(_MEMORY, "--numa", variable="LLAMA_ARG_NUMA"),
    _switch("tensors are always checked against the file", "--check-tensors"),
    _ignored("pages do not fragment", "-dt", "--defrag-thold", variable="LLAMA_ARG_DEFRAG_THOLD"),
    _switch("timings are always measured", "--perf", off=("--no-perf",), variable="LLAMA_ARG_PERF"),
    _switch(
        "a window's pages are never reused beyond what is exact",
        "--swa-full",
        variable="LLAMA_ARG_SWA_FULL",
    ),
    _ignored(
        _CHECKPOINTS,
        "-ctxcp",
        "--swa-checkpoints",
        "--ctx-checkpoints",
        variable="LLAMA_ARG_CTX_CHECKPOINTS",
    ),
    _ignored(
        _CHECKPOINTS,
        "-cms",
        "--checkpoint-min-step",
        variable="LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
    ),
    _switch(
        "batching is always continuous",
        "-cb",
        "--cont-batching",
        off=("-nocb", "--no-cont-batching"),
        variable="LLAMA_ARG_CONT_BATCHING",
    ),
    _switch(
        "programs are always compiled before the server is ready",
        "--warmup",
        off=("--no-warmup",),
    ),
    _switch(
        "the device always finds the best candidates",
        "-bs",
        "--backend-sampling",
        variable="LLAMA_ARG_BACKEND_SAMPLING",
    ),
    _switch("a port is never shared", "--reuse-port", variable="LLAMA_ARG_REUSE_PORT"),
    _ignored("prompts are never logged", "--log-prompts-dir"),
    _ignored(_COSMETIC, "--log-colors", variable="LLAMA_ARG_LOG_COLORS"),
    _switch(_COSMETIC, "--log-prefix", off=("--no-log-prefix",), variable="LLAMA_ARG_LOG_PREFIX"),
    _switch(
        _COSMETIC,
        "--log-timestamps",
        off=("--no-log-timestamps",),
        variable="LLAMA_ARG_LOG_TIMESTAMPS",
    ),
    _ignored(
        "the built-in page has no settings",
        "--webui-config",
        "--ui-config",
        variable="LLAMA_ARG_UI_CONFIG",
    ),
    _ignored(
        "the built-in page has no settings",
        "--webui-config-file",
        "--ui-config-file",
        variable="LLAMA_ARG_UI_CONFIG_FILE",
    ),
    _switch(
        _PROJECTOR,
        "--mmproj-auto",
        off=("--no-mmproj", "--no-mmproj-auto"),
        variable="LLAMA_ARG_MMPROJ_AUTO",
    ),
    _switch(
        _PROJECTOR,
        "--mmproj-offload",
        off=("--no-mmproj-offload",),
        variable="LLAMA_ARG_MMPROJ_OFFLOAD",
    ),
)
