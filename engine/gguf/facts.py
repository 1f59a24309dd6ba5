"""What a model file says of itself, for people and model lists: names, sizes, quantisation.

Nothing here changes what is computed.

Source: llama.cpp's llama_ftype names (llama-model-loader) for the quantisation.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from gguf import GGMLQuantizationType, LlamaFileType

from engine.gguf.reader import GgufFile

# Where llama.cpp's name is not the enum's own without its prefix.
_NAMES: dict[LlamaFileType, str] = {
    LlamaFileType.ALL_F32: "all F32",
    LlamaFileType.MOSTLY_Q2_K: "Q2_K - Medium",
    LlamaFileType.MOSTLY_Q2_K_S: "Q2_K - Small",
    LlamaFileType.MOSTLY_Q3_K_S: "Q3_K - Small",
    LlamaFileType.MOSTLY_Q3_K_M: "Q3_K - Medium",
    LlamaFileType.MOSTLY_Q3_K_L: "Q3_K - Large",
    LlamaFileType.MOSTLY_Q4_K_S: "Q4_K - Small",
    LlamaFileType.MOSTLY_Q4_K_M: "Q4_K - Medium",
    LlamaFileType.MOSTLY_Q5_K_S: "Q5_K - Small",
    LlamaFileType.MOSTLY_Q5_K_M: "Q5_K - Medium",
    LlamaFileType.MOSTLY_TQ1_0: "TQ1_0 - 1.69 bpw ternary",
    LlamaFileType.MOSTLY_TQ2_0: "TQ2_0 - 2.06 bpw ternary",
    LlamaFileType.MOSTLY_IQ1_S: "IQ1_S - 1.5625 bpw",
    LlamaFileType.MOSTLY_IQ1_M: "IQ1_M - 1.75 bpw",
    LlamaFileType.MOSTLY_IQ2_XXS: "IQ2_XXS - 2.0625 bpw",
    LlamaFileType.MOSTLY_IQ2_XS: "IQ2_XS - 2.3125 bpw",
    LlamaFileType.MOSTLY_IQ2_S: "IQ2_S - 2.5 bpw",
    LlamaFileType.MOSTLY_IQ2_M: "IQ2_M - 2.7 bpw",
    LlamaFileType.MOSTLY_IQ3_XS: "IQ3_XS - 3.3 bpw",
    LlamaFileType.MOSTLY_IQ3_XXS: "IQ3_XXS - 3.0625 bpw",
    LlamaFileType.MOSTLY_IQ3_S: "IQ3_S - 3.4375 bpw",
    LlamaFileType.MOSTLY_IQ3_M: "IQ3_S mix - 3.66 bpw",
    LlamaFileType.MOSTLY_IQ4_NL: "IQ4_NL - 4.5 bpw",
    LlamaFileType.MOSTLY_IQ4_XS: "IQ4_XS - 4.25 bpw",
    LlamaFileType.MOSTLY_MXFP4_MOE: "MXFP4 MoE",
}


@dataclass(frozen=True)
class FileFacts:
    """`name` is "" where the file has none; `num_params` counts elements of all tensors.

    `pooling_type` is llama.cpp's number of how the model pools hidden states, None where the file
    says nothing.
    """

    architecture: str
    name: str
    file_type: str
    num_params: int
    size_bytes: int
    pooling_type: int | None = None


def read_facts(file: GgufFile) -> FileFacts:
    """Reads them from the header.

    Raises:
        ModelFileError: `general.architecture` is missing, or a key has the wrong type.
    """
    tensors = file.tensors.values()
    architecture = file.metadata.get_str("general.architecture")
    pooling = f"{architecture}.pooling_type"
    return FileFacts(
        architecture=architecture,
        name=file.metadata.get_str("general.name", ""),
        file_type=_file_type(file),
        num_params=sum(math.prod(tensor.shape) for tensor in tensors),
        size_bytes=sum(tensor.nbytes for tensor in tensors),
        pooling_type=file.metadata.get_uint(pooling) if pooling in file.metadata else None,
    )


def _file_type(file: GgufFile) -> str:
    """The file's own word, else a guess from the commonest type, as llama.cpp marks it."""
    if "general.file_type" in file.metadata:
        return _type_name(file.metadata.get_uint("general.file_type"))
    counts = Counter(tensor.ggml_type for tensor in file.tensors.values())
    commonest = counts.most_common(1)[0][0] if counts else GGMLQuantizationType.F32
    return f"(guessed) {_type_name(_guessed_type(commonest))}"


def _guessed_type(commonest: GGMLQuantizationType) -> LlamaFileType:
    """The file type that a tensor type stands for; K types stand for their medium mix."""
    for name in (f"MOSTLY_{commonest.name}", f"MOSTLY_{commonest.name}_M"):
        if name in LlamaFileType.__members__:
            return LlamaFileType[name]
    return LlamaFileType.ALL_F32


def _type_name(number: int) -> str:
    try:
        file_type = LlamaFileType(number)
    except ValueError:
        return "unknown, may not work"
    return _NAMES.get(file_type, file_type.name.removeprefix("MOSTLY_"))
