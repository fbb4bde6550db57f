# SPDX-License-Identifier: Apache-2.0
"""What attention and a Transformer layer must compute, in float64 and from the definitions.

Nothing of it calls the package. Tensors of attention are [batch, heads, length, channels] here.
"""

import attention_reference as reference
import torch
from comparators import assert_nmse, nmse

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
    """Bool [batch, heads, queries, keys]; diagonal: a number, or a tensor of one a sequence."""
    batch, heads, queries, keys = sizes
    if not isinstance(diagonal, torch.Tensor):
        diagonal = torch.full((batch, 1, 1, 1), diagonal)
    rows = [
        reference.allowed((1, heads, queries, keys), None, *window, int(d))
        for d in diagonal.flatten()
    ]
    may = torch.cat(rows)
    return may if mask is None else may & ~mask.cpu()


def attention(q, k, v, may, *, scale=None, bias=0.0, factors=1.0, sink=None):
    """softmax(scale q k^T + bias) over the allowed keys, dropped by factors, times v.

    `sink` [heads] are scores without a key.
    """
    each = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(each, 1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (reference.softmax(scale * (q @ k.mT) + bias, may, sink) * factors) @ v


def score_gradients(q, k, v, may, grad, *, scale=None, bias=0.0, factors=1.0):
    """The scores' gradient p (dp - sum(p dp)), and the magnitudes of its terms."""
    each = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(each, 1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    p = reference.softmax(scale * (q @ k.mT) + bias, may)
    dp = grad @ v.mT * factors
    gradient = p * (dp - (p * dp).sum(-1, keepdim=True))
    return gradient, p * (dp.abs() + (p * dp.abs()).sum(-1, keepdim=True))


def gradient_terms(q, k, v, may, grad, **options):
    """Sums of the magnitudes of the terms of the gradients of q and k, [b, h, s, d], and of scores.

    `options`: those of `attention`.
    """
    of_scores = score_gradients(q, k, v, may, grad, **options)[1]
    scale = options.get("scale")
    terms = of_scores * (q.shape[-1] ** -0.5 if scale is None else abs(scale))
    groups = k.shape[1]
    of_queries = terms @ k.abs().repeat_interleave(q.shape[1] // groups, 1)
    return of_queries, (terms.mT @ q.abs()).unflatten(1, (groups, -1)).sum(2), of_scores


def cancellation(q, k, v, may, grad):
    """Mean square of the terms of the scores' gradient p (dp - sum(p dp)), over that of their sum.

    A probability near 1 leaves little of terms that were rounded before: errors of the gradients of
    q and k grow by as much.
    """
    gradient, terms = score_gradients(q, k, v, may, grad)
    return float(terms.square().sum() / gradient.square().sum())


def distance(queries, keys, diagonal):
    """|key - key on the diagonal| of [queries, keys]."""
    return (torch.arange(keys) - torch.arange(queries)[:, None] - diagonal).abs().double()


# ---- layers --------------------------------------------------------------------------------------


def norm(x, weight, bias, kind, eps, zero_centered=False):
    """LayerNorm, RMSNorm or L2Normalization of the last dim; weight None: 1."""
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    square = x.square().sum(-1, keepdim=True)
    if kind != "L2Normalization":
        square = square / x.shape[-1]
    x = x * (square + eps).rsqrt()
    if weight is not None:
        x = x * (weight + 1 if zero_centered else weight)
    return x if bias is None else x + bias


def split_rows(rows, heads, groups, channels, interleaved):
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


class Model:
    """A MultiheadAttention or TransformerLayer over its parameters (name to float64 tensor).

    Options: what the module was built with; and functions that a test replaces: `position` of
    queries and keys [.., heads, channels], `drop(branch, name)` of what is added to the residual.
    """

    heads = groups = 4
    form, kind, eps, zero_centered, interleaved = "sbhd", "LayerNorm", 1e-5, False, False
    channels = (8, 8)
    bias = 0.0
    post_residual = parallel = output_norm = False

    def __init__(self, parameters, **options):
        self.p = parameters
        for name, value in options.items():
            assert hasattr(type(self), name), name
            setattr(self, name, value)

    @staticmethod
    def activation(x):
        return torch.nn.functional.gelu(x, approximate="tanh")

    @staticmethod
    def position(q, k):
        return q, k

    @staticmethod
    def drop(branch, name):
        return branch

    def norm(self, x, label):
        """The norm of a module, where it has one."""
        weight = self.p.get(f"{label}layer_norm_weight")
        if weight is None:
            return x
        bias = self.p.get(f"{label}layer_norm_bias")
        return norm(x, weight, bias, self.kind, self.eps, self.zero_centered)

    def linear(self, x, label):
        return x @ self.p[f"{label}weight"].T + self.p.get(f"{label}bias", 0.0)

    def projections(self, x, label, names):
        """Queries, keys or values, as named, each [.., heads, channels]."""
        counts = {"query": self.heads, "key": self.groups, "value": self.groups}
        split = f"{label}{names[0]}_weight" in self.p
        if split:
            made = [self.linear(x, f"{label}{name}_") for name in names]
        elif names == ("query",):
            made = [self.linear(x, label)]
        else:
            count = self.heads if "query" in names else 0
            sizes = (count, self.groups, self.channels, self.interleaved)
            weights = split_rows(self.p[f"{label}weight"], *sizes)[-len(names) :]
            made = [x @ weight.T for weight in weights]
            if f"{label}bias" in self.p:
                biases = split_rows(self.p[f"{label}bias"], *sizes)[-len(names) :]
                made = [y + bias for y, bias in zip(made, biases, strict=True)]
        pairs = zip(names, made, strict=True)
        return [y.unflatten(-1, (counts[name], -1)) for name, y in pairs]

    def attention(self, x, may, prefix="", source=None):
        """(output, normalized input) of a MultiheadAttention; `source`: of its keys and values."""
        has_norm = any(".layer_norm_weight" in n for n in self.p if n.startswith(prefix))
        if source is None:
            label = f"{prefix}{'layernorm_qkv' if has_norm else 'qkv'}."
            x = self.norm(x, label)
            q, k, v = self.projections(x, label, ("query", "key", "value"))
        else:
            label = f"{prefix}{'layernorm_query' if has_norm else 'query_layer'}."
            x = self.norm(x, label)
            (q,) = self.projections(x, label, ("query",))
            k, v = self.projections(source, f"{prefix}key_value.", ("key", "value"))
        q, k = self.position(q, k)
        q, k, v = (to_bhsd(t, self.form) for t in (q, k, v))
        out = joined(attention(q, k, v, may, bias=self.bias), self.form)
        return self.linear(out, f"{prefix}proj."), x

    def mlp(self, x, prefix="layernorm_mlp."):
        """(output, normalized input) of a LayerNormMLP."""
        x = self.norm(x, prefix)
        out = self.activation(self.linear(x, f"{prefix}fc1_"))
        return self.linear(out, f"{prefix}fc2_"), x

    def layer(self, x, may, source=None, may_source=None):
        """Output of a TransformerLayer; `source`: output of an encoder, for a decoder."""
        branch, normed = self.attention(x, may, "self_attention.")
        if self.parallel:
            return x + self.drop(branch + self.mlp(x)[0], "mlp")
        x = (normed if self.post_residual else x) + self.drop(branch, "attention")
        if source is not None:
            branch, normed = self.attention(x, may_source, "inter_attention.", source)
            x = (normed if self.post_residual else x) + self.drop(branch, "cross")
        branch, normed = self.mlp(x)
        x = (normed if self.post_residual else x) + self.drop(branch, "mlp")
        if self.output_norm:
            weight, bias = self.p["layernorm.weight"], self.p.get("layernorm.bias")
            x = norm(x, weight, bias, self.kind, self.eps, self.zero_centered)
        return x


def wide(module):
    """Parameters of a module by name, as float64 leaves on the CPU."""
    return {
        name: parameter.detach().cpu().double().requires_grad_()
        for name, parameter in module.named_parameters()
    }


def randomise(module):
    """Other biases and norm weights than 0 and 1, so that a test sees them."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if leaf.endswith("bias") or leaf == "layer_norm_weight" or owner.endswith("norm"):
                parameter.add_(torch.randn(parameter.shape).to(parameter), alpha=0.3)
            else:
                parameter.mul_(8)


def check(module, model, run, exact, inputs, bound):
    """Output and gradients of a module (inputs and parameters) against its model.

    Parameters
    ----------
    module, model : Module, Model
        The module, and the model over `wide(module)`.
    run : callable
        ``run(*inputs)`` calls the module.
    exact : callable
        ``exact(*wide inputs)`` is the float64 output.
    inputs : list of Tensor
        Leaves that want gradients.
    bound : float
        Normalised error allowed to the output and to each gradient.
    """
    out = run(*inputs)
    wide_inputs = [t.detach().cpu().double().requires_grad_() for t in inputs]
    expected = exact(*wide_inputs)
    assert out.dtype == inputs[0].dtype and out.shape == expected.shape
    assert_nmse(out, expected.detach(), bound)
    grad = torch.randn(out.shape).to(out)
    named = dict(module.named_parameters())
    assert named.keys() == model.p.keys()
    grads = torch.autograd.grad(out, [*inputs, *named.values()], grad)
    wanted = torch.autograd.grad(
        expected, [*wide_inputs, *model.p.values()], grad.detach().cpu().double()
    )
    labels = [f"input {i}" for i in range(len(inputs))] + list(named)
    groups = {}
    for label, found, right in zip(labels, grads, wanted, strict=True):
        assert found.shape == right.shape, label
        # Softmax does not see a bias of all keys: its gradient is 0 but for rounding, so the biases
        # of a projection are compared together, and those of the norms of queries and keys.
        label = label.replace("k_norm.bias", "q_norm.bias")
        # Few rows may see more than one key, which leaves next to nothing of the gradients of
        # queries and keys: separate weights are judged like the fused one.
        for name in ("query", "key", "value"):
            label = label.replace(f".{name}_bias", ".bias").replace(f".{name}_weight", ".weight")
        group = groups.setdefault(label, ([], []))
        group[0].append(found.flatten())
        group[1].append(right.flatten())
    for label, (found, right) in groups.items():
        error = nmse(torch.cat(found), torch.cat(right))
        assert error <= bound, f"gradient of {label}: error {error:.3e} exceeds {bound:.3e}"
