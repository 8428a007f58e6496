"""Kernels at a GPT's shapes, each in the ways one could compute it; `kernels.py` measures them."""

# R rows (tokens), H hidden size, V vocabulary.
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN, HEADS, SEQUENCE, VOCABULARY, PARAMETERS = 768, 12, 256, 50257, 124_000_000
LINEARS = {"qkv": (768, 2304), "projection": (768, 768), "up": (768, 3072), "down": (3072, 768)}


@dataclass(frozen=True)
class Section:
    """Ways to compute one thing."""

    title: str
    work: float
    """Operations (or elements, or bytes) of one call."""
    unit: str
    """What `work` divided by nanoseconds is called."""
    ways: Mapping[str, Callable[[], object]]


def one_dnn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, post: str = "none", form: str = ""
) -> Tensor:
    """x @ weight.T + bias through oneDNN, in float32 too, where `torch.mm` would take MKL."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, post, [], form)


def products(rows: int, dtype: torch.dtype) -> Iterator[Section]:
    """The block linears: forward, both gradients, weights stored either way, bias inside or
    after.
    """
    for name, (inputs, outputs) in LINEARS.items():
        x, dy = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype)
        w, b = torch.randn(inputs, outputs).to(dtype), torch.randn(outputs).to(dtype)  # [in, out]
        t = w.t().contiguous()  # [out, in]
        total = torch.zeros(inputs, outputs)
        packed = torch.ops.mkldnn._reorder_linear_weight(t, rows)
        forward = {
            "mm [in,out]": lambda: x @ w,
            "mm [out,in]": lambda: x @ t.t(),
            "addmm [in,out]": lambda: torch.addmm(b, x, w),
            "mm, add_": lambda: (x @ w).add_(b),
            "oneDNN [in,out]": lambda: one_dnn(x, w.t(), b),
            "oneDNN [out,in]": lambda: one_dnn(x, t, b),
            "oneDNN packed": lambda: one_dnn(x, packed, b),
            "oneDNN [in,out], gelu inside": lambda: one_dnn(x, w.t(), b, "gelu", "tanh"),
        }
        back = {
            "mm [in,out]": lambda: dy @ w.t(),
            "mm [out,in]": lambda: dy @ t,
            "oneDNN [in,out]": lambda: one_dnn(dy, w),
            "oneDNN [out,in]": lambda: one_dnn(dy, t.t()),
        }
        gradient = {
            "mm -> [in,out]": lambda: x.t() @ dy,
            "mm -> [out,in]": lambda: dy.t() @ x,
            "mm -> [in,out], add_ to float32": lambda: total.add_(x.t() @ dy),
            "oneDNN -> [in,out]": lambda: one_dnn(x.t(), dy.t()),
            "oneDNN -> [out,in]": lambda: one_dnn(dy.t(), x.t()),
            "oneDNN -> [in,out], copied x.t()": lambda: one_dnn(x.t().contiguous(), dy.t()),
            "oneDNN -> [in,out], add_ to float32": lambda: total.add_(one_dnn(x.t(), dy.t())),
        }
        if dtype == torch.float32:
            gradient["addmm_ -> [in,out]"] = lambda: total.addmm_(x.t(), dy)
        work = 2.0 * rows * inputs * outputs
        for kind, ways in (("forward", forward), ("dX", back), ("dW", gradient)):
            yield Section(f"{name} {inputs}->{outputs}, {rows} rows, {kind}", work, "GFLOP/s", ways)


def vocabulary(rows: int, dtype: torch.dtype) -> Iterator[Section]:
    """The head's products, weight stored [vocabulary, hidden] or [hidden, vocabulary], padded to 64
    or not.
    """
    ways: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "dX": {}, "dW": {}}
    x = torch.randn(rows, HIDDEN).to(dtype)
    for size in (VOCABULARY, -(-VOCABULARY // 64) * 64):
        v, dy = torch.randn(size, HIDDEN).to(dtype), torch.randn(rows, size).to(dtype)
        h = v.t().contiguous()
        kept, kept_t = torch.empty_like(v), torch.empty_like(h)
        ways["forward"] |= {
            f"mm [V,H] {size}": lambda v=v: x @ v.t(),
            f"mm [H,V] {size}": lambda h=h: x @ h,
            f"oneDNN [V,H] {size}": lambda v=v: one_dnn(x, v),
            f"oneDNN [H,V] {size}": lambda h=h: one_dnn(x, h.t()),
        }
        ways["dX"] |= {
            f"mm [V,H] {size}": lambda v=v, dy=dy: dy @ v,
            f"mm [H,V] {size}": lambda h=h, dy=dy: dy @ h.t(),
            f"oneDNN [V,H] {size}": lambda v=v, dy=dy: one_dnn(dy, v.t()),
            f"oneDNN [H,V] {size}": lambda h=h, dy=dy: one_dnn(dy, h),
        }
        ways["dW"] |= {
            f"mm -> [V,H] {size}": lambda dy=dy: dy.t() @ x,
            f"mm -> kept [V,H] {size}": lambda dy=dy, kept=kept: torch.mm(dy.t(), x, out=kept),
            f"mm -> kept [H,V] {size}": lambda dy=dy, kept_t=kept_t: torch.mm(
                x.t(), dy, out=kept_t
            ),
            f"oneDNN -> [V,H] {size}": lambda dy=dy: one_dnn(dy.t(), x.t()),
            f"oneDNN -> [H,V] {size}": lambda dy=dy: one_dnn(x.t(), dy.t()),
        }
    for kind, alternatives in ways.items():
        yield Section(
            f"head, {rows} rows, {kind}", 2.0 * rows * HIDDEN * VOCABULARY, "GFLOP/s", alternatives
        )


def cross_entropy(rows: int, dtype: torch.dtype) -> Iterator[Section]:
    """Loss and gradient of the logits."""
    logits, labels = torch.randn(rows, VOCABULARY).to(dtype), torch.randint(0, VOCABULARY, (rows,))
    at, kept = (torch.arange(rows), labels), torch.empty_like(logits)

    def by_autograd() -> None:
        leaf = logits.detach().requires_grad_()
        F.cross_entropy(leaf.float(), labels).backward()

    def finish(p: Tensor, scale: bool = True) -> tuple[Tensor, Tensor]:
        loss = -p[at].float().log().mean()
        p[at] -= 1.0
        return loss, p.mul_(1.0 / rows) if scale else p

    def by_log_softmax() -> tuple[Tensor, Tensor]:
        log_probs = torch.log_softmax(logits, -1)
        loss = -log_probs[at].mean()
        log_probs.exp_()[at] -= 1.0
        return loss, log_probs.mul_(1.0 / rows)

    @torch.compile(dynamic=False)
    def one_kernel(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = logits.float()
        total = torch.logsumexp(x, -1, keepdim=True)
        hit = torch.arange(VOCABULARY)[None] == labels[:, None]
        return (total[:, 0] - x[at]).mean(), (((x - total).exp() - hit.float()) / rows).to(
            logits.dtype
        )

    ways = {
        "autograd": by_autograd,
        "log_softmax, exp_, fix, scale": by_log_softmax,
        "softmax, fix, scale": lambda: finish(torch.softmax(logits, -1)),
        "softmax into kept, fix, scale": lambda: finish(torch.softmax(logits, -1, out=kept)),
        "softmax in place, fix, no scale": lambda: finish(
            torch.softmax(kept, -1, out=kept), scale=False
        ),
        "compiled": lambda: one_kernel(logits, labels),
    }
    yield Section(
        f"cross entropy with gradient, {rows} x {VOCABULARY}",
        rows * VOCABULARY,
        "elements/ns",
        ways,
    )


def attention(rows: int, dtype: torch.dtype) -> Iterator[Section]:
    """Causal attention, forward and backward, from packed query, key, value columns to theirs."""
    batch, size, scale = max(1, rows // SEQUENCE), HIDDEN // HEADS, 1 / math.sqrt(HIDDEN // HEADS)
    count = batch * HEADS
    qkv = torch.randn(batch, SEQUENCE, 3, HEADS, size).to(dtype)
    dy = torch.randn(batch, SEQUENCE, HIDDEN).to(dtype)
    above = torch.full((SEQUENCE, SEQUENCE), -math.inf).triu(1).to(dtype)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def apart() -> list[Tensor]:
        return [t.reshape(count, SEQUENCE, size) for t in qkv.permute(2, 0, 3, 1, 4)]

    def heads_of_dy() -> Tensor:
        return dy.view(batch, SEQUENCE, HEADS, size).transpose(1, 2).reshape(count, SEQUENCE, size)

    def packed(*gradients: Tensor) -> Tensor:
        whole = torch.stack(gradients).view(3, batch, HEADS, SEQUENCE, size)
        return whole.permute(1, 3, 0, 2, 4).reshape(batch, SEQUENCE, -1)

    def autograd() -> None:
        leaf = qkv.detach().requires_grad_()
        y = F.scaled_dot_product_attention(*leaf.permute(2, 0, 3, 1, 4), is_causal=True)
        y.transpose(1, 2).reshape(batch, SEQUENCE, HIDDEN).backward(dy)

    def fused() -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y, lse = flash(q, k, v, 0.0, True)
        g = dy.view(batch, SEQUENCE, HEADS, size).transpose(1, 2)
        return packed(*flash_backward(g, q, k, v, y, lse, 0.0, True))

    def scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale), -1)

    def forward_products() -> Tensor:
        q, k, v = apart()
        y = torch.bmm(scores(q, k, above), v)
        return y.view(batch, HEADS, SEQUENCE, size).transpose(1, 2).reshape(batch, SEQUENCE, HIDDEN)

    def all_products() -> Tensor:
        q, k, v = apart()
        p, g = scores(q, k, above), heads_of_dy()
        torch.bmm(p, v)
        ds = torch._softmax_backward_data(torch.bmm(g, v.transpose(1, 2)), p, -1, dtype)
        dq, dk = torch.bmm(ds, k).mul_(scale), torch.bmm(ds.transpose(1, 2), q).mul_(scale)
        return packed(dq, dk, torch.bmm(p.transpose(1, 2), g))

    def causal_chunks(chunk: int) -> Tensor:
        q, k, v = apart()
        g, y, dq = heads_of_dy(), torch.empty_like(q), torch.empty_like(q)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for start in range(0, SEQUENCE, chunk):
            end = start + chunk
            here, keys, values = q[:, start:end], k[:, :end], v[:, :end]
            p, dhere = scores(here, keys, above[start:end, :end]), g[:, start:end]
            y[:, start:end] = torch.bmm(p, values)
            dv[:, :end] += torch.bmm(p.transpose(1, 2), dhere)
            ds = torch._softmax_backward_data(
                torch.bmm(dhere, values.transpose(1, 2)), p, -1, dtype
            )
            dq[:, start:end] = torch.bmm(ds, keys).mul_(scale)
            dk[:, :end] += torch.bmm(ds.transpose(1, 2), here).mul_(scale)
        return packed(dq, dk, dv)

    def one_dnn_per_head() -> Tensor:
        q, k, v = apart()
        g, dq, dk, dv = heads_of_dy(), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for i in range(count):
            p = torch.softmax(one_dnn(q[i], k[i]).mul_(scale).add_(above), -1)
            one_dnn(p, v[i].t())
            ds = torch._softmax_backward_data(one_dnn(g[i], v[i]), p, -1, dtype)
            dq[i], dk[i] = one_dnn(ds, k[i].t()), one_dnn(ds.t(), q[i].t())
            dv[i] = one_dnn(p.t(), g[i].t())
        return packed(dq.mul_(scale), dk.mul_(scale), dv)

    work = 2.0 * 6 * count * SEQUENCE * SEQUENCE * size
    both = {
        "fused, autograd": autograd,
        "fused, kernels": fused,
        "products": all_products,
        "products, causal chunks of 128": lambda: causal_chunks(128),
        "oneDNN, head by head": one_dnn_per_head,
    }
    yield Section(f"attention, {batch} x {SEQUENCE}, forward and backward", work, "GFLOP/s", both)
    only = {
        "fused": lambda: flash(*qkv.permute(2, 0, 3, 1, 4), 0.0, True),
        "products": forward_products,
    }
    yield Section(f"attention, {batch} x {SEQUENCE}, forward", work / 3, "GFLOP/s", only)


def gelu(rows: int, dtype: torch.dtype) -> Iterator[Section]:
    """GELU, tanh form, forward and gradient."""
    shape, k = (rows, 4 * HIDDEN), 2 * math.sqrt(2 / math.pi)
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    y = torch.empty_like(x)

    def forward(x: Tensor) -> Tensor:
        f = x.float()
        return (f * torch.sigmoid(f * (k + k * 0.044715 * f * f))).to(x.dtype)

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        f = x.float()
        square = f * f
        s = torch.sigmoid(f * (k + k * 0.044715 * square))
        return (dy.float() * (s + f * s * (1 - s) * (k + k * 3 * 0.044715 * square))).to(x.dtype)

    def forward_chunks(chunk: int) -> None:
        f, z = torch.empty(chunk), torch.empty(chunk)
        for source, target in zip(x.view(-1).split(chunk), y.view(-1).split(chunk)):
            f.copy_(source)
            torch.mul(f, f, out=z).mul_(k * 0.044715).add_(k).mul_(f).sigmoid_()
            target.copy_(z.mul_(f))

    def gradient_chunks(chunk: int) -> None:
        f, q, s, t = (torch.empty(chunk) for _ in range(4))
        for source, upstream, target in zip(*(t.view(-1).split(chunk) for t in (x, dy, y))):
            f.copy_(source)
            torch.mul(f, f, out=q)
            torch.mul(q, k * 0.044715, out=s).add_(k).mul_(f).sigmoid_()
            q.mul_(k * 3 * 0.044715).add_(k).mul_(f)
            torch.addcmul(q, q, s, value=-1.0, out=t).add_(1.0).mul_(s)  # s·(1 + (1 - s)·f·u')
            target.copy_(t.mul_(upstream))

    compiled, compiled_gradient = (torch.compile(f, dynamic=False) for f in (forward, gradient))
    ways = {
        "PyTorch tanh": lambda: F.gelu(x, approximate="tanh"),
        "PyTorch erf (another function)": lambda: F.gelu(x),
        "compiled sigmoid": lambda: compiled(x),
        **{
            f"sigmoid in float32 chunks of {n}": lambda n=n: forward_chunks(n)
            for n in (1 << 16, 1 << 18)
        },
    }
    back = {
        "PyTorch tanh": lambda: torch.ops.aten.gelu_backward(dy, x, approximate="tanh"),
        "PyTorch erf (another function)": lambda: torch.ops.aten.gelu_backward(
            dy, x, approximate="none"
        ),
        "compiled sigmoid": lambda: compiled_gradient(dy, x),
        **{
            f"sigmoid in float32 chunks of {n}": lambda n=n: gradient_chunks(n)
            for n in (1 << 16, 1 << 18)
        },
    }
    yield Section(f"GELU, {rows} x {4 * HIDDEN}, forward", x.numel(), "elements/ns", ways)
    yield Section(f"GELU, {rows} x {4 * HIDDEN}, gradient", x.numel(), "elements/ns", back)


def norms(rows: int, dtype: torch.dtype) -> Iterator[Section]:
    """Layer norm, residual addition, bias gradient."""
    x, dy = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, HIDDEN).to(dtype)
    gain, bias = torch.randn(HIDDEN).to(dtype), torch.randn(HIDDEN).to(dtype)
    _, mean, rstd = torch.native_layer_norm(x, (HIDDEN,), gain, bias, 1e-5)
    backward = torch.ops.aten.native_layer_norm_backward
    wide, ones = torch.randn(rows, 4 * HIDDEN).to(dtype), torch.ones(1, rows, dtype=dtype)
    ways = {
        "layer norm": lambda: torch.native_layer_norm(x, (HIDDEN,), gain, bias, 1e-5),
        "gradient": lambda: backward(dy, x, (HIDDEN,), mean, rstd, gain, bias, (True, True, True)),
        "gradient of x alone": lambda: backward(
            dy, x, (HIDDEN,), mean, rstd, gain, bias, (True, False, False)
        ),
        "add": lambda: x + dy,
        "add_": lambda: x.add_(dy, alpha=1e-3),
    }
    yield Section(f"layer norm and residual, {rows} x {HIDDEN}", x.numel(), "elements/ns", ways)
    sums = {
        "sum(0)": lambda: wide.sum(0),
        "sum(0) in float32": lambda: wide.sum(0, dtype=torch.float32),
        "ones @ dy": lambda: ones @ wide,
        "dy.t() @ ones": lambda: torch.mv(wide.t(), ones[0]),
    }
    yield Section(f"bias gradient, {rows} x {4 * HIDDEN}", wide.numel(), "elements/ns", sums)


def adam(rows: int, dtype: torch.dtype) -> Iterator[Section]:
    """AdamW and its helpers over all parameters, in pieces of the size of a layer's largest
    weight.
    """
    piece = 4 * HIDDEN * HIDDEN
    p, g, m, v = (
        [t for t in torch.randn(PARAMETERS).mul_(1e-3).abs_().split(piece)] for _ in range(4)
    )
    steps = [torch.tensor(1.0) for _ in p]
    settings = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    low = [t.to(torch.bfloat16) for t in p]

    def fused(scale: Tensor | None = None) -> None:
        torch._fused_adamw_(
            p, g, m, v, [], steps, **settings, amsgrad=False, maximize=False, grad_scale=scale
        )

    def formula() -> None:
        for value, gradient, first, second in zip(p, g, m, v):
            first.lerp_(gradient, 0.1)
            second.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
            value.mul_(1 - 1e-5).addcdiv_(first, second.sqrt().add_(1e-8), value=-1e-4)

    @torch.compile(dynamic=False)
    def one_kernel(
        value: Tensor, gradient: Tensor, first: Tensor, second: Tensor, low: Tensor
    ) -> None:
        first.lerp_(gradient, 0.1)
        second.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        value.mul_(1 - 1e-5).addcdiv_(first, second.sqrt().add_(1e-8), value=-1e-4)
        low.copy_(value)

    def compiled() -> None:
        for pieces in zip(p[:-1], g, m, v, low):
            one_kernel(*pieces)

    def casts() -> None:
        for source, target in zip(p, low):
            target.copy_(source)

    scale = torch.tensor(1.5)
    ways = {
        "fused": fused,
        "fused, clip scale inside": lambda: fused(scale),
        "formula": formula,
        "compiled, with bfloat16 copy": compiled,
    }
    yield Section(f"AdamW, {PARAMETERS // 10**6} M parameters", PARAMETERS, "parameters/ns", ways)
    helpers = {
        "squared norm (dot)": lambda: [torch.dot(t, t) for t in g],
        "squared norm (vector_norm)": lambda: torch._foreach_norm(g),
        "scale (mul_)": lambda: torch._foreach_mul_(g, 1.0),
        "zero_": lambda: torch._foreach_zero_(g),
        "copy to bfloat16": casts,
    }
    yield Section(
        f"beside it, {PARAMETERS // 10**6} M parameters", PARAMETERS, "parameters/ns", helpers
    )


def memory(rows: int, dtype: torch.dtype) -> Iterator[Section]:
    """Copying, into memory that is kept or fresh."""
    for megabytes in (3, 150):
        source = torch.ones(megabytes * 2**18)
        kept = torch.empty_like(source)
        ways = {
            "into kept memory": lambda: kept.copy_(source),
            "into fresh memory": lambda: source.clone(),
        }
        yield Section(
            f"copy {megabytes} MB (read and write counted)", 2.0 * source.nbytes, "GB/s", ways
        )
