"""Says which instruction a CUDA core dump died at: python coredump.py CORE [CUBIN]. Untested (no dump at hand).

A dump: CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 CUDA_ENABLE_LIGHTWEIGHT_COREDUMP=1 CUDA_COREDUMP_FILE=$OUT/core.%p \
    CUDA_COREDUMP_SHOW_PROGRESS=1 python crowd_variants.py --only as-is --cases "128 turns"
(cuda-gdb, where there is one, says the same: `cuda-gdb -ex 'target cudacore CORE' -ex 'x/6i $errorpc' -ex 'info registers'`)
"""
import pathlib, re, struct, subprocess, sys

USER = 0x80000000
GRID, CTA, WARP, LANE, REGS, UREGS, ELF, RELF = (USER + i for i in (12, 13, 14, 15, 5, 19, 6, 7))
KINDS = {1: "lane illegal address", 4: "illegal instruction (also a register out of range)", 5: "out of range address",
         6: "misaligned", 7: "invalid address space", 8: "invalid PC", 10: "device illegal address", 14: "warp illegal address"}


def sections(data):
    off, = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    for i in range(count):
        _, kind, _, _, start, length, link, info, _, row = struct.unpack_from("<IIQQQQIIQQ", data, off + i * size)
        yield i, kind, start, length, link, info, row


def main(core, cubin=None):
    data = pathlib.Path(core).read_bytes()
    all_ = list(sections(data))
    rows = lambda s: [data[s[2] + i : s[2] + i + s[6]] for i in range(0, s[3], s[6] or s[3])]
    entry = {}
    for s in all_:
        if s[1] == GRID:
            for r in rows(s):
                gid, _, _, start = struct.unpack_from("<4Q", r)
                entry[gid] = start
                print("grid", gid, "entry", hex(start), "regs", struct.unpack_from("<I", r, 56 + 12)[0])
    if cubin is None:
        for s in all_:
            if s[1] in (ELF, RELF):
                cubin = f"{core}.{s[0]}.cubin"
                pathlib.Path(cubin).write_bytes(data[s[2] : s[2] + s[3]])
    sass = []
    if cubin:
        try:
            import triton
            tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
            sass = subprocess.run([tool, "-c", cubin], capture_output=True, text=True).stdout.splitlines()
        except OSError as e:
            print(e)
    lanes = {(s[4], s[5]): s for s in all_ if s[1] == LANE}
    for s in all_:
        if s[1] != WARP:
            continue
        for i, r in enumerate(rows(s)):
            pc, warp, valid, active, broken, has_pc = struct.unpack_from("<Q5I", r)
            table = lanes.get((s[0], i))
            faults = []
            for j, lane in enumerate(rows(table) if table else []):
                vpc, _, ln, x, _, _, exc = struct.unpack_from("<2Q5I", lane)
                if exc:
                    faults.append((j, ln, x, exc, vpc))
            if not (has_pc or faults):
                continue
            base = min(entry.values(), key=lambda e: abs((pc or faults[0][4]) - e)) if entry else 0
            at = (pc or faults[0][4]) - base
            print(f"warp {warp}: error PC {pc:#x} (+{at:#x}) valid {valid:#x} active {active:#x} broken {broken}",
                  [(ln, x, KINDS.get(e, e)) for _, ln, x, e, _ in faults[:3]], f"{len(faults)} lanes")
            where = [k for k, l in enumerate(sass) if re.match(rf"\s+/\*0*{at:x}\*/", l)]
            for k in where[:1]:
                print("\n".join(sass[max(0, k - 12) : k + 6]))
            for q in all_:
                if q[1] == REGS and table and q[4] == table[0] and faults and q[5] == faults[0][0]:
                    words = struct.unpack_from(f"<{q[3] // 4}I", data, q[2])
                    print("R:", " ".join(f"{n}={w:08x}" for n, w in enumerate(words[:208])))
                if q[1] == UREGS and q[4] == s[0] and q[5] == i:
                    words = struct.unpack_from(f"<{q[3] // 4}I", data, q[2])
                    print("UR:", " ".join(f"{n}={w:08x}" for n, w in enumerate(words)))


if __name__ == "__main__":
    main(*sys.argv[1:])
