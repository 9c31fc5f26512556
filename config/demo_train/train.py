#!/usr/bin/env python3
"""Trains the demo model of Tandem from scratch on a synthetic corpus, on a CPU.

Makes the tokenizer and the corpus (corpus.py, seeded), trains a small Qwen3-MoE model (model.py) with
Muon for the matrices and Adam for the rest, keeps the parameters that did best on the valid part,
and writes a Hugging Face directory: config.json, generation_config.json, model.safetensors (bf16),
tokenizer.json, tokenizer_config.json and heldout.jsonl.

Needs torch, tokenizers and safetensors. About an hour on two cores.
Then: evaluate.py --local DIR (transformers) or evaluate.py --base-url URL (a server).
"""
import argparse
import itertools
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import corpus
import tokenizer as tokenizer_module
from model import BLOCK, Model, export, load_layer

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "head_dim": 32, "hidden_act": "silu", "hidden_size": 128,
    "initializer_range": 0.02, "intermediate_size": 256, "max_position_embeddings": 2048,
    "max_window_layers": 4, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 64,
    "norm_topk_prob": True, "num_attention_heads": 8, "num_experts": 16, "num_experts_per_tok": 4,
    "num_hidden_layers": 4, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": tokenizer_module.VOCAB_SIZE}
SHORT, LONG = 128, 512  # tokens in a row of packed short conversations, and of one long conversation
ROWS_TOKENS = 4608      # tokens in a batch


class Batches:
    """Packs conversations into rows. A row's segments do not see each other; `want` marks the
    positions whose next token is part of an answer."""

    def __init__(self, tokenizer, where, seed):
        self.tokenizer, self.where, self.rng = tokenizer, where, random.Random(seed)
        self.head = tokenizer.encode("<|im_start|>assistant\n").ids
        self.newline = tokenizer.encode("\n").ids
        self.pool = []

    def refill(self):
        samples = [corpus.draw(self.rng, self.where) for _ in range(2000)]
        self.pool = self.encode(samples)

    def encode(self, samples):
        """(ids, wanted) of each sample: its question, its answer, and what follows on them."""
        pairs = [[(s.question, s.answer), *s.follow] for s in samples]
        asked = self.tokenizer.encode_batch_fast(
            [f"<|im_start|>user\n{q}<|im_end|>\n" for turns in pairs for q, _ in turns])
        said = self.tokenizer.encode_batch_fast([f"{a}<|im_end|>" for turns in pairs for _, a in turns])
        coded, out = zip(asked, said), []
        for turns in pairs:
            ids, want = [], []
            for q, a in itertools.islice(coded, len(turns)):
                before = q.ids + self.head
                ids += before + a.ids + self.newline
                want += [0] * (len(before) - 1) + [1] * len(a.ids) + [0, 0]
            out.append((ids, want))
        return out

    def turn(self):
        if not self.pool:
            self.refill()
        return self.pool.pop()

    def conversation(self, limit):
        """One conversation: mostly one turn, else two or three, or turns up to the limit."""
        r = self.rng.random()
        turns = 1 if r < 0.7 else 2 if r < 0.88 else 3
        ids, want = [], []
        if self.rng.random() < 0.08:
            system = self.rng.choice(corpus.SYSTEM)
            ids = self.tokenizer.encode(f"<|im_start|>system\n{system}<|im_end|>\n").ids
            want = [0] * len(ids)
        while turns if limit == SHORT else len(ids) < limit - 110:
            a, b = self.turn()
            if ids and len(ids) + len(a) > limit:
                break
            ids, want, turns = ids + a, want + b, turns - 1
        return ids[:limit], want[:limit]

    def batch(self, length):
        rows = ROWS_TOKENS // length
        ids = torch.zeros(rows, length, dtype=torch.long)
        want = torch.zeros(rows, length, dtype=torch.bool)
        segment = torch.zeros(rows, length, dtype=torch.long)
        for r in range(rows):
            at, number = 0, 1
            while at < length - 24:
                i, w = self.conversation(length)
                if at + len(i) > length:
                    if at > length * 3 // 4:
                        break
                    i, w = i[:length - at], w[:length - at]
                ids[r, at:at + len(i)] = torch.tensor(i)
                want[r, at:at + len(i)] = torch.tensor(w, dtype=torch.bool)
                segment[r, at:at + len(i)] = number
                at, number = at + len(i), number + 1
        want[:, -1] = False
        return ids, want, segment


def orthogonal(m):
    """Newton-Schulz iteration towards the nearest orthogonal matrix (Muon), batched over the first axis."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        y = x @ x.mT
        x = a * x + (b * y + c * y @ y) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.95, decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, decay=decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                step = p.grad.lerp(buffer, group["momentum"])
                by_shape.setdefault(p.shape[-2:], []).append((p, step))
            for shape, pairs in by_shape.items():
                flat = orthogonal(torch.cat([s.view(-1, *shape) for _, s in pairs]))
                flat *= max(1.0, shape[0] / shape[1]) ** 0.5
                at = 0
                for p, s in pairs:
                    n = s.numel() // (shape[0] * shape[1])
                    p.mul_(1 - group["lr"] * group["decay"])
                    p.sub_(flat[at:at + n].view_as(p), alpha=group["lr"])
                    at += n


def optimizers(model):
    matrices, rest = [], []
    for name, p in model.named_parameters():
        matrix = p.ndim >= 2 and not name.endswith("gate") and "embed" not in name and "head" not in name
        (matrices if matrix else rest).append(p)
    return [Muon(matrices, lr=0.02), torch.optim.Adam(rest, lr=0.004, betas=(0.9, 0.95), fused=True)]


def forward(model, ids, want, segment):
    """Logits and target ids of the wanted positions, filled up to whole blocks with target -100."""
    keep = want.flatten().nonzero()[:, 0]
    target = ids.roll(-1, 1).flatten()[keep]
    fill = -len(keep) % BLOCK
    keep, target = F.pad(keep, (0, fill)), F.pad(target, (0, fill), value=-100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, balance, share = model(ids, keep, segment)
    return logits, target, balance, share


@torch.no_grad()
def validate(model, tokenizer, samples):
    """Share of answers that greedy decoding gives exactly, by task. An answer is what greedy decoding
    gives exactly when each of its tokens is the most likely one after the right tokens before it."""
    turns = Batches(tokenizer, "valid", 0).encode(samples)
    right, total = {}, {}
    order = sorted(range(len(turns)), key=lambda i: len(turns[i][0]))
    for at in range(0, len(order), 64):
        chunk = order[at:at + 64]
        length = max(len(turns[i][0]) for i in chunk)
        ids = torch.zeros(len(chunk), length, dtype=torch.long)
        want = torch.zeros(len(chunk), length, dtype=torch.bool)
        for r, i in enumerate(chunk):
            ids[r, :len(turns[i][0])] = torch.tensor(turns[i][0])
            want[r, :len(turns[i][1])] = torch.tensor(turns[i][1], dtype=torch.bool)
        logits, target, _, _ = forward(model, ids, want, torch.ones_like(ids))
        wrong = torch.zeros(len(chunk), dtype=torch.bool)
        row = want.nonzero()[:, 0]
        wrong[row[(logits.argmax(-1) != target)[:len(row)]]] = True
        for r, i in enumerate(chunk):
            task = samples[i].task
            total[task] = total.get(task, 0) + 1
            right[task] = right.get(task, 0) + int(not wrong[r])
    return {t: right[t] / total[t] for t in total}


def write(folder, model, tokenizer):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(export(model), folder / "model.safetensors", {"format": "pt"})
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    ids = {"bos_token_id": pad, "eos_token_id": end, "pad_token_id": pad}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **ids}, indent=2, sort_keys=True) + "\n")
    made = {"do_sample": False, **ids, "eos_token_id": [end, pad]}
    (folder / "generation_config.json").write_text(json.dumps(made, indent=2) + "\n")
    tokenizer_module.save(tokenizer, folder)
    with open(folder / "heldout.jsonl", "w") as out:
        for s in corpus.heldout():
            out.write(json.dumps({"task": s.task, "question": s.question, "answer": s.check}) + "\n")


def start_from(model, tokenizer, folder):
    """Takes the parameters of a model that write() has written. Its vocabulary may differ: the rows of
    tokens that it does not have stay as they are."""
    tensors = load_file(folder / "model.safetensors")
    old = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pairs = [(i, old.token_to_id(t)) for t, i in tokenizer.get_vocab().items() if old.token_to_id(t) is not None]
    new, was = torch.tensor(pairs).unbind(1)
    with torch.no_grad():
        for parameter, name in ((model.embed.weight, "model.embed_tokens"), (model.head.weight, "lm_head")):
            parameter[new] = tensors[name + ".weight"].float()[was]
        model.norm.weight.copy_(tensors["model.norm.weight"])
        for i, layer in enumerate(model.layers):
            load_layer(layer, tensors, f"model.layers.{i}.")
    print(f"started from {folder}, {len(pairs)} tokens in common", flush=True)


def rate(step, done):
    """Learning rate over its peak: warm-up over 50 steps, level, down to zero over the last two thirds.
    done: share of the training that is over, by steps or by time, whichever is nearer its end."""
    return max(0.0, min(1.0, (step + 1) / 50, 1.5 * (1.0 - done)))


def train(args):
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = tokenizer_module.build()
    model = Model(CONFIG)
    batches = Batches(tokenizer, "train", args.seed)
    rng = random.Random(args.seed + 1)
    valid = [corpus.draw(rng, "valid", task)._replace(follow=()) for task in corpus.SHARES for _ in range(60)]
    if args.start:
        start_from(model, tokenizer, Path(args.start))
    opts = optimizers(model)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {args.steps} steps", flush=True)
    start, mean, best = time.time(), 0.0, -1.0
    use = torch.zeros(CONFIG["num_hidden_layers"], CONFIG["num_experts"])
    step, done = 0, 0.0
    while done < 1.0:
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * rate(step, done)
        logits, target, balance, share = forward(model, *batches.batch(LONG if step % 10 == 9 else SHORT))
        loss = F.cross_entropy(logits, target)
        (loss + args.balance * balance).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        mean += (loss.item() - mean) * max(0.02, 1 / (step + 1))
        use.lerp_(share.detach(), 0.02)
        step += 1
        done = max(step / args.steps, (time.time() - start) / (60 * args.minutes))
        if step % args.every == 0 or done >= 1.0:
            score = validate(model, tokenizer, valid)
            overall = sum(score.values()) / len(score)
            print(f"step {step} {time.time() - start:.0f}s loss {mean:.4f} balance {balance.item():.3f} "
                  f"expert use {use.min() / use.sum(1)[0]:.4f}..{use.max() / use.sum(1)[0]:.4f} right {overall:.3f} "
                  + " ".join(f"{t} {v:.2f}" for t, v in score.items()), flush=True)
            if overall >= best:
                best = overall
                write(Path(args.out), model, tokenizer)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=3500, help="batches of 4608 tokens (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=180, help="at most (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default %(default)s)")
    parser.add_argument("--start", metavar="DIR", help="start from the parameters of this model, not from scratch")
    parser.add_argument("--seed", type=int, default=1, help="of corpus and parameters (default %(default)s)")
    parser.add_argument("--balance", type=float, default=0.02, help="weight of the gate's balance loss")
    parser.add_argument("--every", type=int, default=250, help="steps between validations")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
