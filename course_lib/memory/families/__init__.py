"""The table: how each model type of Transformers' causal-LM mapping is put together.

One row says what differs from Llama (see `course_lib.memory.blocks.Family`). Rows hold names of configuration fields,
never numbers of a particular model. A model type without a row, or a configuration that turns on something its row does
not cover, is left to the real class on the meta device.
"""

from __future__ import annotations

from course_lib.memory.blocks import Family
from course_lib.memory.families import dense, encoders, experts, hybrid, latent

FAMILIES: dict[str, Family] = {
    **dense.FAMILIES,
    **encoders.FAMILIES,
    **experts.FAMILIES,
    **latent.FAMILIES,
    **hybrid.FAMILIES,
}
FAMILIES["sarvam_mla"] = FAMILIES["deepseek_v3"]
FAMILIES["sarvam_moe"] = FAMILIES["glm4_moe"]
FAMILIES["gemma4_unified_text"] = FAMILIES["gemma4_text"]
