"""A conversation: each turn runs only the tokens that the cache does not hold yet."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from course_lib.generation.loop import GenerationResult, generate, make_cache
from course_lib.generation.text import TextStream
from course_lib.kv_cache import KVCache, PrefixCache
from course_lib.memory.units import whole
from course_lib.models.decoder import DecoderLM

Message = dict[str, str]


class ChatSession:
    """A conversation with a model.

    Each turn renders the whole history with the tokenizer's chat template and compares its token ids with those that the cache
    holds: it goes back to where they part and runs the rest. So a template may render history otherwise than it was written, drop
    thinking or trim spaces; only less is reused then.

    Parameters
    ----------
    model : DecoderLM or PreTrainedModel
        A causal language model.
    tokenizer
        With a chat template.
    cache : str or transformers.Cache
        As for :func:`course_lib.generation.generate`; an object must be empty, but for a `PrefixCache`, which conversations may share
        one after the other. ``"static"`` needs `max_tokens`.
    system : str, optional
        A system message, which is never dropped.
    max_tokens : int, optional
        How long history, new message and longest reply together may be. Turns are dropped from the oldest on until they fit, and
        what follows is computed anew, at its new position.

    Attributes
    ----------
    messages : list of dict
        ``role`` and ``content`` of all that the model is shown, the last reply included.
    reused_tokens, processed_tokens : int
        Of the last turn's prompt: tokens that the cache held, and tokens that were computed.
    cache : transformers.Cache
        With the tokens of the conversation so far, all but the last.
    result : GenerationResult or None
        Of the last turn.

    Raises
    ------
    ValueError
        If the tokenizer has no chat template, the cache holds tokens, or an argument is out of range or without effect.

    Notes
    -----
    A turn that an exception ends, KeyboardInterrupt too, leaves the messages as they were before it; the cache is then emptied, for it
    may hold part of a token, and the next turn computes all anew. Chapter 08 measures what reuse saves.
    """

    def __init__(
        self,
        model: DecoderLM | PreTrainedModel,
        tokenizer: Any,
        cache: str | Cache = "dynamic",
        system: str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if not hasattr(tokenizer, "apply_chat_template") or getattr(tokenizer, "chat_template", "") is None:
            raise ValueError(
                f"tokenizer is a {type(tokenizer).__name__} without a chat template; one is needed to chat"
            )
        if max_tokens is not None:
            max_tokens = whole(max_tokens, "max_tokens", least=1)
        if cache is None:
            raise ValueError("cache is None; a conversation without one is `generate` with all messages")
        if cache == "static" and max_tokens is None:
            raise ValueError("cache is 'static' and max_tokens None; a static cache has room for a number of tokens")
        if isinstance(cache, Cache) and not isinstance(cache, PrefixCache) and cache.get_seq_length():
            raise ValueError(f"cache holds {cache.get_seq_length()} tokens; an empty one is needed")
        self.model, self.tokenizer, self.max_tokens = model, tokenizer, max_tokens
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.reused_tokens = self.processed_tokens = 0
        self.result: GenerationResult | None = None
        self.cache: Any = make_cache(cache, model, max_tokens or 0)
        self._none = None if isinstance(self.cache, KVCache) else copy.deepcopy(self.cache)
        self._held: list[int] = []

    def send(
        self,
        text: str,
        *,
        max_new_tokens: int = 256,
        on_text: Callable[[str], object] | None = None,
        **options: Any,
    ) -> str:
        """Send a message and return the reply.

        Parameters
        ----------
        text : str
            The user's message.
        max_new_tokens : int
            The longest reply.
        on_text : callable, optional
            Called with each piece of the reply as soon as it is certain.
        **options
            Of :func:`course_lib.generation.generate`; `eos_token_id` is by default the model's own.

        Raises
        ------
        ValueError
            If the message with the system message alone is too long for `max_tokens`, or an option is not accepted; the session is
            then as it was.
        """
        max_new_tokens = whole(max_new_tokens, "max_new_tokens", least=1)
        messages, ids = self._fitting([*self.messages, {"role": "user", "content": text}], max_new_tokens)
        options.setdefault("eos_token_id", self._end_tokens())
        stream = TextStream(self.tokenizer, options.get("stop") or ())
        watch = options.pop("on_token", None)

        def on_token(tokens: torch.Tensor) -> None:
            if watch is not None:
                watch(tokens)
            if on_text is not None and (piece := stream.push(int(tokens[0]))):
                on_text(piece)

        try:
            self._go_back(ids)
            result = generate(
                self.model,
                torch.tensor([ids], device=self.model.device),
                max_new_tokens=max_new_tokens,
                cache=self.cache,
                tokenizer=self.tokenizer,
                on_token=on_token,
                **options,
            )
            if on_text is not None and (piece := stream.end()):
                on_text(piece)
        except BaseException:
            self._empty()
            raise
        assert result.texts is not None
        reply = result.texts[0]
        self._held = result.sequences[0, :-1].tolist()
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        self.reused_tokens, self.processed_tokens = result.reused_tokens, len(ids) - result.reused_tokens
        self.result = result
        return reply

    def _fitting(self, messages: list[Message], new: int) -> tuple[list[Message], list[int]]:
        """Return the messages without the oldest turns that `max_tokens` has no room for, and their token ids."""
        ids = self._render(messages)
        while self.max_tokens is not None and len(ids) + new > self.max_tokens:
            first = 1 if messages[0]["role"] == "system" else 0
            later = [i for i, message in enumerate(messages) if i > first and message["role"] == "user"]
            if not later:
                raise ValueError(
                    f"text makes a prompt of {len(ids)} tokens and max_new_tokens is {new}; max_tokens {self.max_tokens} has no room for both"
                )
            messages = messages[:first] + messages[later[0] :]
            ids = self._render(messages)
        return messages, ids

    def _render(self, messages: list[Message]) -> list[int]:
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        return list(ids["input_ids"])

    def _end_tokens(self) -> list[int]:
        """Return the tokens that end a reply, the tokenizer's and the model's."""
        config = getattr(self.model, "generation_config", None)
        found: set[int] = set()
        for tokens in (getattr(self.tokenizer, "eos_token_id", None), getattr(config, "eos_token_id", None)):
            found |= set() if tokens is None else {tokens} if isinstance(tokens, int) else set(tokens)
        return sorted(found)

    def _go_back(self, ids: list[int]) -> None:
        """Make the cache hold a beginning of these tokens, and nothing else."""
        if isinstance(self.cache, PrefixCache):  # which finds it itself
            return
        alike = zip(self._held, ids[:-1], strict=False)
        common = next((i for i, (held, token) in enumerate(alike) if held != token), min(len(self._held), len(ids) - 1))
        try:
            if common < len(self._held):
                self.cache.crop(common - len(self._held))
        except (ValueError, NotImplementedError, RuntimeError):
            self._empty()  # a window, say, has dropped what would be seen again
        self._held = self._held[:common]

    def _empty(self) -> None:
        self._held = []
        if isinstance(self.cache, PrefixCache):  # starts anew with each turn, and keeps what it has stored
            return
        if isinstance(self.cache, KVCache):
            self.cache.reset()
        else:  # Transformers' own before 5.18 do not forget how much they held
            self.cache = copy.deepcopy(self._none)
