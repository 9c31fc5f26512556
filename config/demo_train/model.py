"""A compact torch form of the Qwen3-MoE architecture, for training on a CPU.

The parameters of a layer's experts are three stacked tensors; export() writes them under the names
that Hugging Face's Qwen3MoeForCausalLM reads. Norms, the gate's softmax and the loss run in f32.
"""
import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rope_tables(length, head_dim, theta):
    freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), freq)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rope(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"])
        self.q_proj = nn.Linear(c["hidden_size"], self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c["hidden_size"], bias=False)
        self.q_norm = Norm(self.dim, c["rms_norm_eps"])
        self.k_norm = Norm(self.dim, c["rms_norm_eps"])

    def forward(self, x, cos, sin, mask):
        rows, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, length, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, length, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rope(q, cos, sin).to(v.dtype), rope(k, cos, sin).to(v.dtype)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        # Plain products: at these lengths the fused form's backward is several times slower.
        score = (q * self.dim ** -0.5) @ k.transpose(2, 3)
        y = (score + mask).softmax(-1).to(v.dtype) @ v
        return self.o_proj(y.transpose(1, 2).reshape(rows, length, -1))


class Spread(torch.autograd.Function):
    """x (tokens, hidden) -> grid rows; `grid` names each row's token (or the zero row past the end),
    `place` the topk grid rows of each token. The gradient is a gather, which index_put is not."""

    @staticmethod
    def forward(ctx, x, grid, place):
        ctx.save_for_backward(place)
        ctx.tokens = x.shape[0]
        return torch.cat([x, x.new_zeros(1, x.shape[1])])[grid]

    @staticmethod
    def backward(ctx, d):
        place, = ctx.saved_tensors
        return d[place].view(ctx.tokens, -1, d.shape[1]).sum(1), None, None


class Collect(torch.autograd.Function):
    """y (grid rows, hidden) -> the rows at `place`, each of which occurs once."""

    @staticmethod
    def forward(ctx, y, place):
        ctx.save_for_backward(place)
        ctx.rows = y.shape[0]
        return y[place]

    @staticmethod
    def backward(ctx, d):
        place, = ctx.saved_tensors
        out = d.new_zeros(ctx.rows, d.shape[1])
        return out.index_copy_(0, place, d), None


class Experts(nn.Module):
    """Top-k of softmax over all experts, renormalised; rows are sorted by expert and padded to the
    largest expert, so that each projection is one batched product."""

    def __init__(self, c):
        super().__init__()
        n, hidden, inner = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]
        self.topk = c["num_experts_per_tok"]
        self.gate = nn.Parameter(torch.randn(n, hidden) * 0.02)
        self.gate_up = nn.Parameter(torch.randn(n, hidden, 2 * inner) * hidden ** -0.5)
        self.down = nn.Parameter(torch.randn(n, inner, hidden) * inner ** -0.5)

    def forward(self, x):
        n = self.gate.shape[0]
        with torch.autocast("cpu", enabled=False):
            prob = F.linear(x.float(), self.gate).softmax(-1)
        weight, expert = prob.topk(self.topk, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        expert = expert.reshape(-1)
        order = expert.argsort()
        count = torch.bincount(expert, minlength=n)
        start = count.cumsum(0) - count
        slot = torch.arange(len(expert)) - start[expert[order]]
        rows = int(count.max())
        place = torch.empty_like(expert)
        place[order] = expert[order] * rows + slot
        # Place of each (token, choice) pair in the padded (expert, rows) grid.
        grid = torch.full((n * rows,), x.shape[0], dtype=torch.long)
        grid[place] = torch.arange(len(expert)) // self.topk
        h = torch.bmm(Spread.apply(x, grid, place).view(n, rows, -1), self.gate_up)
        g, u = h.chunk(2, -1)
        y = torch.bmm(F.silu(g) * u, self.down).view(n * rows, -1)
        y = (Collect.apply(y, place).view(-1, self.topk, x.shape[1]) * weight.unsqueeze(-1)).sum(1)
        share = count.float() / count.sum()
        balance = n * (share * prob.mean(0)).sum()
        return y, balance, share


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.mlp = Experts(c)

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        rows, length, hidden = x.shape
        y, balance, share = self.mlp(self.post_attention_layernorm(x).view(-1, hidden))
        return x + y.view(rows, length, hidden), balance, share


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        for layer in self.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down)
        cos, sin = rope_tables(c["max_position_embeddings"], c["head_dim"], c["rope_theta"])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids, keep, segment):
        """ids (rows, length); keep (rows, length) bool picks the positions whose logits are wanted;
        segment (rows, length) numbers the conversation a position belongs to.
        Returns logits, the mean balance loss and the share of tokens of each (layer, expert)."""
        x = self.embed(ids)
        cos, sin = self.cos[:ids.shape[1]], self.sin[:ids.shape[1]]
        length = ids.shape[1]
        same = (segment[:, :, None] == segment[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
        mask = torch.zeros(same.shape, dtype=torch.bfloat16).masked_fill_(~same, -1e4)[:, None]
        balances, shares = [], []
        for layer in self.layers:
            x, balance, share = layer(x, cos, sin, mask)
            balances.append(balance)
            shares.append(share)
        x = self.norm(x[keep])
        return self.head(x).float(), torch.stack(balances).mean(), torch.stack(shares)


def export(model):
    """The parameters in bf16 under Hugging Face's names."""
    out = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight,
           "lm_head.weight": model.head.weight}
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}."
        for name, value in layer.named_parameters():
            if not name.startswith("mlp."):
                out[at + name] = value
        out[at + "mlp.gate.weight"] = layer.mlp.gate
        for e in range(layer.mlp.gate.shape[0]):
            gate, up = layer.mlp.gate_up[e].t().chunk(2, 0)
            out[f"{at}mlp.experts.{e}.gate_proj.weight"] = gate
            out[f"{at}mlp.experts.{e}.up_proj.weight"] = up
            out[f"{at}mlp.experts.{e}.down_proj.weight"] = layer.mlp.down[e].t()
    return {k: v.detach().to(torch.bfloat16).contiguous().clone() for k, v in out.items()}
