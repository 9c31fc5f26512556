"""The HTTP API of a running bundle on the demo model, asked with the openai package."""

import concurrent.futures
import http.client
import json
import math
import socket
import time
import urllib.parse

import openai
import pytest

from conftest import ROOT

QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]
PROMPT = "The fox has a small red hat. The bear"


@pytest.fixture(scope="module")
def bundle(start):
    return start(None, {"attention.workers": 2, "router.max_body_bytes": 1 << 20},
                 config=ROOT / "config" / "demo.json")


@pytest.fixture(scope="module")
def client(bundle):
    return bundle.client()


def complete(client, prompt=PROMPT, **kwargs):
    kwargs = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}, **kwargs}
    return client.completions.create(model="demo_model", prompt=prompt, **kwargs)


def chat(client, messages=QUESTION, **kwargs):
    kwargs = {"temperature": 0, "max_tokens": 24, **kwargs}
    return client.chat.completions.create(model="demo_model", messages=messages, **kwargs)


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_models(bundle, client):
    models = client.models.list().data
    assert [m.id for m in models] == ["demo_model"]
    assert client.models.retrieve("demo_model").id == "demo_model"
    assert models[0].max_model_len == 2048 and models[0].root.endswith("/config/demo_model")


def test_state_routes(bundle):
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert bundle.http("GET", path)[0] == 200, path


def test_completion(client):
    answer = complete(client)
    assert answer.object == "text_completion" and answer.model == "demo_model"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.choices[0].text == complete(client).choices[0].text
    assert complete(client, max_tokens=None).usage.completion_tokens == 16


def test_prompt_forms(bundle, client):
    ids = json.loads(bundle.http("POST", "/tokenize", {"prompt": PROMPT})[2])["tokens"]
    text = complete(client).choices[0].text
    assert complete(client, prompt=ids).choices[0].text == text
    other = complete(client, prompt="Once").choices[0].text
    both = complete(client, prompt=[PROMPT, "Once"])
    assert {c.index: c.text for c in both.choices} == {0: text, 1: other}
    pair = complete(client, prompt=[ids, ids])
    assert [c.text for c in pair.choices] == [text, text]


def test_chat(client):
    answer = chat(client)
    message = answer.choices[0].message
    assert message.role == "assistant" and "42" in message.content
    assert answer.choices[0].finish_reason == "stop"
    follow_up = QUESTION + [{"role": "assistant", "content": message.content},
                            {"role": "user", "content": [{"type": "text", "text": "Spell cat."}]}]
    assert chat(client, follow_up).usage.prompt_tokens > answer.usage.prompt_tokens


def test_chat_stream(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole.choices[0].message.content
    assert len({c.id for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop" and not any(reasons[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_completion_stream(client):
    chunks = list(complete(client, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == complete(client).choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_stream_bytes(bundle):
    """Events end in a blank line, and [DONE] ends the stream."""
    status, headers, body = bundle.http("POST", "/v1/chat/completions", {
        "messages": QUESTION, "stream": True, "max_tokens": 8})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    events = [e for e in body.decode().split("\n\n") if not e.startswith(":")]
    assert events[-2:] == ["data: [DONE]", ""] and b"\r" not in body
    assert all(json.loads(e.removeprefix("data: "))["choices"] for e in events[:-2])


def test_stop(client):
    text = complete(client).choices[0].text
    stop = text[8:12]
    cut = text[:text.index(stop)]
    for kwargs in ({"stop": stop}, {"stop": ["\x01", stop]}):
        answer = complete(client, **kwargs)
        assert answer.choices[0].text == cut and answer.choices[0].finish_reason == "stop"
        chunks = list(complete(client, stream=True, **kwargs))
        assert "".join(c.choices[0].text for c in chunks) == cut
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_seed(client):
    sample = [complete(client, temperature=1.5, seed=seed).choices[0].text
              for seed in (7, 7, 8, 9)]
    assert sample[0] == sample[1]
    assert len(set(sample)) > 1


def test_sampling_settings(client):
    greedy = complete(client).choices[0].text
    assert complete(client, temperature=1, top_p=1e-6, seed=1).choices[0].text == greedy
    assert complete(client, temperature=1, seed=1, extra_body={"top_k": 1, "ignore_eos": True}
                    ).choices[0].text == greedy


def test_completion_logprobs(client):
    answer = complete(client, logprobs=3, max_tokens=4).choices[0]
    logprobs = answer.logprobs
    assert "".join(logprobs.tokens).replace("<|im_end|>", "") == answer.text
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 4
    assert logprobs.text_offset[0] in (0, len(PROMPT))
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs):
        assert chosen <= 0 and math.isclose(max(top.values()), chosen, abs_tol=1e-5)
        assert 3 <= len(top) <= 4


def test_chat_logprobs(client):
    answer = chat(client, logprobs=True, top_logprobs=2).choices[0]
    entries = answer.logprobs.content
    assert "".join(e.token for e in entries).startswith(answer.message.content)
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert bytes(entry.bytes).decode() == entry.token
    streamed = [e for c in chat(client, logprobs=True, top_logprobs=2, stream=True)
                if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.token for e in streamed] == [e.token for e in entries]


def test_echo_scores_a_prompt(client):
    answer = complete(client, max_tokens=0, logprobs=1, echo=True)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == PROMPT == "".join(logprobs.tokens)
    assert logprobs.token_logprobs[0] is None and all(x <= 0 for x in logprobs.token_logprobs[1:])
    assert answer.usage.completion_tokens == 0


def test_n(client):
    answer = chat(client, n=3)
    assert sorted(c.index for c in answer.choices) == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) == 1
    answer = complete(client, n=3, temperature=2, seed=5)
    assert len({c.text for c in answer.choices}) > 1
    chunks = list(complete(client, n=2, stream=True))
    texts = {i: "".join(c.choices[0].text for c in chunks if c.choices[0].index == i)
             for i in (0, 1)}
    assert texts[0] == texts[1] == complete(client).choices[0].text


def check_error(status, body, expected, param=None, code=None):
    error = json.loads(body)["error"]
    assert status == expected, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(error["message"]) < 1000
    if param:
        assert error["param"] == param
    if code:
        assert error["code"] == code


BAD_REQUESTS = [
    ({"temperature": "hot"}, 400, "temperature", None),
    ({"temperature": -1}, 400, "temperature", None),
    ({"top_p": 0}, 400, "top_p", None),
    ({"max_tokens": -3}, 400, "max_tokens", None),
    ({"n": 0}, 400, "n", None),
    ({"stop": [1]}, 400, "stop", None),
    ({"messages": []}, 400, "messages", None),
    ({"messages": "hello"}, 400, "messages", None),
    ({"messages": [{"role": "alien", "content": "x"}]}, 400, None, None),
    ({"top_logprobs": 2}, 400, "top_logprobs", None),
    ({"model": "gpt-4"}, 404, "model", "model_not_found"),
    ({"max_tokens": 100000}, 400, None, "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "one two " * 3000}]}, 400, None,
     "context_length_exceeded"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", None),
]


@pytest.mark.parametrize("change,expected,param,code", BAD_REQUESTS)
def test_bad_request(bundle, change, expected, param, code):
    body = {"model": "demo_model", "messages": QUESTION, **change}
    status, _, answer = bundle.http("POST", "/v1/chat/completions", body)
    check_error(status, answer, expected, param, code)


def test_bad_http(bundle):
    path = "/v1/chat/completions"
    for body in (b"{", b"", b"[]", b"\xff", b'{"messages": [' + b"[" * 5000):
        status, _, answer = bundle.http("POST", path, body)
        check_error(status, answer, 400)
    status, _, answer = bundle.http("POST", path, b" " * ((1 << 20) + 1))
    check_error(status, answer, 413)
    check_error(*[bundle.http("GET", path)[i] for i in (0, 2)], 405)
    check_error(*[bundle.http("GET", "/v1/nothing")[i] for i in (0, 2)], 404)
    status, _, answer = bundle.http("GET", "/v1/models/gpt-4")
    check_error(status, answer, 404, "model", "model_not_found")


def test_errors_of_the_package(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        chat(client, temperature=9)


def test_explicit_nulls(bundle):
    body = {"messages": QUESTION, "stop": None, "temperature": None, "max_tokens": None,
            "logprobs": None, "stream": None, "unheard_of": 1, "n": None, "seed": None}
    assert bundle.http("POST", "/v1/chat/completions", body)[0] == 200


def test_keep_alive(bundle):
    where = urllib.parse.urlsplit(bundle.url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    connection.request("GET", "/v1/models")
    assert json.loads(connection.getresponse().read())["data"]
    used = connection.sock
    connection.request("POST", "/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 3}),
                       {"content-type": "application/json"})
    assert connection.getresponse().read() and connection.sock is used
    connection.close()


def test_concurrent_streams(bundle, client):
    """32 streams at once give each what it gets alone."""
    questions = [f"What is {a} plus {b}?" for a, b in zip(range(11, 27), range(60, 28, -2))]
    alone = {q: chat(client, [{"role": "user", "content": q}]).choices[0].message.content
             for q in questions}

    def ask(question):
        chunks = list(chat(client, [{"role": "user", "content": question}], stream=True))
        assert chunks[-1].choices[0].finish_reason == "stop"
        return question, text_of(chunks)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        for question, answer in pool.map(ask, questions * 2):
            assert answer == alone[question]
    bundle.wait_metric("num_requests_running", lambda value: value == 0)


def test_client_that_leaves(bundle):
    """A closed connection ends its request: slot and KV pages are free again."""
    where = urllib.parse.urlsplit(bundle.url)
    for stream in (True, False):
        generated = bundle.metrics()["generation_tokens_total"]
        body = json.dumps({"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True,
                           "stream": stream}).encode()
        with socket.create_connection((where.hostname, where.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                               b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                               % (len(body), body))
            if stream:
                assert connection.recv(4096)
            end = time.monotonic() + 20
            while bundle.metrics()["num_requests_running"] == 0 and time.monotonic() < end:
                time.sleep(0.005)
            assert bundle.metrics()["num_requests_running"] == 1
        bundle.wait_metric("num_requests_running", lambda value: value == 0)
        bundle.wait_metric("kv_cache_usage_perc", lambda value: value == 0)
        assert bundle.metrics()["generation_tokens_total"] - generated < 1900


def test_metrics_add_up(bundle, client):
    before = bundle.metrics()
    answer = complete(client, max_tokens=10)
    after = bundle.metrics()
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 10
    assert (after["prompt_tokens_total"] - before["prompt_tokens_total"]
            == answer.usage.prompt_tokens)
    assert after["request_success_total"] - before["request_success_total"] == 1
    assert after["steps_total"] - before["steps_total"] >= 10
    # Every token that is computed is a bf16 row there and back in each layer, with the index and
    # weight of its experts; a step adds the headers and padding of its frames.
    model = json.loads((ROOT / "config" / "demo_model" / "config.json").read_text())
    rows = answer.usage.prompt_tokens + 9
    wire = after["transport_bytes_total"] - before["transport_bytes_total"]
    least = rows * model["num_hidden_layers"] * (
        2 * model["hidden_size"] * 2 + model["num_experts_per_tok"] * (2 + 4))
    steps = after["steps_total"] - before["steps_total"]
    assert least <= wire <= least + steps * model["num_hidden_layers"] * 512
