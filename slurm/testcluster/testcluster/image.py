"""Small container images, made of the machine's own programs: nothing is downloaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from testcluster import machine, packages
from testcluster.errors import ClusterError
from testcluster.settings import Layout

_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
# fmt: off
_PROGRAMS = (
    "sh", "bash", "dash", "env", "unshare", "nsenter", "setpriv", "mount", "umount", "setsid", "flock", "git", "patch",
    "grep", "sed", "awk", "find", "xargs", "tar", "gzip", "diff", "cmp", "ps", "pgrep", "pkill", "kill", "free",
    "hostname",
)
_DIRECTORIES = (
    "dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp", "usr/bin", "usr/lib", "usr/sbin",
    "usr/share", "var/tmp", "workspace",
)
# fmt: on
# Ways to reach a server, for which the image has no network configuration: they bring large libraries along.
_GIT_WITHOUT = re.compile(r"git-(remote-.*|http-.*|imap-send|daemon|shell)|scalar")
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/sh\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": "127.0.0.1 localhost\n",
    "resolv.conf": "",
    "profile": "",
    "environment": "",
}


def host_image(directory: str | os.PathLike[str]) -> Path:
    """Return images/base.sqsh in a directory, made of the machine's coreutils, util-linux, git, patch and so on."""
    packages.require(packages.IMAGE)
    return _once(directory, "base.sqsh", _fill_from_host)


def busybox_image(directory: str | os.PathLike[str]) -> Path:
    """Return images/busybox.sqsh in a directory: busybox alone, whose setpriv knows no bounding set."""
    packages.require(packages.BUSYBOX)
    return _once(directory, "busybox.sqsh", _fill_from_busybox)


def _once(directory: str | os.PathLike[str], name: str, fill: Callable[[Path], None]) -> Path:
    layout = Layout.at(directory)
    layout.images.mkdir(parents=True, exist_ok=True)
    target = layout.images / name
    with machine.locked(layout.images / "lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=layout.images, prefix=".build-") as work:
                root = Path(work, "root")
                _skeleton(root)
                fill(root)
                _pack(root, Path(work, name))
                Path(work, name).rename(target)
    return target


def _skeleton(root: Path) -> None:
    for name in _DIRECTORIES:
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    (root / "root").chmod(0o700)
    for name, text in _ETC.items():
        (root / "etc" / name).write_text(text)


def _pack(root: Path, target: Path) -> None:
    options = ["-comp", "gzip", "-Xcompression-level", "1", "-all-root", "-noappend", "-no-progress", "-quiet"]
    _run([packages.which("mksquashfs") or "mksquashfs", str(root), str(target), *options])
    target.chmod(0o644)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": _PATH, "LANG": "C"})
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise ClusterError(f"{Path(command[0]).name}: {last[-1]}")
    return done.stdout


def _fill_from_host(root: Path) -> None:
    release = Path("/etc/os-release")
    (root / "etc/os-release").write_text(release.read_text() if release.exists() else 'ID=host\nNAME="host"\n')
    programs = [found for name in _PROGRAMS if (found := shutil.which(name, path=_PATH))]
    programs += [path for path in _files_of("coreutils") if path.startswith(("/bin/", "/usr/bin/"))]
    _copy_programs(root, programs)
    _copy_git(root)
    _copy_libraries(root)


def _files_of(package: str) -> list[str]:
    return _run(["dpkg", "-L", package]).splitlines()


def _copy_programs(root: Path, programs: Iterable[str]) -> None:
    for source in {Path(program) for program in programs}:
        target = root / "usr/bin" / source.name
        if source.exists() and not target.exists():
            # Followed: /usr/bin/awk is a link into /etc/alternatives, which the image does not have.
            shutil.copy2(source, target, follow_symlinks=True)


def _copy_git(root: Path) -> None:
    """Copy git's own directory: nearly all of it is links to one program."""
    core = Path(_run(["git", "--exec-path"]).strip())
    inside = root / str(core).lstrip("/")
    inside.mkdir(parents=True)
    main = (root / "usr/bin/git").stat()
    for source in core.iterdir():
        if not source.is_file() or _GIT_WITHOUT.fullmatch(source.name):
            continue
        if source.stat().st_size == main.st_size:
            (inside / source.name).symlink_to("/usr/bin/git")
        else:
            shutil.copy2(source, inside / source.name)
    templates = Path("/usr/share/git-core/templates")
    if templates.is_dir():
        shutil.copytree(templates, root / str(templates).lstrip("/"), symlinks=True)


def _copy_libraries(root: Path) -> None:
    # awk and others may be scripts or static: ldd says so with exit status 1 and is not an error here.
    programs = [str(path) for path in (root / "usr/bin").iterdir()]
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False, env={"PATH": _PATH})
    wanted = set(re.findall(r"(/\S+) \(0x", done.stdout))
    # Looked up at run time, not linked: user names.
    wanted |= {str(path) for path in Path("/usr/lib").glob("*-linux-gnu/libnss_files.so.2")}
    for library in sorted(wanted):
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target, follow_symlinks=True)


def _fill_from_busybox(root: Path) -> None:
    busybox = packages.which("busybox")
    if busybox is None:
        raise ClusterError("busybox is not installed")
    shutil.copy2(busybox, root / "usr/bin/busybox")
    for applet in _run([busybox, "--list"]).split():
        if applet != "busybox":
            (root / "usr/bin" / applet).symlink_to("busybox")
    (root / "etc/os-release").write_text('ID=busybox\nNAME="busybox"\n')
