"""What fewer key-value heads save when a model decodes on a CPU, beside a model that counts bytes, arithmetic and cores.

    python kernels/heads_on_cpu.py [--context 2048,4096,8192] [--layers 30] [--rounds 7] [--json FOLDER]

SmolLM2's shapes with 9, 3 and 1 key-value heads for its 9 query heads; weights are random, for time does not depend on them. Attention
runs alone over the caches of all layers, then the whole step runs. On the layout in the middle attention also runs with twice the
queries: the same bytes and twice the arithmetic, which is what tells the two apart, since with the context both grow alike. From these
times alone the other layouts are predicted. Chapter 10 explains what the numbers mean.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from course_lib import machine
from course_lib.attention import attention
from course_lib.attention.rules import Rules
from course_lib.attention.sdpa import sdpa_attention
from course_lib.benchmark import in_turns, numbers
from course_lib.kv_cache import DynamicCache
from course_lib.memory import StepCost, published_config, step_cost
from course_lib.memory.rates import Calibration, calibrate
from course_lib.models import DecoderConfig, DecoderLM

MODEL, LAYOUTS, FITTED = "smollm2-135m", (9, 3, 1), 3
CONTEXTS, ROUNDS = [2048, 4096, 8192], 7


def config(kv_heads: int, layers: int) -> dict[str, Any]:
    """Return SmolLM2's configuration with other key-value heads, and maybe fewer layers."""
    return {**published_config(MODEL), "num_key_value_heads": kv_heads, "num_hidden_layers": layers}


def decoders(layers: int) -> dict[int, DecoderLM]:
    """Return a decoder of each layout. All but the attention is shared, so that together they need little more memory than one."""
    found: dict[int, DecoderLM] = {}
    for heads in LAYOUTS:
        known = DecoderConfig().to_dict().keys() - {"model_type"}
        fields = {name: value for name, value in config(heads, layers).items() if name in known}
        with torch.device("meta" if found else "cpu"):
            model = DecoderLM(DecoderConfig(**fields))
        if found:
            first: Any = found[LAYOUTS[0]]
            model.embed_tokens, model.lm_head, model.norm = first.embed_tokens, first.lm_head, first.norm
            for layer, shared in zip(model.layers, first.layers, strict=True):
                layer.self_attn.to_empty(device="cpu").apply(model._draw)
                layer.mlp, layer.input_layernorm = shared.mlp, shared.input_layernorm
                layer.post_attention_layernorm = shared.post_attention_layernorm
        found[heads] = model.eval().optimize_for_decoding()
    return found


def filled(model: DecoderLM, tokens: int) -> DynamicCache:
    """Return a cache that holds so many random tokens, the same ones in each layer."""
    cache, sizes = DynamicCache(model.config), model.config
    keys, values = torch.randn(2, 1, sizes.num_key_value_heads, tokens, sizes.head_dim)
    for layer in range(sizes.num_hidden_layers):
        cache.update(keys, values, layer)
    return cache


def attend(cache: DynamicCache, tokens: int, times: int = 1) -> Callable[[], list[torch.Tensor]]:
    """Return a call of one token's attention in every layer, as the model makes it, with so many times its queries."""
    sizes = cache.layers[0]
    rules = Rules(sizes.head_dim**-0.5, causal=True)
    q = torch.randn(1, times * LAYOUTS[0], 1, sizes.head_dim)
    held = [(layer.keys[:, :, :tokens], layer.values[:, :, :tokens]) for layer in cache.layers]
    return lambda: [sdpa_attention(q, keys, values, rules) for keys, values in held]


def check(model: DecoderLM, cache: DynamicCache, tokens: int) -> None:
    """End the study if attention over the cache is wrong, or if the cache is not of the size that is counted.

    Raises
    ------
    ArithmeticError
        If so.
    """
    sizes, layer = model.config, cache.layers[0]
    counted = step_cost(config(sizes.num_key_value_heads, sizes.num_hidden_layers), context=tokens, dtype="float32")
    if cache.used_nbytes != counted.cache_bytes:
        raise ArithmeticError(f"the cache holds {cache.used_nbytes} bytes, counted are {counted.cache_bytes}")
    torch.manual_seed(0)
    found = attend(cache, tokens)()[0]
    torch.manual_seed(0)
    q = torch.randn_like(found).double()
    exact = attention(q, layer.keys.double(), layer.values.double(), causal=True, backend="reference")
    error = ((found - exact).norm() / exact.norm()).item()
    if not error <= 1e-5:
        raise ArithmeticError(f"{sizes.num_key_value_heads} heads: attention errs by {error:.1e}; nothing was timed")


def busiest(kv_heads: int, cores: int) -> float:
    """Return the share of attention that the busiest core does: whole heads, but a single head is cut for all cores."""
    return 1 / cores if kv_heads == 1 else -(-kv_heads // cores) / kv_heads


class Run(NamedTuple):
    """One measurement: what ran, its cost, and its seconds."""

    what: str
    kv_heads: int
    context: int
    times: int
    cost: StepCost
    seconds: float


def measure(contexts: Iterable[int], rounds: int, layers: int) -> list[Run]:
    """Time attention alone and the whole step, at each context all layouts in turns."""
    models = decoders(layers)
    longest = max(contexts)
    caches = {heads: filled(model, longest) for heads, model in models.items()}
    for heads, model in models.items():
        check(model, caches[heads], longest)
    runs = []
    token = torch.tensor([[7]])
    for context in sorted(contexts, reverse=True):
        calls: dict[tuple[str, int, int], Callable[[], Any]] = {}
        for heads, cache in caches.items():
            cache.crop(context - cache.get_seq_length())
            calls["attention", heads, 1] = attend(cache, context)
            if heads == FITTED:
                calls["attention", heads, 2] = attend(cache, context, 2)
            # The token that a step adds takes the place of the last one.
            calls["step", heads, 1] = lambda m=models[heads], c=cache: (c.crop(-1), m(token, cache=c))
        in_turns(calls, 1)  # to warm up
        for (what, heads, times), seconds in in_turns(calls, rounds).items():
            cost = step_cost(config(heads, layers), context=context, dtype="float32")
            if what == "attention":
                cost = StepCost(0, cost.cache_bytes, 0, times * cost.attention_flops)
            runs.append(Run(what, heads, context, times, cost, seconds))
    return runs


class Fit(NamedTuple):
    """What the runs of one layout say: a core's rates in attention, and the seconds that a byte of weights takes in a step."""

    attention: Calibration
    per_weight_byte: float
    cores: int

    def alone(self, run: Run) -> float:
        """Predict the seconds of attention."""
        return self.attention.seconds(on_busiest(run, self.cores))

    def step(self, run: Run) -> float:
        """Predict the seconds of a whole step."""
        return self.alone(run) + run.cost.weight_bytes * self.per_weight_byte


def on_busiest(run: Run, cores: int) -> StepCost:
    """Return what the busiest core reads and computes in a run's attention."""
    share = busiest(run.kv_heads, cores)
    traffic, products = round(share * run.cost.cache_bytes), round(share * run.cost.attention_flops)
    return replace(run.cost, weight_bytes=0, weight_flops=0, cache_bytes=traffic, attention_flops=products)


def fit(runs: Iterable[Run], cores: int) -> Fit:
    """Fit to runs of one layout."""
    runs = list(runs)
    alone = {(run.context, run.times): run for run in runs if run.what == "attention"}
    rates = calibrate((on_busiest(run, cores), run.seconds) for run in alone.values())
    steps = [run for run in runs if run.what == "step"]
    rest = [(run.seconds - alone[run.context, 1].seconds) / run.cost.weight_bytes for run in steps]
    return Fit(rates, sum(rest) / len(rest), cores)


def predictions(runs: list[Run], cores: int) -> list[dict[str, Any]]:
    """Return each run with the seconds predicted for it from the fitted layout, and by the ratio of bytes alone."""
    own = [run for run in runs if run.kv_heads == FITTED]
    fitted, records = fit(own, cores), []
    base = {(run.what, run.context): run for run in own if run.times == 1}
    for run in runs:
        same = base[run.what, run.context]
        records.append(
            {
                **{name: getattr(run, name) for name in ("what", "kv_heads", "context", "times", "seconds")},
                "bytes": run.cost.bytes,
                "flops": run.cost.flops,
                "predicted": fitted.alone(run) if run.what == "attention" else fitted.step(run),
                "by_bytes": same.seconds * run.cost.bytes / same.cost.bytes,
                "fitted": run.kv_heads == FITTED,
            }
        )
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Return records as text."""
    lines = ["             heads  context      MB   ms a token   predicted       by bytes"]
    for one in sorted(records, key=lambda one: (one["what"], one["context"], -one["kv_heads"], one["times"])):
        lines.append(
            f"{one['what']:9}{'' if one['times'] == 1 else ' x2':3} {one['kv_heads']:5}  {one['context']:7,} {one['bytes'] / 1e6:7.0f}  "
            f"{1e3 * one['seconds']:11.2f}"
            + "".join(
                f"{1e3 * one[way]:8.2f} {one[way] / one['seconds'] - 1:+5.0%}" for way in ("predicted", "by_bytes")
            )
            + ("  fitted" if one["fitted"] else "")
        )
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--context", type=numbers, default=CONTEXTS, help="tokens that the caches hold")
    arguments.add_argument("--layers", type=int, default=30, help="layers of the model; SmolLM2 has 30")
    arguments.add_argument("--rounds", type=int, default=ROUNDS, help="how often each is timed; the median counts")
    arguments.add_argument("--json", type=Path, help="folder that gets the raw results")
    options = arguments.parse_args()
    for name in ("layers", "rounds"):
        if getattr(options, name) < 1:
            arguments.error(f"--{name} is {getattr(options, name)}; at least 1 is needed")
    if len(options.context) < 2:
        arguments.error("--context needs at least 2 lengths, from which the rates are fitted")

    cores = torch.get_num_threads()
    print(f"{machine.cpu_name()}, {cores} threads")
    with torch.no_grad():
        records = predictions(measure(options.context, options.rounds, options.layers), cores)
    print(table(records))
    for what in ("attention", "step"):
        off = [one["predicted"] / one["seconds"] - 1 for one in records if one["what"] == what and not one["fitted"]]
        print(f"{what}: predictions are off by {min(off):+.0%} to {max(off):+.0%}")
    if options.json:
        print(machine.record("heads_on_cpu", [{**one, "threads": cores} for one in records], options.json))


if __name__ == "__main__":
    main()
