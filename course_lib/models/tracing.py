"""One prompt through a decoder, step by step: every tensor's shape, the positions of its tokens, and what the cache holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from course_lib.kv_cache import CacheLayer, DynamicCache, KVCache
from course_lib.memory.units import dtype_name, whole
from course_lib.models.decoder import DecoderLM, Placement
from course_lib.models.shapes import AXES, OUTSIDE, Traced, expected_bytes, expected_tensors


@dataclass(frozen=True)
class Step:
    """One pass: what went in, what it made, and the cache around it.

    Attributes
    ----------
    name : str
        ``"prefill"``, ``"decode 1"``, ...
    token_ids : tuple of int
        The tokens that went in.
    positions : tuple of int
        Where the model placed them.
    tensors, expected : tuple of Traced
        All tensors in the order in which they were made, and what the configuration says of them.
    length_before, length_after : int
        Tokens that the cache has taken.
    cache_bytes, expected_bytes : int
        Of what the cache holds after the pass, by its own account and by the configuration; the latter may be None, see
        :func:`course_lib.models.shapes.expected_bytes`.
    logits : Tensor
        Of the next token, ``[vocab_size]`` on the CPU.
    """

    name: str
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    tensors: tuple[Traced, ...]
    expected: tuple[Traced, ...]
    length_before: int
    length_after: int
    cache_bytes: int
    expected_bytes: int | None
    logits: torch.Tensor = field(repr=False, compare=False)

    @property
    def chosen(self) -> int:
        """The most likely next token."""
        return int(self.logits.argmax())

    def problems(self) -> Iterator[str]:
        """Yield a sentence on each thing that is not as the configuration says."""
        made = {(one.layer, one.name): one for one in self.tensors}
        wanted = {(one.layer, one.name): one for one in self.expected}
        for key, one in made.items():
            if key not in wanted:
                yield f"{one.label} was made, and the configuration has none"
                continue
            for what, write in (("shape", _list), ("dtype", dtype_name), ("positions", _span)):
                found, right = (write(getattr(tensor, what)) for tensor in (one, wanted[key]))
                if found != right:
                    axes = f" ({', '.join(AXES[one.name])})" if what == "shape" else ""
                    yield f"{one.label} has {what} {found}, and the configuration says {right}{axes}"
        for key, one in wanted.items():
            # A cache whose store is read in place returns nothing.
            if key not in made and "in_sight" not in AXES[one.name]:
                yield f"{one.label} was not made"
        start, end = self.length_before, self.length_before + len(self.token_ids)
        if self.positions != tuple(range(start, end)):
            yield f"tokens stand at positions {_span(self.positions)}, and {_span(range(start, end))} are next"
        if self.length_after != end:
            yield f"the cache has taken {self.length_after} tokens, and {end} have gone in"
        if self.expected_bytes not in (None, self.cache_bytes):
            yield f"the cache holds {self.cache_bytes:,} bytes, and the configuration says {self.expected_bytes:,}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and a row for each tensor, as `course_lib.display.show_table` takes them; alike layers share a row."""
        alike = Counter((one.name, one.shape, one.dtype, one.positions, one.nbytes) for one in self.tensors)
        return ["tensor", "layers", "shape", "axes", "positions", "dtype", "bytes each"], [
            [
                name,
                "" if name in OUTSIDE else str(layers),
                _list(shape),
                ", ".join(AXES[name]),
                _span(positions),
                dtype_name(dtype),
                f"{nbytes:,}",
            ]
            for (name, shape, dtype, positions, nbytes), layers in alike.items()
        ]

    def __str__(self) -> str:
        headers, rows = self.table()
        title = f"{self.name}: {self.length_before} tokens in the cache, then {self.length_after}, {self.cache_bytes:,} bytes"
        return "\n".join([title, *map(" | ".join, (headers, *rows))])


@dataclass(frozen=True)
class Trace(Sequence[Step]):
    """The steps of one text, prefill first.

    Attributes
    ----------
    steps : tuple of Step
        One for each new token; ``trace[0]`` is the first.
    pieces : tuple of tuple of str
        The text of each token that went in, by step.
    text : str
        The text of the new tokens.
    """

    steps: tuple[Step, ...]
    pieces: tuple[tuple[str, ...], ...]
    text: str

    def __getitem__(self, index: Any) -> Any:
        return self.steps[index]

    def __len__(self) -> int:
        return len(self.steps)

    def check(self) -> Trace:
        """Return the trace itself if all is as the configuration says.

        Raises
        ------
        AssertionError
            With a sentence on the first thing that is not.
        """
        end = self.steps[0].length_before
        for step in self.steps:
            for problem in step.problems():
                raise AssertionError(f"{step.name}: {problem}")
            if step.length_before != end:
                raise AssertionError(
                    f"{step.name}: the cache begins with {step.length_before} tokens, and the step before left {end}"
                )
            end = step.length_after
        return self

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and a row for each step, as `course_lib.display.show_table` takes them."""
        return ["step", "went in", "positions", "cache before", "after", "cache bytes", "logits"], [
            [
                step.name,
                f"{len(pieces)} tokens" if len(pieces) > 1 else repr(*pieces),
                _span(step.positions),
                str(step.length_before),
                str(step.length_after),
                f"{step.cache_bytes:,}",
                _list(step.tensors[-1].shape),
            ]
            for step, pieces in zip(self.steps, self.pieces, strict=True)
        ]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.steps))


@torch.no_grad()
def trace(model: DecoderLM, tokenizer: Any, prompt: str, *, new_tokens: int, cache: KVCache | None = None) -> Trace:
    """Continue a text by its most likely tokens, and record every tensor on the way.

    Parameters
    ----------
    model : DecoderLM
        Any; it is left as it was.
    tokenizer
        Of Transformers, or a `course_lib.models.ByteTokenizer`.
    prompt : str
        The text.
    new_tokens : int
        How many tokens to choose. Each takes one pass: the prompt's is the first, and the token chosen last goes nowhere.
    cache : KVCache, optional
        Any of `course_lib.kv_cache`, which the call lengthens; the tokens that it holds are taken for the prompt's first. A new
        `DynamicCache` by default.

    Returns
    -------
    Trace
        Its `check` compares everything with what follows from the configuration.

    Raises
    ------
    TypeError
        If the model is no DecoderLM, or the cache none of the course.
    ValueError
        If `new_tokens` is below 1, the cache has too few layers, or the prompt has no token that the cache lacks.

    Notes
    -----
    While it is watched, each linear layer multiplies for itself, where the decoder otherwise takes some together: the logits of a
    single token may differ from an unwatched pass in the last digits. Chapter 11 (notebooks/11-the-whole-decoder.ipynb) runs it.
    """
    if not isinstance(model, DecoderLM):
        raise TypeError(f"model is of type {type(model).__name__}; a DecoderLM is needed")
    cache = DynamicCache(model.config) if cache is None else cache
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is of type {type(cache).__name__}; a cache of course_lib.kv_cache is needed")
    new_tokens = whole(new_tokens, "new_tokens", least=1)
    layers: Any = model.layers
    if len(cache.layers) < len(layers):
        raise ValueError(f"cache has {len(cache.layers)} layers; the model's {len(layers)} are needed")
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    past, steps = int(cache.get_seq_length()), []
    if past >= ids.shape[1]:
        raise ValueError(f"prompt has {ids.shape[1]} tokens and the cache holds {past}; at least one must be new")
    fed = ids[:, past:]
    with _watch(model, cache) as watched:
        for number in range(new_tokens):
            expected = tuple(expected_tensors(model.config, model.dtype, cache, past, fed.shape[1]))
            watched.tensors.clear()
            logits = model(fed, cache=cache, logits_to_keep=1).logits[0, -1].cpu()
            before, past = past, int(cache.get_seq_length())
            steps.append(
                Step(
                    f"decode {number}" if number else "prefill",
                    tuple(fed[0].tolist()),
                    watched.positions,
                    tuple(watched.placed()),
                    expected,
                    before,
                    past,
                    cache.used_nbytes,
                    expected_bytes(model.config, model.dtype, cache, before + fed.shape[1]),
                    logits,
                )
            )
            fed = fed.new_tensor([[steps[-1].chosen]])
    pieces = tuple(tuple(tokenizer.decode([token]) for token in step.token_ids) for step in steps)
    return Trace(tuple(steps), pieces, tokenizer.decode([step.chosen for step in steps]))


class _Watched:
    """What a pass has made so far, and where its tokens stand."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, int | None, torch.Size, torch.dtype, range | None]] = []
        self.positions: tuple[int, ...] = ()

    def note(self, name: str, layer: int | None, tensor: torch.Tensor, positions: range | None = None) -> None:
        """Note a tensor, with positions of its own if they are not those of the pass."""
        self.tensors.append((name, layer, tensor.shape, tensor.dtype, positions))

    def placed(self) -> Iterator[Traced]:
        """Yield the tensors with the positions of their tokens."""
        for name, layer, shape, dtype, own in self.tensors:
            usual = self.positions[-1:] if "last" in AXES[name] else self.positions
            yield Traced(name, layer, tuple(shape), dtype, usual if own is None else tuple(own))


@contextmanager
def _watch(model: DecoderLM, cache: KVCache) -> Iterator[_Watched]:
    """Note what a model and its cache make, as long as the context lasts."""
    watched = _Watched()
    with ExitStack() as undo:

        def hook(module: nn.Module, name: str, layer: int | None = None) -> None:
            handle = module.register_forward_hook(lambda _, __, output: watched.note(name, layer, output))
            undo.callback(handle.remove)

        def stand_in(owner: Any, name: str, new: Callable[..., Any]) -> None:
            # What stands before the class's method is the object's own, and goes again.
            before = {name: vars(owner)[name]} if name in vars(owner) else {}
            vars(owner)[name] = new
            undo.callback(vars(owner).update, before)
            undo.callback(vars(owner).pop, name)

        for name, module in model.named_children():
            if name in OUTSIDE:
                hook(module, name)
        stand_in(model, "_place", _placing(watched, model._place))
        layers: Any = model.layers
        for index, layer in enumerate(layers):
            for name, module in layer.named_modules():
                name = name.rpartition(".")[2] or "layer"
                if name in AXES and not isinstance(module, nn.Identity):
                    hook(module, name, index)
            stand_in(layer.self_attn, "_attend", _attending(watched, index, layer.self_attn._attend))
            own = cache.layers[index]
            stand_in(own, "update", _updating(watched, index, own, own.update))
        yield watched


def _placing(watched: _Watched, place: Callable[..., Placement]) -> Callable[..., Placement]:
    def placing(past: int, position_ids: torch.Tensor, *rest: Any) -> Placement:
        found = place(past, position_ids, *rest)
        watched.positions = tuple(position_ids.flatten().tolist())
        for name, table in zip(("cos", "sin"), found.cos_sin or (), strict=False):
            watched.note(name, None, table)
        return found

    return placing


def _attending(watched: _Watched, layer: int, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attending(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        for name, tensor in (("queries", q), ("keys", k), ("values", v)):
            watched.note(name, layer, tensor)
        found = attend(q, k, v, *rest)
        watched.note("attended", layer, found)
        return found

    return attending


def _updating(watched: _Watched, layer: int, own: CacheLayer, update: Callable[..., Any]) -> Callable[..., Any]:
    def updating(key_states: torch.Tensor, *rest: Any, **options: Any) -> Any:
        end, (_, first) = own.get_seq_length() + key_states.shape[2], own.get_mask_sizes(key_states.shape[2])
        pair = update(key_states, *rest, **options)
        for name, tensor in zip(("keys in sight", "values in sight"), pair, strict=True):
            watched.note(name, layer, tensor, range(first, end))
        return pair

    return updating


def _list(shape: Sequence[int]) -> str:
    return str(list(shape))


def _span(positions: Sequence[int]) -> str:
    """Write positions, as their first and last where none is left out."""
    if len(positions) < 2 or list(positions) != list(range(positions[0], positions[-1] + 1)):
        return ", ".join(map(str, positions))
    return f"{positions[0]} to {positions[-1]}"
