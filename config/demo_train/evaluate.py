#!/usr/bin/env python3
"""Asks the demo model's held-out questions and counts the right answers, task by task.

Over HTTP (--base-url, any OpenAI-compatible server; standard library only) or through transformers
(--local DIR, bf16, which also reports how the gate spreads tokens over the experts). Greedy decoding.
Exit status: 0 when at least --min answers are right, 1 when fewer are, 2 when the server fails.
"""
import argparse
import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

QUESTIONS = Path(__file__).resolve().parent.parent / "demo_model" / "heldout.jsonl"


def call(url, body, key):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as reply:
        return json.load(reply)


def http_asker(args):
    base = args.base_url.rstrip("/")
    model = args.model or call(base + "/models", None, args.key)["data"][0]["id"]

    def ask(messages):
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": args.max_tokens}
        return call(base + "/chat/completions", body, args.key)["choices"][0]["message"]["content"]

    return ask


class Local:
    """The model in this process, through transformers."""

    def __init__(self, args):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        self.torch, self.max_tokens = torch, args.max_tokens
        self.tokenizer = AutoTokenizer.from_pretrained(args.local)
        self.model = AutoModelForCausalLM.from_pretrained(args.local, dtype=torch.bfloat16).eval()
        self.use = [0] * self.model.config.num_hidden_layers
        for i, layer in enumerate(self.model.model.layers):
            layer.mlp.gate.register_forward_hook(lambda module, inputs, _, i=i: self.count(i, module, inputs[0]))

    def count(self, i, gate, x):
        scores = self.torch.nn.functional.linear(x.flatten(0, -2), gate.weight)
        chosen = scores.topk(self.model.config.num_experts_per_tok, -1).indices.flatten()
        self.use[i] = self.use[i] + chosen.bincount(minlength=self.model.config.num_experts)

    def ask(self, messages):
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, return_tensors="pt").input_ids
        with self.torch.no_grad():
            out = self.model.generate(ids, attention_mask=self.torch.ones_like(ids), do_sample=False,
                                      max_new_tokens=self.max_tokens)
        return self.tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True)

    def report(self):
        for i, use in enumerate(self.use):
            share = use / use.sum()
            print(f"layer {i}: an expert's share of tokens {share.min():.4f} to {share.max():.4f}, "
                  f"even share {1 / len(share):.4f}")


def run(args, ask):
    questions = [json.loads(line) for line in Path(args.questions).read_text().splitlines()]
    right, total, messages = {}, {}, []
    for i, q in enumerate(questions):
        if i % args.turns == 0:
            messages = []
        messages.append({"role": "user", "content": q["question"]})
        said = ask(messages)
        messages.append({"role": "assistant", "content": said})
        good = re.search(q["answer"], said.strip()) is not None
        total[q["task"]] = total.get(q["task"], 0) + 1
        right[q["task"]] = right.get(q["task"], 0) + good
        if args.verbose or not good:
            print(f"{'right' if good else 'WRONG'} {q['task']}: {q['question']!r} -> {said!r}", flush=True)
    for task in total:
        print(f"{task:8} {right[task]}/{total[task]}")
    print(f"total    {sum(right.values())}/{sum(total.values())}")
    return sum(right.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", help="of the server, with /v1")
    where.add_argument("--local", metavar="DIR", help="model directory, evaluated by transformers")
    parser.add_argument("--questions", default=QUESTIONS, help="JSON lines of task, question, answer (a regexp)")
    parser.add_argument("--min", type=int, default=90, help="right answers wanted (default %(default)s)")
    parser.add_argument("--turns", type=int, default=1, help="questions per conversation (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="per answer (default %(default)s)")
    parser.add_argument("--model", help="name of the model; default: the first that the server lists")
    parser.add_argument("--key", default="none", help="API key, where the server wants one")
    parser.add_argument("--verbose", action="store_true", help="print every answer, not only the wrong ones")
    args = parser.parse_args()
    try:
        local = Local(args) if args.local else None
        right = run(args, local.ask if local else http_asker(args))
    except (urllib.error.URLError, OSError, KeyError, IndexError, ValueError) as e:
        print(f"evaluate: {e}", file=sys.stderr)
        return 2
    if local:
        local.report()
    return 0 if right >= args.min else 1


if __name__ == "__main__":
    sys.exit(main())
