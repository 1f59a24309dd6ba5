"""How each `tokenizer.ggml.pre` cuts text into the words that BPE never merges across.

The patterns are Oniguruma's (what the `tokenizers` package compiles). They give the words that
llama.cpp's splitter gives, its simplifications included, and never take more than linear time.
Knows no vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import UnsupportedModel

# No pattern sees past a single blank between two plain words, or crosses it, unless it says so.
_BETWEEN_WORDS = r"(?<=[A-Za-z])(?= [A-Za-z])"
_BETWEEN_LINES = r"(?<=[A-Za-z]\n)(?=[A-Za-z])"


@dataclass(frozen=True)
class PreTokenizer:
    """The splits of one family, applied one after the other, and what else its name implies.

    `ignores_merges`: a word that is a token is not merged. `adds_bos`: a BOS token is the default.
    `has_default_bos`: token 11 is BOS unless the file says otherwise. `byte_level`: bytes are
    written as GPT-2's printable characters; otherwise text is raw UTF-8 with `<0xXX>` tokens.
    `escapes_spaces`: spaces are written as U+2581. `newline_words`: a run of newlines that is a
    token is not merged. `breaks` matches where a text can be cut in two without changing a word
    (None: nowhere), for Python's `re`.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    has_default_bos: bool = True
    byte_level: bool = True
    escapes_spaces: bool = False
    newline_words: bool = False
    breaks: str | None = _BETWEEN_WORDS


def find_pre_tokenizer(name: str | None) -> PreTokenizer:
    """Returns the pre-tokenizer of a `tokenizer.ggml.pre` value.

    Raises:
        UnsupportedModel: the value is absent or unknown. Guessing would degrade every answer
            silently, so the caller has to choose one.
    """
    if name in _PRE_TOKENIZERS:
        return _PRE_TOKENIZERS[name]
    cause = "is missing" if name is None else f"{name!r} is unknown"
    raise UnsupportedModel(
        "tokenizer.ggml.pre",
        f"{cause}; choose one of the known pre-tokenizers with --override-pre "
        f"({', '.join(sorted(_PRE_TOKENIZERS))})",
    )


_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_WORD_WITH_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_OTHERS_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
# Blanks up to the last newline among them. The plain `\s*[\r\n]+` gives back one blank at a time
# where there is none, of which the regular expressions allow ten million in all.
_NEWLINES = r"(?:[^\S\r\n]*+[\r\n]++)++"
_BLANKS = r"\s+(?!\S)|\s+"
_ASCII_MARK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_KANJI_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_LINES = r"[^\n]+|\n+"

_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = "|".join((_CONTRACTION, _WORD, r"\p{N}{1,3}", _OTHERS, _NEWLINES, _BLANKS))
_QWEN2 = "|".join((_CONTRACTION, _WORD, r"\p{N}", _OTHERS, _NEWLINES, _BLANKS))
_PUNCTUATED = (
    rf"{_ASCII_MARK}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_NEWLINES}|{_BLANKS}"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _cased(letters: str, ending: str) -> str:
    """Words of letters but a-z, then letters but A-Z, where either part may be empty.

    Written so that nothing is given back: up to the first small letter and on from there; else up
    to the last letter that is neither; else capitals alone.
    """
    lead = r"[^\r\n\p{L}\p{N}]?"
    upper, lower, caseless = (f"[{letters}&&[^{case}]]" for case in ("a-z", "A-Z", "A-Za-z"))
    return (
        f"{lead}(?:{upper}*+[a-z]{lower}*+|(?:[A-Z]*+{caseless})++){ending}|{lead}[A-Z]++{ending}"
    )


_GPT4O = "|".join(
    (
        _cased(r"\p{L}", f"(?:{_CONTRACTION})?"),
        r"\p{N}{1,3}",
        _OTHERS_OR_SLASH,
        _NEWLINES,
        _BLANKS,
    )
)
_GRANITE_MULTILINGUAL = "|".join(
    (
        _cased(r"[\p{L}\p{M}]", f"(?:{_CONTRACTION})?"),
        r"\p{N}{1,3}",
        _OTHERS_OR_SLASH,
        _NEWLINES,
        _BLANKS,
    )
)
_TEKKEN = "|".join((_cased(r"\p{L}", ""), r"\p{N}", _OTHERS_OR_SLASH, _NEWLINES, _BLANKS))

# llama.cpp knows no letter case beyond ASCII here, so a word is any run of letters and marks.
_CASELESS_WORD = rf"{_WORD_WITH_MARKS}(?:{_CONTRACTION})?"

_HAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
)
_KIMI = "|".join(
    (
        f"[{_HAN}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_CONTRACTION})?",
        r"\p{N}{1,3}",
        _OTHERS,
        _NEWLINES,
        _BLANKS,
    )
)

# Digits in threes from the right; what precedes a number stays with its first group. \G makes
# every group after the first find its start at once: a look-ahead per group would be quadratic.
_THREES_FROM_RIGHT = r"\G(?:(?<=\p{N})\p{N}{3}|\P{N}*+\p{N}{1,3}(?=(?:\p{N}{3})*+(?!\p{N})))"
# Splits before each group of three ASCII digits and nowhere else, so a word runs from one such
# point to the next, over whatever numerals of other scripts lie between.
_TO_NEXT_THREE = r"(?:[^0-9]++[0-9]{0,2}(?=(?:[0-9]{3})*+(?![0-9])))*+"
_BEFORE_THREES = (
    rf"(?!\A)[0-9]{{3}}{_TO_NEXT_THREE}"
    rf"|\A(?:[0-9]{{1,3}}(?=(?:[0-9]{{3}})*+(?![0-9])))?{_TO_NEXT_THREE}"
)

_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
# The third range begins at U+8C48, as in llama.cpp, and so takes in Hangul and private use too.
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_DEEPSEEK_MARKS = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+"
# These ranges hold blanks (U+2028, U+3000), which llama.cpp does not count as text here.
_DEEPSEEK_CJK = "[[\u0800-\u9fa5\uac00-\ud7ff]&&[^\\s]]+"
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_KANJI_KANA}"
)

_QWEN2_LIKE = PreTokenizer((_QWEN2,))
_GPT2_LIKE = PreTokenizer((_GPT2,))
_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_LIKE = PreTokenizer((_LLAMA3,))
_LLAMA3_WITH_BOS = PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)
_DEEPSEEK3_LIKE = PreTokenizer((r"\p{N}{1,3}", _KANJI_KANA, _PUNCTUATED))
_GPT4O_LIKE = PreTokenizer((_GPT4O,))
_BLOOM_LIKE = PreTokenizer((_BLOOM,))
_TINY_AYA = PreTokenizer(
    (
        _THREES_FROM_RIGHT,
        "|".join((_CASELESS_WORD, r"\p{N}{1,3}", _OTHERS_OR_SLASH, _NEWLINES, _BLANKS)),
    )
)
_BAILING = PreTokenizer(("|".join((_CONTRACTION, _WORD, r"\p{N}", _OTHERS, _NEWLINES, _BLANKS)),))
_GEMMA4 = PreTokenizer(
    (_LINES,),
    adds_bos=True,
    byte_level=False,
    escapes_spaces=True,
    newline_words=True,
    breaks=_BETWEEN_LINES,
)

_PRE_TOKENIZERS = {
    **dict.fromkeys(
        (
            "a.x-4.0",
            "exaone4",
            "gigachat",
            "gpt-2",
            "granite-docling",
            "jais",
            "jina-de",
            "jina-es",
            "jina-v1-en",
            "jina-v2-code",
            "jina-v2-de",
            "jina-v2-es",
            "mellum",
            "modern-bert",
            "mpt",
            "olmo",
            "phi-2",
            "roberta-bpe",
            "trillion",
        ),
        _GPT2_LIKE,
    ),
    **dict.fromkeys(
        (
            "codeshell",
            "command-r",
            "exaone",
            "mellum2",
            "minerva-7b",
            "refact",
            "smollm",
            "starcoder",
        ),
        _DIGITS_THEN_GPT2,
    ),
    **dict.fromkeys(
        (
            "falcon-h1",
            "falcon3",
            "jina-v5-nano",
            "lfm2",
            "llama-bpe",
            "llama-v3",
            "llama3",
            "midm-2.0",
            "pixtral",
        ),
        _LLAMA3_WITH_BOS,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3_LIKE),
    **dict.fromkeys(
        (
            "deepseek-r1-qwen",
            "f2llmv2",
            "grok-2",
            "hunyuan",
            "kormo",
            "megrez",
            "qwen2",
            "solar-open",
            "stablelm2",
        ),
        _QWEN2_LIKE,
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK3_LIKE),
    **dict.fromkeys(("gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie"), _GPT4O_LIKE),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _BLOOM_LIKE),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("cohere2moe", "tiny_aya"), _TINY_AYA),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _GEMMA4),
    **dict.fromkeys(
        ("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignores_merges=True, has_default_bos=False)
    ),
    "chatglm-bpe": PreTokenizer((_LLAMA3,), has_default_bos=False),
    "default": PreTokenizer(
        (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9]{3}"),
    ),
    "minicpm5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            "|".join((_CONTRACTION, _WORD, r"\p{N}+", _OTHERS, _NEWLINES, _BLANKS)),
        ),
        ignores_merges=True,
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            _DEEPSEEK_MARKS,
            # Only where the run begins: from every blank of a long run it would be quadratic.
            r"(?<!\s)\s++\z",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
    ),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _KANJI_KANA,
            rf"{_ASCII_MARK}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_BLANKS}",
            r"\p{N}",
        )
    ),
    "youtu": PreTokenizer(
        (
            _YOUTU_SCRIPTS,
            "|".join((_CASELESS_WORD, r"\p{N}", _OTHERS_OR_SLASH, _NEWLINES, _BLANKS)),
        ),
        ignores_merges=True,
    ),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9]{3}")),
    "jais-2": PreTokenizer(
        (
            "|".join(
                (
                    *(_CONTRACTION, _WORD, r"\p{N}{1,3}", _OTHERS, _NEWLINES),
                    *(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)),
                    r"\s{1,2}(?!\S)|\s",
                )
            ),
        )
    ),
    "sarvam-moe": PreTokenizer(
        (_LINES,), byte_level=False, escapes_spaces=True, breaks=_BETWEEN_LINES
    ),
    "whitespace": PreTokenizer((r"\S+",), byte_level=False),
    "qwen35": PreTokenizer(
        (
            "|".join(
                (
                    *(_CONTRACTION, _WORD_WITH_MARKS, r"\p{N}"),
                    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _NEWLINES, _BLANKS),
                )
            ),
        )
    ),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "tekken": PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "exaone-moe": PreTokenizer(
        (
            "|".join(
                (
                    _CONTRACTION,
                    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                    *(r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]?", _NEWLINES, _BLANKS),
                )
            ),
        ),
        breaks=_BETWEEN_LINES,
    ),
    "chameleon": PreTokenizer(
        (
            r"<sentinel:[0-9]+>",
            r"IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    "granite-embed-multi-97m": PreTokenizer((_GRANITE_MULTILINGUAL,), ignores_merges=True),
    "superbpe": PreTokenizer((r"\p{N}+", _BEFORE_THREES), breaks=None),
    "seed-coder": PreTokenizer(
        (
            "|".join(
                (
                    *(_CONTRACTION, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"),
                    *(_NEWLINES, _BLANKS),
                )
            ),
        )
    ),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "ufakzeka": PreTokenizer(("|".join((_WORD, r"\p{N}", _OTHERS, _NEWLINES, _BLANKS)),)),
    "afmoe": PreTokenizer((_THREES_FROM_RIGHT, _AFMOE_SCRIPTS, _PUNCTUATED)),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
}
