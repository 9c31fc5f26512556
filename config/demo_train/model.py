"""A compact torch form of the Qwen3-MoE architecture, for training on a CPU.

The parameters of a layer's experts are three stacked tensors; export() writes them under the names
that Hugging Face's Qwen3MoeForCausalLM reads. Norms, the gate's softmax and the loss run in f32.
"""
import torch
import torch.nn.functional as F
from torch import nn

# An expert's rows are padded to a multiple of this: the library compiles a product for each new shape.
BLOCK = 256


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


class Swiglu(torch.autograd.Function):
    """The experts' SwiGLU over rows sorted by expert, one expert's rows after the other's.

    x (rows, hidden), gate_up (experts, hidden, 2 * inner), down (experts, inner, hidden) in bf16;
    count: rows of each expert. By hand, because autograd would copy the stacked gradients per expert.
    """

    @staticmethod
    def forward(ctx, x, gate_up, down, count):
        y = torch.empty_like(x)
        h = x.new_empty(x.shape[0], gate_up.shape[2])
        a = x.new_empty(x.shape[0], down.shape[1])
        at = 0
        for e, n in enumerate(count):
            torch.mm(x[at:at + n], gate_up[e], out=h[at:at + n])
            at += n
        g, u = h.chunk(2, -1)
        torch.mul(F.silu(g), u, out=a)
        at = 0
        for e, n in enumerate(count):
            torch.mm(a[at:at + n], down[e], out=y[at:at + n])
            at += n
        ctx.save_for_backward(x, h, a, gate_up, down)
        ctx.count = count
        return y

    @staticmethod
    def backward(ctx, dy):
        x, h, a, gate_up, down = ctx.saved_tensors
        dy = dy.to(x.dtype)
        d_gate_up, d_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        da, dx, dh = torch.empty_like(a), torch.empty_like(x), torch.empty_like(h)
        at = 0
        for e, n in enumerate(ctx.count):
            torch.mm(dy[at:at + n], down[e].t(), out=da[at:at + n])
            torch.mm(a[at:at + n].t(), dy[at:at + n], out=d_down[e])
            at += n
        g, u = h.chunk(2, -1)
        s = torch.sigmoid(g)
        gs = g * s
        inner = g.shape[1]
        torch.mul(da, gs, out=dh[:, inner:])
        torch.mul(da * u, s + gs * (1 - s), out=dh[:, :inner])
        at = 0
        for e, n in enumerate(ctx.count):
            torch.mm(dh[at:at + n], gate_up[e].t(), out=dx[at:at + n])
            torch.mm(x[at:at + n].t(), dh[at:at + n], out=d_gate_up[e])
            at += n
        return dx, d_gate_up, d_down, None


class Spread(torch.autograd.Function):
    """x (tokens, hidden) -> the rows of the sorted grid; `grid` names each row's token (or the zero row
    past the end), `place` the topk grid rows of each token. The gradient too is a gather."""

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
        return d.new_zeros(ctx.rows, d.shape[1]).index_copy_(0, place, d), None


class Experts(nn.Module):
    """Top-k of the gate's softmax over all experts, renormalised; rows are sorted by expert."""

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
        padded = (count + BLOCK - 1) // BLOCK * BLOCK
        shift = (padded.cumsum(0) - padded) - (count.cumsum(0) - count)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order)) + shift[expert[order]]
        grid = torch.full((int(padded.sum()),), x.shape[0])
        grid[place] = torch.arange(len(order)) // self.topk
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        rows = Spread.apply(x.to(dtype), grid, place)
        y = Swiglu.apply(rows, self.gate_up.to(dtype), self.down.to(dtype), padded.tolist())
        y = Collect.apply(y, place).view(-1, self.topk, x.shape[1])
        y = torch.bmm(weight.to(dtype).unsqueeze(1), y).squeeze(1)
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

    def forward(self, x, cos, sin, mask, keep=None):
        """x (rows, length, hidden) -> the same shape, or (positions kept, hidden)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        shape = x.shape
        x = x.view(-1, shape[-1])
        if keep is not None:
            x = x.index_select(0, keep)
        y, balance, share = self.mlp(self.post_attention_layernorm(x))
        return x + y if keep is not None else (x + y).view(shape), balance, share


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
        """ids (rows, length); keep: indices, in ids flattened, of the positions whose logits are wanted;
        segment (rows, length) numbers the conversation a position belongs to.
        Returns logits, the mean balance loss and the share of tokens of each (layer, expert)."""
        x = self.embed(ids)
        cos, sin = self.cos[:ids.shape[1]], self.sin[:ids.shape[1]]
        length = ids.shape[1]
        same = (segment[:, :, None] == segment[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
        mask = torch.zeros(same.shape, dtype=torch.bfloat16).masked_fill_(~same, -1e4)[:, None]
        balances, shares = [], []
        for layer in self.layers:
            # Of the last layer's experts only the wanted positions are of use.
            x, balance, share = layer(x, cos, sin, mask, keep if layer is self.layers[-1] else None)
            balances.append(balance)
            shares.append(share)
        x = self.norm(x)
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


def load_layer(layer, tensors, at):
    """Fills a layer from tensors under Hugging Face's names; `at` is the layer's prefix."""
    for name, value in layer.named_parameters():
        if not name.startswith("mlp."):
            value.copy_(tensors[at + name])
    layer.mlp.gate.copy_(tensors[at + "mlp.gate.weight"])
    for e in range(layer.mlp.gate.shape[0]):
        expert = f"{at}mlp.experts.{e}."
        layer.mlp.gate_up[e] = torch.cat(
            [tensors[expert + "gate_proj.weight"], tensors[expert + "up_proj.weight"]]).t()
        layer.mlp.down[e] = tensors[expert + "down_proj.weight"].t()
