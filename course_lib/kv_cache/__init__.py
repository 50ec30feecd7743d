"""Keys and values of earlier tokens, so that none is computed twice.

Every cache here is a cache of Transformers: it works in ``model.generate(...)`` and in `course_lib.models.DecoderLM`.

Classes
-------
DynamicCache
    Grows with the text.
OffloadedCache
    Lives in CPU memory or in files, one layer ahead on the model's device.
QuantizedCache
    Keeps older tokens in 8 or 4 bits a value. RoundedCache does the damage without the saving, in ways to compare.
SlidingWindowCache
    Keeps the last tokens and the very first.
StaticCache
    Has room for all tokens from the start, in tensors that never move, for compiled models.
PagedCache
    Takes blocks of a pool as its sequences grow, and shares those that sequences have in common.
PrefixCache
    Keeps the blocks of finished sequences for those that begin like them.
"""

from course_lib.kv_cache.base import CacheLayer, KVCache
from course_lib.kv_cache.dynamic import DynamicCache
from course_lib.kv_cache.offloaded import OffloadedCache
from course_lib.kv_cache.paged import PagedCache
from course_lib.kv_cache.prefix import PrefixCache
from course_lib.kv_cache.quantized import QuantizedCache
from course_lib.kv_cache.rounded import RoundedCache
from course_lib.kv_cache.sliding_window import SlidingWindowCache
from course_lib.kv_cache.static import StaticCache

__all__ = [
    "CacheLayer",
    "DynamicCache",
    "KVCache",
    "OffloadedCache",
    "PagedCache",
    "PrefixCache",
    "QuantizedCache",
    "RoundedCache",
    "SlidingWindowCache",
    "StaticCache",
]
