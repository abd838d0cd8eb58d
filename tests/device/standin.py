"""A device that is not the CPU, for machines without one: torch's PrivateUse1 under this name.

Importing this module registers the device in the process, so what workers are built from names
something of this module. There are two devices. As on CUDA, tensors on different devices do not
mix; each device has random numbers of its own (those of a CPU generator with the same seed); a copy
to the host with ``non_blocking=True`` is there only after `synchronize`; memory can be pinned; and
a process forked from one that used the device cannot use it. Unlike CUDA, operators run on the CPU,
streams and events are names only, and there are no graphs.

The first import on a machine compiles ``standin.cpp``, into torch's folder for extensions.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("standin.cpp")


class NoCompiler(Exception):
    """There is nothing to build the device with."""


def make(kind, *args, **kwargs):
    """Call ``kind``, in a process where the device is registered: sending this registers it."""
    return kind(*args, **kwargs)


def _library():
    """Return the compiled device; one process builds it."""
    told = (_SOURCE.read_bytes(), torch.__version__, sys.version, sysconfig.get_platform())
    name = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    root = os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache/torch_extensions")
    library = Path(root) / f"gleanrl-standin-{name}.so"
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise NoCompiler("there is no C++ compiler to build the stand-in device with")
    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(compiler, library)
    return library


def _build(compiler, library):
    from torch.utils import cpp_extension

    fresh = library.with_suffix(f".{os.getpid()}")
    folders = cpp_extension.library_paths()
    command = [
        *(compiler, "-shared", "-fPIC", "-O0", "-w", "-std=c++20", str(_SOURCE), "-o", str(fresh)),
        *(f"-I{folder}" for folder in cpp_extension.include_paths()),
        *(f"-L{folder}" for folder in folders),
        *(
            "-lc10",
            "-ltorch_cpu",
            "-ltorch",
            f"-D_GLIBCXX_USE_CXX11_ABI={torch._C._GLIBCXX_USE_CXX11_ABI:d}",
        ),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"the stand-in device does not compile:\n{done.stderr}")
    fresh.replace(library)


def _index(device):
    index = device if isinstance(device, int) else torch.device(device or "standin").index
    return _C.current_device() if index is None else index


def _seed_all(seed):
    for index in range(2):
        _C.seed(index, seed)


torch.ops.load_library(_library())
_C = torch.ops.standin
torch.utils.rename_privateuse1_backend("standin")
torch._register_device_module(
    "standin",
    types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=_C.initialised,
        _is_in_bad_fork=_C.in_bad_fork,
        device_count=lambda: 2,
        current_device=_C.current_device,
        set_device=lambda device: _C.set_device(_index(device)),
        synchronize=lambda device=None: _C.synchronise(),
        manual_seed=lambda seed: _C.seed(_C.current_device(), seed),
        manual_seed_all=_seed_all,
        get_rng_state=lambda device=None: _C.rng_state(_index(device)),
        set_rng_state=lambda state, device=None: _C.set_rng_state(_index(device), state),
        device=lambda device: torch.accelerator.device_index(_index(device)),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        memory_allocated=lambda device=None: _C.allocated(),
    ),
)
torch.utils.generate_methods_for_privateuse1_backend()
