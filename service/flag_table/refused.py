"""Flags of llama-server that end the start.

They would change answers or exposure, or the peer itself has removed them. Each row says what to
do instead.
"""

from __future__ import annotations

from typing import Any

from service.flag_values import SWITCH, TEXT, Kind
from service.flags import Flag, Verdict

_GEOMETRY = "the file's own values are used; convert the model instead"
_SPECULATIVE = "there is no speculative decoding; leave it out"
_REMOVED = "the peer has removed it; leave it out"
_TOOLS = "the server runs no tools; run them in the client"
_ROUTER = "one server serves one model; start one per model"
_MEDIA = "only text is taken; leave it out"
_VECTOR = "there are no control vectors; leave it out"
_PRESET = "there are no presets; name the model with -hf"
_DOWNLOAD = "use -m with a file, or -hf"
_PLACEMENT = "a model is placed on one device as a whole; leave it out"
_OTHER = "leave it out"


def _refused(
    instead: str,
    *names: str,
    kind: Kind = TEXT,
    off: tuple[str, ...] = (),
    variable: str | None = None,
    neutral: tuple[Any, ...] = (),
) -> Flag:
    return Flag(
        names,
        kind,
        dest="refused",
        off_names=off,
        verdict=Verdict.REFUSE,
        note=instead,
        variable=variable,
        neutral=(False, *neutral) if kind is SWITCH else neutral,
    )


def _switch(
    instead: str, *names: str, off: tuple[str, ...] = (), variable: str | None = None
) -> Flag:
    return _refused(instead, *names, kind=SWITCH, off=off, variable=variable)


_MODEL_ROWS = (
    _refused(_DOWNLOAD, "-mu", "--model-url", variable="LLAMA_ARG_MODEL_URL"),
    _refused(_DOWNLOAD, "-dr", "--docker-repo", variable="LLAMA_ARG_DOCKER_REPO"),
    _refused(_GEOMETRY, "--override-kv"),
    _refused(_GEOMETRY, "--rope-scaling", variable="LLAMA_ARG_ROPE_SCALING_TYPE"),
    _refused(_GEOMETRY, "--rope-scale", variable="LLAMA_ARG_ROPE_SCALE"),
    _refused(_GEOMETRY, "--rope-freq-base", variable="LLAMA_ARG_ROPE_FREQ_BASE"),
    _refused(_GEOMETRY, "--rope-freq-scale", variable="LLAMA_ARG_ROPE_FREQ_SCALE"),
    _refused(_GEOMETRY, "--yarn-orig-ctx", variable="LLAMA_ARG_YARN_ORIG_CTX"),
    _refused(_GEOMETRY, "--yarn-ext-factor", variable="LLAMA_ARG_YARN_EXT_FACTOR"),
    _refused(_GEOMETRY, "--yarn-attn-factor", variable="LLAMA_ARG_YARN_ATTN_FACTOR"),
    _refused(_GEOMETRY, "--yarn-beta-slow", variable="LLAMA_ARG_YARN_BETA_SLOW"),
    _refused(_GEOMETRY, "--yarn-beta-fast", variable="LLAMA_ARG_YARN_BETA_FAST"),
    _refused(_PLACEMENT, "-ot", "--override-tensor", variable="LLAMA_ARG_OVERRIDE_TENSOR"),
    _refused(_PLACEMENT, "--rpc", variable="LLAMA_ARG_RPC"),
    _refused(_VECTOR, "--control-vector"),
    _refused(_VECTOR, "--control-vector-scaled"),
    _refused(_VECTOR, "--control-vector-layer-range"),
    _refused(_MEDIA, "-mm", "--mmproj", variable="LLAMA_ARG_MMPROJ"),
    _refused(_MEDIA, "-mmu", "--mmproj-url", variable="LLAMA_ARG_MMPROJ_URL"),
    _refused(_MEDIA, "-mmdev", "--mmproj-device", variable="MTMD_BACKEND_DEVICE"),
    _refused(_MEDIA, "--image-min-tokens", variable="LLAMA_ARG_IMAGE_MIN_TOKENS"),
    _refused(_MEDIA, "--image-max-tokens", variable="LLAMA_ARG_IMAGE_MAX_TOKENS"),
    _refused(_MEDIA, "--mtmd-batch-max-tokens", variable="LLAMA_ARG_MTMD_BATCH_MAX_TOKENS"),
    _refused(_MEDIA, "--video-fps", variable="LLAMA_ARG_VIDEO_FPS"),
    _refused(_MEDIA, "--video-timestamp-interval", variable="LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL"),
    _refused(_MEDIA, "--video-ffmpeg-dir", variable="LLAMA_ARG_VIDEO_FFMPEG_DIR"),
    _refused(_MEDIA, "--media-path"),
)

_SERVER_ROWS = (
    _refused(_TOOLS, "--tools-runtime", variable="LLAMA_ARG_TOOLS_RUNTIME"),
    _refused(_TOOLS, "--mcp-servers-config", variable="LLAMA_ARG_MCP_SERVERS_CONFIG"),
    _refused(_TOOLS, "--mcp-servers-json", variable="LLAMA_ARG_MCP_SERVERS_JSON"),
    _switch(_TOOLS, "-ag", "--agent", off=("-no-ag", "--no-agent"), variable="LLAMA_ARG_AGENT"),
    _refused(_ROUTER, "--models-dir", variable="LLAMA_ARG_MODELS_DIR"),
    _refused(_ROUTER, "--models-preset", variable="LLAMA_ARG_MODELS_PRESET"),
    _refused(_ROUTER, "--models-max", variable="LLAMA_ARG_MODELS_MAX"),
    # Its negation only says that nothing loads by itself, which is so.
    _switch(
        _ROUTER,
        "--models-autoload",
        off=("--no-models-autoload",),
        variable="LLAMA_ARG_MODELS_AUTOLOAD",
    ),
    _switch(_OTHER, "-cl", "--cache-list"),
    _switch(_OTHER, "--list-devices"),
    _switch(_OTHER, "--completion-bash"),
    *(
        _switch(_PRESET, name)
        for name in (
            "--embd-gemma-default",
            "--fim-qwen-1.5b-default",
            "--fim-qwen-3b-default",
            "--fim-qwen-7b-default",
            "--fim-qwen-7b-spec",
            "--fim-qwen-14b-spec",
            "--fim-qwen-30b-default",
            "--gpt-oss-20b-default",
            "--gpt-oss-120b-default",
            "--vision-gemma-4b-default",
            "--vision-gemma-12b-default",
        )
    ),
)

_SPECULATIVE_NAMES: tuple[tuple[tuple[str, ...], str | None], ...] = (
    (("-lcs", "--lookup-cache-static"), None),
    (("-lcd", "--lookup-cache-dynamic"), None),
    (
        ("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"),
        "LLAMA_ARG_SPEC_DRAFT_HF_REPO",
    ),
    (("-md", "--model-draft", "--spec-draft-model"), "LLAMA_ARG_SPEC_DRAFT_MODEL"),
    (("-td", "--threads-draft", "--spec-draft-threads"), None),
    (("-tbd", "--threads-batch-draft", "--spec-draft-threads-batch"), None),
    (("-Cd", "--cpu-mask-draft", "--spec-draft-cpu-mask"), None),
    (("-Crd", "--cpu-range-draft", "--spec-draft-cpu-range"), None),
    (("--cpu-strict-draft", "--spec-draft-cpu-strict"), None),
    (("--prio-draft", "--spec-draft-prio"), None),
    (("--poll-draft", "--spec-draft-poll"), None),
    (("-Cbd", "--cpu-mask-batch-draft", "--spec-draft-cpu-mask-batch"), None),
    (("--cpu-strict-batch-draft", "--spec-draft-cpu-strict-batch"), None),
    (("--prio-batch-draft", "--spec-draft-prio-batch"), None),
    (("--poll-batch-draft", "--spec-draft-poll-batch"), None),
    (
        ("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"),
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
    ),
    (
        ("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"),
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
    ),
    (("-otd", "--override-tensor-draft", "--spec-draft-override-tensor"), None),
    (
        ("-ncmoed", "--n-cpu-moe-draft", "--spec-draft-ncmoe", "--spec-draft-n-cpu-moe"),
        "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
    ),
    (("--spec-draft-n-max",), "LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    (("--spec-draft-n-min",), "LLAMA_ARG_SPEC_DRAFT_N_MIN"),
    (("--spec-synth-len",), "LLAMA_ARG_SPEC_SYNTH_LEN"),
    (("--spec-synth-rates",), "LLAMA_ARG_SPEC_SYNTH_RATES"),
    (("--draft-p-split", "--spec-draft-p-split"), "LLAMA_ARG_SPEC_DRAFT_P_SPLIT"),
    (("--draft-p-min", "--spec-draft-p-min"), "LLAMA_ARG_SPEC_DRAFT_P_MIN"),
    (("-devd", "--device-draft", "--spec-draft-device"), None),
    (
        ("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl"),
        "LLAMA_ARG_N_GPU_LAYERS_DRAFT",
    ),
    (("--spec-ngram-mod-n-min",), None),
    (("--spec-ngram-mod-n-max",), None),
    (("--spec-ngram-mod-n-match",), None),
    (("--spec-ngram-simple-size-n",), None),
    (("--spec-ngram-simple-size-m",), None),
    (("--spec-ngram-simple-min-hits",), None),
    (("--spec-ngram-map-k-size-n",), None),
    (("--spec-ngram-map-k-size-m",), None),
    (("--spec-ngram-map-k-min-hits",), None),
    (("--spec-ngram-map-k4v-size-n",), None),
    (("--spec-ngram-map-k4v-size-m",), None),
    (("--spec-ngram-map-k4v-min-hits",), None),
)

_REMOVED_NAMES: tuple[tuple[tuple[str, ...], str | None], ...] = (
    (("--draft", "--draft-n", "--draft-max"), "LLAMA_ARG_DRAFT_MAX"),
    (("--draft-min", "--draft-n-min"), "LLAMA_ARG_DRAFT_MIN"),
    (("--spec-ngram-size-n",), None),
    (("--spec-ngram-size-m",), None),
    (("--spec-ngram-min-hits",), None),
)

_SPECULATIVE_ROWS = (
    _refused(_SPECULATIVE, "--spec-type", variable="LLAMA_ARG_SPEC_TYPE", neutral=("none",)),
    _switch(
        _SPECULATIVE,
        "-cmoed",
        "--cpu-moe-draft",
        "--spec-draft-cpu-moe",
        variable="LLAMA_ARG_SPEC_DRAFT_CPU_MOE",
    ),
    _switch(
        _SPECULATIVE,
        "--spec-draft-backend-sampling",
        off=("--no-spec-draft-backend-sampling",),
        variable="LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING",
    ),
    _switch(_SPECULATIVE, "--spec-default"),
    *(_refused(_SPECULATIVE, *names, variable=var) for names, var in _SPECULATIVE_NAMES),
    *(_refused(_REMOVED, *names, variable=var) for names, var in _REMOVED_NAMES),
)

REFUSED = (*_MODEL_ROWS, *_SERVER_ROWS, *_SPECULATIVE_ROWS)
