"""Caches and small models that tests of caches share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from course_lib import kv_cache
from course_lib.memory.meta import cache_argument

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = 9
#: Small configurations of each family, some with windows that short texts outgrow.
CONFIGURATIONS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, sliding_window=WINDOW),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=WINDOW),
}


#: Every cache that must not change a single number: from a configuration to an empty cache with room for 700 tokens.
LOSSLESS: dict[str, Callable[[PretrainedConfig], kv_cache.KVCache]] = {
    "dynamic": kv_cache.DynamicCache,
    "static": lambda config: kv_cache.StaticCache(config, 700),
    "sliding window": lambda config: kv_cache.SlidingWindowCache(config, window=700),
    "offloaded to cpu": kv_cache.OffloadedCache,
    "offloaded to disk": lambda config: kv_cache.OffloadedCache(config, to="disk"),
    "paged": kv_cache.PagedCache,
    "paged, fixed": lambda config: kv_cache.PagedCache(config, block_size=4, num_blocks=1000),
    "prefix": lambda config: kv_cache.PrefixCache(config, block_size=4),
}


def written(
    model: transformers.PreTrainedModel, ids: torch.Tensor, cache: transformers.Cache, new: int, **options: Any
) -> Any:
    """Run Transformers' own greedy generation with a cache."""
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        **{cache_argument(model): cache},
        **options,
    )


@dataclass(frozen=True)
class Driven:
    """How a cache is driven through random operations.

    Attributes
    ----------
    empty : callable
        From a configuration to an empty cache.
    configurations : tuple of str
        Of `CONFIGURATIONS`, those it is driven with.
    tolerance : float
        How far a number between -1 and 1 may be from what was stored.
    """

    empty: Callable[[PretrainedConfig], kv_cache.KVCache]
    configurations: tuple[str, ...] = ("llama", "gemma3")
    tolerance: float = 0.0


STATEFUL = {
    "dynamic": Driven(kv_cache.DynamicCache),
    "static": Driven(lambda config: kv_cache.StaticCache(config, 400)),
    "sliding window": Driven(lambda config: kv_cache.SlidingWindowCache(config, window=700)),
    "offloaded to cpu": Driven(kv_cache.OffloadedCache),
    "offloaded to disk": Driven(lambda config: kv_cache.OffloadedCache(config, to="disk")),
    "paged": Driven(lambda config: kv_cache.PagedCache(config, block_size=4)),
    "prefix": Driven(lambda config: kv_cache.PrefixCache(config, block_size=4), ("llama",)),
    # Half a step of 8 bits when a token is quantised, and another for each of the crops of a run that cuts its group.
    "quantized": Driven(
        lambda config: kv_cache.QuantizedCache(config, scheme="int8", group_size=4, residual_length=3), tolerance=0.11
    ),
}
