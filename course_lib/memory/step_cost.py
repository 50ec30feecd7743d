"""What one pass of a decoder reads and computes, and the least time that a machine needs for it.

Everything is arithmetic on a configuration; no tensor is touched. Chapter 10
(notebooks/10-grouped-heads.ipynb) compares it with measured steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from course_lib.memory.architecture import Weight
from course_lib.memory.blocks import active_experts
from course_lib.memory.counting import CACHE_DTYPES, Model
from course_lib.memory.estimate import own_storage, query_heads, stored_bytes
from course_lib.memory.units import dtype_name, whole

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class StepCost:
    """Traffic and arithmetic of one pass over some tokens of every sequence of a batch.

    Attributes
    ----------
    weight_bytes : int
        Weights that are read from main memory, once for the whole batch.
    cache_bytes : int
        Keys, values and states that are read, of all sequences.
    weight_flops : int
        Operations of the products with weights; a multiplication and the addition after it are two.
    attention_flops : int
        Operations of the products of queries with keys and of probabilities with values.
    """

    weight_bytes: int
    cache_bytes: int
    weight_flops: int
    attention_flops: int

    @property
    def bytes(self) -> int:
        """Everything that is read from main memory."""
        return self.weight_bytes + self.cache_bytes

    @property
    def flops(self) -> int:
        """All operations that are counted."""
        return self.weight_flops + self.attention_flops

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in operations per byte."""
        return self.flops / self.bytes

    def seconds(self, bandwidth: float, flops_per_second: float, *, overhead: float = 0.0) -> float:
        """Return the time of the step where traffic and arithmetic overlap perfectly: the roofline.

        Parameters
        ----------
        bandwidth : float
            Bytes that the machine reads in a second.
        flops_per_second : float
            Operations that it does in a second; infinite leaves the arithmetic out.
        overhead : float
            Seconds that every step takes besides, such as launching its kernels.

        Returns
        -------
        float
            ``overhead + max(bytes / bandwidth, flops / flops_per_second)``. With the rates of a datasheet and no overhead
            it is a lower bound.

        Raises
        ------
        ValueError
            If a rate is not positive or the overhead is negative.
        """
        for name, rate in (("bandwidth", bandwidth), ("flops_per_second", flops_per_second)):
            if not rate > 0:
                raise ValueError(f"{name} must be positive, got {rate!r}")
        if not overhead >= 0:
            raise ValueError(f"overhead must be at least 0 seconds, got {overhead!r}")
        return overhead + max(self.bytes / bandwidth, self.flops / flops_per_second)


def step_cost(
    model: Any,
    *,
    context: int,
    batch_size: int = 1,
    query_tokens: int = 1,
    logits_to_keep: int | None = None,
    dtype: Any = None,
    quantization: str | None = None,
    kv_cache_dtype: Any = None,
) -> StepCost:
    """Count what one pass reads and computes: a decode step, the check of drafted tokens, or a whole prompt.

    Parameters
    ----------
    model : str, path, dict or transformers.PretrainedConfig
        See `count_parameters`.
    context : int
        Tokens of each sequence that the cache has seen at the end of the pass, those of the pass among them.
    batch_size : int
        Sequences.
    query_tokens : int
        Tokens of each sequence that pass through the model: 1 in a decode step, `context` for a whole prompt.
    logits_to_keep : int, optional
        Of the query tokens, the last ones that the output head scores; all by default. A prompt needs 1.
    dtype, quantization, kv_cache_dtype
        As for `estimate`.

    Returns
    -------
    StepCost
        In bytes and operations.

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        As for `estimate`; if there are more query tokens than context, or logits than query tokens.

    Notes
    -----
    *Weights* are read once and count as `estimate` stores them, quantisation constants included. Of an embedding table
    only the rows of the tokens are read; a table that is also the output head is read whole, once. Every matrix costs two
    operations a value and token; norms, biases, softmax and the few operations per value of a recurrent state are left out,
    and a block that several layers share counts once.

    *Experts*: each token computes with the experts that the configuration calls active. What is read are the different ones
    that a layer's tokens choose, ``E * (1 - (1 - k / E) ** tokens)`` of E on average if every choice of k is as likely as
    any other. Routers that prefer some experts read less.

    *Attention* reads what `kv_cache_bytes` says the cache holds, and multiplies each query with the tokens up to its own, or
    those of a sliding window: ``4 * heads * head_dim`` operations for each pair of tokens and layer, so a decode step costs
    that times the context. Latent attention is counted with its expansion absorbed into queries and output (DeepSeek-V2,
    section 2.1.2), without which every step expands the whole cache; a sparse indexer saves nothing here. A layer that reads
    another's cache is not counted, and where the real class counts (see `MemoryEstimate.method`) heads are taken as equal.

    Activations, which stay on the chip at best, are left out. So is the work of dequantising.
    """
    tokens = whole(context, "context", least=1)
    batch = whole(batch_size, "batch_size", least=1)
    queries = whole(query_tokens, "query_tokens", least=1, most=tokens)
    scored = queries if logits_to_keep is None else whole(logits_to_keep, "logits_to_keep", most=queries)
    if kv_cache_dtype is not None:
        dtype_name(kv_cache_dtype, argument="kv_cache_dtype", accepted=CACHE_DTYPES)
    counted = Model.of(model)
    name, quantization = own_storage(counted, dtype, quantization)
    read, rows, head = _by_use(counted)
    experts = {w: n for w, n in read.items() if w.kind == "experts"}
    dense = {w: n for w, n in read.items() if w.kind != "experts"}
    count, active = _experts(counted) if experts else (1, 1)
    passing = batch * queries
    chosen = 1 - (1 - active / count) ** passing
    looked_up = sum(min(passing, w.rows) * w.columns * n for w, n in rows.items())
    weight_bytes = (
        sum(stored_bytes({**dense, **head}, name, quantization))
        + round(chosen * sum(stored_bytes(experts, name, quantization)))
        + stored_bytes({Weight(looked_up): 1}, name, None)[0]
    )
    products = passing * (_matrices(dense) + _matrices(experts) * active // count) + batch * scored * _matrices(head)
    return StepCost(
        weight_bytes=weight_bytes,
        cache_bytes=counted.cache_bytes(tokens, batch, kv_cache_dtype or name, "kv_cache_dtype"),
        weight_flops=2 * products,
        attention_flops=2 * batch * _attention_products(counted, tokens, queries),
    )


def _by_use(model: Model) -> tuple[dict[Weight, int], dict[Weight, int], dict[Weight, int]]:
    """Split the weights into those read whole, tables of which rows are read, and the output head."""
    tables = {w: n for w, n in model.weights.items() if w.kind == "embedding"}
    head = {w: n for w, n in model.weights.items() if w.kind == "head"}
    others = {w: n for w, n in model.weights.items() if w.kind not in ("embedding", "head")}
    vocab = model.text.largest("vocab_size")
    if tables and not any(w.rows == vocab for w in head):  # the head is a table, also where a matrix comes before it
        words = [w for w in tables if w.rows == vocab] or [max(tables, key=lambda w: w.size)]
        tied = min(words, key=lambda w: w.columns)
        head[tied], tables[tied] = head.get(tied, 0) + 1, tables[tied] - 1
    return others, tables, head


def _matrices(weights: dict[Weight, int]) -> int:
    """Values of the matrices among some weights."""
    return sum(w.size * n for w, n in weights.items() if w.columns > 1)


def _experts(model: Model) -> tuple[int, int]:
    """Experts of a layer and those that work on a token."""
    count = max((model.text.largest(name) or 0 for name in _EXPERTS), default=0)
    if not count:
        raise ValueError(f"{model.fields.label} has experts, and its configuration does not say how many")
    return count, min(active_experts(model.text), count)


def _attention_products(model: Model, context: int, queries: int) -> int:
    """Multiplications of the last `queries` of `context` tokens with the tokens that each of them sees."""
    if model.part is not None:
        return sum(c.products * n * _pairs(context, queries, c.window) for c, n in model.part.cache.items())
    heads = query_heads(model.text) or 1
    kv_heads = model.text.largest("num_key_value_heads") or heads
    held = sum(tensor.elements for tensor in model.cached_elements(context) if tensor.attention)
    return held * heads * _pairs(context, queries, None) // (kv_heads * context)


def _pairs(context: int, queries: int, window: int | None) -> int:
    """Pairs of a query and a token that it sees."""
    width = context if window is None else window

    def up_to(last: int) -> int:
        full = min(last, width)
        return full * (full + 1) // 2 + (last - full) * width

    return up_to(context) - up_to(context - queries)
