"""Check and normalise references to container images, before srun sees them.

Pyxis takes anything that does not start with ``/`` or ``./`` for a registry's: ``a.sqsh`` is asked for at Docker Hub,
and so is ``reg.example.org/app``, because enroot sets a registry off by ``#``. Both fail minutes later, with words that
do not tell.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable

from stepfence.errors import BadInput

_SQUASHFS_SUFFIXES = (".sqsh", ".sqfs", ".squashfs")
_SQUASHFS_MAGIC = b"hsqs"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)\Z")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?\Z")
_USER = re.compile(r"[^\s@#/]+\Z")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")

_DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry.hub.docker.com", "hub.docker.com"})
"""Names of Docker Hub that are not its API's host; enroot goes to the right one by itself."""


def is_squashfs(path: str) -> bool:
    """Tell whether a file here starts as a squashfs does."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == _SQUASHFS_MAGIC
    except OSError:
        return False


def normalise(ref: str, *, cwd: str, is_image_file: Callable[[str], bool] = is_squashfs) -> str:
    """Return the image as Pyxis and enroot understand it.

    A path is made absolute and not checked: it may exist on the node alone. A path is what starts with ``/``, ``./`` or
    ``../``, what ends in .sqsh, .sqfs or .squashfs, and what is a squashfs file in the working directory. Everything
    else is a registry's: a first component with a dot or a port, or ``localhost``, is the registry and is set off by
    ``#``; Docker Hub's own name is left out.

    Args:
        ref: the reference as given.
        cwd: the absolute directory that relative paths start from.
        is_image_file: whether a file here is an image.

    Raises:
        BadInput: it is no reference; the message names it, the reason and a form that works.
    """
    if not ref:
        raise BadInput(
            "the image reference is empty: give a path to a .sqsh file or a registry reference, e.g. ubuntu:22.04"
        )
    if re.search(r"\s", ref) or not ref.isprintable():
        raise _bad(
            ref, "there is white space or a control character in it", "take it out, or give the file another name"
        )
    if ref.startswith("~"):
        raise _bad(ref, "the shell did not expand ~", "give the absolute path")
    scheme = _SCHEME.match(ref)
    if scheme:
        return _with_scheme(ref, scheme[1], scheme[2])
    if ref.startswith(("/", "./", "../")) or ref.endswith(_SQUASHFS_SUFFIXES):
        return ref if ref.startswith("/") else os.path.normpath(f"{cwd}/{ref}")
    if is_image_file(f"{cwd}/{ref}"):
        return os.path.normpath(f"{cwd}/{ref}")
    return _registry_reference(ref, ref)


def _with_scheme(ref: str, scheme: str, rest: str) -> str:
    if scheme in ("dockerd", "podman"):
        # The daemon's own name for an image: it has no '#' and is looked up as it is.
        if not re.fullmatch(r"[A-Za-z0-9/._:-]+", rest):
            raise _bad(ref, "that is no image of a local daemon", f"give {scheme}://NAME[:TAG]")
        return ref
    if scheme != "docker":
        raise _bad(ref, "a URL is not an image reference", "give HOST#REPO[:TAG], or a path to a .sqsh file")
    return f"docker://{_registry_reference(ref, rest)}"


def _registry_reference(ref: str, body: str) -> str:
    if body.startswith(("#", "@")) or "@#" in body:
        raise _bad(ref, "a name is missing before '#' or '@'", "give [USER@][HOST#]REPO[:TAG]")
    user, host, image = _split(body)
    if user and not _USER.match(user):
        raise _bad(ref, f"{user!r} is no user name", "give USER@HOST#REPO[:TAG]")
    if host and not _HOST.match(host):
        raise _bad(ref, f"{host!r} is no registry", "give HOST[:PORT]#REPO[:TAG]")
    if host.lower() in _DOCKER_HUB:
        host, image = "", image.removeprefix("library/")
    _check_image(ref, image)
    return (f"{user}@" if user else "") + (f"{host}#" if host else "") + image


def _split(body: str) -> tuple[str, str, str]:
    """Return user, registry and image; each of the first two may be ""."""
    registry, hash_sign, image = body.partition("#")
    if hash_sign:
        user, at, host = registry.rpartition("@")
        return (user if at else ""), host, image
    user, at, rest = body.partition("@")
    if not at or rest.startswith("sha256:"):
        user, rest = "", body
    first, slash, image = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return user, first, image
    return user, "", rest


def _check_image(ref: str, image: str) -> None:
    named, at, digest = image.partition("@")
    if at and not _DIGEST.match(digest):
        raise _bad(ref, f"{digest!r} is no digest", "give @sha256: and 64 hexadecimal digits")
    repository, colon, tag = named.partition(":")
    if colon and not _TAG.match(tag):
        raise _bad(ref, f"{tag!r} is no tag", "a tag is letters, digits, dot, dash and underscore, 128 at most")
    if re.search(r"[A-Z]", repository):
        raise _bad(ref, "repository names are lower case", "write it in lower case")
    if not _REPOSITORY.match(repository):
        raise _bad(ref, f"{repository!r} is no repository", "give [USER@][HOST#]REPO[:TAG], or a path to a .sqsh file")


def _bad(ref: str, reason: str, remedy: str) -> BadInput:
    return BadInput(f"{ref[:300]!r} is not an image reference: {reason}; {remedy}")
