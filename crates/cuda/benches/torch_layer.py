"""One layer of DeepSeek-V4-Flash in plain PyTorch: what a user would otherwise run.

`python3 torch_layer.py` times the three kinds of layer with random weights at 1 to 16 positions of one
session, eager and as CUDA graphs, and prints a `time` line for each; `--tiny` runs small sizes on
whatever device there is, to check the script. Standard output only; nothing is read.

What is fair: every variant keeps the layer's structure (four streams with Sinkhorn, window and compressed
keys, the indexer's top-k, routed and shared experts), in static shapes that a graph can hold, and leaves
out what the model adds for its formats alone (rounding of activations, keys and queries to FP8 and FP4),
which would only cost it time. Of each variant the experts w1 and w3 are one matrix, and so are products of
the same input. The variants, of which the fastest counts:

  bf16     weights widened to bf16 when loaded; experts by PyTorch's grouped product over all 256
  fp8      products and experts in FP8 with a scale to a row, by PyTorch's scaled products
  gather   bf16; the experts that are met copied side by side, then batched products
  fp4      experts as stored, two codes to a byte; those that are met are widened on the way
           (the only one whose weights are as small as ours)

bf16 takes 3.8 times the memory of the stored experts, fp8 1.9 times. `gather` is run only where it is
named: at one position it is about as fast as bf16, at more it is slower. Sums are in whatever order
PyTorch likes: nothing here repeats bits from one batch shape to another.
"""

import sys
import time

import torch
import torch.nn.functional as F

TINY = "--tiny" in sys.argv
DEV = "cuda" if torch.cuda.is_available() else "cpu"
# Layers in a graph, layers in an eager run, runs whose median counts.
REPEATS, EAGER, RUNS = (2, 2, 3) if TINY else (10, 4, 7)
ROWS = (1, 2, 4) if TINY else (1, 2, 4, 8, 16)
POSITION, CAPACITY = (300, 512) if TINY else (4096, 4224)
EPS = 1e-6


class Sizes:
    if TINY:
        dim, heads, head, rope, q_rank, o_rank, groups, window = 256, 4, 128, 64, 128, 128, 2, 32
        index_heads, index_dim, top_k, experts, per_token, inner, vocab = 4, 64, 16, 16, 4, 128, 512
    else:
        dim, heads, head, rope, q_rank, o_rank, groups, window = 4096, 64, 512, 64, 1024, 1024, 8, 128
        index_heads, index_dim, top_k, experts, per_token, inner, vocab = 64, 128, 512, 256, 6, 2048, 129280
    hc, sinkhorn, route_scale, limit = 4, 20, 1.5, 10.0


S = Sizes


def rand(*shape, dtype=torch.bfloat16, spread=None):
    spread = shape[-1] ** -0.5 if spread is None else spread
    return (torch.randn(*shape, device=DEV, dtype=torch.bfloat16) * spread).to(dtype)


def rms(x, weight):
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight).bfloat16()


def rotate(x, cos, sin, back=False):
    """Rotates the last dimensions of `x` [m, ..., d] in interleaved pairs; cos, sin are [m, rope / 2]."""
    keep, turn = x[..., : -S.rope], x[..., -S.rope :].float()
    a, b = turn[..., 0::2], turn[..., 1::2]
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[1],)
    cos, sin = cos.view(shape), sin.view(shape)
    if back:
        sin = -sin
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((keep, turned.to(x.dtype)), -1)


class Dense:
    """A matrix [n, k] for x [m, k]."""

    def __init__(self, weight, fp8):
        self.fp8 = fp8
        if fp8:
            self.scale = (weight.float().abs().amax(1) / 448.0).clamp(min=1e-12)
            self.weight = (weight.float() / self.scale[:, None]).to(torch.float8_e4m3fn)
            self.scale = self.scale[None, :].contiguous()
        else:
            self.weight = weight

    def __call__(self, x):
        if not self.fp8:
            return F.linear(x, self.weight)
        codes, scale = to_fp8(x)
        return torch._scaled_mm(
            codes, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )


def to_fp8(x):
    scale = (x.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


class Experts:
    """All experts of a layer: w1 and w3 as one matrix [experts, 2 inner, dim], w2 [experts, dim, inner]."""

    def __init__(self, variant):
        self.variant = variant
        e, n, k = S.experts, S.inner, S.dim
        if variant == "fp4":
            codes = lambda rows, cols: torch.randint(0, 256, (e, rows, cols // 2), device=DEV, dtype=torch.uint8)
            self.up, self.down = codes(2 * n, k), codes(k, n)
            # A random code is 2.9 in size.
            scale = lambda rows, cols: torch.full((e, rows, cols // 32), cols**-0.5 / 2.9, device=DEV).bfloat16()
            self.up_scale, self.down_scale = scale(2 * n, k), scale(k, n)
            pairs = [[CODES[i & 15], CODES[i >> 4]] for i in range(256)]
            self.table = torch.tensor(pairs, device=DEV, dtype=torch.bfloat16)
        else:
            self.up, self.down = rand(e, 2 * n, k), rand(e, k, n)
        if variant == "fp8":
            self.up, self.up_scale = self.narrow(self.up)
            self.down, self.down_scale = self.narrow(self.down)

    @staticmethod
    def narrow(weight):
        scale = (weight.abs().amax(-1).float() / 448.0).clamp(min=1e-12)
        codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        for i in range(weight.shape[0]):
            codes[i] = (weight[i].float() / scale[i][:, None]).to(torch.float8_e4m3fn)
        return codes, scale

    def act(self, gated, weight):
        gate, up = gated.float().chunk(2, -1)
        up, gate = up.clamp(-S.limit, S.limit), gate.clamp(max=S.limit)
        return (F.silu(gate) * up * weight).bfloat16()

    def widened(self, codes, scales, picks):
        values = self.table[codes[picks].int()].flatten(-2)
        return (values.unflatten(-1, (-1, 32)) * scales[picks].unsqueeze(-1)).flatten(-2)

    def __call__(self, x, picks, weights):
        m = x.shape[0]
        flat = picks.flatten()
        if self.variant in ("gather", "fp4"):
            if self.variant == "fp4":
                up, down = self.widened(self.up, self.up_scale, flat), self.widened(self.down, self.down_scale, flat)
            else:
                up, down = self.up[flat], self.down[flat]
            rows = x.repeat_interleave(S.per_token, 0).unsqueeze(2)
            t = self.act(torch.bmm(up, rows).squeeze(2), weights.flatten()[:, None])
            y = torch.bmm(down, t.unsqueeze(2)).squeeze(2)
            return y.float().view(m, S.per_token, S.dim).sum(1)
        order = torch.argsort(flat, stable=True)
        rows = order // S.per_token
        ends = (flat[:, None] == torch.arange(S.experts, device=DEV)).sum(0).cumsum(0).to(torch.int32)
        t = self.act(self.grouped(x[rows], "up", ends), weights.flatten()[order][:, None])
        y = self.grouped(t, "down", ends)
        return torch.zeros(m, S.dim, device=DEV).index_add_(0, rows, y.float())

    def grouped(self, x, part, ends):
        weight = getattr(self, part).transpose(-2, -1)
        if self.variant != "fp8":
            return torch._grouped_mm(x, weight, offs=ends)
        codes, scale = to_fp8(x)
        return torch._scaled_grouped_mm(
            codes,
            weight,
            scale.squeeze(1),
            getattr(self, part + "_scale"),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )


class Compressor:
    """Slots of `ratio` positions, `width` values each, for the rows' own slots."""

    def __init__(self, ratio, width):
        self.ratio, self.width = ratio, width
        self.both = 2 if ratio == 4 else 1
        self.weight = rand(2 * self.both * width, S.dim, dtype=torch.float32)
        self.ape = rand(ratio, self.both * width, dtype=torch.float32)
        self.norm = torch.ones(width, device=DEV)
        self.raw = torch.zeros(CAPACITY, 2 * self.both * width, device=DEV)
        self.raw.normal_()
        self.slots = rand(CAPACITY // ratio, width, spread=1.0)

    def __call__(self, x, pos, tables, turn=None):
        raw = F.linear(x.float(), self.weight)
        raw[:, self.both * self.width :] += self.ape[pos % self.ratio]
        self.raw.index_copy_(0, pos, raw)
        # The slots that these positions may complete: each once, the last one first.
        count = -(-pos.shape[0] // self.ratio)
        slots = (pos[-1] + 1) // self.ratio - 1 - torch.arange(count, device=DEV)
        w, r = self.width, self.ratio
        if self.both == 2:
            at = slots[:, None] * r + torch.arange(-r, r, device=DEV)
            rows = self.raw[at].unflatten(-1, (2, 2, w))
            rows = torch.cat((rows[:, :r, :, 0], rows[:, r:, :, 1]), 1)
        else:
            rows = self.raw[slots[:, None] * r + torch.arange(r, device=DEV)].unflatten(-1, (2, w))
        values, scores = rows[:, :, 0], rows[:, :, 1]
        slot = rms((scores.softmax(1) * values).sum(1), self.norm)
        first = slots * r
        slot = rotate(slot, tables[0][first], tables[1][first])
        self.slots.index_copy_(0, slots, slot if turn is None else slot @ turn)


class Layer:
    def __init__(self, kind, variant, experts):
        fp8 = variant == "fp8"
        self.ratio = {"window": 0, "ratio 128": 128, "ratio 4": 4}[kind]
        mixes = (2 + S.hc) * S.hc
        self.mixes = [
            (rand(mixes, S.hc * S.dim, dtype=torch.float32), torch.full((3,), 0.5, device=DEV), rand(mixes).float())
            for _ in range(2)
        ]
        self.attn_norm, self.ffn_norm = torch.ones(S.dim, device=DEV), torch.ones(S.dim, device=DEV)
        self.q_norm, self.kv_norm = torch.ones(S.q_rank, device=DEV), torch.ones(S.head, device=DEV)
        # wq_a and wkv take the same input.
        self.w_in = Dense(rand(S.q_rank + S.head, S.dim), fp8)
        index = S.index_heads * S.index_dim if self.ratio == 4 else 0
        # wq_b and the indexer's too.
        self.wq_b = Dense(rand(S.heads * S.head + index, S.q_rank), fp8)
        per_group = S.heads * S.head // S.groups
        self.wo_a = rand(S.groups, S.o_rank, per_group)
        self.wo_b = Dense(rand(S.dim, S.groups * S.o_rank), fp8)
        self.sink = rand(S.heads, dtype=torch.float32)
        self.keys = rand(CAPACITY, S.head, spread=1.0)
        if self.ratio:
            self.compressor = Compressor(self.ratio, S.head)
        if self.ratio == 4:
            self.index = Compressor(4, S.index_dim)
            self.index_weights = rand(S.index_heads, S.dim)
            h = torch.ones(1, 1, device=DEV)
            while h.shape[0] < S.index_dim:
                h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
            self.hadamard = (h * S.index_dim**-0.5).bfloat16()
        angles = torch.arange(CAPACITY, device=DEV)[:, None] * 10000.0 ** (
            -torch.arange(0, S.rope, 2, device=DEV) / S.rope
        )
        self.tables = (angles.cos(), angles.sin())
        self.gate = rand(S.experts, S.dim, dtype=torch.float32)
        self.bias = rand(S.experts, dtype=torch.float32)
        self.by_id = torch.randint(0, S.experts, (S.vocab, S.per_token), device=DEV)
        self.hashed = kind == "window"
        self.experts = experts
        self.shared_up = Dense(rand(2 * S.inner, S.dim), fp8)
        self.shared_down = Dense(rand(S.dim, S.inner), fp8)

    def enter(self, h, which, norm):
        weight, scale, base = self.mixes[which]
        x = h.flatten(1).float()
        m = F.linear(x, weight) * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        n = S.hc
        pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + EPS
        post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        c = (m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + EPS
        c = c / (c.sum(1, keepdim=True) + EPS)
        for _ in range(S.sinkhorn - 1):
            c = c / (c.sum(2, keepdim=True) + EPS)
            c = c / (c.sum(1, keepdim=True) + EPS)
        y = (pre.unsqueeze(2) * h.float()).sum(1).bfloat16()
        return rms(y, norm), post, c

    def leave(self, y, h, post, c):
        mixed = torch.bmm(c.transpose(1, 2), h.float())
        return (post.unsqueeze(2) * y.float().unsqueeze(1) + mixed).bfloat16()

    def attention(self, x, pos):
        m = x.shape[0]
        cos, sin = self.tables[0][pos], self.tables[1][pos]
        low, kv = self.w_in(x).split((S.q_rank, S.head), -1)
        qr = rms(low, self.q_norm)
        wide = self.wq_b(qr)
        q = wide[:, : S.heads * S.head].view(m, S.heads, S.head)
        q = rotate((q.float() * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + EPS)).bfloat16(), cos, sin)
        self.keys.index_copy_(0, pos, rotate(rms(kv, self.kv_norm), cos, sin))
        at = pos[:, None] - torch.arange(S.window - 1, -1, -1, device=DEV)
        keys, seen = self.keys[at.clamp(min=0)], at >= 0
        if self.ratio:
            self.compressor(x, pos, self.tables)
            whole = (pos + 1) // self.ratio
            if self.ratio == 4:
                slots = self.picked(x, wide[:, S.heads * S.head :], pos, whole, (cos, sin))
            else:
                slots = torch.arange(CAPACITY // self.ratio, device=DEV).expand(m, -1)
            keys = torch.cat((keys, self.compressor.slots[slots]), 1)
            seen = torch.cat((seen, slots < whole[:, None]), 1)
        scores = torch.bmm(q, keys.transpose(1, 2)).float() * S.head**-0.5
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        sink = self.sink.view(1, -1, 1).expand(m, -1, 1)
        p = torch.cat((scores, sink), -1).softmax(-1)[..., :-1].bfloat16()
        o = rotate(torch.bmm(p, keys), cos, sin, back=True)
        z = torch.bmm(o.view(m, S.groups, -1).transpose(0, 1), self.wo_a.transpose(1, 2))
        return self.wo_b(z.transpose(0, 1).reshape(m, -1))

    def picked(self, x, wide, pos, whole, turn):
        m = x.shape[0]
        q = rotate(wide.view(m, S.index_heads, S.index_dim), *turn) @ self.hadamard
        self.index(x, pos, self.tables, self.hadamard)
        w = F.linear(x, self.index_weights) * (S.index_dim * S.index_heads) ** -0.5
        dots = torch.relu(torch.matmul(q, self.index.slots.t()))
        scores = torch.bmm(w.unsqueeze(1), dots).squeeze(1).float()
        slots = torch.arange(scores.shape[1], device=DEV)
        return scores.masked_fill(slots >= whole[:, None], float("-inf")).topk(S.top_k, -1, sorted=False).indices

    def moe(self, x, ids):
        scores = F.softplus(F.linear(x.float(), self.gate)).sqrt()
        picks = self.by_id[ids] if self.hashed else (scores + self.bias).topk(S.per_token, -1).indices
        weights = scores.gather(1, picks)
        weights = weights / weights.sum(-1, keepdim=True) * S.route_scale
        shared = self.shared_down(self.experts.act(self.shared_up(x), 1.0))
        return (self.experts(x, picks, weights) + shared.float()).bfloat16()

    def __call__(self, h, pos, ids):
        x, post, c = self.enter(h, 0, self.attn_norm)
        h = self.leave(self.attention(x, pos), h, post, c)
        x, post, c = self.enter(h, 1, self.ffn_norm)
        return self.leave(self.moe(x, ids), h, post, c)


def rows(m):
    pos = torch.arange(POSITION, POSITION + m, device=DEV)
    h = torch.randn(m, S.hc, S.dim, device=DEV, generator=torch.Generator(DEV).manual_seed(7)).bfloat16()
    return h, pos, (pos * 104729) % S.vocab


def check(kind, variant, layer):
    """Four positions at once against the same one after the other."""
    h, pos, ids = rows(4)
    together = layer(h, pos, ids)
    single = torch.cat([layer(h[i : i + 1], pos[i : i + 1], ids[i : i + 1]) for i in range(4)])
    error = ((together.float() - single.float()).norm() / single.float().norm()).item()
    if not (together.shape == h.shape and error < 0.05):
        raise RuntimeError(f"positions together differ from positions alone by {error}")
    print(f"check {kind}, {variant}: shape {tuple(together.shape)}, together against alone {error:.1e}")


def clock(run):
    if DEV == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def median(run, layers):
    """Microseconds of one of the layers that `run` goes through."""
    run()
    return sorted(clock(run) for _ in range(RUNS))[RUNS // 2] / layers


def measure(kind, variant, layer):
    for m in ROWS:
        args = rows(m)

        def many(count):
            for _ in range(count):
                layer(*args)

        us = median(lambda: many(EAGER), EAGER)
        print(f"time\t{kind}\t{variant}\teager\t{m}\t{us:.1f}")
        if DEV == "cuda":
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                layer(*args)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                many(REPEATS)
            print(f"time\t{kind}\t{variant}\tgraph\t{m}\t{median(graph.replay, REPEATS):.1f}")
            del graph
    sys.stdout.flush()


@torch.inference_mode()
def main():
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    name = torch.cuda.get_device_name() if DEV == "cuda" else "cpu"
    print(f"PyTorch {torch.__version__} on {name}, {REPEATS} layers in a graph, {EAGER} eager, medians of {RUNS}")
    for variant in [arg for arg in sys.argv[1:] if not arg.startswith("-")] or ["bf16", "fp8", "fp4"]:
        start = time.perf_counter()
        try:
            experts = Experts(variant)
        except Exception as why:
            print(f"not run: {variant}: {type(why).__name__}: {str(why).splitlines()[0]}")
            continue
        for kind in ("window", "ratio 128", "ratio 4"):
            try:
                layer = Layer(kind, variant, experts)
                check(kind, variant, layer)
                measure(kind, variant, layer)
            except Exception as why:
                print(f"not run: {kind}, {variant}: {type(why).__name__}: {(str(why).splitlines() or [''])[0]}")
        print(f"{variant}: {time.perf_counter() - start:.1f} s")
        del experts
        if DEV == "cuda":
            torch.cuda.empty_cache()


main()
