# SPDX-License-Identifier: Apache-2.0
"""What attention and a Transformer layer must compute, in float64 and from the definitions.

Nothing of it calls the package. Tensors of attention are [batch, heads, length, channels] here.
"""

import attention_reference as reference
import torch

# ---- formats -------------------------------------------------------------------------------------


def to_bhsd(tensor, form):
    """[s, b, h, d] or [b, s, h, d] as [b, h, s, d]."""
    return tensor.permute(1, 2, 0, 3) if form == "sbhd" else tensor.transpose(1, 2)


def joined(tensor, form):
    """[b, h, s, d] as [s, b, h d] or [b, s, h d]."""
    tensor = tensor.permute(2, 0, 1, 3) if form == "sbhd" else tensor.transpose(1, 2)
    return tensor.flatten(2)


def make_qkv(form, sizes, dtype, device):
    """Normal queries, keys and values that want gradients.

    sizes: batch, queries, keys, heads, groups, channels of queries and keys, channels of values.
    """
    batch, queries, keys, heads, groups, k, v = sizes
    made = []
    for length, count, channels in ((queries, heads, k), (keys, groups, k), (keys, groups, v)):
        lead = (length, batch) if form == "sbhd" else (batch, length)
        made.append(torch.randn(*lead, count, channels).to(device, dtype).requires_grad_())
    return made


# ---- attention -----------------------------------------------------------------------------------


def may_attend(sizes, mask=None, window=(-1, -1), diagonal=0):
    """Bool [batch, heads, queries, keys]; a tensor as diagonal: [batch, 1, 1, 1] of each sequence."""
    batch, heads, queries, keys = sizes
    if not isinstance(diagonal, torch.Tensor):
        diagonal = torch.full((batch, 1, 1, 1), diagonal)
    rows = [
        reference.allowed((1, heads, queries, keys), None, *window, int(d))
        for d in diagonal.flatten()
    ]
    may = torch.cat(rows)
    return may if mask is None else may & ~mask.cpu()


def attention(q, k, v, may, *, scale=None, bias=0.0, factors=1.0):
    """softmax(scale q k^T + bias) over the allowed keys, dropped by factors, times v."""
    each = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(each, 1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (reference.softmax(scale * (q @ k.mT) + bias, may) * factors) @ v


def distance(queries, keys, diagonal):
    """|key - key on the diagonal| of [queries, keys]."""
    return (torch.arange(keys) - torch.arange(queries)[:, None] - diagonal).abs().double()


# ---- layers --------------------------------------------------------------------------------------


def norm(x, weight, bias, kind, eps, zero_centered=False):
    """LayerNorm or RMSNorm over the last dim; weight None: 1."""
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    mean = (lambda t: t.sum(-1, keepdim=True)) if kind == "L2Normalization" else None
    square = mean(x * x) if mean else (x * x).mean(-1, keepdim=True)
    x = x * (square + eps).rsqrt()
    if weight is not None:
        x = x * (weight + 1 if zero_centered else weight)
    return x if bias is None else x + bias


def split_weight(rows, heads, groups, channels, interleaved):
    """Rows (of a weight or a bias) of queries, keys and values.

    Interleaved: for each group its queries' rows, then its key's, then its value's.
    """
    k, v = channels
    each = heads // groups
    if not interleaved:
        return rows.split([heads * k, groups * k, groups * v])
    parts = [[], [], []]
    for group in rows.split(each * k + k + v):
        for part, piece in zip(parts, group.split([each * k, k, v]), strict=True):
            part.append(piece)
    return [torch.cat(part) for part in parts]


class Layer:
    """A pre-norm encoder layer over the parameters of a `TransformerLayer`, by their names.

    Options: heads, groups, channels (k, v), form, kind, eps, zero_centered, interleaved, and hooks
    that a test replaces: `position` of queries and keys, `drop` of a branch's output.
    """

    heads, groups, form, kind, eps = 4, 4, "sbhd", "LayerNorm", 1e-5
    zero_centered = interleaved = False
    activation = staticmethod(lambda x: torch.nn.functional.gelu(x, approximate="tanh"))

    def __init__(self, parameters, **options):
        self.p = parameters
        for name, value in options.items():
            setattr(self, name, value)

    @staticmethod
    def position(q, k):
        return q, k

    @staticmethod
    def drop(branch, name):
        return branch

    def normed(self, x, prefix):
        bias = self.p.get(f"{prefix}.layer_norm_bias")
        weight = self.p[f"{prefix}.layer_norm_weight"]
        return norm(x, weight, bias, self.kind, self.eps, self.zero_centered)

    def linear(self, x, name, separator="."):
        bias = self.p.get(f"{name}{separator}bias", 0.0)
        return x @ self.p[f"{name}{separator}weight"].T + bias

    def projections(self, x, prefix, names, source=None):
        """Queries, keys and values (those of names) as [.., heads, channels]."""
        heads = {"query": self.heads, "key": self.groups, "value": self.groups}
        out = {}
        for name in names:
            if f"{prefix}.{name}_weight" in self.p:
                out[name] = self.linear(x, f"{prefix}.{name}", "_")
        if not out:
            k, v = self.channels
            rows = [self.p[f"{prefix}.weight"], self.p.get(f"{prefix}.bias")]
            if names == ("query",):
                pieces = [[rows[0]], [rows[1]]]
            else:
                count = self.heads if "query" in names else 0
                pieces = [
                    split_weight(r, count, self.groups, (k, v), self.interleaved)[-len(names) :]
                    if r is not None
                    else [None] * len(names)
                    for r in rows
                ]
            for name, weight, bias in zip(names, *pieces, strict=True):
                out[name] = x @ weight.T + (0.0 if bias is None else bias)
        return [out[name].unflatten(-1, (heads[name], -1)) for name in names]

    def attend(self, x, prefix, may, source=None, bias=0.0):
        """Attention before the output projection; x is normalized."""
        if source is None:
            names = ("query", "key", "value")
            label = "layernorm_qkv" if f"{prefix}.layernorm_qkv" in self.modules() else "qkv"
            q, k, v = self.projections(x, f"{prefix}.{label}", names)
        else:
            label = "layernorm_query" if f"{prefix}.layernorm_query" in self.modules() else "query_layer"
            (q,) = self.projections(x, f"{prefix}.{label}", ("query",))
            k, v = self.projections(source, f"{prefix}.key_value", ("key", "value"))
        q, k = self.position(q, k)
        q, k, v = (to_bhsd(t, self.form) for t in (q, k, v))
        return joined(attention(q, k, v, may, bias=bias), self.form)

    def modules(self):
        return {name.rpartition(".")[0] for name in self.p}

    def mlp(self, x, prefix="layernorm_mlp"):
        """MLP of a normalized input."""
        x = self.linear(x, f"{prefix}.fc1", "_")
        return self.linear(self.activation(x), f"{prefix}.fc2", "_")

    def __call__(self, x, may):
        normed = self.normed(x, "self_attention.layernorm_qkv")
        branch = self.linear(self.attend(normed, "self_attention", may), "self_attention.proj")
        x = x + self.drop(branch, "attention")
        branch = self.mlp(self.normed(x, "layernorm_mlp"))
        return x + self.drop(branch, "mlp")


def wide(module):
    """Parameters of a module by name, as float64 leaves on the CPU."""
    return {
        name: parameter.detach().cpu().double().requires_grad_()
        for name, parameter in module.named_parameters()
    }
