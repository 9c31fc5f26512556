"""A worker's resident memory stays near its share of the weights plus its KV cache."""

import json
import struct

from conftest import memory_bytes

LIMIT = 1.15


def tensor_bytes(model):
    """Bytes of the routed experts, and of all other tensors."""
    experts = others = 0
    for file in model.glob("*.safetensors"):
        with open(file, "rb") as opened:
            header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                if ".experts." in name:
                    experts += end - begin
                else:
                    others += end - begin
    return experts, others


def test_resident_memory(start, synth):
    # 200 MB for each worker, so that what any process needs does not decide.
    model = synth("olmoe", hidden=1024, layers=4, heads=16, kv_heads=16, experts=16, top_k=2,
                  intermediate=1024, vocab=40000, context=1024, dtype="bf16")
    kv_tokens, y = 1024, 2
    bundle = start(model, {"attention.workers": 2, "ffn.workers": y, "attention.max_seqs": 16,
                           "attention.kv_tokens": kv_tokens, "attention.token_budget": 64})
    bundle.client().completions.create(model="olmoe", prompt="abc " * 100, max_tokens=8,
                                       extra_body={"ignore_eos": True})
    experts, others = tensor_bytes(model)
    kv = 2 * 4 * 1024 * 2 * kv_tokens
    pids = bundle.pids()
    for name, share in (("tandem-attn", others + kv), ("tandem-ffn", experts / y)):
        for pid in pids[name]:
            peak = memory_bytes(pid, "VmHWM")  # loading included
            print(f"{name}: {peak / 1e6:.0f} MB at most (now "
                  f"{memory_bytes(pid, 'VmRSS') / 1e6:.0f} MB), share {share / 1e6:.0f} MB, "
                  f"ratio {peak / share:.3f}")
            assert peak <= LIMIT * share, name
