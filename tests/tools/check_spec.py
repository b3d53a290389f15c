#!/usr/bin/env python3
"""Independent re-implementation of ../spec/glm-moe-dsa.md in plain numpy, checked against the oracle.

No torch, no transformers, no safetensors package: only numpy and the standard library.  If this
file agrees with expected/*.safetensors, the formulas in the spec are the model.

    python check_spec.py [--dir DIR] [--only CASE] [--f64] [-v]

For every case it checks
  1. one-shot prefill, expanded ("naive") MLA: per-layer hidden states, attention and MLP outputs,
     router ids/weights, indexer scores and top-k sets, cache rows, final norm, logits;
  2. the absorbed MLA form with incremental caches: chunked prefill + one token at a time, same vectors;
  3. greedy continuation (tokens exact, logits close);
  4. MTP: teacher-forced rows, chained drafting in three index-share variants, the whole greedy
     speculative loop for k = 1..4 (drafts, acceptance and output exact);
  5. FP8 block dequantisation (the fp8 case goes through the same checks);
  6. OLMoE.
Exit status 0 = everything within tolerance.
"""
import argparse
import json
import math
import os
import sys

import numpy as np

F = np.float32
TOL = 1e-4

# ------------------------------------------------------------------ safetensors, by hand

def e4m3_table():
    t = np.zeros(256, np.float64)
    for b in range(256):
        s, e, m = b >> 7, (b >> 3) & 15, b & 7
        if e == 15 and m == 7:
            v = math.nan                       # no infinities in e4m3fn; 0x7f / 0xff are NaN
        elif e == 0:
            v = m / 8 * 2.0 ** -6
        else:
            v = (1 + m / 8) * 2.0 ** (e - 7)
        t[b] = -v if s else v
    return t


E4M3 = e4m3_table()


def st_read(path):
    raw = open(path, "rb").read()
    n = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8:8 + n])
    out, base = {}, 8 + n
    for name, d in head.items():
        if name == "__metadata__":
            continue
        a, b = d["data_offsets"]
        buf, dt = raw[base + a:base + b], d["dtype"]
        if dt == "F32":
            v = np.frombuffer(buf, "<f4")
        elif dt == "I32":
            v = np.frombuffer(buf, "<i4")
        elif dt == "BF16":
            v = (np.frombuffer(buf, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif dt == "F8_E4M3":
            v = E4M3[np.frombuffer(buf, np.uint8)].astype(np.float32)
        else:
            raise SystemExit(f"{path}: {name}: unsupported dtype {dt}")
        out[name] = v.reshape(d["shape"])
    return out


def load_weights(path, block=128):
    t = st_read(path)
    w = {}
    for k, v in t.items():
        if k.endswith("_scale_inv"):
            continue
        s = t.get(k + "_scale_inv")
        if s is not None:                      # w[o,i] = q[o,i] * s[o/128, i/128]
            o, i = v.shape
            assert s.shape == (-(-o // block), -(-i // block)), k
            v = v * s[np.arange(o)[:, None] // block, np.arange(i)[None, :] // block]
        w[k] = v.astype(F)
    return w


# ------------------------------------------------------------------ primitives

def rms(x, w, eps):
    return (x / np.sqrt((x * x).mean(-1, keepdims=True) + F(eps)) * w).astype(F)


def layer_norm(x, w, b, eps):
    m = x.mean(-1, keepdims=True)
    v = ((x - m) ** 2).mean(-1, keepdims=True)
    return ((x - m) / np.sqrt(v + F(eps)) * w + b).astype(F)


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(x, g, u, d):
    return (silu(x @ g.T) * (x @ u.T)) @ d.T


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rope_angles(pos, dim, theta):
    inv = (1.0 / (F(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / F(dim)))).astype(np.float32)
    a = np.asarray(pos, np.float32)[:, None] * inv[None, :]
    return np.cos(a).astype(F), np.sin(a).astype(F)


def rope_interleaved(x, cos, sin):
    """x [n, ..., R]; pair i = elements (2i, 2i+1); result layout = [all first halves | all second halves]."""
    a, b = x[..., 0::2], x[..., 1::2]
    sh = (x.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[-1],)
    c, s = cos.reshape(sh), sin.reshape(sh)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def rope_half(x, cos, sin):
    """NeoX style (OLMoE): pair i = elements (i, i + R/2)."""
    h = x.shape[-1] // 2
    a, b = x[..., :h], x[..., h:]
    sh = (x.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[-1],)
    c, s = cos.reshape(sh), sin.reshape(sh)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def top_indices(scores, k):
    """k largest; equal scores: the lower index wins (our rule; the reference leaves it open)."""
    return np.argsort(-scores, kind="stable")[:k]


# ------------------------------------------------------------------ GLM

def indexer_types(c):
    if c.get("indexer_types"):
        return c["indexer_types"]
    pat = c.get("index_topk_pattern")
    if pat:
        return [{"F": "full", "S": "shared"}[x] for x in pat]
    f, o = max(c.get("index_topk_freq", 1), 1), c.get("index_skip_topk_offset", 2)
    return ["full" if max(i - o + 1, 0) % f == 0 else "shared" for i in range(c["num_hidden_layers"])]


class LayerCache:
    def __init__(self):
        self.kv, self.ik = None, None          # [T, kv_lora + rope], [T, index_head_dim]

    def push(self, name, rows):
        old = getattr(self, name)
        setattr(self, name, rows if old is None else np.concatenate([old, rows]))

    def truncate(self, n):
        self.kv = None if self.kv is None else self.kv[:n]
        self.ik = None if self.ik is None else self.ik[:n]


class Glm:
    LATENT_EPS = 1e-6                          # q_a_layernorm / kv_a_layernorm in the reference
    INDEX_EPS = 1e-6                           # indexer.k_norm (LayerNorm)

    def __init__(self, c, w):
        self.c, self.w = c, w
        self.types = indexer_types(c)
        self.L = c["num_hidden_layers"]
        self.H = c["num_attention_heads"]
        self.no, self.ro, self.vd = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        self.kl, self.eps = c["kv_lora_rank"], c["rms_norm_eps"]
        self.theta = c["rope_parameters"]["rope_theta"]
        self.scale = F((self.no + self.ro) ** -0.5)
        self.cache = {}

    def new_cache(self):
        return [LayerCache() for _ in range(self.L + 1)]

    # ---- attention of one layer over n new rows at positions p0..p0+n-1
    def attention(self, i, x, p0, cache, sel, full, absorbed, rec, tag):
        c, w, n = self.c, self.w, x.shape[0]
        p = f"model.layers.{i}.self_attn."
        cos, sin = rope_angles(np.arange(p0, p0 + n), self.ro, self.theta)
        q_res = rms(x @ w[p + "q_a_proj.weight"].T, w[p + "q_a_layernorm.weight"], self.LATENT_EPS)
        q = (q_res @ w[p + "q_b_proj.weight"].T).reshape(n, self.H, self.no + self.ro)
        q_nope, q_rope = q[..., :self.no], rope_interleaved(q[..., self.no:], cos, sin)
        ckv = x @ w[p + "kv_a_proj_with_mqa.weight"].T
        lat = rms(ckv[:, :self.kl], w[p + "kv_a_layernorm.weight"], self.LATENT_EPS)
        k_rope = rope_interleaved(ckv[:, self.kl:], cos, sin)
        cache.push("kv", np.concatenate([lat, k_rope], -1))
        T = cache.kv.shape[0]
        assert T == p0 + n

        if full:                               # DSA indexer
            ih, idim = c["index_n_heads"], c["index_head_dim"]
            u = p + "indexer."
            iq = (q_res @ w[u + "wq_b.weight"].T).reshape(n, ih, idim)
            iq = np.concatenate([rope_interleaved(iq[..., :self.ro], cos, sin), iq[..., self.ro:]], -1)
            ik = layer_norm(x @ w[u + "wk.weight"].T, w[u + "k_norm.weight"], w[u + "k_norm.bias"], self.INDEX_EPS)
            ik = np.concatenate([rope_interleaved(ik[:, :self.ro], cos, sin), ik[:, self.ro:]], -1)
            cache.push("ik", ik)
            s = np.maximum(np.einsum("nhd,td->nht", iq, cache.ik) * F(idim ** -0.5), 0)
            hw = (x @ w[u + "weights_proj.weight"].T) * F(ih ** -0.5)
            score = np.einsum("nh,nht->nt", hw, s).astype(F)
            sel = []
            for r in range(n):
                vis = p0 + r + 1               # causal: positions 0..p0+r
                sel.append(np.sort(top_indices(score[r, :vis], min(c["index_topk"], vis))))
                score[r, vis:] = -1e30
            if rec is not None:
                rec[f"{tag}.index_scores"] = score
                k = min(c["index_topk"], T)
                m = np.full((n, k), -1, np.int32)
                for r in range(n):
                    m[r, :len(sel[r])] = sel[r]
                rec[f"{tag}.index_topk"] = m

        kvb = w[p + "kv_b_proj.weight"].reshape(self.H, self.no + self.vd, self.kl)
        w_uk, w_uv = kvb[:, :self.no], kvb[:, self.no:]          # [H,no,kl], [H,vd,kl]
        out = np.zeros((n, self.H, self.vd), F)
        if absorbed:
            q_lat = np.einsum("nhd,hdk->nhk", q_nope, w_uk)      # fold W_uk into the query
            for r in range(n):
                rows = cache.kv[sel[r]]
                c_t, kr = rows[:, :self.kl], rows[:, self.kl:]
                a = softmax((q_lat[r] @ c_t.T + q_rope[r] @ kr.T) * self.scale)     # [H, S]
                ctx = a @ c_t                                     # [H, kl]
                out[r] = np.einsum("hk,hvk->hv", ctx, w_uv)       # unfold W_uv once per head
        else:
            k_nope = np.einsum("tk,hdk->thd", cache.kv[:, :self.kl], w_uk)
            v = np.einsum("tk,hdk->thd", cache.kv[:, :self.kl], w_uv)
            kr = cache.kv[:, self.kl:]
            for r in range(n):
                t = sel[r]
                sc = np.einsum("hd,thd->ht", q_nope[r], k_nope[t]) + q_rope[r] @ kr[t].T
                out[r] = np.einsum("ht,thd->hd", softmax(sc * self.scale), v[t])
        return out.reshape(n, -1) @ w[p + "o_proj.weight"].T, sel

    # ---- router
    def route(self, logits, bias):
        c = self.c
        s = 1 / (1 + np.exp(-logits))
        choice = s + bias                      # the bias decides who is chosen, never the weight
        g, kg, E = c["n_group"], c["topk_group"], c["n_routed_experts"]
        if g > 1:
            per = choice.reshape(g, E // g)
            gs = np.sort(per, 1)[:, -2:].sum(1)
            keep = np.zeros(g, bool)
            keep[top_indices(gs, kg)] = True
            choice = np.where(np.repeat(keep, E // g), choice, -np.inf)
        ids = np.sort(top_indices(choice, c["num_experts_per_tok"]))
        wt = s[ids]
        if c["norm_topk_prob"]:
            wt = wt / (wt.sum() + F(1e-20))
        return ids, wt * F(c["routed_scaling_factor"])

    def moe(self, i, x, rec, tag):
        w, p = self.w, f"model.layers.{i}.mlp."
        logits = x @ w[p + "gate.weight"].T
        bias = w[p + "gate.e_score_correction_bias"]
        y = np.zeros_like(x)
        ids_all, wt_all = [], []
        for r in range(x.shape[0]):
            ids, wt = self.route(logits[r], bias)
            ids_all.append(ids)
            wt_all.append(wt)
            for e, g in zip(ids, wt):
                q = f"{p}experts.{e}."
                y[r] += g * swiglu(x[r], w[q + "gate_proj.weight"], w[q + "up_proj.weight"], w[q + "down_proj.weight"])
        if rec is not None:
            rec[f"{tag}.router_logits"] = logits
            rec[f"{tag}.router_ids"] = np.array(ids_all, np.int32)
            rec[f"{tag}.router_weights"] = np.array(wt_all)
        q = p + "shared_experts."
        return y + swiglu(x, w[q + "gate_proj.weight"], w[q + "up_proj.weight"], w[q + "down_proj.weight"])

    def layer(self, i, x, p0, cache, sel, full, sparse, absorbed, rec, tag):
        p, w = f"model.layers.{i}.", self.w
        a, sel = self.attention(i, rms(x, w[p + "input_layernorm.weight"], self.eps), p0, cache, sel, full, absorbed, rec, tag)
        x = x + a
        h = rms(x, w[p + "post_attention_layernorm.weight"], self.eps)
        if sparse:
            m = self.moe(i, h, rec, tag)
        else:
            q = p + "mlp."
            m = swiglu(h, w[q + "gate_proj.weight"], w[q + "up_proj.weight"], w[q + "down_proj.weight"])
        x = x + m
        if rec is not None:
            rec[f"{tag}.attn_out"], rec[f"{tag}.mlp_out"], rec[f"{tag}.hidden"] = a, m, x
            rec[f"{tag}.kv_cache"] = cache.kv
            if full:
                rec[f"{tag}.indexer_keys"] = cache.ik
        return x, sel

    def forward(self, ids, cache, p0=0, absorbed=False, rec=None):
        """Returns (h, logits): h is the post-final-norm hidden of every new row."""
        x = self.w["model.embed_tokens.weight"][np.asarray(ids)]
        if rec is not None:
            rec["embed"] = x
        sel = None
        for i in range(self.L):
            x, sel = self.layer(i, x, p0, cache[i], sel, self.types[i] == "full",
                                self.c["mlp_layer_types"][i] == "sparse", absorbed, rec, f"l{i}")
        h = rms(x, self.w["model.norm.weight"], self.eps)
        lg = h @ self.w["lm_head.weight"].T
        if rec is not None:
            rec["final_norm"], rec["logits"] = h, lg
        return h, lg

    # ---- MTP layer (index L): rows p0.. consume (h_r, token_{r+1})
    def mtp(self, tokens, h, p0, cache, sel=None, absorbed=True, rec=None):
        w, p = self.w, f"model.layers.{self.L}."
        e = w["model.embed_tokens.weight"][np.asarray(tokens)]
        x = np.concatenate([rms(e, w[p + "enorm.weight"], self.eps), rms(h, w[p + "hnorm.weight"], self.eps)], -1)
        x = x @ w[p + "eh_proj.weight"].T
        y, sel = self.layer(self.L, x, p0, cache, sel, sel is None, True, absorbed, rec, "mtp")
        g = rms(y, w[p + "shared_head.norm.weight"], self.eps)
        lg = g @ w["lm_head.weight"].T
        if rec is not None:
            rec["mtp.head_norm"], rec["mtp.logits"] = g, lg
        return g, lg, sel

    def draft(self, cache, tokens, h, p0, k, mode):
        """Draft-extend over newly verified rows (tokens[r] = t_{p0+r+1}), then k-1 chained steps.

        Rows written by the chained steps are dropped before returning."""
        g, lg, sel = self.mtp(tokens, h, p0, cache)
        p = p0 + len(tokens) - 1
        s0 = [int(v) for v in sel[-1]]
        g, out, logits, sets = g[-1:], [int(lg[-1].argmax())], [lg[-1]], [s0]
        for j in range(1, k):
            if mode == "recompute":
                use = None
            elif mode == "literal":
                use = [np.array(s0)]
            else:
                use = [np.array(s0 + list(range(p + 1, p + j + 1)))]
            g, lg, sel = self.mtp([out[-1]], g, p + j, cache, use)
            out.append(int(lg[-1].argmax()))
            logits.append(lg[-1])
            sets.append([int(v) for v in sel[-1]])
        cache.truncate(p + 1)
        return out, np.array(logits), sets


# ------------------------------------------------------------------ OLMoE

class Olmoe:
    def __init__(self, c, w):
        self.c, self.w = c, w
        self.L = c["num_hidden_layers"]

    def new_cache(self):
        return [[None, None] for _ in range(self.L)]

    def forward(self, ids, cache, p0=0, absorbed=False, rec=None):
        c, w, eps = self.c, self.w, self.c["rms_norm_eps"]
        nh, nkv = c["num_attention_heads"], c["num_key_value_heads"]
        hd = c["hidden_size"] // nh
        theta = (c.get("rope_parameters") or {}).get("rope_theta", c.get("rope_theta", 10000.0))
        x = w["model.embed_tokens.weight"][np.asarray(ids)]
        n = len(ids)
        if rec is not None:
            rec["embed"] = x
        cos, sin = rope_angles(np.arange(p0, p0 + n), hd, theta)
        for i in range(self.L):
            p = f"model.layers.{i}."
            a = p + "self_attn."
            h = rms(x, w[p + "input_layernorm.weight"], eps)
            q = rms(h @ w[a + "q_proj.weight"].T, w[a + "q_norm.weight"], eps)      # norm over the whole row,
            k = rms(h @ w[a + "k_proj.weight"].T, w[a + "k_norm.weight"], eps)      # before the head split
            v = h @ w[a + "v_proj.weight"].T
            if c.get("clip_qkv") is not None:
                q, k, v = (np.clip(t, -c["clip_qkv"], c["clip_qkv"]) for t in (q, k, v))
            q = rope_half(q.reshape(n, nh, hd), cos, sin)
            k = rope_half(k.reshape(n, nkv, hd), cos, sin)
            v = v.reshape(n, nkv, hd)
            K = k if cache[i][0] is None else np.concatenate([cache[i][0], k])
            V = v if cache[i][1] is None else np.concatenate([cache[i][1], v])
            cache[i] = [K, V]
            o = np.zeros((n, nh, hd), F)
            for r in range(n):
                T = p0 + r + 1
                for hh in range(nh):
                    kv = hh // (nh // nkv)
                    o[r, hh] = softmax((K[:T, kv] @ q[r, hh]) * F(hd ** -0.5)) @ V[:T, kv]
            ao = o.reshape(n, -1) @ w[a + "o_proj.weight"].T
            x = x + ao
            h = rms(x, w[p + "post_attention_layernorm.weight"], eps)
            lg = h @ w[p + "mlp.gate.weight"].T
            y = np.zeros_like(h)
            ids_all, wt_all = [], []
            for r in range(n):
                pr = softmax(lg[r])
                top = np.sort(top_indices(pr, c["num_experts_per_tok"]))
                wt = pr[top]
                if c["norm_topk_prob"]:
                    wt = wt / wt.sum()
                ids_all.append(top)
                wt_all.append(wt)
                for e, g in zip(top, wt):
                    u = f"{p}mlp.experts.{e}."
                    y[r] += g * swiglu(h[r], w[u + "gate_proj.weight"], w[u + "up_proj.weight"], w[u + "down_proj.weight"])
            x = x + y
            if rec is not None:
                rec[f"l{i}.attn_out"], rec[f"l{i}.mlp_out"], rec[f"l{i}.hidden"] = ao, y, x
                rec[f"l{i}.router_logits"] = lg
                rec[f"l{i}.router_ids"], rec[f"l{i}.router_weights"] = np.array(ids_all, np.int32), np.array(wt_all)
                rec[f"l{i}.k_cache"], rec[f"l{i}.v_cache"] = K.transpose(1, 0, 2), V.transpose(1, 0, 2)
        h = rms(x, w["model.norm.weight"], eps)
        lg = h @ w["lm_head.weight"].T
        if rec is not None:
            rec["final_norm"], rec["logits"] = h, lg
        return h, lg


# ------------------------------------------------------------------ checks

class Report:
    def __init__(self, verbose):
        self.v, self.bad, self.worst = verbose, 0, {}

    def close(self, what, a, b, group):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape:
            self.bad += 1
            print(f"  FAIL {what}: shape {a.shape} vs {b.shape}")
            return
        seen = b > -1e29                       # -1e30 marks a causally hidden index score
        if not np.array_equal(seen, a > -1e29):
            self.bad += 1
            print(f"  FAIL {what}: causal mask differs")
            return
        d = float(np.abs(a.astype(np.float64) - b)[seen].max())
        lim = TOL * max(1.0, float(np.abs(b[seen]).max(initial=0)))
        self.worst[group] = max(self.worst.get(group, 0), d / lim)
        if not d <= lim:
            self.bad += 1
            print(f"  FAIL {what}: max abs {d:.3g} > {lim:.3g}")
        elif self.v:
            print(f"  ok   {what}: {d:.2g}")

    def same(self, what, a, b, group):
        self.worst.setdefault(group, 0)
        if isinstance(a, np.ndarray):
            a = a.tolist()
        if isinstance(b, np.ndarray):
            b = b.tolist()
        if a != b:
            self.bad += 1
            print(f"  FAIL {what}: {a} != {b}")
        elif self.v:
            print(f"  ok   {what}")


def compare_recorded(R, rec, exp, group, prefix=("l", "embed", "final_norm", "logits")):
    n = 0
    for k, b in exp.items():
        if not k.startswith(prefix) or k not in rec:
            continue
        n += 1
        if k.endswith(("router_ids", "index_topk")):
            R.same(k, rec[k], b, group)
        else:
            R.close(k, rec[k], b, group)
    return n


def run(case, root, R):
    d = os.path.join(root, case)
    cfg = json.load(open(os.path.join(d, "config.json")))
    meta = json.load(open(os.path.join(d, "expected", "meta.json")))
    exp = st_read(os.path.join(d, "expected", "expected.safetensors"))
    w = load_weights(os.path.join(d, "model.safetensors"))
    model = (Glm if cfg["model_type"] == "glm_moe_dsa" else Olmoe)(cfg, w)
    ids, P = meta["input_ids"], meta["prompt_len"]
    assert ids == exp["input_ids"].tolist()

    rec = {}
    model.forward(ids, model.new_cache(), rec=rec)
    n = compare_recorded(R, rec, exp, "prefill")
    assert n >= 2 + 2 * cfg["num_hidden_layers"], n
    R.same("teacher-forced argmax", rec["logits"].argmax(-1), meta["teacher_forced_argmax"], "prefill")

    # absorbed / incremental: chunks of 7, then single tokens
    cache, lgs, hs, p = model.new_cache(), [], [], 0
    steps = [7, 7, 7] + [1] * (len(ids) - 21)
    last = {}
    for s in steps:
        last = {}
        h, lg = model.forward(ids[p:p + s], cache, p, absorbed=True, rec=last)
        hs.append(h)
        lgs.append(lg)
        p += s
    R.close("incremental logits", np.concatenate(lgs), exp["logits"], "incremental")
    R.close("incremental final_norm", np.concatenate(hs), exp["final_norm"], "incremental")
    for k in [k for k in exp if k.endswith(("kv_cache", "indexer_keys", "k_cache", "v_cache")) and k.startswith("l")]:
        R.close("incremental " + k, last[k], exp[k], "incremental")

    # greedy
    cache = model.new_cache()
    h, lg = model.forward(ids[:P], cache, 0, absorbed=True)
    out, lgs = [], []
    for t in range(meta["greedy_new_tokens"]):
        lgs.append(lg[-1])
        out.append(int(lg[-1].argmax()))
        h, lg = model.forward([out[-1]], cache, P + t, absorbed=True)
    R.same("greedy ids", out, meta["greedy_ids"], "greedy")
    R.close("greedy logits", np.array(lgs), exp["greedy_logits"], "greedy")

    if cfg.get("num_nextn_predict_layers"):
        check_mtp(model, cfg, meta, exp, ids, P, R)


def check_mtp(model, cfg, meta, exp, ids, P, R):
    L, T = model.L, len(ids)
    h, _ = model.forward(ids, model.new_cache())
    for absorbed in (False, True):
        rec = {}
        model.mtp(ids[1:], h[:T - 1], 0, LayerCache(), absorbed=absorbed, rec=rec)
        compare_recorded(R, rec, exp, "mtp", ("mtp.",))
        R.same("mtp argmax", rec["mtp.logits"].argmax(-1), meta["mtp_teacher_forced_argmax"], "mtp")

    full = ids[:P] + meta["greedy_ids"]
    h, _ = model.forward(full, model.new_cache())
    for e in meta["mtp_chains"]:
        n = e["n_processed"]
        for mode in ("recompute", "literal", "union"):
            toks, lg, sets = model.draft(LayerCache(), full[1:n + 1], h[:n], 0, e["k"], mode)
            R.same(f"chain {n} {mode} tokens", toks, e[mode]["tokens"], "mtp-chain")
            R.same(f"chain {n} {mode} selection", sets, e[mode]["selected"], "mtp-chain")
            key = f"mtp.chain{n}.{mode}.logits"
            if key in exp:
                R.close(key, lg, exp[key], "mtp-chain")

    # whole speculative loop, caches kept and rolled back incrementally
    want = meta["greedy_ids"]
    for k, ref in meta["spec_greedy"].items():
        k = int(k)
        cache = model.new_cache()
        hn, lg = model.forward(ids[:P], cache, 0, absorbed=True)
        known, n, mtp_at, pend, rounds = ids[:P] + [int(lg[-1].argmax())], P, 0, hn, []
        while len(known) - P < len(want):
            dr, _, _ = model.draft(cache[L], known[mtp_at + 1:n + 1], pend, mtp_at, k, "union")
            mtp_at = n
            hv, lg = model.forward([known[n]] + dr, cache, n, absorbed=True)
            a = 0
            while a < k and int(lg[a].argmax()) == dr[a]:
                a += 1
            new = dr[:a] + [int(lg[a].argmax())]
            rounds.append({"n_processed": n, "drafts": dr, "accepted": a, "emitted": new})
            known += new
            n += 1 + a
            pend = hv[:1 + a]                  # target hiddens of the verified rows feed the next draft-extend
            for i in range(L):
                cache[i].truncate(n)           # rejected rows leave every cache
        R.same(f"spec k={k} rounds", rounds, ref["rounds"], "spec")
        R.same(f"spec k={k} output", known[P:P + len(want)], want, "spec")


def main():
    global F
    ap = argparse.ArgumentParser()
    ap.add_argument("--dir", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
    ap.add_argument("--only")
    ap.add_argument("--f64", action="store_true", help="compute in float64 (shows the reference's own rounding)")
    ap.add_argument("-v", action="store_true")
    a = ap.parse_args()
    if a.f64:
        F = np.float64
    bad = 0
    cases = sorted(x for x in os.listdir(a.dir) if os.path.exists(os.path.join(a.dir, x, "expected", "meta.json")))
    for case in cases:
        if a.only and a.only != case:
            continue
        R = Report(a.v)
        run(case, a.dir, R)
        print(f"{case}: {'OK' if not R.bad else str(R.bad) + ' FAILED'}   error as a fraction of the tolerance: "
              + ", ".join(f"{k} {v:.2f}" for k, v in R.worst.items()))
        bad += R.bad
    print("ALL OK" if not bad else f"{bad} check(s) failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
