"""How a decoder knows where a token stands.

Functions
---------
sinusoidal_embedding, LearnedPositions
    Absolute positions, added to the embeddings.
rope_frequencies, rope_cos_sin, apply_rope, convert_rope_layout
    Rotary positions, every scaling in use, both layouts.
alibi_slopes, alibi_bias
    Attention with linear biases.
"""

from course_lib.positions.absolute import LearnedPositions, sinusoidal_embedding
from course_lib.positions.alibi import alibi_bias, alibi_slopes
from course_lib.positions.rope import apply_rope, convert_rope_layout, rope_cos_sin
from course_lib.positions.rope_scaling import ROPE_TYPES, rope_frequencies

__all__ = [
    "ROPE_TYPES",
    "LearnedPositions",
    "alibi_bias",
    "alibi_slopes",
    "apply_rope",
    "convert_rope_layout",
    "rope_cos_sin",
    "rope_frequencies",
    "sinusoidal_embedding",
]
