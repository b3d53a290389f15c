#!/usr/bin/env python3
"""Would the oracle notice a wrong implementation?  Re-runs check_spec.py with one deliberate mistake at a time.

    python mutation_check.py            # table: mistake -> cases that catch it

A mistake that no case catches is printed as MISSED.
"""
import contextlib
import io
import os
import sys

import numpy as np

import check_spec as cs

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data")
ORIG = cs.Glm
GLM = ["tiny-dense-index", "tiny-sparse", "tiny-groups", "tiny-mtp", "tiny-mtp-fp8"]


def patched(cls, **kw):
    return type("Mut" + cls.__name__, (cls,), kw)


def attention_variant(rope_main=None, rope_index=None, scale=None, dense=False, own=False, relu=True, swap_kv=False):
    """Glm.attention with pieces replaced (kept close to the original on purpose)."""
    base = ORIG.attention

    def f(self, i, x, p0, cache, sel, full, absorbed, rec, tag):
        saved = cs.rope_interleaved
        calls = [0]

        def rope(v, c, s):
            calls[0] += 1
            kind = rope_main if calls[0] <= 2 else rope_index      # order: q, k, then indexer q, k
            return kind(v, c, s) if kind else saved(v, c, s)
        cs.rope_interleaved = rope
        old = self.scale
        if scale:
            self.scale = cs.F(scale(self))
        if (dense and not full) or own:
            n = x.shape[0]
            sel = [np.arange(p0 + r + 1) for r in range(n)]
        keep = dict(self.w)
        try:
            if swap_kv:
                k = f"model.layers.{i}.self_attn.kv_b_proj.weight"
                w = self.w[k].reshape(self.H, self.no + self.vd, self.kl)
                self.w = dict(self.w)
                self.w[k] = np.concatenate([w[:, self.vd:], w[:, :self.vd]], 1).reshape(-1, self.kl)
            return base(self, i, x, p0, cache, sel, full, absorbed, rec, tag)
        finally:
            cs.rope_interleaved, self.scale, self.w = saved, old, keep
    return f


def route_variant(bias_in_weight=False, no_group=False, no_norm=False, no_scale=False, softmax=False, no_bias=False, bf16_bias=False):
    def f(self, logits, bias):
        c = dict(self.c)
        if bf16_bias:
            u = bias.astype(np.float32).view(np.uint32)
            bias = (((u + 0x7fff + ((u >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
        if no_group:
            c["n_group"] = 1
        s = cs.softmax(logits) if softmax else 1 / (1 + np.exp(-logits))
        ch = s if no_bias else s + bias
        g, kg, E = c["n_group"], c["topk_group"], c["n_routed_experts"]
        if g > 1:
            gs = np.sort(ch.reshape(g, E // g), 1)[:, -2:].sum(1)
            keep = np.zeros(g, bool)
            keep[cs.top_indices(gs, kg)] = True
            ch = np.where(np.repeat(keep, E // g), ch, -np.inf)
        ids = np.sort(cs.top_indices(ch, c["num_experts_per_tok"]))
        w = (ch if bias_in_weight else s)[ids]
        if c["norm_topk_prob"] and not no_norm:
            w = w / (w.sum() + cs.F(1e-20))
        return ids, w if no_scale else w * cs.F(c["routed_scaling_factor"])
    return f


def group_max(self, logits, bias):
    """group score = best expert instead of the sum of the two best"""
    c = self.c
    s = 1 / (1 + np.exp(-logits))
    ch = s + bias
    g, kg, E = c["n_group"], c["topk_group"], c["n_routed_experts"]
    if g > 1:
        keep = np.zeros(g, bool)
        keep[cs.top_indices(ch.reshape(g, E // g).max(1), kg)] = True
        ch = np.where(np.repeat(keep, E // g), ch, -np.inf)
    ids = np.sort(cs.top_indices(ch, c["num_experts_per_tok"]))
    w = s[ids]
    return ids, w / w.sum() * cs.F(c["routed_scaling_factor"])


def no_shared(self, i, x, rec, tag):
    w, p = self.w, f"model.layers.{i}.mlp.shared_experts."
    return ORIG.moe(self, i, x, rec, tag) - cs.swiglu(x, w[p + "gate_proj.weight"], w[p + "up_proj.weight"], w[p + "down_proj.weight"])


def mtp_variant(swap=False, zero0=False, no_hnorm=False, prenorm_recycle=False):
    def f(self, tokens, h, p0, cache, sel=None, absorbed=True, rec=None):
        w, p = self.w, f"model.layers.{self.L}."
        e = w["model.embed_tokens.weight"][np.asarray(tokens)].copy()
        if zero0 and p0 == 0:
            e[0] = 0
        a = cs.rms(e, w[p + "enorm.weight"], self.eps)
        b = h if no_hnorm else cs.rms(h, w[p + "hnorm.weight"], self.eps)
        x = np.concatenate([b, a] if swap else [a, b], -1) @ w[p + "eh_proj.weight"].T
        y, sel = self.layer(self.L, x, p0, cache, sel, sel is None, True, absorbed, rec, "mtp")
        g = cs.rms(y, w[p + "shared_head.norm.weight"], self.eps)
        lg = g @ w["lm_head.weight"].T
        if rec is not None:
            rec["mtp.logits"] = lg
        return (y if prenorm_recycle else g), lg, sel
    return f


def forward_prenorm(self, ids, cache, p0=0, absorbed=False, rec=None):
    """hands the PRE-final-norm hidden to the MTP layer"""
    mine = {} if rec is None else rec
    h, lg = ORIG.forward(self, ids, cache, p0, absorbed, mine)
    if rec is None:
        return mine[f"l{self.L - 1}.hidden"], lg
    return h, lg


def half(v, c, s):
    return cs.rope_half(v, c, s)


M = [
    ("MLA RoPE half-split instead of interleaved pairs", dict(attention=attention_variant(rope_main=half))),
    ("indexer RoPE half-split instead of interleaved", dict(attention=attention_variant(rope_index=half))),
    ("attention scale from nope dims only", dict(attention=attention_variant(scale=lambda m: m.no ** -0.5))),
    ("kv_b_proj split as [v | k] instead of [k | v]", dict(attention=attention_variant(swap_kv=True))),
    ("shared layers attend densely", dict(attention=attention_variant(dense=True))),
    ("router: bias also in the weights", dict(route=route_variant(bias_in_weight=True))),
    ("router: bias ignored", dict(route=route_variant(no_bias=True))),
    ("router: bias rounded to bf16", dict(route=route_variant(bf16_bias=True))),
    ("router: groups ignored", dict(route=route_variant(no_group=True))),
    ("router: group score = max, not sum of top two", dict(route=group_max)),
    ("router: weights not normalised", dict(route=route_variant(no_norm=True))),
    ("router: routed_scaling_factor omitted", dict(route=route_variant(no_scale=True))),
    ("router: softmax instead of sigmoid", dict(route=route_variant(softmax=True))),
    ("shared expert omitted", dict(moe=no_shared)),
    ("MTP fed the pre-final-norm hidden", dict(forward=forward_prenorm)),
    ("MTP concat order swapped", dict(mtp=mtp_variant(swap=True))),
    ("MTP without hnorm", dict(mtp=mtp_variant(no_hnorm=True))),
    ("MTP zeroes the embedding at position 0 (vLLM)", dict(mtp=mtp_variant(zero0=True))),
    ("MTP recycles the pre-shared_head.norm output (colibri)", dict(mtp=mtp_variant(prenorm_recycle=True))),
    ("latent norms use rms_norm_eps 1e-5, not 1e-6", dict(LATENT_EPS=1e-5)),
    ("indexer k_norm eps 1e-5, not 1e-6", dict(INDEX_EPS=1e-5)),
    ("all RMSNorm eps 1e-6", "eps"),
]


def main():
    original, missed = ORIG, 0
    for name, kw in M:
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        if kw == "eps":
            class Mut(original):
                def __init__(self, c, w):
                    super().__init__(c, w)
                    self.eps = 1e-6
        else:
            Mut = patched(original, **kw)
        cs.Glm = Mut
        hit = []
        for case in GLM:
            R = cs.Report(False)
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    cs.run(case, ROOT, R)
                except Exception as e:
                    R.bad += 1
                    case += f" (crashed: {type(e).__name__})"
            if R.bad:
                hit.append(case)
        cs.Glm = original
        note = ", ".join(hit) or "MISSED"
        missed += not hit
        print(f"{name:62s} {note}", flush=True)
    print("every mistake is caught" if not missed else f"{missed} mistakes are not caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
