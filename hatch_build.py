"""Build `isolate`, the step script's one native program, into the wheel where a C compiler is at hand.

It is static and free of any C library, so a wheel that has it runs on every Linux of its machine type. Without a
compiler the wheel is pure Python, and the step script does the same by unshare, mount and setpriv, more slowly.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STEP = Path(__file__).parent / "src" / "stepfence" / "step"
MACHINES = ("x86_64", "aarch64")
FLAGS = (
    *("-Os", "-std=c11", "-Wall", "-Wextra", "-s", "-static", "-nostdlib", "-ffreestanding", "-fno-builtin"),
    *("-fno-pie", "-no-pie", "-fno-stack-protector", "-fno-asynchronous-unwind-tables"),
    *("-Wl,--build-id=none", "-Wl,-z,noexecstack", "-Wl,-z,norelro"),
)


class Isolate(BuildHookInterface):
    """Compile isolate.c with $CC, cc, gcc or clang; the wheel is then one for this machine type."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        program = self._compiled()
        if program is None:
            return
        build_data["artifacts"].append(str(program.relative_to(self.root)))
        build_data["pure_python"] = False
        machine = platform.machine()
        build_data["tag"] = f"py3-none-manylinux_2_17_{machine}.musllinux_1_1_{machine}"

    def _compiled(self) -> Path | None:
        machine = platform.machine()
        compilers = filter(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))
        compiler = next(compilers, None)
        if sys.platform != "linux" or machine not in MACHINES or compiler is None:
            self.app.display_warning(f"no C compiler for {sys.platform} on {machine}: building without isolate")
            return None
        program = STEP / f"isolate-{machine}"
        made = subprocess.run([compiler, *FLAGS, str(STEP / "isolate.c"), "-o", str(program)], check=False)
        if made.returncode != 0:
            program.unlink(missing_ok=True)
            self.app.display_warning("isolate.c does not compile here (are the kernel's headers there?): without it")
            return None
        return program
