"""What a server answers, how fast, and every way in which it may not: a stub that speaks OpenAI's protocol stands in for it."""

import http.client
import json
import re
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from course_lib import cli
from course_lib.generation import generate
from course_lib.integrations import endpoint
from course_lib.integrations.endpoint import EndpointError, answer_ourselves, ask, report
from course_lib.models import load

MODEL = "a-model"


class Stub(ThreadingHTTPServer):
    """Answers each prompt with its words in reverse, in the way that `manner` says, or with `manner` itself, an event."""

    daemon_threads = True

    def __init__(self, manner: str = "well") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.manner, self.requests, self.keys = manner, [], []  # type: str, list, list
        self.under_way = self.most_under_way = 0
        self.lock, self.together = threading.Lock(), threading.Barrier(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *arguments) -> None:
        pass

    def whole(self, status: int, kind: str, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def event(self, **content) -> None:
        self.chunk(f"data: {json.dumps({'object': 'text_completion', **content})}\n\n")

    def do_GET(self) -> None:
        self.whole(200, "application/json", json.dumps({"data": [{"id": MODEL}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.keys.append(self.headers["Authorization"])
        with suppress(ConnectionError):  # whoever asked has given up waiting
            self.answer(body)

    def meet(self) -> None:
        """Waits until as many requests are under way as `together` asks for; no answer has ended by then."""
        with self.server.lock:
            self.server.under_way += 1
            self.server.most_under_way = max(self.server.most_under_way, self.server.under_way)
        try:
            self.server.together.wait(timeout=30)
            time.sleep(0.05)  # for one too many to arrive
        finally:
            with self.server.lock:
                self.server.under_way -= 1

    def answer(self, body: dict) -> None:
        manner = self.server.manner
        if self.path != "/v1/completions":
            return self.whole(404, "text/plain", "nothing here")
        if body["model"] != MODEL:
            error = {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}
            return self.whole(404, "application/json", json.dumps(error))
        if manner == "locked":
            return self.whole(401, "application/json", json.dumps({"error": "Unauthorized"}))
        if manner == "broken":
            return self.whole(500, "application/json", json.dumps({"detail": "out of memory"}))
        if manner == "whole":
            return self.whole(200, "application/json", json.dumps({"choices": [{"text": "all"}]}))
        if manner == "silent":
            time.sleep(2)
            return None
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if manner == "no json":
            return self.chunk("data: {what?\n\n")
        if manner.startswith("{"):
            self.chunk(f"data: {manner}\n\n")
            return self.chunk("")
        self.meet()
        words = body["prompt"].split()[::-1][: body["max_tokens"]]
        self.chunk(": a comment, and an empty line, and a field that is not data\n\nid: 7\n\n")
        for number, word in enumerate(words):
            if manner == "late error" and number == 1:
                return self.event(error={"message": "the engine died"})
            if manner == "cut off" and number == 1:
                self.close_connection = True
                return None
            if manner == "stalls" and number == 1:
                time.sleep(2)
            if manner == "slowly":
                time.sleep(0.02)
            self.event(choices=[{"index": 0, "text": f" {word}", "finish_reason": None}])
        self.event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
        if manner not in ("no count", "no end"):
            self.event(choices=[], usage={"completion_tokens": len(words) + 1})
        if manner != "no end":
            self.chunk("data: [DONE]\n\n")
        self.chunk("")
        return None


@pytest.fixture
def serve():
    servers = []

    def start(manner: str = "well") -> Stub:
        server = Stub(manner)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_texts_come_in_the_order_of_their_prompts_and_are_asked_for_greedily(serve):
    server = serve()
    prompts = ["one two three", "grün weiß", "alone"]
    found = ask(server.url, MODEL, prompts, max_new_tokens=2, concurrency=2)
    assert [one.prompt for one in found.answers] == prompts
    assert [one.text for one in found.answers] == [" three two", " weiß grün", " alone"]
    assert [one.tokens for one in found.answers] == [3, 3, 2]  # as the server counts
    for body in server.requests:
        assert (body["model"], body["temperature"], body["max_tokens"], body["stream"]) == (MODEL, 0, 2, True)
    assert server.keys == [None] * 3


@pytest.mark.parametrize("manner", ["no count", "no end"])
def test_pieces_are_counted_where_the_server_does_not_count(serve, manner):
    """And a stream may end without saying so, once it has said why the text does."""
    found = ask(serve(manner).url + "/v1/", MODEL, ["one two three"])
    assert (found.answers[0].text, found.answers[0].tokens) == (" three two one", 3)


@pytest.mark.parametrize(
    "odd",
    ['"error": null', '"usage": null', '"usage": {"completion_tokens": -5}', '"usage": {"completion_tokens": true}'],
)
def test_what_says_nothing_beside_a_text_is_passed_over(serve, odd):
    server = serve(f'{{{odd}, "choices": [{{"text": "a", "finish_reason": "stop"}}]}}')
    (answer,) = ask(server.url, MODEL, ["x"]).answers
    assert (answer.text, answer.tokens, type(answer.tokens)) == ("a", 1, int)


def test_numpys_numbers_are_numbers(serve):
    server = serve()
    sizes = {"max_new_tokens": np.int64(2), "concurrency": np.int32(1), "timeout": np.float32(30)}
    assert ask(server.url, MODEL, ["one two three"], **sizes).answers[0].text == " three two"


def test_times_are_those_of_the_pieces(serve):
    found = ask(serve("slowly").url, MODEL, ["a b c d e f", "g h i j k l"], concurrency=2)
    for one in found.answers:
        assert 0.02 <= one.first_token_seconds < one.seconds <= found.seconds
        assert one.seconds >= 6 * 0.02
        assert one.seconds_per_token == pytest.approx((one.seconds - one.first_token_seconds) / (one.tokens - 1))
    assert found.tokens_per_second == pytest.approx(14 / found.seconds)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_prompts_are_under_way_as_were_asked_for(serve, concurrency):
    server = serve()
    server.together = threading.Barrier(concurrency)
    ask(server.url, MODEL, ["a b"] * 6, concurrency=concurrency)  # fewer at once would break the barrier
    assert server.most_under_way == concurrency


def test_a_key_is_taken_from_the_environment_alone(serve, monkeypatch):
    server = serve()
    for key in ("secret", " secret\n"):  # as read from a file
        monkeypatch.setenv(endpoint.KEY, key)
        ask(server.url, MODEL, ["a"])
    assert server.keys == ["Bearer secret"] * 2


@pytest.mark.parametrize("key", ["hush\nX-Header: 1", "hush–"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(serve, monkeypatch, key):
    monkeypatch.setenv(endpoint.KEY, key)
    server = serve()
    with pytest.raises(ValueError, match="COURSE_API_KEY holds a character that no key has") as raised:
        ask(server.url, MODEL, ["a"])
    assert "hush" not in "".join(traceback.format_exception(raised.value))
    assert not server.requests


@pytest.mark.parametrize(
    ("manner", "message"),
    [
        ("locked", r"answered 401 .*: Unauthorized; a key is taken from the environment variable COURSE_API_KEY"),
        ("broken", r"answered 500 .*: out of memory"),
        ("whole", "answered with application/json instead of a stream of events"),
        ("no json", "sent '{what\\?', which is no JSON object"),
        ("late error", "gave up with 'the engine died'"),
        ('{"object": "error", "message": "bad", "error": null}', "gave up with 'bad'"),
        ('{"choices": [null]}', r"sent choices of \[None\], which are no pieces of text"),
        ('{"choices": {"text": "a"}}', "sent choices of {'text': 'a'}"),
        ('{"choices": [{"text": 5}]}', r"sent choices of \[{'text': 5}\]"),
        ("cut off", "broke off after 1 pieces of text"),
        ("silent", "sent nothing for 0.3 seconds"),
        ("stalls", "sent nothing for 0.3 seconds"),
    ],
)
def test_a_server_that_fails_is_one_sentence(serve, manner, message):
    with pytest.raises(EndpointError, match=message) as raised:
        ask(serve(manner).url, MODEL, ["one two"], timeout=0.3 if manner in ("silent", "stalls") else 30)
    assert "\n" not in str(raised.value)


def test_a_wrong_name_is_answered_with_the_right_ones(serve):
    with pytest.raises(EndpointError, match=r"`other` does not exist\.; it serves a-model, and model is 'other'"):
        ask(serve().url, "other", ["a"])


def test_a_wrong_path_is_said(serve):
    with pytest.raises(EndpointError, match=r"/elsewhere/v1/completions answered 404 .*: nothing here"):
        ask(serve().url + "/elsewhere", MODEL, ["a"])


def test_no_server_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(EndpointError, match="cannot be reached"):
            ask(f"http://127.0.0.1:{taken.getsockname()[1]}", MODEL, ["a"])


def test_what_speaks_no_http_is_said():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"SSH-2.0\r\n")
            connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(EndpointError, match="broke off its answer, or speaks no HTTP"):
            ask(f"http://127.0.0.1:{server.getsockname()[1]}", MODEL, ["a"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "localhost:8000"}, "url is 'localhost:8000'; the address of a server"),
        *(
            ({"url": url}, f"url is {re.escape(repr(url))}; the address of a server")
            for url in (
                8000,
                "http://host:port",
                "http://h:1?x=1",
                "http://h:1#x",
                "http://h:1/ü",
                "http://h:1\n",
                "http://loc al:1",
                "http://ex..ample:1",
                "http://[::1:8000",
                "http://]:1",
            )
        ),
        *(
            (
                {"url": f"{scheme}://me:secret@localhost:1{port}"},
                "^url holds a name or password before the @; put a key",
            )
            for scheme, port in (("http", ""), ("ftp", ""), ("https", "x"))
        ),
        ({"prompts": []}, "prompts holds an empty text, or none at all"),
        ({"prompts": ["a", ""]}, "prompts holds an empty text"),
        ({"prompts": "hello"}, "prompts is the text 'hello'; a sequence of texts"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"concurrency": 0}, "concurrency"),
        *(({"timeout": value}, re.escape(f"timeout is {value!r}")) for value in (0.0, "3", None, 1e300, float("nan"))),
    ],
)
def test_arguments_out_of_range_are_refused_before_anything_is_sent(change, message):
    with pytest.raises(ValueError, match=message) as refused:
        ask(**{"url": "http://localhost:1", "model": MODEL, "prompts": ["a"]} | change)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])
def test_an_address_of_colons_without_a_port_is_asked_at_the_usual_one(monkeypatch, scheme, port):
    asked = []

    def connect(connection):
        asked.append((connection.host, connection.port))
        raise ConnectionRefusedError("nobody there")

    monkeypatch.setattr(http.client.HTTPConnection, "connect", connect)
    monkeypatch.setattr(http.client.HTTPSConnection, "connect", connect)
    with pytest.raises(EndpointError, match="cannot be reached"):
        ask(f"{scheme}://[::1]", MODEL, ["a"])
    assert asked == [("::1", port)]


def test_our_own_answers_are_those_of_generate():
    prompts = ["def add(a, b):", "class ", "import"]
    found, where = answer_ourselves("course/rope", prompts, max_new_tokens=6, concurrency=2)
    model, tokenizer = load("course/rope")
    for prompt, one in zip(prompts, found.answers, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        assert generate(model, ids, max_new_tokens=6, tokenizer=tokenizer).texts == (one.text,)
        assert one.tokens == 6
        assert 0 < one.first_token_seconds < one.seconds < found.seconds
    assert where.startswith("float32 on ")


def test_our_own_batcher_takes_any_number_at_a_time_and_no_single_text():
    found, _ = answer_ourselves(load("course/rope"), ["a", "b"], max_new_tokens=1, concurrency=300)
    assert len(found.answers) == 2
    with pytest.raises(ValueError, match="prompts is the text 'ab'"):
        answer_ourselves("course/rope", "ab")


def test_a_report_says_where_texts_part(serve):
    server = serve()
    theirs = ask(server.url, MODEL, ["one two", "three four"])
    ours = ask(server.url, MODEL, ["one two", "Three four"])
    found = report(theirs, ours)
    assert found["agreement"] == [None, 6]
    assert found["ours"]["tokens_per_second"] == ours.tokens_per_second
    assert found["endpoint"]["answers"][1]["text"] == " four three"
    assert json.loads(json.dumps(found)) == found
    assert "ours" not in report(theirs)


def command(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["course", "endpoint", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, arguments


def test_the_command_prints_both_and_json(serve, monkeypatch, tmp_path, capsys):
    url = serve().url
    lines = tmp_path / "prompts.txt"
    lines.write_text("one two\n\nthree\n", encoding="utf-8")
    options = [url, "--model", MODEL, "--prompts", str(lines), "--ours", "course/rope", "--max-new-tokens", "3"]
    command(monkeypatch, *options, "--json")
    found = json.loads(capsys.readouterr().out)
    assert [one["prompt"] for one in found["endpoint"]["answers"]] == ["one two", "three"]
    assert len(found["ours"]["answers"]) == len(found["agreement"]) == 2
    monkeypatch.setenv("COLUMNS", "200")
    command(monkeypatch, *options)
    shown = capsys.readouterr().out
    assert f"{MODEL} at {url}" in shown
    assert "course/rope, float32 on" in shown
    command(monkeypatch, *options, "--no-compare")
    assert "course/rope" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "0"], "--concurrency must be"),
        (["--timeout", "1e300"], "--timeout is 1e+300;"),
        ([], "--ours must be 'smollm2-135m'"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line_before_the_server_is_asked(
    serve, monkeypatch, capsys, options, message
):
    """And before our model is loaded, where it is not the model that is wrong."""
    server = serve()
    monkeypatch.setattr(sys, "argv", ["course", "endpoint", server.url, "--model", MODEL, "--ours", "nope", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"course: {message}")
    assert shown.count("\n") == 1
    assert not server.requests
