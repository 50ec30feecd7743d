"""How a model is served, and what follows from that alone: bytes before anybody asks, and the cost of every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from course_lib.memory.config import resolve
from course_lib.memory.estimate import estimate
from course_lib.memory.step_cost import step_cost
from course_lib.memory.units import whole


@dataclass(frozen=True)
class Plan:
    """How a model is served.

    Attributes
    ----------
    max_batch : int
        Most requests that run at a time; the others wait, first come, first served.
    num_key_value_heads : int, optional
        Head layout, for a configuration that has this field; the model's own by default.
    dtype, quantization, kv_cache_dtype
        As for `estimate`.
    block_size : int, optional
        Token slots of a page of the cache; None reserves a contiguous range for the longest chat.
    token_budget : int
        Most tokens of a step. Requests that are writing have one each, prompts share the rest in chunks.
    prefix_reuse : bool
        Whether the cache of a chat stays while its user thinks, unless others need the room.
    """

    max_batch: int
    num_key_value_heads: int | None = None
    dtype: Any = None
    quantization: str | None = None
    kv_cache_dtype: Any = None
    block_size: int | None = 16
    token_budget: int = 512
    prefix_reuse: bool = True

    def __post_init__(self) -> None:
        batch = whole(self.max_batch, "max_batch", least=1)
        whole(self.token_budget, "token_budget", least=batch + 1)
        if self.block_size is not None:
            whole(self.block_size, "block_size", least=1)

    def storage(self) -> dict[str, Any]:
        """Return how weights and cache are stored, as arguments of `estimate` and `step_cost`."""
        return {"dtype": self.dtype, "quantization": self.quantization, "kv_cache_dtype": self.kv_cache_dtype}

    def model(self, model: Any) -> Any:
        """Return the model's configuration with this plan's heads."""
        if self.num_key_value_heads is None:
            return model
        source = resolve(model).source
        model = source if isinstance(source, Mapping) else source.to_dict()
        if "num_key_value_heads" not in model:
            raise ValueError("num_key_value_heads is given, and the model's configuration has no such field")
        return {**model, "num_key_value_heads": self.num_key_value_heads}


def _table(value: Callable[[int], float], last: int) -> list[float]:
    """Return ``[value(0), ..., value(last)]`` from as few calls as straight pieces allow; at 0 it is taken to be 0."""
    known = {1: float(value(1)), last: float(value(last))}

    def refine(low: int, high: int) -> list[float]:
        middle = (low + high) // 2
        if middle == low:
            return [known[high]]
        known[middle] = float(value(middle))
        slope = (known[high] - known[low]) / (high - low)
        if abs(known[low] + slope * (middle - low) - known[middle]) <= 1e-3 * abs(known[middle]):
            return [known[low] + slope * (place - low) for place in range(low + 1, high)] + [known[high]]
        return refine(low, middle) + refine(middle, high)

    return [0.0, known[1], *(refine(1, last) if last > 1 else [])]


class Costs:
    """What a plan's steps read and compute, in tables, and how much memory it takes."""

    def __init__(self, model: Any, plan: Plan, max_tokens: int) -> None:
        self.plan, self.max_tokens = plan, whole(max_tokens, "max_tokens", least=2)
        model, storage = plan.model(model), plan.storage()
        block = plan.block_size or self.max_tokens
        self.block = block
        last = -(-self.max_tokens // block) * block
        tokens = min(plan.token_budget, plan.max_batch * self.max_tokens)

        def cost(context: int, **more: Any) -> Any:
            return step_cost(model, context=context, **storage, **more)

        self.cache = [round(size) for size in _table(lambda context: cost(context).cache_bytes, last)]
        self.attention = _table(lambda context: cost(context).attention_flops, last)
        self.weights = _table(lambda count: cost(1, batch_size=count).weight_bytes, max(2, tokens))
        self.head = cost(2, query_tokens=2).weight_flops - cost(2, query_tokens=2, logits_to_keep=1).weight_flops
        self.token = cost(1).weight_flops - self.head
        prompt = estimate(model, **storage, prompt_tokens=tokens)
        batch = estimate(model, **storage, batch_size=plan.max_batch, prompt_tokens=1)
        self.fixed = (
            prompt.weights
            + prompt.quantization_constants
            + max(prompt.activations, batch.activations)
            + max(prompt.workspace, batch.workspace)
        )

    def slots(self, tokens: int) -> int:
        """Return the token slots that a request of so many tokens holds."""
        return -(-tokens // self.block) * self.block


def plan_memory(model: Any, plan: Plan, *, max_tokens: int) -> tuple[int, int]:
    """Return the bytes that a plan takes before anybody asks, and those that the cache of one chat of `max_tokens` adds.

    Parameters
    ----------
    model, plan, max_tokens
        As for `simulate`.

    Returns
    -------
    (int, int)
        Weights with their constants, activations and workspace; and a cache in whole pages.
    """
    costs = Costs(model, plan, max_tokens)
    return costs.fixed, costs.cache[costs.slots(costs.max_tokens)]
