"""Which property of the Hopper backward kernel fails beside other processes: variants of its PTX, each in a process.

Run on the machine with the GPU, from the project's root:
    python tests/kernels/experiments/crowd_variants.py                  # all, 4 neighbours, 60 runs each
    python tests/kernels/experiments/crowd_variants.py --only as-is,no-setmaxnreg --runs 100 --neighbours 8
    python tests/kernels/experiments/crowd_variants.py --assemble       # no GPU: do all variants assemble (registers, spills)
Each line: variant, heads, mode: "50 runs, equal bits" or the error and the run in which it came.
"""
import argparse, dataclasses, multiprocessing, pathlib, re, subprocess, sys, tempfile, time

SET = r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32 *\t?"


def no_256(ptx):  # never more than 208 registers for the first warpgroup (CUTLASS stays at 240)
    return re.sub(r"(setmaxnreg\.inc\.sync\.aligned\.u32\s+)256", r"\g<1>208", ptx)


def no_setmaxnreg(ptx):  # 128 registers for everybody, spills, slow; everything else is the same
    return re.sub(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+\d+;", "", ptx)


def no_return(ptx):  # registers are handed out once per block, and not given back at its end
    head = re.search(r"(\$L__BB0_2:.*?setmaxnreg\.dec\.sync\.aligned\.u32\s+80;)", ptx, re.S)
    assert head
    out = ptx[: head.end()] + "\n$L_after_dec:" + ptx[head.end() :]
    parts = out.split("$L_after_dec:", 1)
    end = r"(barrier\.sync\s+1;\s*)setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+80;"
    tail, n = re.subn(end, r"\1bra.uni $L_after_dec;", parts[1])
    before, m = re.subn(end, r"\1bra.uni $L_after_dec;", parts[0].rsplit("$L__BB0_2:", 1)[0])
    body = parts[0].rsplit("$L__BB0_2:", 1)[1]
    joined = before + "$L__BB0_2:" + body + "$L_after_dec:" + tail
    pieces = list(re.finditer(r"setmaxnreg\.inc\.sync\.aligned\.u32\s+256;", joined))
    last = pieces[-1]  # the first warpgroup's at the end
    return joined[: last.start()] + joined[last.end() :]


def budget(key, query, load):
    def change(ptx):
        for old, new in ((208, key), (72, query), (24, load)):
            ptx = re.sub(rf"(setmaxnreg\.\w+\.sync\.aligned\.u32\s+){old};", rf"\g<1>{new};", ptx)
        return ptx
    return change


def no_red(ptx):  # the queries' gradient is not added up: only errors and the bits of the others count
    return re.sub(r"red\.relaxed\.gpu\.global\.add\.v4\.f32 [^;]*;", "", ptx)


def scalar_red(ptx):
    def four(m):
        a, v = m[1], [x.strip() for x in m[2].split(",")]
        return "".join(f"red.relaxed.gpu.global.add.f32 [{a}+{4 * i}], {x};" for i, x in enumerate(v))
    return re.sub(r"red\.relaxed\.gpu\.global\.add\.v4\.f32 \[([^\]]*)\], \{([^}]*)\};", four, ptx)


def fence_inits(ptx):  # barriers in shared memory are opened before the copy engine may see them
    i = ptx.rindex("mbarrier.init.shared")
    i = ptx.index("\n", ptx.index("// end inline asm", i))
    return ptx[:i] + "\nfence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" + ptx[i:]


VARIANTS = {
    "as-is": lambda x: x,
    "no-setmaxnreg": no_setmaxnreg,
    "no-return": no_return,
    "no-256": no_256,
    "headroom": budget(200, 72, 24),   # 496 of 512 registers
    "load-40": budget(192, 80, 40),    # no warp at the minimum of 24
    "no-red": no_red,
    "scalar-red": scalar_red,
    "fence-inits": fence_inits,
}
CASES = {"128 turns": (128, 128, True), "128 any": (128, 128, False), "192 any": (192, 128, False)}


def specs(head, value, turns):
    from torch_core.calls import DenseCall, backward_of
    from torch_core.specs import ArraySpec, AttentionSpec
    q, k, v = (ArraySpec((16384, h, d), "bfloat16") for h, d in ((32, head), (8, head), (8, value)))
    s = ArraySpec((2,), "int32")
    call = DenseCall(query=q, key=k, value=v, query_start_loc=s, key_start_loc=s, max_query_len=16384,
                     with_lse=True, spec=AttentionSpec(scale=head**-0.5))
    o = ArraySpec((16384, 32, value), "bfloat16")
    return dataclasses.replace(backward_of(call, out=o, lse=ArraySpec((16384, 32), "float32"), d_out=o), deterministic=turns)


def assemble(ptx):
    import triton
    ptxas = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as d:
        src, out = pathlib.Path(d) / "k.ptx", pathlib.Path(d) / "k.cubin"
        src.write_text(ptx)
        r = subprocess.run([ptxas, "-v", "--gpu-name=sm_90a", src, "-o", out], capture_output=True, text=True)
        if r.returncode:
            raise RuntimeError(r.stderr[-600:])
        info = " ".join(re.findall(r"(\d+ bytes spill stores|Used \d+ registers|(?i:.*setmaxnreg.*ignored.*))", r.stderr))
        return out.read_bytes(), info


def compiled_ptx(case):
    from torch_core.plan.compile import compile_variant, kernel_variant
    from torch_core.plan.plan import DeviceLimits
    from torch_core.planner import plan_call
    plan = plan_call(specs(*CASES[case]), DeviceLimits())
    launch = next(x for x in plan.launches if x.name == "hopper_backward_kernel")
    return compile_variant(kernel_variant(launch, plan.specs), 90).asm["ptx"]


def patched(call, variant):
    """The call's launches, with the kernel's code replaced by the variant's."""
    from triton.runtime import driver
    from torch_core.planner import plan_call
    from torch_core.run import array_spec
    from torch_core.run.launch import _prepared, device_limits
    import torch
    plan = plan_call(call.map(array_spec), device_limits(torch.device("cuda", 0)))
    for entry in _prepared(plan, 0):
        compiled = entry[0]
        if compiled.metadata.name == "hopper_backward_kernel" and variant != "as-is":
            cubin, _ = assemble(VARIANTS[variant](compiled.asm["ptx"]))
            loaded = driver.active.utils.load_binary("hopper_backward_kernel", cubin, compiled.metadata.shared, 0)
            compiled.module, compiled.function = loaded[0], loaded[1]
    return plan


def victim(end, case, variant, runs):
    import torch
    from torch_core import ops
    from torch_core.calls import DenseCall, backward_of
    from torch_core.specs import AttentionSpec
    head, value, turns = CASES[case]
    try:
        g = torch.Generator("cuda").manual_seed(1)
        normal = lambda h, d: torch.randn(16384, h, d, generator=g, device="cuda", dtype=torch.bfloat16)
        s = torch.tensor([0, 16384], dtype=torch.int32, device="cuda")
        fwd = DenseCall(query=normal(32, head), key=normal(8, head), value=normal(8, value), query_start_loc=s,
                        key_start_loc=s, max_query_len=16384, with_lse=True, spec=AttentionSpec(scale=head**-0.5))
        r = ops.run(fwd)
        bwd = backward_of(fwd, out=r["out"], lse=r["lse"], d_out=normal(32, value))
        call = dataclasses.replace(bwd, deterministic=turns)
        patched(call, variant)
        first = ops.run(call)
        torch.cuda.synchronize()
        end.send("ready")
        end.recv()
        names = [n for n in first if n != "d_query" or (turns and variant != "no-red")]
        start, i = time.time(), 0
        for i in range(runs):
            found = ops.run(call)
            bad = [n for n in names if not torch.equal(found[n].view(torch.int16), first[n].view(torch.int16))]
            if bad:
                end.send(f"run {i}: other bits in {bad}")
                return
        end.send(f"{runs} runs in {time.time() - start:.1f} s, equal bits")
    except RuntimeError as e:
        end.send(f"run {locals().get('i', '-')}: {str(e).splitlines()[0]}")


def neighbour(end):
    import torch
    a = torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.mm(a, a)
    torch.cuda.synchronize()
    end.send("busy")
    while not end.poll():
        for _ in range(4):
            torch.mm(a, a, out=b)
        torch.cuda.synchronize()


def start(ctx, f, *args):
    mine, other = ctx.Pipe()
    p = ctx.Process(target=f, args=(other, *args), daemon=True)
    p.start()
    other.close()
    return p, mine


def main():
    o = argparse.ArgumentParser()
    o.add_argument("--only", default=",".join(VARIANTS))
    o.add_argument("--cases", default=",".join(CASES))
    o.add_argument("--runs", type=int, default=60)
    o.add_argument("--neighbours", type=int, default=4)
    o.add_argument("--assemble", action="store_true")
    o = o.parse_args()
    if o.assemble:
        for case in o.cases.split(","):
            ptx = compiled_ptx(case)
            for name in o.only.split(","):
                new = VARIANTS[name](ptx)
                try:
                    print(f"{name:16} {case:10} changed={new != ptx} {assemble(new)[1]}", flush=True)
                except RuntimeError as e:
                    print(f"{name:16} {case:10} DOES NOT ASSEMBLE {e}", flush=True)
        return
    ctx = multiprocessing.get_context("spawn")
    crowd = [start(ctx, neighbour) for _ in range(o.neighbours)]
    print("neighbours:", [end.recv() for _, end in crowd], flush=True)
    for case in o.cases.split(","):
        for name in o.only.split(","):
            p, end = start(ctx, victim, case, name, o.runs)
            try:
                said = end.recv() if end.poll(180) else "stuck before it began"
                if said == "ready":
                    end.send("go")
                    said = end.recv() if end.poll(180) else "stuck"
            except EOFError:
                p.join(10)
                said = f"ended with exit code {p.exitcode}"
            print(f"{name:16} {case:10} {said}", flush=True)
            end.close()
            p.join(15)
            p.kill()
    for p, end in crowd:
        end.close()
    for p, _ in crowd:
        p.join(15)
        p.kill()


if __name__ == "__main__":
    sys.path.insert(0, ".")
    main()
