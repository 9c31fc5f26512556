"""Start, idling, drain and end of a bundle, and what it says when it cannot start."""

import concurrent.futures
import json
import os
import shutil
import signal
import socket
import threading
import time

import openai
import pytest

from conftest import ROOT, STOP_S, cpu_seconds, run_tandem

LONG = {"model": "qwen3_moe", "prompt": "abc", "max_tokens": 300, "temperature": 0,
        "extra_body": {"ignore_eos": True}}


def test_six_processes(start, synth):
    bundle = start(synth(), {"attention.workers": 3, "ffn.workers": 2})
    pids = bundle.pids()
    assert {name: len(found) for name, found in pids.items()} == {
        "tandem": 1, "tandem-attn": 3, "tandem-ffn": 2}
    bundle.terminate()
    assert bundle.wait() == 0
    assert not bundle.survivors()


def test_idle_costs_nothing(start, synth):
    bundle = start(synth(), {"attention.workers": 2, "ffn.workers": 2})
    bundle.client().completions.create(**LONG)
    time.sleep(1)
    pids = [pid for found in bundle.pids().values() for pid in found]
    before = sum(map(cpu_seconds, pids))
    time.sleep(5)
    used = sum(map(cpu_seconds, pids)) - before
    assert used <= 0.05, f"{used} s of CPU in 5 s, at most 1% of a core is idle"


def terminate_and_see(bundle):
    """SIGTERM, until the router says that it drains."""
    bundle.terminate()
    end = time.monotonic() + STOP_S
    while bundle.http("GET", "/ready")[0] != 503 and time.monotonic() < end:
        time.sleep(0.01)
    assert bundle.http("GET", "/ready")[0] == 503


class Stream:
    """A completion streamed by a thread."""

    def __init__(self, bundle, n):
        self.chunks, self.error, self.first = [], None, threading.Event()
        self.thread = threading.Thread(target=self._run, args=(bundle.client(), n), daemon=True)
        self.thread.start()
        assert self.first.wait(STOP_S)

    def _run(self, client, n):
        try:
            for chunk in client.completions.create(**{**LONG, "max_tokens": n}, stream=True):
                self.chunks.append(chunk)
                self.first.set()
        except Exception as error:  # what the package raises when a connection breaks is its own
            self.error = error
        self.first.set()

    def join(self):
        self.thread.join(STOP_S)
        assert not self.thread.is_alive()

    def finish_reason(self):
        return self.chunks[-1].choices[0].finish_reason

    def text(self):
        return "".join(c.choices[0].text for c in self.chunks)


def test_drain(start, synth):
    """SIGTERM while streams run: they end properly, new requests are refused, nothing is left."""
    bundle = start(synth(context=4096), {"attention.workers": 2, "ffn.workers": 2})
    client = bundle.client()
    streams = [Stream(bundle, 4000) for _ in range(4)]
    terminate_and_see(bundle)
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**LONG)
    assert caught.value.status_code == 503
    assert streams[-1].thread.is_alive()
    for stream in streams:
        stream.join()
        assert stream.error is None and stream.finish_reason() == "length"
        assert stream.text() == streams[0].text()
    assert bundle.wait() == 0
    assert not bundle.survivors()


def test_second_signal_ends_at_once(start, synth):
    bundle = start(synth(context=100000), {"attention.kv_tokens": 100000})
    stream = Stream(bundle, 90000)
    terminate_and_see(bundle)
    assert bundle.process.poll() is None
    began = time.monotonic()
    bundle.terminate()
    assert bundle.wait(10) == 0
    assert time.monotonic() - began < 5
    stream.join()
    assert stream.error or stream.finish_reason() == "abort"
    assert not bundle.survivors()


def test_drain_has_a_deadline(start, synth):
    bundle = start(synth(context=100000), {"attention.kv_tokens": 100000,
                                           "router.drain_timeout_s": 1})
    stream = Stream(bundle, 90000)
    began = time.monotonic()
    bundle.terminate()
    assert bundle.wait(20) == 0
    assert 0.9 < time.monotonic() - began < 10
    stream.join()
    assert stream.error or stream.finish_reason() == "abort"
    assert not bundle.survivors()


def test_router_killed_leaves_no_worker(start, synth):
    bundle = start(synth(), {"attention.workers": 2})
    bundle.process.kill()
    end = time.monotonic() + 10
    while bundle.survivors() and time.monotonic() < end:
        bundle.process.poll()
        time.sleep(0.05)
    assert not bundle.survivors()


@pytest.mark.parametrize("kind", ["tandem-attn", "tandem-ffn"])
def test_worker_killed_ends_the_bundle(start, synth, kind):
    """A running stream gets an error event, the bundle says who died and ends."""
    bundle = start(synth(context=100000), {"attention.kv_tokens": 100000})
    stream = Stream(bundle, 90000)
    os.kill(bundle.pids()[kind][0], signal.SIGKILL)
    stream.join()
    assert isinstance(stream.error, openai.APIError), stream.error
    assert bundle.wait(30) == 1
    lines = [line for line in bundle.errors().splitlines() if " error " in line]
    assert any(kind.removeprefix("tandem-") in line for line in lines), bundle.errors()
    assert not bundle.survivors()


def test_worker_that_cannot_start(start, synth):
    bundle = start(synth(), {"ffn.device": "cuda:7"}, wait=False)
    assert bundle.wait(30) == 1
    errors = bundle.errors()
    assert "cuda:7" in errors, errors
    assert not bundle.survivors()


def test_worker_that_never_joins(start, synth):
    bundle = start(synth(), {"ffn.workers": 2, "ffn.launch": 1, "router.control": "127.0.0.1:0",
                             "router.start_timeout_s": 1}, wait=False)
    assert bundle.wait(30) == 1
    assert "ffn1: has not joined within router.start_timeout_s" in bundle.errors()
    assert not bundle.survivors()


def test_port_in_use(start, synth):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        bundle = start(synth(), {"router.port": port}, wait=False)
        assert bundle.wait(30) == 1
    assert str(port) in bundle.errors() and "in use" in bundle.errors()


def test_api_key(start, synth):
    bundle = start(synth(), {"router.api_key": "secret"})
    for key in ("none", "secre", "secret1"):
        with pytest.raises(openai.AuthenticationError) as caught:
            bundle.client(api_key=key).models.list()
        assert caught.value.body["code"] == "invalid_api_key"
    assert bundle.client(api_key="secret").completions.create(**LONG).usage.completion_tokens == 300
    assert bundle.http("GET", "/health")[0] == 200
    assert bundle.http("GET", "/metrics")[0] == 200
    for pid in [p for found in bundle.pids().values() for p in found if p != bundle.process.pid]:
        with open(f"/proc/{pid}/cmdline", "rb") as arguments:
            assert b"secret" not in arguments.read()


def test_full_queue(start, synth):
    bundle = start(synth(context=4096), {"attention.max_seqs": 1, "router.max_waiting": 2})
    client = bundle.client()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(client.completions.create, **{**LONG, "max_tokens": 2000})
                 for _ in range(8)]
        outcomes = [a.exception(STOP_S) for a in asked]
    refused = [e for e in outcomes if e]
    assert 1 <= len(refused) <= 6 and any(e is None for e in outcomes)
    for error in refused:
        assert isinstance(error, openai.InternalServerError) and error.status_code == 503
        assert int(error.response.headers["retry-after"]) >= 1


# ---- Configurations and models that are refused ----

def check_refused(command, config, *parts):
    code, out, errors = run_tandem(command, config)
    assert code == 2 and errors.count("\n") == 1, errors
    assert all(str(part) in errors for part in parts), errors
    assert "ready" not in out


@pytest.mark.parametrize("command", ["check", "serve"])
def test_bad_configurations(tmp_path, synth, command):
    config = tmp_path / "c.json"
    model = json.dumps(str(synth()))
    for text, line, key, what in [
            ('{\n"model": %s,\n"attention": {"worker": 1}}' % model, 3, "attention.worker",
             "did you mean attention.workers"),
            ('{"model": %s,\n"router": {"port": "80"}}' % model, 2, "router.port", "integer"),
            ('{"model": %s,\n\n"ffn": {"workers": 65}}' % model, 3, "ffn.workers", "1 to 64"),
            ('{\n"model": "nowhere"}', 2, "model", "No such file"),
            ('{"model": %s' % model, 1, "", "closing }")]:
        config.write_text(text)
        check_refused(command, config, f"{config}:{line}:", key, what)
    check_refused(command, tmp_path / "none.json", "none.json", "No such file")


def broken_copy(model, path):
    shutil.copytree(model, path)
    config = path.parent / f"{path.name}.json"
    config.write_text(json.dumps({"model": str(path)}))
    return config, path / "model.safetensors"


@pytest.mark.parametrize("command", ["check", "serve"])
def test_bad_models(tmp_path, synth, command):
    """A truncated, mistyped or missing tensor is refused with its name before serving starts."""
    config, file = broken_copy(synth(), tmp_path / "truncated")
    os.truncate(file, file.stat().st_size - 8)
    check_refused(command, config, "model.safetensors")

    name = b"model.layers.1.mlp.experts.3.up_proj.weight"
    config, file = broken_copy(synth(), tmp_path / "missing")
    file.write_bytes(file.read_bytes().replace(name, name.replace(b"up_", b"op_"), 1))
    check_refused(command, config, name.decode())

    config, file = broken_copy(synth(), tmp_path / "mistyped")
    content = file.read_bytes()
    at = content.index(b'"F32"', content.index(name))
    file.write_bytes(content[:at] + b'"I32"' + content[at + 5:])
    check_refused(command, config, name.decode())

    config, file = broken_copy(synth(vocab=300), tmp_path / "foreign")
    shutil.copy(ROOT / "config" / "demo_model" / "tokenizer.json", file.parent)
    check_refused(command, config, "tokenizer.json", "has 768 ids", "300 rows")

    config, file = broken_copy(synth(), tmp_path / "unknown")
    described = json.loads((file.parent / "config.json").read_text())
    described["architectures"] = ["LlamaForCausalLM"]
    (file.parent / "config.json").write_text(json.dumps(described))
    check_refused(command, config, "LlamaForCausalLM")


def test_check(synth):
    code, out, errors = run_tandem("check", ROOT / "config" / "demo.json")
    assert code == 0, errors
    assert "Qwen3MoeForCausalLM" in out and "KV cache" in out and "chatml" in out
