"""Split equals whole: greedy text does not depend on how a bundle is laid out."""

import concurrent.futures
import socket
import subprocess
import time

import pytest

from conftest import BIN, STOP_S

PROMPTS = ["The quick brown fox", "x", "0123456789 " * 12, "zebra zebra", "A\nB\nC\nD", "the end. " * 5]


def ask_all(bundle, n=40, prompts=PROMPTS, **settings):
    """Greedy texts and logprobs of all prompts, asked at once."""
    client = bundle.client()

    def ask(prompt):
        answer = client.completions.create(model=client.models.list().data[0].id, prompt=prompt,
                                           max_tokens=n, temperature=0, logprobs=0,
                                           extra_body={"ignore_eos": True}, **settings)
        choice = answer.choices[0]
        assert choice.finish_reason == "length" and answer.usage.completion_tokens == n
        return choice.text, choice.logprobs.token_logprobs

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


@pytest.fixture(scope="module")
def whole(start, synth):
    cache = {}

    def colocated(arch, dtype):
        if (arch, dtype) not in cache:
            bundle = start(synth(arch, dtype=dtype), {"mode": "colocated", "attention.lanes": 1})
            cache[arch, dtype] = ask_all(bundle)
            bundle.terminate()
            assert bundle.wait() == 0
        return cache[arch, dtype]

    return colocated


LAYOUTS = [(1, 1, 2, {}), (2, 1, 2, {"attention.token_budget": 64}), (1, 2, 1, {}),
           (3, 2, 3, {"wire.transport": "tcp"}), (2, 3, 2, {"ffn.gather": "none"})]


@pytest.mark.parametrize("x,y,lanes,settings", LAYOUTS)
def test_split_equals_whole(start, synth, whole, x, y, lanes, settings):
    bundle = start(synth("qwen3_moe", dtype="f32"), {
        "attention.workers": x, "ffn.workers": y, "attention.lanes": lanes, "attention.lane_rows": 1,
        "attention.max_seqs": 8, **settings})
    for _ in range(2):
        texts, logprobs = zip(*ask_all(bundle))
        expected_texts, expected_logprobs = zip(*whole("qwen3_moe", "f32"))
        assert texts == expected_texts
        for got, expected in zip(logprobs, expected_logprobs):
            assert got == pytest.approx(expected, abs=1e-4)
    bundle.terminate()
    assert bundle.wait() == 0


@pytest.mark.parametrize("arch", ["olmoe", "qwen2_moe", "mixtral"])
def test_architectures(start, synth, whole, arch):
    bundle = start(synth(arch, dtype="f32"), {"attention.workers": 2, "ffn.workers": 2})
    assert [text for text, _ in ask_all(bundle)] == [text for text, _ in whole(arch, "f32")]
    bundle.terminate()
    assert bundle.wait() == 0


def test_bf16_serves(start, synth):
    """bf16 on both sides of the wire; a row's result does not depend on the others'."""
    bundle = start(synth("qwen3_moe", dtype="bf16"), {"attention.workers": 1, "ffn.workers": 2})
    together = ask_all(bundle)
    assert [ask_all(bundle, prompts=[p])[0] for p in PROMPTS] == together


def test_preemption(start, synth):
    """A KV cache that holds one of six requests: they are set back, none fails, no text changes."""
    bundle = start(synth("qwen3_moe", dtype="f32"), {
        "attention.kv_tokens": 224, "attention.max_seqs": 8, "max_model_len": 200})
    prompts = ["The quick brown fox", "x", "0123456789", "zebra zebra", "A\nB\nC\nD", "the end."]
    alone = [ask_all(bundle, n=150, prompts=[p])[0][0] for p in prompts]
    assert bundle.metrics()["num_preemptions_total"] == 0
    assert [text for text, _ in ask_all(bundle, n=150, prompts=prompts)] == alone
    bundle.wait_metric("num_preemptions_total", lambda value: value > 0)
    bundle.wait_metric("kv_cache_usage_perc", lambda value: value == 0)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_workers_that_join(start, synth, whole, tmp_path):
    """Workers that the router did not launch, as on another host: only addresses differ."""
    control = f"127.0.0.1:{free_port()}"
    bundle = start(synth("qwen3_moe", dtype="f32"), {
        "attention.workers": 2, "attention.launch": 1, "ffn.workers": 2, "ffn.launch": 0,
        "router.control": control, "wire.transport": "tcp"}, wait=False)
    end = time.monotonic() + STOP_S
    while "attention rank 0" not in bundle.errors() and time.monotonic() < end:
        time.sleep(0.02)  # until its own worker has joined, the router may not listen yet
    with open(tmp_path / "stderr.log", "wb") as log:
        joined = [subprocess.Popen([BIN / name, "--join", control], stdin=subprocess.DEVNULL,
                                   stderr=log)
                  for name in ("tandem-ffn", "tandem-attn", "tandem-ffn")]
    try:
        bundle.wait_ready()
        assert [text for text, _ in ask_all(bundle)] == [
            text for text, _ in whole("qwen3_moe", "f32")]
        bundle.terminate()
        assert bundle.wait() == 0
        assert [worker.wait(STOP_S) for worker in joined] == [0, 0, 0], (
            tmp_path / "stderr.log").read_text()
    finally:
        for worker in joined:
            worker.kill()
            worker.wait()
