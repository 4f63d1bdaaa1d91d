"""Only registers that change hands (setmaxnreg), nothing else of Hopper: does a crowd break that alone?

No copies, no products, no sums in memory, no named barriers: each role runs a recurrence in as many registers as the
backward kernel's has, in many blocks of about half a millisecond. Run from the project's root on the GPU machine:
    python tests/kernels/experiments/crowd_registers.py            # with setmaxnreg, without, and without a role of 256/24 registers
    python tests/kernels/experiments/crowd_registers.py --compile  # no GPU
"""
import argparse, multiprocessing, re, sys, time

sys.path[:0] = ["/tmp/brief3", "."]
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

ROLES = 6


@gluon.jit
def role(OWN: gl.constexpr, out, steps, WIDTH: gl.constexpr):
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([WIDTH], [32], [WARPS], [0])
    x = gl.arange(0, WIDTH * 32 * WARPS, layout=layout) + gl.program_id(0) * 7919
    for _ in range(steps):
        x = x * 1664525 + 1013904223
        x = x ^ (x >> 13)
    total = gl.sum(x, 0)
    gl.store(out + gl.program_id(0) * 6 + OWN, total)


@gluon.jit
def kernel(out, steps, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr):
    gl.warp_specialize(
        [
            (role, (0, out, steps, 128)), (role, (1, out, steps, 128)), (role, (2, out, steps * 4, 32)),
            (role, (3, out, steps * 32, 4)), (role, (4, out, steps * 32, 4)), (role, (5, out, steps * 32, 4)),
        ],
        [4, 4, 1, 1, 1],
        [A, B, C, C, C],
    )


def compiled(a=208, b=72, c=24):
    src = GluonASTSource(fn=kernel, signature={"out": "*i32", "steps": "i32", "A": "constexpr", "B": "constexpr", "C": "constexpr"},
                         constexprs={(2,): a, (3,): b, (4,): c}, attrs={})
    return triton.compile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def victim(end, variant, runs):
    import torch
    from triton.runtime import driver
    import crowd_variants as v
    try:
        out = torch.zeros(4000 * ROLES, dtype=torch.int32, device="cuda")
        k = compiled()
        run = k.run
        if variant != "as-is":
            cubin, _ = v.assemble(v.VARIANTS[variant](k.asm["ptx"]))
            m = driver.active.utils.load_binary("kernel", cubin, k.metadata.shared, 0)
            k.module, k.function = m[0], m[1]
        k[(4000, 1, 1)](out, 2000, 208, 72, 24)
        torch.cuda.synchronize()
        t = time.time()
        k[(4000, 1, 1)](out, 2000, 208, 72, 24)
        torch.cuda.synchronize()
        ms = (time.time() - t) * 1e3
        first = out.clone()
        end.send("ready")
        end.recv()
        i = 0
        for i in range(runs):
            out.zero_()
            k[(4000, 1, 1)](out, 2000, 208, 72, 24)
            if not torch.equal(out, first):
                end.send(f"run {i}: {int((out != first).sum())} of {out.numel()} results differ")
                return
        end.send(f"{runs} runs of {ms:.1f} ms alone, equal")
    except RuntimeError as e:
        end.send(f"run {locals().get('i', '-')}: {str(e).splitlines()[0]}")


def main():
    import crowd_variants as v
    o = argparse.ArgumentParser()
    o.add_argument("--runs", type=int, default=60)
    o.add_argument("--neighbours", type=int, default=4)
    o.add_argument("--compile", action="store_true")
    o = o.parse_args()
    names = ["as-is", "no-setmaxnreg", "no-256", "no-return", "headroom", "load-40"]
    if o.compile:
        ptx = compiled().asm["ptx"]
        print(sorted(re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+\d+", ptx)))
        for n in names:
            print(n, v.assemble(v.VARIANTS[n](ptx))[1])
        return
    ctx = multiprocessing.get_context("spawn")
    crowd = [v.start(ctx, v.neighbour) for _ in range(o.neighbours)]
    print("neighbours:", [end.recv() for _, end in crowd], flush=True)
    for n in names:
        p, end = v.start(ctx, victim, n, o.runs)
        try:
            said = end.recv() if end.poll(120) else "stuck before it began"
            if said == "ready":
                end.send("go")
                said = end.recv() if end.poll(180) else "stuck"
        except EOFError:
            p.join(10)
            said = f"ended with exit code {p.exitcode}"
        print(f"{n:16} {said}", flush=True)
        end.close()
        p.join(15)
        p.kill()
    for p, end in crowd:
        end.close()
    for p, _ in crowd:
        p.join(15)
        p.kill()


if __name__ == "__main__":
    main()
