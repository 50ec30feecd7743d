"""Many requests through one model at a time: each step is one forward pass over the next tokens of all that are running."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from course_lib.generation.loop import end_tokens
from course_lib.generation.sampling import check_sampling, choose_tokens, seeded
from course_lib.generation.text import TextStream, check_on_token, check_stop
from course_lib.kv_cache.packed import PackedCache, Row
from course_lib.memory.units import whole
from course_lib.models.decoder import DecoderLM


class Request:
    """A text that a `ContinuousBatcher` continues; made by its `submit`.

    Attributes
    ----------
    id : int
        The number of its arrival: 0, 1 and so on.
    prompt : tuple of int
        Its token ids.
    max_new_tokens : int
        How many tokens are added at most.
    tokens : list of int
        New tokens so far, the one that ended it included.
    state : str
        ``"waiting"`` (also between a preemption and the next start), ``"running"``, ``"finished"`` or ``"cancelled"``.
    reason : str or None
        Why it finished: ``"length"``, ``"eos"`` or ``"stop"``; ``"nan"`` where its logits were no finite numbers, so that there is no
        next token; ``"error"`` where its tokenizer raised an exception.
    preemptions : int
        How often its blocks were taken for one that came before it; what they held was then computed anew.
    """

    def __init__(self, number: int, prompt: tuple[int, ...], max_new_tokens: int, options: _Options) -> None:
        self.id, self.prompt, self.max_new_tokens = number, prompt, max_new_tokens
        self.tokens: list[int] = []
        self.state, self.reason = "waiting", None  # type: str, str | None
        self.preemptions = 0
        self._options = options
        self._row: Row | None = None  # while it runs

    def __repr__(self) -> str:
        return f"Request({self.id}: {len(self.prompt)} tokens, {len(self.tokens)} of {self.max_new_tokens} new, {self.state})"

    @property
    def text(self) -> str | None:
        """With a tokenizer, the new text so far, without special tokens and cut before a stop string; else None."""
        stream = self._options.stream
        return None if stream is None else stream.text

    @property
    def _due(self) -> int:
        """Tokens that must be computed before there is another: one, once it is being written."""
        return len(self.prompt) + len(self.tokens) - (0 if self._row is None else self._row.length)

    def _ids(self, start: int, end: int) -> list[int]:
        length = len(self.prompt)
        if start >= length:
            return self.tokens[start - length : end - length]
        return [*self.prompt[start:end], *self.tokens[: max(0, end - length)]]


class NewToken(NamedTuple):
    """A token that a step has chosen."""

    request: Request
    token: int


@dataclass(frozen=True)
class BatchStats:
    """What a `ContinuousBatcher` has done so far.

    Attributes
    ----------
    steps : int
        Forward passes.
    tokens : int
        New tokens of all requests.
    prefill_tokens : int
        Tokens of prompts that were computed, those of preempted requests once more.
    preemptions : int
        How often a request lost its blocks to an earlier one.
    running, waiting : int
        Requests now.
    blocks_used, blocks_peak, blocks_total : int
        Blocks in use now, at most after any step, and all there are (those allocated so far, where their number grows).
    occupancy : float
        Requests in a step, on average, as a share of ``max_batch``; 0 before the first step.
    """

    steps: int
    tokens: int
    prefill_tokens: int
    preemptions: int
    running: int
    waiting: int
    blocks_used: int
    blocks_peak: int
    blocks_total: int
    occupancy: float


@dataclass
class _Options:
    """How a request's tokens are chosen, and what ends it."""

    sampling: dict[str, Any]
    generator: torch.Generator | None
    ends: frozenset[int]
    stream: TextStream | None
    on_token: Callable[[int], object] | None

    @property
    def plain(self) -> bool:
        """Whether the most likely token is taken as it is."""
        return self.sampling["temperature"] == 0 and self.sampling["repetition_penalty"] in (None, 1)


class ContinuousBatcher:
    """Continues many texts at once; they may arrive, end and be cancelled between any two steps.

    A step is one forward pass over one row of tokens: the last token of every text that is being written, and pieces of prompts, up to
    a budget. Keys and values of all lie in the blocks of one pool. Each text becomes what
    :func:`course_lib.generation.generate` makes of it alone with the same options.

    Parameters
    ----------
    model : DecoderLM or PreTrainedModel
        A causal language model; one of Transformers is converted by `DecoderLM.from_transformers`, which shares its weights. Fastest on
        a CPU is ``load(..., as_decoder=True)``.
    num_blocks : int, optional
        Blocks of the pool. Where they do not suffice, the request that came last is preempted: its blocks are given to earlier ones, and
        it starts again, with all its tokens, as soon as there is room. By default their number grows as needed.
    block_size : int
        Tokens in a block.
    max_batch : int
        The most requests that run at once.
    token_budget : int
        The most tokens in a step, at least ``max_batch``. What those that are writing leave goes to prompts, in order of arrival.

    Attributes
    ----------
    model : DecoderLM
        What runs.
    cache : course_lib.kv_cache.packed.PackedCache
        The pool; ``cache.pool.used`` is 0 when no request is running.
    running, waiting : sequence of Request
        In order of arrival.
    last_step : list of (Request, int)
        In the order of the last step's tokens, whose they were, and how many of each.

    Raises
    ------
    TypeError
        If `model` is no language model.
    ValueError
        If a number is out of range, or the model is one that cannot run so.

    Notes
    -----
    Continuous batching: Yu et al. 2022, "Orca: A distributed serving system for transformer-based generative models". Chunks of
    prompts beside decoding: Agrawal et al. 2023, "SARATHI". Preemption by recomputation: Kwon et al. 2023, section 4.5. Who came
    first is served first, and takes what it needs from those that came later, so that no request waits for ever. Chapter 11 uses it.

    Examples
    --------
    >>> batcher = ContinuousBatcher(model, num_blocks=512)
    >>> first = batcher.submit(tokenizer("The sea").input_ids, max_new_tokens=20)
    >>> batcher.step()
    [NewToken(request=Request(0: 2 tokens, 1 of 20 new, running), token=314)]
    >>> second = batcher.submit(tokenizer("A hill").input_ids, max_new_tokens=5, temperature=0.8, seed=1)
    >>> batcher.run()
    >>> first.tokens, second.tokens
    """

    def __init__(
        self,
        model: DecoderLM | PreTrainedModel,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_batch: int = 32,
        token_budget: int = 256,
    ) -> None:
        if not isinstance(model, DecoderLM | PreTrainedModel):
            raise TypeError(
                f"model is of type {type(model).__name__}; a DecoderLM or a PreTrainedModel is needed, the first of the pair that "
                "load(name) returns, (model, tokenizer)"
            )
        self.model = model if isinstance(model, DecoderLM) else DecoderLM.from_transformers(model)
        self.max_batch = whole(max_batch, "max_batch", least=1)
        self.token_budget = whole(token_budget, "token_budget", least=1)
        if token_budget < max_batch:
            raise ValueError(
                f"token_budget is {token_budget} and max_batch {max_batch}; at least one token for each request is needed"
            )
        if self.model.attention_backend != "auto":
            raise ValueError(
                f"model has attention_backend {self.model.attention_backend!r}; 'auto' is needed to read blocks"
            )
        kind = (self.model.config.rope_parameters or {}).get("rope_type", "default")
        if self.model.config.position == "rope" and kind in ("dynamic", "longrope"):
            raise ValueError(
                f"model has rope_type {kind!r}, whose angles depend on a text's length; texts of several lengths cannot share a step"
            )
        self.cache = PackedCache(self.model.config, block_size=block_size, num_blocks=num_blocks)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.last_step: list[tuple[Request, int]] = []
        self._numbers = itertools.count()
        self._unheard: deque[NewToken] = deque()
        self._steps = self._tokens = self._prefilled = self._preemptions = self._peak = self._served = 0

    def submit(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        seed: int | None = None,
        on_token: Callable[[int], object] | None = None,
    ) -> Request:
        """Add a request behind those that wait; nothing is computed yet.

        Parameters
        ----------
        input_ids : Tensor or sequence of int
            The prompt, ``[length]`` or ``[1, length]``, at least one token.
        max_new_tokens : int
            How many tokens to add at most.
        temperature, top_k, top_p, min_p, repetition_penalty, eos_token_id, stop, tokenizer
            As for :func:`course_lib.generation.generate`.
        seed : int, optional
            Makes the request's own sampling repeatable, whatever runs beside it.
        on_token : callable, optional
            Called with each token, an int, at the end of its step. An exception of its leaves `step` or `run`; the token is in
            ``tokens`` even so, and the next call goes on, with the calls that are due first.

        Returns
        -------
        Request
            Changes as it is served.

        Raises
        ------
        TypeError
            If `input_ids`, `tokenizer` or `on_token` is something else.
        ValueError
            If an argument is out of range, or the request needs more blocks or positions than there are.
        """
        prompt = _prompt(input_ids, self.model.config.vocab_size)
        max_new_tokens = whole(max_new_tokens, "max_new_tokens", least=1)
        check_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        if check_stop(stop) and tokenizer is None:
            raise ValueError(f"tokenizer is None; stop {stop!r} needs one to decode the text")
        check_on_token(on_token)
        self._check_room(len(prompt), max_new_tokens)
        options = _Options(
            {
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "min_p": min_p,
                "repetition_penalty": repetition_penalty,
            },
            seeded(seed, self.model.device),
            end_tokens(eos_token_id),
            None if tokenizer is None else TextStream(tokenizer, stop or ()),
            on_token,
        )
        request = Request(next(self._numbers), prompt, max_new_tokens, options)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request and free its blocks at once; its tokens stay. One that has ended is left as it is.

        An exception of its tokenizer, which decodes the last of its text, leaves `cancel`; the request has ended even so.

        Raises
        ------
        ValueError
            If the request is of another batcher.
        """
        if request.state in ("finished", "cancelled"):
            return
        if request not in self.running and request not in self.waiting:
            raise ValueError(f"request is {request!r}, which is not one of this batcher's")
        self._end(request, "cancelled")
        if request._options.stream is not None:
            request._options.stream.end()

    def step(self) -> list[NewToken]:
        """Run one forward pass, and return the tokens that it has chosen; nothing, where no request is left.

        A step may choose no token, while it runs a part of a long prompt. An exception of a request's tokenizer ends that request, and
        leaves `step` or `run` when the step is over; the next call goes on with the others.
        """
        self._tell()
        self.last_step = self._schedule()
        chosen = self._forward(self.last_step) if self.last_step else []
        self._tell()
        return chosen

    def run(self) -> None:
        """Step until every request has ended."""
        self._tell()
        while self.running or self.waiting:
            self.step()

    @property
    def stats(self) -> BatchStats:
        """Counts so far."""
        pool = self.cache.pool
        return BatchStats(
            steps=self._steps,
            tokens=self._tokens,
            prefill_tokens=self._prefilled,
            preemptions=self._preemptions,
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_used=pool.used,
            blocks_peak=self._peak,
            blocks_total=pool.total,
            occupancy=self._served / (self._steps * self.max_batch) if self._steps else 0.0,
        )

    # ---- one step

    def _schedule(self) -> list[tuple[Request, int]]:
        """Choose how many tokens of each request are computed, and take the blocks for them."""
        work: list[tuple[Request, int]] = []
        budget = self.token_budget - sum(request._due == 1 for request in self.running)
        crowded = False
        for request in list(self.running):
            if request._row is None:  # preempted for one before it
                continue
            due = request._due
            wanted = 1 if due == 1 else min(due, budget)
            while request._row.missing(wanted) and self.running[-1] is not request:
                self._preempt(self.running[-1])
                crowded = True
            # The last to come waits for blocks with what it has.
            count = request._row.fitting(wanted)
            crowded = crowded or count < wanted
            budget -= count if due > 1 else 0
            if count:
                request._row.reserve(count)
                work.append((request, count))
        while self.waiting and not crowded and budget and len(self.running) < self.max_batch:
            request, row = self.waiting[0], self.cache.row()
            count = min(request._due, budget)
            # With a block for each that runs, or its own would soon be taken away again.
            needed = self.cache.blocks_for(request._due, count) + len(self.running)
            if self.running and self.cache.pool.missing(needed):
                break
            count = row.fitting(count)
            row.reserve(count)
            request._row, request.state = row, "running"
            self.running.append(self.waiting.popleft())
            work.append((request, count))
            budget -= count
        self._peak = max(self._peak, self.cache.pool.used)
        # Those that are being written first, by length: they attend together.
        return sorted(work, key=lambda one: (one[0]._due > 1, one[0]._row.length if one[0]._row else 0))

    @torch.inference_mode()
    def _forward(self, work: list[tuple[Request, int]]) -> list[NewToken]:
        """Compute these tokens, and choose the next of each request that lacks none."""
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        prefilled = 0
        writing: list[Request] = []
        rows: list[tuple[Row, int]] = []
        for request, count in work:
            row = request._row
            assert row is not None
            start = row.length
            ids += request._ids(start, start + count)
            positions += range(start, start + count)
            rows.append((row, count))
            if count == request._due:
                last.append(len(ids) - 1)
                writing.append(request)
            prefilled += count if count > 1 or not request.tokens else 0
        device = self.model.device
        self.cache.pack(rows, device)
        logits = self.model(
            torch.tensor([ids], device=device),
            cache=self.cache,
            position_ids=torch.tensor([positions], device=device),
            logits_to_keep=torch.tensor(last, dtype=torch.long, device=device),
        ).logits[0]
        tokens = self._choose(logits, writing)
        self.cache.advance()
        self._steps += 1
        self._served += len(work)
        self._prefilled += prefilled
        chosen: list[NewToken] = []
        errors: list[Exception] = []
        for request, token in zip(writing, tokens, strict=True):
            if token is None:
                self._end(request, "finished", "nan")
                continue
            chosen.append(NewToken(request, token))
            try:
                self._take(request, token)
            except Exception as error:  # the others go on
                errors.append(error)
        self._unheard.extend(new for new in chosen if new.request._options.on_token is not None)
        if errors:
            raise errors[0]
        return chosen

    def _choose(self, logits: torch.Tensor, writing: list[Request]) -> list[int | None]:
        """Choose a token for each row of logits, ``[requests, vocab_size]``; None where they are no finite numbers."""
        largest, most_likely = logits.max(-1)  # NaN is larger than all
        finite = largest.isfinite().tolist()
        tokens: list[int | None] = most_likely.tolist()
        for index, request in enumerate(writing):
            options = request._options
            if not finite[index]:
                tokens[index] = None
            elif not options.plain:
                previous = None
                if options.sampling["repetition_penalty"] is not None:
                    previous = torch.tensor([[*request.prompt, *request.tokens]], device=logits.device)
                own, generator = logits[index : index + 1], options.generator
                tokens[index] = int(choose_tokens(own, previous=previous, generator=generator, **options.sampling))
        return tokens

    def _take(self, request: Request, token: int) -> None:
        """Add a token to a request, and end it if that is the last, or if its tokenizer raises an exception."""
        self._tokens += 1
        request.tokens.append(token)
        ends, stream, reason = request._options.ends, request._options.stream, None
        try:
            if stream is not None:
                stream.push(token)
            if token in ends:
                reason = "eos"
            elif stream is not None and stream.stopped:
                reason = "stop"
            elif len(request.tokens) == request.max_new_tokens:
                reason = "length"
            if reason is not None and stream is not None:
                stream.end()
        except Exception:
            reason = "error"
            raise
        finally:
            if reason is not None:
                self._end(request, "finished", reason)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.state = "waiting"
        request.preemptions += 1
        self._preemptions += 1
        self.waiting.appendleft(request)

    def _end(self, request: Request, state: str, reason: str | None = None) -> None:
        (self.running if request.state == "running" else self.waiting).remove(request)
        self._release(request)
        request.state, request.reason = state, reason

    def _release(self, request: Request) -> None:
        if request._row is not None:
            request._row.free()
            request._row = None

    def _tell(self) -> None:
        """Make the calls that are due."""
        while self._unheard:
            request, token = self._unheard.popleft()
            if request.state != "cancelled" and request._options.on_token is not None:
                request._options.on_token(token)

    def _check_room(self, length: int, new: int) -> None:
        """Refuse a request that could never be served."""
        stored = length + new - 1  # the last token is never stored
        config, pool = self.model.config, self.cache.pool
        if config.position == "learned" and stored > config.max_position_embeddings:
            raise ValueError(
                f"input_ids has {length} tokens and max_new_tokens is {new}, but the model has {config.max_position_embeddings} positions"
            )
        needed = self.cache.blocks_for(stored, 1)
        if pool.fixed and needed > pool.total:
            raise ValueError(
                f"input_ids has {length} tokens and max_new_tokens is {new}, which need {needed} blocks of "
                f"{self.cache.pages.block_size}; num_blocks is {pool.total}"
            )


def _prompt(input_ids: torch.Tensor | Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return token ids as numbers."""
    if isinstance(input_ids, torch.Tensor):
        row = input_ids[0] if input_ids.ndim == 2 and len(input_ids) == 1 else input_ids
        if row.ndim != 1 or row.is_floating_point() or row.dtype == torch.bool:
            raise ValueError(
                f"input_ids has shape {list(input_ids.shape)} and dtype {input_ids.dtype}; integers [length] or [1, length] are needed"
            )
        found = tuple(row.tolist())
    else:
        ids: Any = input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids  # also a NumPy array
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise TypeError(
                f"input_ids is of type {type(input_ids).__name__}; a list or tensor of token ids is needed, as tokenizer(text).input_ids"
            )
        if len(ids) == 1 and isinstance(ids[0], Sequence):
            ids = ids[0]
        found = tuple(whole(token, "input_ids") for token in ids)
    if not found:
        raise ValueError("input_ids has no tokens; at least one is needed")
    wrong = next((token for token in found if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"input_ids holds {wrong}; the model has {vocab_size} tokens, from 0 on")
    return found
