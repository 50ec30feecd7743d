"""Other servers beside our own batcher: the same prompts to anything that speaks OpenAI's protocol, and what it answers, how fast.

vLLM, ``transformers serve`` and llama.cpp's server do. Needs nothing but the standard library, and for the comparison our own model.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any
from urllib.parse import urlsplit

from course_lib.memory.units import shown, whole

#: The environment variable with the key that a server asks for; a key is never an argument, which other users of a machine can read.
KEY = "COURSE_API_KEY"
#: The longest timeout, in seconds; no system's sockets take one of 2**31 milliseconds.
LONGEST = 1e6
#: What is asked where no prompts are given.
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time, in a village by the sea,",
    "To make bread, you need flour, water, salt and",
    "The three primary colours are",
    "A poem about the autumn wind:\n",
    "def fibonacci(n):\n",
    "The difference between a list and a tuple in Python is",
)


class EndpointError(RuntimeError):
    """What a server did instead of answering, in one sentence."""


@dataclass(frozen=True)
class Answer:
    """A prompt's continuation, and how long it took.

    Attributes
    ----------
    prompt, text : str
        What was asked, and what came.
    tokens : int
        New tokens, as the server counts them; if it does not, the pieces in which the text came.
    first_token_seconds, seconds : float
        From sending the prompt to the first piece of text, and to the last.
    """

    prompt: str
    text: str
    tokens: int
    first_token_seconds: float
    seconds: float

    @property
    def seconds_per_token(self) -> float | None:
        """Time between tokens after the first; None where there is none."""
        return (self.seconds - self.first_token_seconds) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True)
class Answers:
    """All prompts' answers, in their order, and the seconds from the first prompt sent to the last answer."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all answers, by the time for all."""
        return sum(answer.tokens for answer in self.answers) / self.seconds


def ask(
    url: str,
    model: str,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    concurrency: int = 1,
    timeout: float = 60.0,
) -> Answers:
    """Have a server continue prompts, greedily, and time it.

    Parameters
    ----------
    url : str
        Where it listens, ``http://host:port``, with or without ``/v1``.
    model : str
        The name under which it serves the model.
    prompts : sequence of str
        Sent as they are, to ``/v1/completions``: no chat template is applied.
    max_new_tokens : int
        How many tokens to add at most.
    concurrency : int
        How many prompts to have under way at a time.
    timeout : float
        Seconds to wait for a connection, and then for each piece of text.

    Raises
    ------
    ValueError
        If an argument is out of range, or no header can hold the key.
    EndpointError
        If the server cannot be reached, refuses, or does not answer in full.

    Notes
    -----
    A key that the server asks for is taken from the environment variable ``COURSE_API_KEY``.
    """
    base, new, workers, seconds = check_request(url, prompts, max_new_tokens, concurrency, timeout)

    def one(prompt: str) -> Answer:
        return _complete(base, model, prompt, new, seconds)

    start = time.perf_counter()
    pool = ThreadPoolExecutor(workers)
    try:
        answers = tuple(pool.map(one, prompts))
    finally:
        pool.shutdown(cancel_futures=True)
    return Answers(answers, time.perf_counter() - start)


def check_request(
    url: str, prompts: Sequence[str], max_new_tokens: int, concurrency: int, timeout: float
) -> tuple[str, int, int, float]:
    """Return what `ask` works with, its address and numbers, or raise the ValueError that it would; nothing is sent."""
    _key()
    new, workers = _check_work(prompts, max_new_tokens, concurrency)
    if not isinstance(timeout, Real) or not 0 < timeout <= LONGEST:
        raise ValueError(f"timeout is {shown(timeout)}; a number of seconds above 0 and up to {LONGEST:,.0f} is needed")
    return _base(url), new, workers, float(timeout)


def _check_work(prompts: Sequence[str], max_new_tokens: int, concurrency: int) -> tuple[int, int]:
    if isinstance(prompts, str):
        raise ValueError(f"prompts is the text {shown(prompts)}; a sequence of texts is needed")
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise ValueError("prompts holds an empty text, or none at all; at least one text is needed")
    return whole(max_new_tokens, "max_new_tokens", least=1), whole(concurrency, "concurrency", least=1)


def _key() -> str:
    """Return the key for a server, empty if there is none; an error does not show it."""
    key = os.environ.get(KEY, "").strip()
    if not re.fullmatch("[ -~]*", key):
        raise ValueError(f"the environment variable {KEY} holds a character that no key has; printable ASCII is needed")
    return key


def _base(url: str) -> str:
    """Return the address below which ``/completions`` stands."""
    if isinstance(url, str) and re.match(r"[^/]*//[^/]*@", url):  # first, for the other error shows the address
        raise ValueError(f"url holds a name or password before the @; put a key into the environment variable {KEY}")
    try:
        # No white space, which urlsplit removes in part, and nothing behind the path, to which more is added.
        parts = urlsplit(url if isinstance(url, str) and not re.search(r"[\s\x00-\x1f\x7f?#]", url) else "")
        host = (parts.hostname or "").encode("idna")
        named = parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and parts.path.isascii()
    except ValueError:  # a port that is no number, brackets that do not match, a name with an empty part
        named = False
    if not named:
        raise ValueError(
            f"url is {shown(url)}; the address of a server, as http://localhost:8000, with or without a path, is needed"
        )
    whole_url = url.rstrip("/")
    return whole_url if whole_url.endswith("/v1") else f"{whole_url}/v1"


def _complete(base: str, model: str, prompt: str, new: int, timeout: float) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    counted: int | None = None
    ended = False
    start = time.perf_counter()
    moments: list[float] = []
    with _response(f"{base}/completions", body, timeout) as response:
        if response.status != 200:
            raise EndpointError(_refusal(base, model, response, timeout))
        for event in _events(base, response):
            usage = event.get("usage")
            told = usage.get("completion_tokens") if isinstance(usage, dict) else None
            if type(told) is int and told >= 0:  # true is an int, too
                counted = told
            for choice in _choices(base, event):
                if choice.get("text"):
                    moments.append(time.perf_counter())
                    pieces.append(choice["text"])
                ended = ended or choice.get("finish_reason") is not None
    if not ended:
        raise EndpointError(f"{base} broke off after {len(pieces)} pieces of text, before it said why the text ends")
    moments = moments or [time.perf_counter()]
    tokens = len(pieces) if counted is None else counted
    return Answer(prompt, "".join(pieces), tokens, moments[0] - start, moments[-1] - start)


@contextmanager
def _response(url: str, body: dict[str, Any] | None, timeout: float) -> Iterator[http.client.HTTPResponse]:
    """Send a request, and say in one sentence what may go wrong until its answer is read."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    if key := _key():
        headers["Authorization"] = f"Bearer {key}"
    # Given no port, http.client takes the end of an address such as ::1 for one.
    connection = kind(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), timeout=timeout)
    try:
        connection.request(
            "GET" if body is None else "POST", parts.path, None if body is None else json.dumps(body), headers
        )
        yield connection.getresponse()
    except TimeoutError:
        raise EndpointError(f"{url} sent nothing for {timeout:g} seconds") from None
    except http.client.HTTPException as error:
        raise EndpointError(f"{url} broke off its answer, or speaks no HTTP ({type(error).__name__})") from None
    except OSError as error:
        raise EndpointError(f"{url} cannot be reached ({error.strerror or error})") from None
    finally:
        connection.close()


def _events(base: str, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Return the objects of a stream of server-sent events as they come."""
    kind = response.headers.get_content_type()
    if kind != "text/event-stream":
        raise EndpointError(f"{base}/completions answered with {kind} instead of a stream of events; times need one")
    for line in response:
        name, _, value = line.decode(errors="replace").strip().partition(":")
        value = value.strip()
        if name != "data" or not value:
            continue
        if value == "[DONE]":
            return
        try:
            event = json.loads(value)
        except json.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            raise EndpointError(f"{base} sent {value!r:.80}, which is no JSON object")
        if event.get("error") is not None or event.get("object") == "error":
            raise EndpointError(f"{base} gave up with {_message(event)!r:.300}")
        yield event


def _choices(base: str, event: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pieces of text in an event."""
    choices = event.get("choices") or []
    pieces: list[Any] = choices if isinstance(choices, list) else [None]
    if not all(isinstance(one, dict) and isinstance(one.get("text") or "", str) for one in pieces):
        raise EndpointError(f"{base} sent choices of {shown(choices)}, which are no pieces of text")
    return pieces


def _refusal(base: str, model: str, response: http.client.HTTPResponse, timeout: float) -> str:
    """Return what a server refuses, and what would help."""
    raw = response.read(10_000).decode(errors="replace")
    try:
        said = _message(json.loads(raw))
    except json.JSONDecodeError:
        said = " ".join(raw.split())
    sentence = f"{base}/completions answered {response.status} {response.reason}" + (f": {said[:300]}" if said else "")
    if response.status in (401, 403):
        return f"{sentence}; a key is taken from the environment variable {KEY}"
    if response.status == 404:
        names = _served(base, timeout)
        if names and model not in names:
            return f"{sentence}; it serves {', '.join(names[:10])}, and model is {model!r}"
        if not names:
            return f"{sentence}; is this the address of an OpenAI-compatible server?"
    return sentence


def _served(base: str, timeout: float) -> list[str]:
    """Return the names of the models that a server offers; none if it does not tell."""
    try:
        with _response(f"{base}/models", None, timeout) as response:
            return [str(one["id"]) for one in json.loads(response.read())["data"]]
    except (EndpointError, ValueError, KeyError, TypeError):
        return []


def _message(said: Any) -> str:
    """Return the sentence in a server's error: OpenAI's form, FastAPI's, or a text."""
    if isinstance(said, dict):
        error = next((said[name] for name in ("error", "detail", "message") if said.get(name)), "")
        return _message(error) if isinstance(error, dict) else str(error)
    return str(said)


# ---- ours


def answer_ourselves(
    model: str | tuple[Any, Any], prompts: Sequence[str], *, max_new_tokens: int = 64, concurrency: int = 1
) -> tuple[Answers, str]:
    """Continue the same prompts with a `ContinuousBatcher`, as many at a time.

    Parameters
    ----------
    model : str or tuple
        A name, as for :func:`course_lib.models.load`, or the model and tokenizer that it returned.
    prompts, max_new_tokens, concurrency
        As for `ask`.

    Returns
    -------
    Answers
        Its times are counted as `ask` counts them, without a network.
    where : str
        The type of the weights, and the device.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    from course_lib.generation import ContinuousBatcher
    from course_lib.models import load

    new, at_once = _check_work(prompts, max_new_tokens, concurrency)
    decoder, tokenizer = model if isinstance(model, tuple) else load(model, as_decoder=True)
    batcher = ContinuousBatcher(decoder, max_batch=at_once, token_budget=max(256, at_once))
    ends = getattr(tokenizer, "eos_token_id", None)
    waiting = list(enumerate(prompts))[::-1]
    running: dict[int, tuple[Any, list[float]]] = {}
    found: dict[int, Answer] = {}
    start = time.perf_counter()

    def submit(prompt: str) -> tuple[Any, list[float]]:
        moments = [time.perf_counter()]
        request = batcher.submit(
            tokenizer(prompt)["input_ids"],
            max_new_tokens=new,
            eos_token_id=ends,
            tokenizer=tokenizer,
            on_token=lambda _: moments.append(time.perf_counter()),
        )
        return request, moments

    while waiting or running:
        while waiting and len(running) < at_once:
            index, prompt = waiting.pop()
            running[index] = submit(prompt)
        batcher.step()
        for index, (request, moments) in list(running.items()):
            if request.state == "finished":
                times = (moment - moments[0] for moment in (moments[1], moments[-1]))
                found[index] = Answer(prompts[index], request.text or "", len(request.tokens), *times)
                del running[index]
    seconds = time.perf_counter() - start
    name = str(decoder.dtype).removeprefix("torch.")
    return Answers(tuple(found[index] for index in range(len(prompts))), seconds), f"{name} on {decoder.device.type}"


def report(theirs: Answers, ours: Answers | None = None) -> dict[str, Any]:
    """Return what was measured, and where two texts part, as plain values for JSON.

    Parameters
    ----------
    theirs : Answers
        A server's.
    ours : Answers, optional
        To the same prompts.

    Returns
    -------
    dict
        ``endpoint`` and ``ours``, each with ``tokens_per_second``, ``seconds``, medians and ``answers``; ``agreement``, for each prompt
        None where the texts are equal, else the number of characters up to which they are.
    """
    found: dict[str, Any] = {"endpoint": _plain(theirs)}
    if ours is not None:
        pairs = zip(theirs.answers, ours.answers, strict=True)
        found |= {"ours": _plain(ours), "agreement": [_parting(a.text, b.text) for a, b in pairs]}
    return found


def _plain(answers: Answers) -> dict[str, Any]:
    import statistics

    paces = [pace for one in answers.answers if (pace := one.seconds_per_token) is not None]
    return {
        "seconds": answers.seconds,
        "tokens_per_second": answers.tokens_per_second,
        "median_first_token_seconds": statistics.median(one.first_token_seconds for one in answers.answers),
        "median_seconds_per_token": statistics.median(paces) if paces else None,
        "answers": [asdict(one) | {"seconds_per_token": one.seconds_per_token} for one in answers.answers],
    }


def _parting(one: str, other: str) -> int | None:
    """Return how many characters two texts begin with alike, or None if they are equal."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
