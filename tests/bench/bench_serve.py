#!/usr/bin/env python3
"""Runs real bundles under load and prints tokens/s, latencies, memory and bytes on the wire.

  bench_serve.py --model DIR --attention 2 --ffn 1 --lanes 2 --concurrency 16
  bench_serve.py --model DIR --variant split --variant whole:mode=colocated,attention.lanes=1

Each --variant is NAME or NAME:KEY=VALUE,KEY=VALUE of the configuration. The bundles of all variants
stay up (an idle one costs nothing) and their runs are interleaved, so that a machine whose speed
drifts does not decide; medians over the runs are printed, and the ratios to the first variant.
Prompts are random token ids, output lengths are fixed. Standard library only.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]


def process_tree(pid):
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                pass
    tree = [pid]
    for known in tree:
        tree += [child for child, parent in parents.items() if parent == known]
    return tree


class Bundle:
    def __init__(self, args, name, settings):
        self.name = name
        self.directory = tempfile.TemporaryDirectory(prefix="tandem-bench-")
        config = pathlib.Path(self.directory.name) / "bundle.json"
        config.write_text(json.dumps({"model": str(pathlib.Path(args.model).resolve())}))
        self.log = open(pathlib.Path(self.directory.name) / "stderr.log", "w+b")
        command = [pathlib.Path(args.bin) / "tandem", "serve", config]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        began = time.monotonic()
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=self.log, text=True, start_new_session=True)
        line = self.process.stdout.readline()
        found = re.match(r"tandem: ready at (http://\S+)", line)
        if not found:
            self.process.wait()
            self.log.seek(0)
            sys.exit(f"bench: variant {name} did not start:\n{self.log.read().decode()}")
        self.start_s = time.monotonic() - began
        self.url = urllib.parse.urlsplit(found.group(1))
        self.pids = process_tree(self.process.pid)

    def metrics(self):
        with urllib.request.urlopen(self.url.geturl() + "/metrics", timeout=30) as response:
            text = response.read().decode()
        sums = {}
        for name, value in re.findall(r"^tandem_(\w+)(?:\{[^}]*\})? (\S+)$", text, re.M):
            sums[name] = sums.get(name, 0) + float(value)
        return sums

    def memory(self):
        """Peak resident bytes, by the name of the executable (the largest of its processes)."""
        peaks = {}
        for pid in self.pids:
            name = pathlib.Path(os.readlink(f"/proc/{pid}/exe")).name
            status = pathlib.Path(f"/proc/{pid}/status").read_text()
            peak = int(re.search(r"^VmHWM:\s+(\d+)", status, re.M).group(1)) * 1024
            peaks[name] = max(peaks.get(name, 0), peak)
        return peaks

    def cpu_s(self):
        ticks = 0
        for pid in self.pids:
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()
        self.directory.cleanup()


async def read_body(reader, headers):
    """Pieces of a body that is chunked or ends with the connection."""
    if b"transfer-encoding: chunked" not in headers.lower():
        while piece := await reader.read(65536):
            yield piece
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def one_request(url, prompt, output_tokens):
    """Times (begin, those of the events with text) and the number of tokens."""
    body = json.dumps({"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True,
                       "temperature": 0, "stream": True,
                       "stream_options": {"include_usage": True}}).encode()
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
                 b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                 % (len(body), body))
    headers = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in headers.split(b"\r\n")[0]:
        raise RuntimeError((headers + await reader.read(4096)).decode(errors="replace"))
    times, usage, rest, done = [], None, b"", False
    async for piece in read_body(reader, headers):
        now = time.monotonic()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                usage = event.get("usage") or usage
                if event["choices"]:
                    times.append(now)
    writer.close()
    if not done or not usage or usage["completion_tokens"] != output_tokens:
        raise RuntimeError(f"a stream ended early: {usage}")
    return began, times, usage


async def load(url, args, seed):
    """All requests, at most `concurrency` at a time; (seconds, results)."""
    random_ids = random.Random(seed)
    prompts = [[random_ids.randrange(args.vocab) for _ in range(args.prompt_tokens)]
               for _ in range(args.requests)]
    waiting, results = iter(prompts), []

    async def client():
        for prompt in waiting:
            results.append(await one_request(url, prompt, args.output_tokens))

    began = time.monotonic()
    await asyncio.gather(*[client() for _ in range(args.concurrency)])
    return time.monotonic() - began, results


def quantile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def measure(bundle, args, seed):
    before, cpu = bundle.metrics(), bundle.cpu_s()
    seconds, results = asyncio.run(load(bundle.url, args, seed))
    after = bundle.metrics()
    n_prompt = sum(usage["prompt_tokens"] for _, _, usage in results)
    n_output = sum(usage["completion_tokens"] for _, _, usage in results)
    samples = {
        "ttft_ms": [1e3 * (times[0] - began) for began, times, _ in results],
        "itl_ms": [1e3 * (b - a) for _, times, _ in results for a, b in zip(times, times[1:])],
        "tpot_ms": [1e3 * (times[-1] - times[0]) / max(1, usage["completion_tokens"] - 1)
                    for _, times, usage in results],
        "e2e_ms": [1e3 * (times[-1] - began) for began, times, _ in results],
    }
    row = {"seconds": seconds, "prefill_tok_s": n_prompt / seconds,
           "decode_tok_s": n_output / seconds,
           "cpu_cores": (bundle.cpu_s() - cpu) / seconds}
    for name, values in samples.items():
        if values:
            row[name + "_mean"] = statistics.fmean(values)
            row[name + "_p50"] = quantile(values, 0.5)
            row[name + "_p99"] = quantile(values, 0.99)
    if "transport_bytes_total" in after:
        row["wire_bytes_per_token"] = (
            after["transport_bytes_total"] - before["transport_bytes_total"]) / (n_prompt + n_output)
    if "num_preemptions_total" in after:
        row["preemptions"] = after["num_preemptions_total"] - before["num_preemptions_total"]
    return row


def print_table(names, medians, memory):
    width = max(22, *(len(n) + 2 for n in names))
    print("".ljust(24) + "".join(n.rjust(width) for n in names))
    keys = [k for k in medians[names[0]] if all(k in medians[n] for n in names)]
    for key in keys:
        line = key.ljust(24)
        for name in names:
            value, base = medians[name][key], medians[names[0]][key]
            text = f"{value:.4g}"
            if name != names[0] and base:
                text += f" ({value / base:.2f}x)"
            line += text.rjust(width)
        print(line)
    for process in sorted({p for m in memory.values() for p in m}):
        print(f"peak MB {process}".ljust(24) + "".join(
            (f"{memory[n][process] / 1e6:.1f}" if process in memory[n] else "-").rjust(width)
            for n in names))


def parse_variant(text, common):
    name, _, rest = text.partition(":")
    settings = dict(common)
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            sys.exit(f"bench: --variant {text}: {pair} is not KEY=VALUE")
        settings[key] = value
    return name, settings


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bin", default=ROOT / "build" / "bin")
    parser.add_argument("--attention", type=int, default=1, help="attention workers (x)")
    parser.add_argument("--ffn", type=int, default=1, help="FFN workers (y)")
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--mode", default="disaggregated", choices=["disaggregated", "colocated"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--variant", action="append", metavar="NAME[:KEY=VALUE,...]")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=0, help="default: 4 for each client")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="all numbers of all runs, to this file")
    args = parser.parse_args()
    args.requests = args.requests or 4 * args.concurrency
    model = json.loads((pathlib.Path(args.model) / "config.json").read_text())
    args.vocab = model["vocab_size"] // 2
    common = {"router.port": 0, "attention.workers": args.attention, "ffn.workers": args.ffn,
              "attention.lanes": args.lanes, "mode": args.mode, "log.level": "warn"}
    common.update(pair.split("=", 1) for pair in args.set)
    variants = dict(parse_variant(v, common) for v in args.variant or
                    [f"{args.attention}A{args.ffn}F" if args.mode == "disaggregated" else args.mode])

    bundles, runs = [], {name: [] for name in variants}
    try:
        for name, settings in variants.items():
            bundles.append(Bundle(args, name, settings))
            asyncio.run(load(bundles[-1].url, argparse.Namespace(
                **{**vars(args), "requests": args.concurrency}), 0))
        for run in range(args.runs):
            for bundle in bundles:
                runs[bundle.name].append(measure(bundle, args, run + 1))
        memory = {bundle.name: bundle.memory() for bundle in bundles}
        start_s = {bundle.name: bundle.start_s for bundle in bundles}
    finally:
        for bundle in bundles:
            bundle.stop()
    medians = {name: {key: statistics.median(r[key] for r in rows) for key in rows[0]}
               for name, rows in runs.items()}
    for name in medians:
        medians[name]["start_s"] = start_s[name]
    print(f"{args.requests} requests, {args.concurrency} at a time, {args.prompt_tokens} tokens in, "
          f"{args.output_tokens} out; medians of {args.runs} runs")
    print_table(list(variants), medians, memory)
    if args.json:
        args.json.write_text(json.dumps({"arguments": sys.argv[1:], "settings": variants,
                                         "runs": runs, "medians": medians, "memory": memory},
                                        indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
