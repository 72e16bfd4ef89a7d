"""The nouns of token saliency: requests that go in, results that come out.

Pure data: no torch, no Streamlit, no file formats. ``base`` holds the shared vocabulary, ``requests`` what can be
asked, ``results`` what comes out; import from here.
"""

from backend.types.base import (
    EMBEDDED_MODEL,
    SCALED_ROLES,
    FloatArray,
    Level,
    Objective,
    Role,
    Scalar,
    Tick,
    Verdict,
    no_tick,
    visible,
)
from backend.types.requests import (
    AnswerRequest,
    CutRequest,
    Decoding,
    MeasureRequest,
    MethodSpec,
    ModelRef,
    Prompt,
    SaliencyRequest,
    Turn,
    cache_key,
)
from backend.types.results import (
    Answer,
    Check,
    Estimate,
    Explanation,
    ModelInfo,
    Passage,
    Passes,
    Scores,
    TargetToken,
    Token,
    TokenAttribution,
)

__all__ = [
    "EMBEDDED_MODEL",
    "SCALED_ROLES",
    "Answer",
    "AnswerRequest",
    "Check",
    "CutRequest",
    "Decoding",
    "Estimate",
    "Explanation",
    "FloatArray",
    "Level",
    "MeasureRequest",
    "MethodSpec",
    "ModelInfo",
    "ModelRef",
    "Objective",
    "Passage",
    "Passes",
    "Prompt",
    "Role",
    "SaliencyRequest",
    "Scalar",
    "Scores",
    "TargetToken",
    "Tick",
    "Token",
    "TokenAttribution",
    "Turn",
    "Verdict",
    "cache_key",
    "no_tick",
    "visible",
]
