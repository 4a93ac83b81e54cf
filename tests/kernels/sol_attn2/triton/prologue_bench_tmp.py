import json, math, os, sys, time, itertools

sys.path.insert(0, os.getcwd())
import torch, triton
from solgen.kernels.sol_attn2.config import *
from solgen.kernels.sol_attn2.triton import prepare as P, route as R, tail as T, statistics as S

dev = torch.device("cuda")
res = {}


def timeit(fn, n=12, warm=2):
    for _ in range(warm):
        fn()
    ev = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for a, b in ev:
        a.record()
        fn()
        b.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in ev)[n // 2]


def rec(name, ms):
    res[name] = ms
    print(f"{name:60s} {ms:9.3f} ms", flush=True)


def case(H, N, variants):
    tag = f"{H}x{N} "
    x = torch.randn(N, 3, H, 128, device=dev, dtype=torch.bfloat16)
    q, k, v = x.permute(1, 2, 0, 3).unsqueeze(1)
    cfg = SolAttn2Config()
    s = 128**-0.5
    mixed = torch.zeros(-(-N // 64), dtype=torch.bool, device=dev)
    op = P.prepare(q, k, v, config=cfg)
    m = R.block_masses(op.q_units, op.k_units, N, scale=s)
    share = (m[:2] - m[:2].logsumexp(-1, keepdim=True)).flatten()
    eps = share[torch.randint(0, share.numel(), (1000000,), device=dev)].quantile(0.9).item() + math.log(mixed.numel())
    cfg = SolAttn2Config(epsilon=eps)
    ro = R.select(m, mixed, config=cfg)
    print(tag, "eps", eps, "density", ro.route.counts.float().mean().item() / mixed.numel())
    rec(tag + "key_mean", timeit(lambda: S.key_mean(k, smooth=True)))
    rec(tag + "value_mean_and_scale", timeit(lambda: S.value_mean_and_scale(v, smooth=True)))
    rec(tag + "quantize q", timeit(lambda: P._quantize_rows(q, None)))
    rec(tag + "quantize k", timeit(lambda: P._quantize_rows(k, op.k_mean)))
    rec(tag + "quantize v", timeit(lambda: P._quantize_values(v, op.v_mean, op.v_scale, True)))
    rec(tag + "prepare", timeit(lambda: P.prepare(q, k, v, config=cfg)))
    rec(tag + "masses", timeit(lambda: R.block_masses(op.q_units, op.k_units, N, scale=s)))
    rec(tag + "select", timeit(lambda: R.select(m, mixed, config=cfg)))
    rec(tag + "anchor", timeit(lambda: T._anchors(op, "slots")))
    rec(tag + "tail slots", timeit(lambda: T.compress(op, ro.route, config=cfg, scale=s)))

    def whole():
        o = P.prepare(q, k, v, config=cfg)
        r = R.select(R.block_masses(o.q_units, o.k_units, N, scale=s), mixed, config=cfg)
        return T.compress(o, r.route, config=cfg, scale=s)

    rec(tag + "prepare+route+tail", timeit(whole))
    t = time.time()
    whole()
    res[tag + "host ms"] = (time.time() - t) * 1e3
    torch.cuda.synchronize()
    print("host ms", res[tag + "host ms"])
    if variants:
        acfg = SolAttn2Config(epsilon=eps, tail="anchors")
        rec(tag + "tail anchors", timeit(lambda: T.compress(op, ro.route, config=acfg, scale=s), 4, 1))
        NB = mixed.numel()
        for st in (2, 3, 4):
            rec(
                tag + f"masses stages {st}",
                timeit(
                    lambda: R._masses_kernel[(triton.cdiv(NB, 32), H)](
                        op.q_units, op.k_units, m, N, NB, s / math.log(2), MEAN=False, STAGES=st, num_warps=4
                    ),
                    6,
                    1,
                ),
            )
        key = torch.empty(H, NB, 64, 128, dtype=torch.float16, device=dev)
        val = torch.empty(H, NB, 64, 128, dtype=torch.uint8, device=dev)
        lm = torch.empty(H, NB, 64, device=dev)
        an = T._anchors(op, "slots")
        for step, st, nw in ((32, 2, 4), (32, 3, 4), (64, 2, 4), (64, 3, 4), (32, 3, 8), (64, 2, 8)):
            rec(
                tag + f"compress step {step} stages {st} warps {nw}",
                timeit(
                    lambda: T._compress_kernel[(triton.cdiv(NB, 64), 64, H)](
                        an,
                        op.k_units,
                        op.v_units,
                        ro.route.mask,
                        op.k_mean,
                        op.v_mean,
                        op.v_scale,
                        key,
                        val,
                        lm,
                        N,
                        NB,
                        ro.route.mask.shape[-1],
                        s,
                        -math.inf,
                        ANCHORS=1,
                        SLOTS=64,
                        INTEGER=False,
                        STEP=step,
                        STAGES=st,
                        D=128,
                        num_warps=nw,
                    ),
                    6,
                    1,
                ),
            )
        kc = torch.empty(H, NB, 64, 128, dtype=torch.uint8, device=dev)
        vc = torch.empty(H, NB, 128, 16, dtype=torch.int32, device=dev)
        ks = torch.empty(H, NB, device=dev)
        bi = torch.empty(H, NB, 64, device=dev)
        for nw in (4, 8):
            rec(
                tag + f"encode warps {nw}",
                timeit(
                    lambda: T._encode_kernel[(NB, H)](
                        key,
                        val,
                        lm,
                        op.q_codes.view(torch.uint8),
                        op.q_scale,
                        kc,
                        ks,
                        vc,
                        bi,
                        N,
                        NB,
                        s,
                        ANCHORS=1,
                        INTEGER=False,
                        D=128,
                        num_warps=nw,
                    ),
                    6,
                    1,
                ),
            )


case(56, 83072, True)
torch.cuda.empty_cache()
case(32, 32768, False)
case(19, 219524, False)
os.makedirs(os.environ.get("OUT", "/tmp/out"), exist_ok=True)
json.dump(res, open(os.environ.get("OUT", "/tmp/out") + "/prologue.json", "w"), indent=1)
