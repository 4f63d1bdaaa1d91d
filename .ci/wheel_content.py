"""Checks what a wheel holds: the two packages with their data, and nothing of tests, notes or the tree around them."""

import sys
import zipfile
from collections import Counter
from pathlib import PurePosixPath

#: Endings of files; benchmarks are part of the package, since `jattn bench` is a command.
_ALLOWED = {".py", ".json", ".md", ".typed", ".safetensors"}
_NEEDED = {
    "jattn/py.typed",
    "torch_core/py.typed",
    "jattn/assets/model.safetensors",
    "torch_core/variants/compiled.json",
}

names = [PurePosixPath(name) for name in zipfile.ZipFile(sys.argv[1]).namelist()]
packages = [name for name in names if not name.parts[0].endswith(".dist-info")]
foreign = [str(name) for name in packages if name.parts[0] not in ("jattn", "torch_core") or "tests" in name.parts]
foreign += [str(name) for name in packages if name.suffix not in _ALLOWED]
missing = _NEEDED - set(map(str, names))
if foreign or missing:
    sys.exit(f"the wheel holds {foreign} and lacks {sorted(missing)}")
print(f"{len(packages)} files:", dict(Counter(name.suffix for name in packages)))
