"""Does a barrier's state come back over what was stored in its memory without mbarrier.inval? The proof of the finding.

Each thread opens a barrier in shared memory, (with "inval") ends it, stores a word over it, waits about half a
millisecond, and reads the word. Alone and beside others. From the project's root on the GPU machine:
    python tests/kernels/experiments/crowd_barrier.py            # seconds; --compile: no GPU
Expected if the finding is the cause: words differ beside others without inval, never with it, never alone.
"""
import argparse, multiprocessing, sys

sys.path[:0] = ["/tmp/brief3", "."]
import triton
import triton.language as tl

BODY = """{
 .reg .pred p; .reg .b32 a, t, now, from; .reg .b64 w, g;
 .shared .align 8 .b8 words[1024];
 mov.u32 t, %tid.x; mov.u32 a, words; mad.lo.u32 a, t, 8, a;
 mbarrier.init.shared::cta.b64 [a], 1;
 USE
 bar.sync 0;
 INVAL
 mul.wide.u32 w, $1, 2654435761; add.u64 w, w, 81985529216486895;
 st.shared.b64 [a], w;
 bar.sync 0;
 mov.u32 from, %clock;
 again: mov.u32 now, %clock; sub.u32 now, now, from; setp.lt.u32 p, now, $2; @p bra again;
 bar.sync 0;
 ld.shared.b64 g, [a];
 setp.ne.u64 p, g, w; selp.u32 $0, 1, 0, p;
}"""
USE = "{ .reg .b64 s; .reg .pred q; mbarrier.arrive.shared::cta.b64 s, [a]; mbarrier.test_wait.shared::cta.b64 q, [a], s; }"
INVAL = "mbarrier.inval.shared::cta.b64 [a];"
ASM = {
    "opened": BODY.replace("USE", "").replace("INVAL", ""),
    "opened, used": BODY.replace("USE", USE).replace("INVAL", ""),
    "opened, ended": BODY.replace("USE", "").replace("INVAL", INVAL),
    "never one": BODY.replace("mbarrier.init.shared::cta.b64 [a], 1;", "").replace("USE", "").replace("INVAL", ""),
}


@triton.jit
def probe(bad, cycles, ASSEMBLY: tl.constexpr):
    ids = tl.program_id(0) * 128 + tl.arange(0, 128)
    wrong = tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r", [ids, cycles], dtype=tl.int32, is_pure=False, pack=1)
    tl.atomic_add(bad + tl.program_id(0) % 1024, tl.sum(wrong, 0))


def victim(end, kind, runs):
    import torch
    try:
        bad = torch.zeros(1024, dtype=torch.int32, device="cuda")
        probe[(132 * 16,)](bad, 1000, ASM[kind], num_warps=4)
        torch.cuda.synchronize()
        end.send("ready")
        end.recv()
        bad.zero_()
        for _ in range(runs):
            probe[(132 * 16 * 4,)](bad, 1_000_000, ASM[kind], num_warps=4)
        torch.cuda.synchronize()
        end.send(f"{int(bad.sum())} of {runs * 132 * 16 * 4 * 128} words differ")
    except RuntimeError as e:
        end.send(str(e).splitlines()[0])


def main():
    import crowd_variants as v
    o = argparse.ArgumentParser()
    o.add_argument("--runs", type=int, default=200)
    o.add_argument("--neighbours", type=int, default=4)
    o.add_argument("--compile", action="store_true")
    o = o.parse_args()
    if o.compile:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        for kind, asm in ASM.items():
            src = ASTSource(fn=probe, signature={"bad": "*i32", "cycles": "i32", "ASSEMBLY": "constexpr"}, constexprs={(2,): asm})
            c = triton.compile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
            import pathlib, subprocess, tempfile
            with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
                f.write(c.asm["cubin"])
                f.flush()
                tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
                s = subprocess.run([tool, "-c", f.name], capture_output=True, text=True).stdout
            print(kind, [l.split("*/")[1].split(";")[0].strip() for l in s.splitlines() if any(x in l for x in ("SYNCS", "STS.64", "LDS.64"))])
        return
    ctx = multiprocessing.get_context("spawn")
    for count in (0, o.neighbours):
        crowd = [v.start(ctx, v.neighbour) for _ in range(count)]
        print(f"beside {count}:", [end.recv() for _, end in crowd], flush=True)
        for kind in ASM:
            p, end = v.start(ctx, victim, kind, o.runs)
            try:
                said = end.recv() if end.poll(120) else "stuck before it began"
                if said == "ready":
                    end.send("go")
                    said = end.recv() if end.poll(180) else "stuck"
            except EOFError:
                p.join(10)
                said = f"ended with exit code {p.exitcode}"
            print(f"beside {count}: {kind:14} {said}", flush=True)
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
