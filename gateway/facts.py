"""What the gateway knows of the served model and server: read once, each time it becomes ready."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvarts.v1 import generation_pb2, model_pb2

from gateway.options import GatewayOptions
from gateway.schema import RANDOM_SEED, CompletionParams, Limits

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

SAMPLER_NAMES = {
    generation_pb2.SAMPLER_PENALTIES: "penalties",
    generation_pb2.SAMPLER_DRY: "dry",
    generation_pb2.SAMPLER_TOP_N_SIGMA: "top_n_sigma",
    generation_pb2.SAMPLER_TOP_K: "top_k",
    generation_pb2.SAMPLER_TYPICAL_P: "typ_p",
    generation_pb2.SAMPLER_TOP_P: "top_p",
    generation_pb2.SAMPLER_MIN_P: "min_p",
    generation_pb2.SAMPLER_XTC: "xtc",
    generation_pb2.SAMPLER_TEMPERATURE: "temperature",
    generation_pb2.SAMPLER_INFILL: "infill",
    generation_pb2.SAMPLER_ADAPTIVE_P: "adaptive_p",
}
SAMPLER_VALUES = {name: value for value, name in SAMPLER_NAMES.items()}
_REASONING_FORMATS = {
    generation_pb2.REASONING_FORMAT_NONE: "none",
    generation_pb2.REASONING_FORMAT_AUTO: "auto",
    generation_pb2.REASONING_FORMAT_DEEPSEEK_LEGACY: "deepseek-legacy",
}
_MIROSTAT_VERSIONS = {generation_pb2.MIROSTAT_V1: 1, generation_pb2.MIROSTAT_V2: 2}


@dataclass(frozen=True)
class Facts:
    """The model, the server, and what follows from them for every request.

    `aliases` and `tags` are sorted; `name` is what replies call the model. `media_marker` is
    fresh per start, as the peer's is.
    """

    model: model_pb2.Model
    info: model_pb2.ServerInfo
    name: str
    aliases: Sequence[str]
    tags: Sequence[str]
    defaults: CompletionParams
    media_marker: str

    @property
    def limits(self) -> Limits:
        """What a request may ask for."""
        return Limits(num_slots=self.info.num_slots)

    @property
    def eog_bias(self) -> tuple[tuple[int, float], ...]:
        """The ban of every end-of-generation token."""
        return tuple((token, float("-inf")) for token in self.model.special_tokens.eog_ids)


def gather(model: model_pb2.Model, info: model_pb2.ServerInfo, options: GatewayOptions) -> Facts:
    """Puts together what the service told and what the gateway was started with."""
    aliases = sorted(options.aliases or model.aliases)
    return Facts(
        model=model,
        info=info,
        name=aliases[0] if aliases else model.id,
        aliases=aliases,
        tags=sorted(options.tags or model.tags),
        defaults=_defaults(info.defaults, options),
        media_marker=f"<__media_{random_id()}__>",
    )


def random_id() -> str:
    """32 letters and digits, the form of the peer's ids."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(32))


def params_of(settings: generation_pb2.GenerationSettings) -> CompletionParams:
    """The settings of a request, as far as the service knows them, in the peer's terms."""
    sampling = settings.sampling
    limit = settings.max_tokens if settings.HasField("max_tokens") else -1
    return CompletionParams(
        cache_prompt=settings.cache_prompt,
        return_progress=settings.return_progress,
        n_predict=limit,
        n_indent=settings.n_indent,
        n_keep=settings.n_keep,
        n_discard=settings.n_discard,
        n_cache_reuse=settings.n_cache_reuse,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        top_n_sigma=sampling.top_n_sigma,
        xtc_probability=sampling.xtc_probability,
        xtc_threshold=sampling.xtc_threshold,
        typical_p=sampling.typical_p,
        temperature=sampling.temperature,
        dynatemp_range=sampling.dynatemp_range,
        dynatemp_exponent=sampling.dynatemp_exponent,
        repeat_last_n=sampling.repeat_last_n,
        repeat_penalty=sampling.repeat_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        dry_multiplier=sampling.dry_multiplier,
        dry_base=sampling.dry_base,
        dry_allowed_length=sampling.dry_allowed_length,
        dry_penalty_last_n=sampling.dry_penalty_last_n,
        dry_sequence_breakers=tuple(sampling.dry_sequence_breakers.values),
        mirostat=_MIROSTAT_VERSIONS.get(sampling.mirostat, 0),
        mirostat_tau=sampling.mirostat_tau,
        mirostat_eta=sampling.mirostat_eta,
        adaptive_target=sampling.adaptive_target,
        adaptive_decay=sampling.adaptive_decay,
        seed=sampling.seed if sampling.HasField("seed") else RANDOM_SEED,
        n_probs=settings.top_logprobs,
        min_keep=sampling.min_keep,
        post_sampling_probs=settings.post_sampling_probs,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        ignore_eos=settings.ignore_eos,
        stop=tuple(settings.stop),
        samplers=tuple(
            SAMPLER_NAMES[value] for value in sampling.samplers.samplers if value in SAMPLER_NAMES
        ),
        lora=tuple((entry.adapter_id, entry.scale) for entry in settings.adapters.scales),
    )


def _defaults(
    settings: generation_pb2.GenerationSettings, options: GatewayOptions
) -> CompletionParams:
    params = params_of(settings)
    return dataclasses.replace(
        params,
        lora=(),
        verbose=options.is_verbose,
        sse_ping_interval=options.sse_ping_interval_s,
        server_n_predict=params.n_predict,
        is_eos_banned=params.ignore_eos,
        grammar=settings.grammar,
        reasoning_format=_REASONING_FORMATS.get(settings.reasoning.format, "deepseek"),
    )
