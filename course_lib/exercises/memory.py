"""Exercises of chapter 01: random decoders to test with, and the answers that common mistakes lead to.

A mistake is an explanation together with the value it gives, so that a test can say why an answer is wrong without
saying what is right.
"""

from __future__ import annotations

from random import Random
from typing import Any

from course_lib import memory

Config = dict[str, Any]


def random_decoder(rng: Random, *, window: bool = False) -> Config:
    """Draw the configuration of a Llama-style decoder with grouped heads.

    Three of four state a ``head_dim`` that is not ``hidden_size / num_attention_heads``; half tie the output head to the
    embeddings. With `window`, every layer has a sliding window.
    """
    kv_heads = rng.randint(1, 4)
    heads = kv_heads * rng.randint(2, 6)
    head_dim = rng.choice([16, 40, 64, 80])
    config = {
        "model_type": "mistral",
        "vocab_size": rng.randint(300, 90_000),
        "hidden_size": heads * head_dim,
        "intermediate_size": rng.randint(100, 9_000),
        "num_hidden_layers": rng.randint(2, 40),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "sliding_window": rng.randint(5, 4_000) if window else None,
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if rng.random() < 0.75:
        config["head_dim"] = head_dim + rng.choice([8, 16, 32])
    return config


def weight_mistakes(num_parameters: int, dtype: str) -> dict[str, float]:
    """Return what mistakes about the bytes of `num_parameters` weights of `dtype` lead to."""
    bits = memory.weight_bytes(8, dtype)
    exact = num_parameters * bits / 8
    return {
        "These are bits: a data type's name counts bits, and eight of them make a byte.": num_parameters * bits,
        "The last byte is lost: half a byte cannot be stored, so an odd number of 4-bit weights rounds up.": int(exact),
        "Half a byte is left over: memory comes in whole bytes, so round up.": exact,
        "Each 4-bit weight gets a whole byte here; two of them share one.": num_parameters * -(-bits // 8),
        "Two bytes for every type: that is right for 16-bit types alone.": num_parameters * 2,
        "Four bytes for every type: that is right for float32 alone.": num_parameters * 4,
        "These are GB; the answer is in bytes.": exact / 1000**3,
        "These are GiB; the answer is in bytes.": exact / 1024**3,
    }


def gibibyte_mistakes(gigabytes: float) -> dict[str, float]:
    """Return what mistakes in turning GB into GiB lead to."""
    return {
        "A GB and a GiB are not the same: 1000 and 1024 multiplied three times by themselves.": gigabytes,
        "Upside down: a GiB is larger than a GB, so the number must become smaller.": gigabytes * 1.024**3,
        "That is one step of 1000 against 1024; from a byte to a GB there are three.": gigabytes / 1.024,
        "That is two steps of 1000 against 1024; from a byte to a GB there are three.": gigabytes / 1.024**2,
        "These are bytes; the answer is in GiB.": gigabytes * 1000**3,
        "Binary units on the way in: a GB is 1000**3 bytes, not 1024**3.": gigabytes * 1024**3 / 1000**3,
    }


def parameter_mistakes(config: Config) -> dict[str, float]:
    """Return what mistakes in counting a Llama-style decoder's parameters lead to."""
    right = memory.count_parameters(config)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    table = config["vocab_size"] * hidden
    heads = config["num_attention_heads"]
    feed_forward = layers * hidden * config["intermediate_size"]
    tied = config["tie_word_embeddings"]
    return {
        "Tied embeddings are counted twice: the output head shares the table of the input embeddings.": right
        + tied * table,
        "The output head is missing: without tied embeddings it has a table of its own.": right - (not tied) * table,
        "head_dim is taken as hidden_size / num_attention_heads, but this configuration states another.": (
            memory.count_parameters({**config, "head_dim": hidden // heads})
        ),
        "Keys and values are given as many heads as queries: they have num_key_value_heads.": (
            memory.count_parameters({**config, "num_key_value_heads": heads})
        ),
        "The feed-forward has three matrices (gate, up and down); two are counted.": right - feed_forward,
        "The norms are missing: each is a vector of hidden_size.": right - (2 * layers + 1) * hidden,
        "The last norm, before the output head, is missing.": right - hidden,
        "Each layer has two norms; one is counted.": right - layers * hidden,
        "The embeddings are missing: a table of vocab_size rows.": right - table,
        "One layer is counted instead of all.": memory.count_parameters({**config, "num_hidden_layers": 1}),
    }


def cache_size(config: Config, tokens: int, batch_size: int, value_bytes: int) -> int:
    """Return the bytes of a key-value cache whose values take 2 or 4 bytes each."""
    return memory.kv_cache_bytes(config, tokens, batch_size, {2: "bfloat16", 4: "float32"}[value_bytes])


def cache_mistakes(config: Config, tokens: int, batch_size: int, value_bytes: int) -> dict[str, float]:
    """Return what mistakes about the bytes of a key-value cache lead to."""

    def size(tokens: int = tokens, batch: int = batch_size, **changed: Any) -> int:
        return cache_size({**config, **changed}, tokens, batch, value_bytes)

    heads, window = config["num_attention_heads"], config["sliding_window"]
    return {
        "Keys and values are both kept; one of the two is counted.": size() // 2,
        "Query heads are counted: the cache holds num_key_value_heads.": size(num_key_value_heads=heads),
        "head_dim is taken as hidden_size / num_attention_heads, but this configuration states another.": size(
            head_dim=config["hidden_size"] // heads
        ),
        "The sliding window is ignored: no layer keeps more than it can still see.": size(sliding_window=None),
        "The window is off by one: it includes the token being computed, which brings its own key and value.": size(
            sliding_window=window and window + 1
        ),
        "The batch is forgotten: every sequence has a cache of its own.": size(batch=1),
        "One layer is counted instead of all.": size(num_hidden_layers=1),
        "These are values, not bytes: each takes value_bytes.": size() // value_bytes,
        "Two bytes for every value: each takes value_bytes.": 2 * size() // value_bytes,
        "These are bits, not bytes.": 8 * size(),
        "Every cache is charged for the whole window, however few the tokens.": size(tokens=max(tokens, window or 0)),
    }


def quantised_mistakes(num_weights: int, block_size: int, constant_bytes: int) -> dict[str, float]:
    """Return what mistakes about the bytes of a matrix quantised to 4 bit in blocks lead to."""
    codes = -(-num_weights // 2)
    whole, rest = divmod(num_weights, block_size)
    blocks = whole + (rest > 0)
    return {
        "The short last block is lost: it needs a constant as well, so round up.": codes + whole * constant_bytes,
        "The constants are missing: each block keeps its largest absolute value.": codes,
        "One constant for the whole matrix: each block has one of its own.": codes + constant_bytes,
        "A constant for every weight: one serves a whole block.": codes + num_weights * constant_bytes,
        "Each code takes a whole byte here; two 4-bit codes share one.": num_weights + blocks * constant_bytes,
        "Every constant is counted as one byte; it takes constant_bytes.": codes + blocks,
        "Bits are added to bytes: constant_bytes already is in bytes.": codes + blocks * constant_bytes / 8,
        "The last code is lost: an odd number of codes rounds up.": num_weights // 2 + blocks * constant_bytes,
        "A part of a block is counted as a part of a constant: constants are whole.": num_weights / 2
        + num_weights / block_size * constant_bytes,
    }


def context_mistakes(
    card_gib: float, weight_bytes: int, token_bytes: int, batch_size: int, max_positions: int
) -> dict[str, float]:
    """Return what mistakes about the longest context that fits a card lead to."""

    def fit(card: float = card_gib * 1024**3, weights: int = weight_bytes, batch: int = batch_size) -> int:
        return int((card - weights) // (batch * token_bytes))

    def limit(tokens: int) -> int:
        return max(0, min(tokens, max_positions))

    return {
        "The card's GiB are read as GB: a GiB is 1024**3 bytes.": limit(fit(card=card_gib * 1000**3)),
        "The batch is forgotten: every sequence has a cache of its own.": limit(fit(batch=1)),
        "One token too many: a token that fits in part does not fit, so round down.": limit(fit() + 1),
        "The weights are forgotten: they lie on the card beside the cache.": limit(fit(weights=0)),
        "Memory is not the only limit: the model knows max_positions positions.": max(0, fit()),
        "A negative context: where the weights alone do not fit, nothing does.": min(fit(), max_positions),
    }
