"""Which model, on what, and how much of it at once."""

from __future__ import annotations

from service.flag_values import SWITCH, TEXT, choice, comma_list, path
from service.flags import Flag, Scope

_MODEL = "Model"

MODEL = (
    Flag(
        ("-m", "--model"),
        path(),
        "model",
        "GGUF file to serve; of a split file its first part (default: SmolLM2-135M-Instruct, "
        "fetched once)",
        variable="LLAMA_ARG_MODEL",
        scope=Scope.SERVICE,
        group=_MODEL,
    ),
    Flag(
        ("-hf", "-hfr", "--hf-repo"),
        TEXT,
        "hf_repo",
        "Hugging Face repository USER/REPO[:QUANT] to serve; without QUANT it is Q4_K_M, then "
        "Q8_0, then the first file",
        variable="LLAMA_ARG_HF_REPO",
        scope=Scope.SERVICE,
        group=_MODEL,
    ),
    Flag(
        ("-hff", "--hf-file"),
        TEXT,
        "hf_file",
        "file of that repository, instead of QUANT",
        variable="LLAMA_ARG_HF_FILE",
        scope=Scope.SERVICE,
        group=_MODEL,
    ),
    Flag(
        ("-hft", "--hf-token"),
        TEXT,
        "hf_token",
        "Hugging Face access token",
        variable="HF_TOKEN",
        scope=Scope.SERVICE,
        group=_MODEL,
        is_secret=True,
    ),
    Flag(
        ("--offline",),
        SWITCH,
        "offline",
        "never use a network: only what lies in the caches",
        default=False,
        variable="LLAMA_ARG_OFFLINE",
        scope=Scope.SERVICE,
        group=_MODEL,
    ),
    Flag(
        ("--model-dir",),
        path("DIR"),
        "model_dir",
        "folder below which LoadModel and POST /admin/models/load find models, which must exist "
        "(default: none can be loaded)",
        scope=Scope.SERVICE,
        group=_MODEL,
    ),
    Flag(
        ("-a", "--alias"),
        comma_list(),
        "aliases",
        "names of the model, comma-separated; the first is shown",
        default=(),
        variable="LLAMA_ARG_ALIAS",
        group=_MODEL,
    ),
    Flag(
        ("--tags",),
        comma_list(),
        "tags",
        "tags of the model card, comma-separated",
        default=(),
        variable="LLAMA_ARG_TAGS",
        group=_MODEL,
    ),
    Flag(
        ("--override-pre",),
        TEXT,
        "pre_override",
        "pre-tokenizer to use instead of the file's",
        scope=Scope.SERVICE,
        group=_MODEL,
    ),
    Flag(
        ("--cache-dir",),
        path("DIR"),
        "cache_dir",
        "where fetched models and compiled programs are kept (default: $XDG_CACHE_HOME/kvarts, "
        "~/.cache/kvarts)",
        scope=Scope.SERVICE,
        group=_MODEL,
    ),
    Flag(
        ("-dev", "--device"),
        choice("auto", "cpu", "gpu", "metal", "none"),
        "device",
        "what runs the model: auto is a GPU if there is one (extra cuda), else the CPU; metal "
        "(extra metal) is experimental; none is cpu",
        default="auto",
        variable="LLAMA_ARG_DEVICE",
        scope=Scope.SERVICE,
        group=_MODEL,
    ),
)
