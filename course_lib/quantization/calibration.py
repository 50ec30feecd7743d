"""Running a model over calibration batches, one layer of it at a time, to see what its linear layers are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from course_lib.quantization.gptq import Hessian

Quantise = Callable[[str, torch.Tensor], None]


@dataclass
class _Call:
    """The arguments of one call of a layer; hidden states are the first, by place or by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Any:
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    @hidden.setter
    def hidden(self, value: Any) -> None:
        if self.args:
            self.args = (value, *self.args[1:])
        else:
            self.kwargs["hidden_states"] = value

    def run(self, layer: nn.Module) -> Any:
        return _first(layer(*self.args, **self.kwargs))


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _no_cache(argument: Any) -> Any:
    """A cache would grow again with every repeated call."""
    return None if hasattr(argument, "get_seq_length") else argument


def _forward(model: nn.Module, batch: Any) -> None:
    model(**batch) if isinstance(batch, Mapping) else model(batch)


def calibrate(model: nn.Module, targets: Mapping[str, nn.Module], batches: Iterable[Any], quantise: Quantise) -> None:
    """Call `quantise` with the name and Hessian of each target, from the first layer to the last.

    Parameters
    ----------
    model : nn.Module
        Any; a chain of repeated layers in it is recognised.
    targets : mapping of str to nn.Module
        Linear layers of the model by name.
    batches : iterable
        Token ids, or a mapping of keyword arguments of the model.
    quantise : callable
        May replace the target, so that later layers see what the quantised ones give.

    Raises
    ------
    ValueError
        If there is no batch.

    Notes
    -----
    Of the repeated layers, only one has Hessians at a time, and each runs twice over all batches, before and after it is
    quantised. Kept are the batches and their hidden states. Targets elsewhere, and all of a model without such a chain, get
    their Hessians together, in one more pass of the whole model.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("calibration has no batch; at least one is needed")
    left = dict(targets)
    with _inference(model):
        chain = _longest_chain(model, targets)
        calls = _record(model, chain[1], batches) if chain else None
        if chain and calls:
            name, layers = chain
            for index, layer in enumerate(layers):
                inside = {key: left.pop(key) for key in list(left) if key.startswith(f"{name}.{index}.")}
                recorded = calls.pop(0)
                with _watched(inside) as hessians:
                    for call in recorded:
                        call.run(layer)
                for key, hessian in hessians.items():
                    quantise(key, hessian.matrix)
                if calls:
                    for call, following in zip(recorded, calls[0], strict=True):
                        following.hidden = call.run(layer)
                        call.hidden = None
        if left:
            with _watched(left) as hessians:
                for batch in batches:
                    _forward(model, batch)
            for key, hessian in hessians.items():
                quantise(key, hessian.matrix)


@contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients."""
    training = model.training
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train(training)


@contextmanager
def _watched(targets: Mapping[str, nn.Module]) -> Iterator[dict[str, Hessian]]:
    """Add up the Hessian of each target while the context lasts."""
    hessians: dict[str, Hessian] = {}
    handles = []

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            hessians[name].add(inputs[0])

        return add

    for name, module in targets.items():
        weight: Any = module.weight
        # Transformers' Conv1D holds [in_features, out_features].
        features = weight.shape[1] if isinstance(module, nn.Linear) else weight.shape[0]
        hessians[name] = Hessian(features, weight.device)
        handles.append(module.register_forward_pre_hook(watch(name)))
    try:
        yield hessians
    finally:
        for handle in handles:
            handle.remove()


def _longest_chain(model: nn.Module, targets: Mapping[str, nn.Module]) -> tuple[str, nn.ModuleList] | None:
    """The outermost list of modules that holds most targets."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and name]
    held = [sum(key.startswith(f"{name}.") for key in targets) for name, _ in lists]
    most = max(held, default=0)
    # The first of equals is the outermost, as named_modules goes from the outside in.
    return lists[held.index(most)] if most else None


def _record(model: nn.Module, layers: nn.ModuleList, batches: list[Any]) -> list[list[_Call]] | None:
    """Run the model once; return each layer's arguments for each batch, hidden states only of the first layer.

    None if the layers do not form a chain: each called once, on exactly what the one before returned.
    """
    calls: list[list[_Call]] = [[] for _ in layers]
    order: list[int] = []
    output: Any = None
    chained = True

    def watch(index: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal chained
            order.append(index)
            call = _Call(tuple(map(_no_cache, args)), {key: _no_cache(value) for key, value in kwargs.items()})
            chained &= isinstance(call.hidden, torch.Tensor) and (index == 0 or call.hidden is output)
            if index:
                call.hidden = None
            calls[index].append(call)

        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            nonlocal output
            output = _first(result)

        return before, after

    handles = []
    for index, layer in enumerate(layers):
        before, after = watch(index)
        handles += [
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(after),
        ]
    try:
        for batch in batches:
            _forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls if chained and order == list(range(len(layers))) * len(batches) else None
