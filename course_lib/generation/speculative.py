"""Several tokens a pass: something cheap drafts them, the model checks them at once, and what it would not write is never kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import Cache, PreTrainedModel

from course_lib.generation.drafts import PromptLookup, Runner, make_drafter
from course_lib.generation.loop import check_prompts, end_tokens, make_cache, now
from course_lib.generation.sampling import check_sampling, seeded, token_chances
from course_lib.generation.text import check_on_token
from course_lib.kv_cache import PrefixCache, SlidingWindowCache
from course_lib.memory.units import whole
from course_lib.models.decoder import DecoderLM

#: How many tokens are drafted at first where the number is ``"adaptive"``, and how it grows and shrinks (Transformers' rule).
ADAPTIVE_START, ADAPTIVE_GROWTH, ADAPTIVE_LOSS = 4, 2, 1


@dataclass(frozen=True)
class SpeculativeResult:
    """What `speculative_generate` returns.

    Attributes
    ----------
    sequences : Tensor
        int64, ``[1, length + new_tokens]``: the prompt and what follows.
    cache : transformers.Cache
        The target's keys and values of all tokens but the last, for another call.
    new_tokens : int
        Tokens added, the one that ended the text included.
    prefill_seconds, decode_seconds : float
        Time to the first new token, which comes without a draft, and from there to the last.
    draft_seconds : float
        What drafting took of `decode_seconds`.
    rounds : int
        Passes of the target after the first token.
    drafted, accepted : int
        Tokens that were drafted, and those of them that stand in the text.
    tried_at, accepted_at : tuple of int
        By their place in a round's draft: tokens whose turn came, for all before them in the draft were accepted, and those
        that were accepted.
    """

    sequences: torch.Tensor
    cache: Cache
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    draft_seconds: float
    rounds: int
    drafted: int
    accepted: int
    tried_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @property
    def acceptance(self) -> float:
        """Share of the tokens whose turn came that were accepted, the rate of `expected_tokens`; 0 where none was drafted.

        A draft's tokens behind a rejected one had no turn: `accepted` / `drafted` is smaller, and smaller the longer drafts are.
        """
        return self.accepted / max(sum(self.tried_at), 1)

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """`acceptance` by the place in a round's draft."""
        return tuple(kept / tried for kept, tried in zip(self.accepted_at, self.tried_at, strict=True))

    @property
    def tokens_per_round(self) -> float:
        """New tokens of a pass of the target, the first token left out; 1 would be decoding without a draft."""
        return (self.new_tokens - 1) / max(self.rounds, 1)


def expected_tokens(acceptance: float, draft_tokens: int) -> float:
    """Return how many tokens a pass of the target adds on average, if each drafted token is accepted with the same chance.

    Parameters
    ----------
    acceptance : float
        The chance, from 0 to 1.
    draft_tokens : int
        How many are drafted.

    References
    ----------
    Leviathan et al. 2023, equation 1: ``(1 - acceptance ** (draft_tokens + 1)) / (1 - acceptance)``. Chapter 12 derives it.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance is {acceptance!r}; a number from 0 to 1 is needed")
    draft_tokens = whole(draft_tokens, "draft_tokens")
    return float(sum(acceptance**place for place in range(draft_tokens + 1)))


def expected_speedup(acceptance: float, draft_tokens: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Return how many times as fast as without a draft a text is then written.

    Parameters
    ----------
    acceptance, draft_tokens
        As for `expected_tokens`.
    draft_cost : float
        Time to draft a token, of the time in which the target writes one.
    verify_cost : float
        Time in which the target checks a draft, of that same time: 1 where reading its weights takes all of it.

    References
    ----------
    Leviathan et al. 2023, theorem 3.8, whose `verify_cost` is 1.
    """
    for name, cost, least in (("draft_cost", draft_cost, 0.0), ("verify_cost", verify_cost, 1e-9)):
        if not least <= cost < float("inf"):
            raise ValueError(f"{name} is {cost!r}; a finite number {'above' if least else 'of at least'} 0 is needed")
    return expected_tokens(acceptance, draft_tokens) / (draft_tokens * draft_cost + verify_cost)


def accept_tokens(
    target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, generator: torch.Generator | None = None
) -> tuple[int, torch.Tensor]:
    """Keep of drafted tokens so many, and add one, that the text is distributed as if the target alone had drawn it.

    A token is accepted with the chance ``target / draft``, at most 1. The first that is not is replaced by a draw from what the target
    gives more to than the draft does, ``max(0, target - draft)``; where all are accepted, the target draws one more.

    Parameters
    ----------
    target : Tensor
        ``[count + 1, vocab_size]``, the target's chances of each token in each place, and after the last.
    draft : Tensor
        ``[count, vocab_size]``, the chances with which the tokens were drawn.
    tokens : Tensor
        int64 ``[count]``.
    generator : torch.Generator, optional
        Makes draws repeatable.

    Returns
    -------
    accepted : int
        How many tokens are kept.
    token : Tensor
        int64, scalar: what follows them.

    References
    ----------
    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, algorithm 1 and appendix A.1; Chen et al.,
    "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
    """
    count = len(tokens)
    places = torch.arange(count, device=target.device)
    draws = torch.rand(count, device=target.device, generator=generator)
    kept = draws * draft[places, tokens] < target[places, tokens]
    accepted = int(kept.cumprod(0).sum())
    chances = target[accepted]
    if accepted < count:
        more = (chances - draft[accepted]).clamp(min=0)
        # Equal chances differ by rounding at most, which may leave nothing.
        chances = more if bool(more.any()) else chances
    return accepted, torch.multinomial(chances, 1, generator=generator)[0]


@torch.no_grad()
def speculative_generate(
    target: DecoderLM | PreTrainedModel,
    draft: DecoderLM | PreTrainedModel | PromptLookup,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    draft_tokens: int | Literal["adaptive"] = 4,
    cache: str | Cache = "dynamic",
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int | None = None,
    on_token: Callable[[torch.Tensor], object] | None = None,
) -> SpeculativeResult:
    """Continue a text as the target alone would, in fewer passes of it.

    Parameters
    ----------
    target : DecoderLM or PreTrainedModel
        A causal language model.
    draft : DecoderLM, PreTrainedModel or PromptLookup
        A cheaper model of the same vocabulary, or a look-up in the text itself.
    input_ids : Tensor
        Integers ``[1, length]``, all that is known, also what a cache already holds.
    max_new_tokens : int
        How many tokens to add at most.
    draft_tokens : int or "adaptive"
        How many tokens to draft in each round; ``"adaptive"`` drafts 2 more after a draft that was accepted whole, and 1 less after
        another.
    cache : str or transformers.Cache
        The target's, as for :func:`course_lib.generation.generate`. It must be able to give up rejected tokens, and show each of
        several tokens what it would show it alone, which ``"sliding_window"`` does not.
    temperature, top_k, top_p, min_p
        As in :func:`course_lib.generation.choose_tokens`, for both models; the most likely token by default.
    eos_token_id : int or sequence of int, optional
        Tokens that end the text.
    seed : int, optional
        Makes sampling repeatable; the draws are others than those of `generate`, of the same distribution.
    on_token : callable, optional
        Called with each new token, int64 ``[1]``, when its round is over.

    Returns
    -------
    SpeculativeResult

    Raises
    ------
    TypeError
        If the draft is none of those.
    ValueError
        If an argument is out of range, there is more than one text, the vocabularies differ, or a model keeps a recurrent state, as
        Mamba does, which cannot give up rejected tokens.

    Notes
    -----
    Greedy tokens are those that `generate` writes, except where two are equally likely but for rounding: several tokens at once are
    added up in another order than one. In float32 that is rare, in bfloat16 it is not. A quantised cache, too, can differ, for it rounds
    tokens in groups. Chapter 12 derives the rule and measures what it saves.
    """
    check_sampling(temperature, top_k, top_p, min_p)
    batch, length, max_new_tokens = check_prompts(input_ids, None, max_new_tokens)
    if batch != 1:
        raise ValueError(
            f"input_ids has {batch} rows; one is needed, for rows would accept different numbers of tokens"
        )
    if draft_tokens != "adaptive":
        draft_tokens = whole(draft_tokens, "draft_tokens, where it is not 'adaptive',", least=1)
    if cache is None or isinstance(cache, SlidingWindowCache) or cache == "sliding_window":
        raise ValueError(
            f"cache is {cache if isinstance(cache, str | None) else type(cache).__name__!r}; one that shows each of several tokens what "
            "it would show it alone is needed"
        )
    check_on_token(on_token)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p} if temperature else None
    generator = seeded(seed, input_ids.device)
    drafter = make_drafter(draft, target, sampling, generator)
    ends = end_tokens(eos_token_id)
    kept: Any = make_cache(cache, target, length + max_new_tokens)
    past = kept.begin(input_ids) if isinstance(kept, PrefixCache) else int(kept.get_seq_length())
    if past >= length:
        raise ValueError(f"cache holds {past} tokens and input_ids {length}; at least one token must be new")

    text = torch.empty(1, length + max_new_tokens, dtype=torch.long, device=input_ids.device)
    text[:, :length] = input_ids
    runner = Runner(target, kept)
    size: int = ADAPTIVE_START if draft_tokens == "adaptive" else draft_tokens
    end, rounds, drafted, drafting = length, 0, 0, 0.0
    tried_at: list[int] = []
    accepted_at: list[int] = []
    moments = [now(input_ids.device)]
    while True:
        count, chances = 0, None
        if end > length:  # the first token comes with the prompt, so that the time to it is the target's
            start = now(input_ids.device)
            # A round adds a token more than are accepted.
            count, chances = drafter.propose(text, end, min(size, length + max_new_tokens - end - 1))
            drafting += now(input_ids.device) - start
        logits = runner(text, end + count, count + 1)
        accepted, token = _verify(logits, text[0, end : end + count], chances, sampling, generator)
        text[0, end + accepted] = token
        new = text[0, end : end + accepted + 1].tolist()
        over = next((place for place, one in enumerate(new) if one in ends), None)
        if over is not None:
            new = new[: over + 1]
        rounds += end > length
        drafted += count
        for place in range(min(count, accepted + 1, len(new))):
            if place == len(tried_at):
                tried_at.append(0)
                accepted_at.append(0)
            tried_at[place] += 1
            accepted_at[place] += place < accepted
        if draft_tokens == "adaptive" and count:
            size = size + ADAPTIVE_GROWTH if accepted == count else max(1, size - ADAPTIVE_LOSS)
        first, end = end, end + len(new)
        runner.back_to(end - 1)
        drafter.back_to(end - 1)
        if first == length:
            moments.append(now(input_ids.device))
        if on_token:
            for place in range(first, end):
                on_token(text[:, place])
        if over is not None or end == length + max_new_tokens:
            break
    moments.append(now(input_ids.device))
    text = text[:, :end]
    if isinstance(kept, PrefixCache):
        kept.commit(text)
    return SpeculativeResult(
        text,
        kept,
        end - length,
        moments[1] - moments[0],
        moments[2] - moments[1],
        drafting,
        rounds,
        drafted,
        sum(accepted_at),
        tuple(tried_at),
        tuple(accepted_at),
    )


def _verify(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    draft: torch.Tensor | None,
    sampling: dict[str, Any] | None,
    generator: torch.Generator | None,
) -> tuple[int, torch.Tensor]:
    """Return how many drafted tokens are kept, and the token that follows them."""
    if sampling is None:
        best = logits.argmax(dim=-1)
        accepted = int((best[:-1] == tokens).cumprod(0).sum())
        return accepted, best[accepted]
    chances = token_chances(logits, **sampling)
    if draft is None:  # each token was drafted with certainty, if there are any
        draft = torch.nn.functional.one_hot(tokens, chances.shape[-1]).to(chances.dtype)
    return accept_tokens(chances, draft, tokens, generator)
