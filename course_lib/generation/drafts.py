"""What drafts for a model: a look-up in the text, another model, or the model's own first layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from course_lib.generation.sampling import token_chances
from course_lib.kv_cache import DynamicCache
from course_lib.memory.meta import cache_argument
from course_lib.memory.units import whole
from course_lib.models.decoder import DecoderLM


@dataclass(frozen=True)
class PromptLookup:
    """A draft that costs nothing: what followed when the text's last tokens stood in it before.

    Parameters
    ----------
    ngram : int
        How many last tokens are looked for, the latest place first; where they are not found, fewer and fewer.
    min_ngram : int
        The fewest that are looked for.

    Raises
    ------
    ValueError
        If a number is below 1, or `min_ngram` above `ngram`.

    References
    ----------
    Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference: Lossless Acceleration of Large Language Models",
    2023.
    """

    ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        whole(self.ngram, "ngram", least=1)
        whole(self.min_ngram, "min_ngram", least=1)
        if self.min_ngram > self.ngram:
            raise ValueError(f"min_ngram is {self.min_ngram} and ngram {self.ngram}; it can be no more than that")

    def find(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """Return what may follow.

        Parameters
        ----------
        tokens : Tensor
            int64 ``[length]``, the text so far.
        count : int
            How many tokens to return at most.

        Returns
        -------
        Tensor
            int64, at most `count`; empty where nothing is found.
        """
        for size in range(min(self.ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            windows = tokens[:-1].unfold(0, size, 1)
            places = (windows == tokens[-size:]).all(dim=1).nonzero()
            if len(places):
                start = int(places[-1]) + size
                return tokens[start : start + count]
        return tokens[:0]


def first_layers(model: DecoderLM, count: int) -> DecoderLM:
    """Return the first layers of a decoder, with its embedding, norm and head, as a draft for it: all weights are shared.

    Parameters
    ----------
    model : DecoderLM
        Stays as it is.
    count : int
        How many layers.

    Raises
    ------
    ValueError
        If it has fewer, or `count` is below 1.

    Notes
    -----
    A model that was not trained to leave early (Elhoushi et al. 2024, LayerSkip) guesses badly; `kernels/speculative_on_cpu.py`
    measures how badly.
    """
    count = whole(count, "count", least=1)
    if count > len(model.layers):
        raise ValueError(f"count is {count}; the model has {len(model.layers)} layers")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    with torch.device("meta"):
        shorter = DecoderLM(config)
    for name, module in model.named_children():
        setattr(shorter, name, module)
    shorter.layers = nn.ModuleList(list(model.layers)[:count])
    return shorter.train(model.training)


class Runner:
    """A model and its cache, which holds a beginning of a text."""

    def __init__(self, model: DecoderLM | PreTrainedModel, cache: Cache) -> None:
        self.model, self.cache, self.recording = model, cache, False
        self.options: dict[str, Any] = {"cache": cache}
        if not isinstance(model, DecoderLM):
            self.options = {cache_argument(model): cache, "use_cache": True}

    def __call__(self, text: torch.Tensor, end: int, keep: int) -> torch.Tensor:
        """Run what the cache lacks of a text up to `end`, and return the logits after the last so many tokens."""
        start = int(self.cache.get_seq_length())
        logits: torch.Tensor = self.model(text[:, start:end], logits_to_keep=keep, **self.options).logits
        if not self.recording:  # not before the prompt, of which a window need not keep all
            self.cache.activate_past_recording()
            self.recording = True
        return logits[0, -keep:]

    def back_to(self, length: int) -> None:
        """Give up the tokens behind the first so many."""
        self.cache.crop(min(0, length - int(self.cache.get_seq_length())))


class Drafter(Protocol):
    """Drafts tokens into a text."""

    def propose(self, text: torch.Tensor, end: int, count: int) -> tuple[int, torch.Tensor | None]:
        """Write at most so many tokens behind the first `end`; return how many, and their chances ``[count, vocab_size]``."""

    def back_to(self, length: int) -> None:
        """Give up what is known of the tokens behind the first so many."""


class LookupDrafter:
    """Drafts by a `PromptLookup`."""

    def __init__(self, lookup: PromptLookup) -> None:
        self.lookup = lookup

    def propose(self, text: torch.Tensor, end: int, count: int) -> tuple[int, torch.Tensor | None]:
        found = self.lookup.find(text[0, :end], count) if count else text[0, :0]
        text[0, end : end + len(found)] = found
        return len(found), None

    def back_to(self, length: int) -> None:
        pass


class ModelDrafter:
    """Drafts by a model, whose cache takes up with its next draft what it has not run."""

    def __init__(self, runner: Runner, sampling: dict[str, Any] | None, generator: torch.Generator | None) -> None:
        self.runner, self.sampling, self.generator = runner, sampling, generator

    def propose(self, text: torch.Tensor, end: int, count: int) -> tuple[int, torch.Tensor | None]:
        rows = []
        for place in range(end, end + count):
            logits = self.runner(text, place, 1)
            if self.sampling is None:
                text[0, place] = logits[0].argmax()
            else:
                rows.append(token_chances(logits, **self.sampling))
                text[0, place] = torch.multinomial(rows[-1], 1, generator=self.generator)[0, 0]
        return count, torch.cat(rows) if rows else None

    def back_to(self, length: int) -> None:
        if self.runner.recording:
            self.runner.back_to(length)


def make_drafter(
    draft: DecoderLM | PreTrainedModel | PromptLookup,
    target: DecoderLM | PreTrainedModel,
    sampling: dict[str, Any] | None,
    generator: torch.Generator | None,
) -> Drafter:
    """Return what drafts for a target.

    Raises
    ------
    TypeError, ValueError
        If `draft` is neither a model nor a look-up, or of another vocabulary than the target, or if one of them cannot go back.
    """
    for name, model in (("target", target), ("draft", draft)):
        _check_goes_back(model, name)
    if isinstance(draft, PromptLookup):
        return LookupDrafter(draft)
    if not isinstance(draft, DecoderLM | PreTrainedModel):
        raise TypeError(f"draft is of type {type(draft).__name__}; a language model or a PromptLookup is needed")
    theirs, ours = (model.config.get_text_config(decoder=True).vocab_size for model in (draft, target))
    if theirs != ours:
        raise ValueError(f"draft has a vocabulary of {theirs} tokens and target one of {ours}; it must be the same")
    return ModelDrafter(Runner(draft, DynamicCache(draft.config)), sampling, generator)


def _check_goes_back(model: Any, name: str) -> None:
    """Refuse a model whose cache sums up all tokens in a state, which no crop of Transformers' takes back."""
    if not getattr(model, "_is_stateful", False):
        return
    # Some of these families have members with attention alone.
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [None])
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{name} is a {type(model).__name__}, whose recurrent state cannot give up rejected tokens; a model with attention alone is needed"
        )
