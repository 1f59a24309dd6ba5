"""Defaults of the sampler chain.

A value is clamped where the peer clamps, or where its sampler takes all beyond for the same. It is
refused where the peer refuses, or where no request could run under it.
"""

from __future__ import annotations

from service.flag_values import (
    LOGIT_BIAS,
    SAMPLER_LETTERS,
    SAMPLERS,
    SEED,
    SWITCH,
    TEXT,
    Kind,
    integer,
    number,
    positive_number,
)
from service.flags import Flag, Scope


def _row(
    names: tuple[str, ...],
    kind: Kind,
    dest: str,
    help_text: str,
    variable: str | None = None,
    *,
    repeats: bool = False,
) -> Flag:
    return Flag(
        names,
        kind,
        dest,
        help_text,
        variable=variable,
        repeats=repeats,
        scope=Scope.SERVICE,
        group="Sampling defaults",
    )


SAMPLING = (
    _row(("--samplers",), SAMPLERS, "samplers", "the chain, names joined by ;"),
    _row(("--sampling-seq", "--sampler-seq"), SAMPLER_LETTERS, "samplers", "the chain in letters"),
    _row(("-s", "--seed"), SEED, "seed", "seed of the draws; -1 is a fresh one per request"),
    _row(("--ignore-eos",), SWITCH, "ignore_eos", "never end at an end-of-sequence token"),
    _row(
        ("--temperature", "--temp"),
        number(0, clamp=True),
        "temperature",
        "temperature (0.8); 0 takes the best token",
        "LLAMA_ARG_TEMPERATURE",
    ),
    _row(
        ("--top-k",),
        integer(-1),
        "top_k",
        "keep the k best tokens (40); 0 is off",
        "LLAMA_ARG_TOP_K",
    ),
    _row(
        ("--top-p",),
        number(0, 1, clamp=True),
        "top_p",
        "keep the best tokens up to this probability (0.95); 1 is off",
        "LLAMA_ARG_TOP_P",
    ),
    _row(
        ("--min-p",),
        number(0, 1, clamp=True),
        "min_p",
        "drop tokens below this share of the best one (0.05); 0 is off",
        "LLAMA_ARG_MIN_P",
    ),
    _row(
        ("--top-n-sigma", "--top-nsigma"),
        number(),
        "top_n_sigma",
        "drop logits this many deviations below the best (-1); 0 or less is off",
    ),
    _row(("--xtc-probability",), number(0, 1, clamp=True), "xtc_probability", "chance of XTC (0)"),
    _row(
        ("--xtc-threshold",),
        number(0, 1, clamp=True),
        "xtc_threshold",
        "probability that XTC takes for certain (0.1); above 0.5 is off",
    ),
    _row(
        ("--typical-p", "--typical"),
        number(0, clamp=True),
        "typical_p",
        "locally typical sampling (1); 1 or more is off",
    ),
    _row(
        ("--repeat-last-n",),
        integer(0),
        "repeat_last_n",
        "tokens that penalties look back at (64); 0 is off",
    ),
    _row(
        ("--repeat-penalty",),
        positive_number(),
        "repeat_penalty",
        "divides the logits of repeated tokens (1); 1 is off",
        "LLAMA_ARG_REPEAT_PENALTY",
    ),
    _row(
        ("--presence-penalty",),
        number(),
        "presence_penalty",
        "taken from the logits of tokens seen (0)",
        "LLAMA_ARG_PRESENCE_PENALTY",
    ),
    _row(
        ("--frequency-penalty",),
        number(),
        "frequency_penalty",
        "taken from a logit for each time its token was seen (0)",
        "LLAMA_ARG_FREQUENCY_PENALTY",
    ),
    _row(("--dry-multiplier",), number(0), "dry_multiplier", "strength of DRY (0); 0 is off"),
    _row(("--dry-base",), number(), "dry_base", "base of DRY (1.75); below 1 is ignored"),
    _row(
        ("--dry-allowed-length",),
        integer(0),
        "dry_allowed_length",
        "repeated tokens that DRY lets pass (2)",
    ),
    _row(
        ("--dry-penalty-last-n",),
        integer(0),
        "dry_penalty_last_n",
        "tokens that DRY looks back at (64); 0 is off",
    ),
    _row(
        ("--dry-sequence-breaker",),
        TEXT,
        "dry_sequence_breakers",
        "text that cuts a DRY match, repeatable, instead of the usual ones; none is no breaker",
        repeats=True,
    ),
    _row(
        ("--adaptive-target",),
        number(high=1, clamp=True),
        "adaptive_target",
        "probability that adaptive-p aims at (-1); below 0 is off",
    ),
    _row(("--adaptive-decay",), number(0, 0.99), "adaptive_decay", "memory of adaptive-p (0.9)"),
    _row(
        ("--dynatemp-range",),
        number(0, clamp=True),
        "dynatemp_range",
        "range of dynamic temperature (0)",
    ),
    _row(("--dynatemp-exp",), number(0), "dynatemp_exponent", "exponent of that range (1)"),
    _row(("--mirostat",), integer(0, 2), "mirostat", "0 is off, else the version of Mirostat (0)"),
    _row(("--mirostat-lr",), number(0), "mirostat_eta", "learning rate of Mirostat (0.1)"),
    _row(("--mirostat-ent",), number(0), "mirostat_tau", "target entropy of Mirostat (5)"),
    _row(("--grammar",), TEXT, "grammar", "GBNF that every answer follows which names no other"),
    _row(("--grammar-file",), TEXT, "grammar_file", "the same from a file"),
    _row(("-j", "--json-schema"), TEXT, "json_schema", "JSON schema in place of a grammar"),
    _row(("-jf", "--json-schema-file"), TEXT, "json_schema_file", "the same from a file"),
    _row(
        ("-l", "--logit-bias"),
        LOGIT_BIAS,
        "logit_bias",
        "bias of one token, like 15043+1 or 15043-inf, repeatable",
        repeats=True,
    ),
)
