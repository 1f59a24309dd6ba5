"""From sampling parameters to the parts of a chain, in llama.cpp's order.

Source: llama.cpp `common_sampler_init` and the `llama_sampler_init_*` functions, which leave out
what has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.errors import NotSupported
from engine.requests import Mirostat, Sampler, SamplingParams
from engine.sampling.adaptive import AdaptiveP
from engine.sampling.breakers import Breakers
from engine.sampling.dist import Dist
from engine.sampling.dry import Dry
from engine.sampling.edits import LogitBias, Penalties
from engine.sampling.infill import Infill
from engine.sampling.mirostat import MirostatV1, MirostatV2
from engine.sampling.stage import Picker, Stage
from engine.sampling.temperature import DynamicTemperature, Temperature
from engine.sampling.truncation import MinP, TopK, TopNSigma, TopP, TypicalP
from engine.sampling.vocab import SamplerVocab
from engine.sampling.xtc import Xtc


class Builder:
    """Makes the parts of a chain; every number is rounded to float32 before it is looked at."""

    def __init__(
        self, params: SamplingParams, *, vocab: SamplerVocab, prompt: Sequence[int], seed: int
    ) -> None:
        self._params = params
        self._vocab = vocab
        self._prompt = prompt
        self._seed = seed

    def stages(self, *, ignore_eos: bool) -> list[Stage]:
        """Returns everything before the draw, in order; samplers without effect are left out."""
        bias = self._bias(ignore_eos=ignore_eos)
        if self._params.mirostat is not Mirostat.OFF:
            return [*bias, *self._fixed_temperature()]
        samplers = self._greedy_samplers() or self._params.samplers
        return [*bias, *(stage for sampler in samplers for stage in self._stage(sampler))]

    def picker(self) -> Picker:
        """Returns what draws."""
        params, seed = self._params, self._seed
        tau, eta = params.mirostat_tau, params.mirostat_eta
        if params.mirostat is Mirostat.V1:
            size = self._vocab.vocab_size
            return MirostatV1(vocab_size=size, tau=tau, eta=eta, seed=seed)
        if params.mirostat is Mirostat.V2:
            return MirostatV2(tau=tau, eta=eta, seed=seed)
        if Sampler.ADAPTIVE_P in params.samplers:
            target, decay = params.adaptive_target, params.adaptive_decay
            return AdaptiveP(target=target, decay=decay, seed=seed)
        return Dist(seed)

    def _bias(self, *, ignore_eos: bool) -> list[Stage]:
        forbidden = self._vocab.suppressed_tokens
        if ignore_eos:
            forbidden = forbidden | self._vocab.eog_tokens
        pairs = [*self._params.logit_bias, *((token_id, -math.inf) for token_id in forbidden)]
        return [LogitBias(pairs)] if pairs else []

    def _stage(self, sampler: Sampler) -> list[Stage]:
        match sampler:
            case Sampler.PENALTIES:
                return self._penalties()
            case Sampler.DRY:
                return self._dry()
            case Sampler.TEMPERATURE:
                return self._temperature()
            case Sampler.XTC:
                return self._xtc()
            case Sampler.INFILL:
                return self._infill()
            case Sampler.ADAPTIVE_P:
                return []
            case _:
                return self._truncation(sampler)

    def _truncation(self, sampler: Sampler) -> list[Stage]:
        params, min_keep = self._params, self._params.min_keep
        top_p, min_p = np.float32(params.top_p), np.float32(params.min_p)
        sigma, typical_p = np.float32(params.top_n_sigma), np.float32(params.typical_p)
        match sampler:
            case Sampler.TOP_N_SIGMA if sigma > 0:
                return [TopNSigma(sigma)]
            case Sampler.TOP_K if params.top_k > 0:
                return [TopK(params.top_k)]
            case Sampler.TYPICAL_P if typical_p < 1:
                return [TypicalP(typical_p, min_keep)]
            case Sampler.TOP_P if top_p < 1:
                return [TopP(top_p, min_keep)]
            case Sampler.MIN_P if min_p > 0:
                return [MinP(min_p, min_keep)]
            case _:
                return []

    def _penalties(self) -> list[Stage]:
        params = self._params
        repeat, frequency, presence = (
            float(np.float32(value))
            for value in (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
        )
        if not params.repeat_last_n or (repeat, frequency, presence) == (1.0, 0.0, 0.0):
            return []
        return [
            Penalties(
                last_n=params.repeat_last_n,
                repeat=repeat,
                frequency=frequency,
                presence=presence,
                prompt=self._prompt,
            )
        ]

    def _dry(self) -> list[Stage]:
        params = self._params
        multiplier, base = np.float32(params.dry_multiplier), np.float32(params.dry_base)
        if multiplier == 0 or base < 1 or not params.dry_penalty_last_n:
            return []
        return [
            Dry(
                multiplier=params.dry_multiplier,
                base=params.dry_base,
                allowed_length=params.dry_allowed_length,
                last_n=params.dry_penalty_last_n,
                breakers=Breakers(
                    params.dry_sequence_breakers,
                    word=self._vocab.word,
                    tokenize=self._vocab.tokenize,
                ).tails,
                prompt=self._prompt,
            )
        ]

    def _temperature(self) -> list[Stage]:
        params = self._params
        around = np.float32(params.dynatemp_range)
        if around <= 0:
            return self._fixed_temperature()
        exponent = np.float32(params.dynatemp_exponent)
        return [DynamicTemperature(np.float32(params.temperature), around, exponent)]

    def _fixed_temperature(self) -> list[Stage]:
        temperature = np.float32(self._params.temperature)
        return [] if temperature == 1 else [Temperature(temperature)]

    def _xtc(self) -> list[Stage]:
        params = self._params
        if not self._has_xtc():
            return []
        return [
            Xtc(
                probability=params.xtc_probability,
                threshold=params.xtc_threshold,
                min_keep=params.min_keep,
                seed=self._seed,
            )
        ]

    def _infill(self) -> list[Stage]:
        if self._vocab.end_token is None:
            raise NotSupported("the infill sampler on a vocabulary without an end token")
        return [Infill(self._vocab)]

    def _has_xtc(self) -> bool:
        probability = np.float32(self._params.xtc_probability)
        threshold = np.float32(self._params.xtc_threshold)
        return bool(probability > 0 and threshold <= 0.5)

    def _greedy_samplers(self) -> tuple[Sampler, ...] | None:
        """Returns what matters of a chain that takes the best token, None if this is not one.

        top_k, top_p, min_p and top_n_sigma never drop the best token, so before a temperature of 0
        they can be left out, and the whole row is not needed for them.
        """
        params = self._params
        edits = (Sampler.PENALTIES, Sampler.DRY)
        head = [sampler for sampler in params.samplers if sampler in edits]
        moves_best = (
            (Sampler.TYPICAL_P in params.samplers and np.float32(params.typical_p) < 1)
            or (Sampler.XTC in params.samplers and self._has_xtc())
            or Sampler.INFILL in params.samplers
            or Sampler.ADAPTIVE_P in params.samplers
        )
        takes_best = (
            Sampler.TEMPERATURE in params.samplers
            and np.float32(params.temperature) <= 0
            and np.float32(params.dynatemp_range) <= 0
        )
        if moves_best or not takes_best or list(params.samplers[: len(head)]) != head:
            return None
        return (*head, Sampler.TEMPERATURE)
