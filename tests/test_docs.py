"""Run every command and code block of README and docs, and compare the reference's tables with the code.

What follows a block's language says where it runs: nothing, on this machine; ``job``, in a Slurm job as an ordinary
user; ``root``, as root with ``/tmp/c`` standing for a cluster that is the document's own; ``make``, names of targets.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stepfence
from stepfence import settings
from stepfence.launch.environment import allowed_names
from stepfence.ledger import LedgerRecord, Outcome, RunQuality, Summary

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
REFERENCE = ROOT / "docs/reference.md"
API = ROOT / "docs/api.md"
MARK = "@@@"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, where it runs, its text."""

    page: str
    line: int
    language: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a console block and the output that the page shows; ``...`` stands for anything."""

    text: str
    shown: str

    def matches(self, output: str) -> bool:
        lines = [re.escape(line).replace(r"\.\.\.", ".*") for line in self.shown.splitlines()]
        pattern = "".join(r"(?:.*\n)*?" if line == ".*" else f"{line}\n" for line in lines)
        return re.fullmatch(pattern, output) is not None


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in re.finditer(r"^```([a-z]+) ?([a-z]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(page.name, text[: found.start()].count("\n") + 1, *found.groups())


def _commands(text: str) -> list[Command]:
    commands: list[Command] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append(Command(line[2:], ""))
        elif line.startswith("> "):
            commands[-1] = Command(f"{commands[-1].text}\n{line[2:]}", "")
        else:
            commands[-1] = Command(commands[-1].text, f"{commands[-1].shown}{line}\n")
    return commands


def _script(commands: list[Command]) -> str:
    """Return one shell script that says where each command begins, and keeps each one's exit status for the next."""
    lines, end = [], ""
    for number, command in enumerate(commands):
        lines.append(f"s=$?; printf '{MARK}{number}\\n'; (exit $s)")
        if re.fullmatch(r"salloc [^|;]*", command.text):  # the commands up to `exit` are typed into its shell
            lines.append(f"{command.text} bash -s <<'END'")
            end = "END"
        elif command.text == "exit":
            lines += [end, "true"]
        else:
            lines.append(command.text)
    return "\n".join(lines) + "\n"


def _check(block: Block, *, cwd: Path, env: Mapping[str, str], user: str | None = None) -> None:
    commands = _commands(block.text)
    answer = subprocess.run(
        ["bash", "-s"],
        input=_script(commands),
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
        **_as(user),
    )
    outputs = dict(re.findall(rf"^{MARK}(\d+)\n(.*?)(?=^{MARK}\d+\n|\Z)", answer.stdout, re.MULTILINE | re.DOTALL))
    for number, command in enumerate(commands):
        output = outputs.get(str(number), "(not reached)\n")
        assert command.matches(output), f"$ {command.text}\nprinted\n{output}\nand {block} shows\n{command.shown}"


def _as(user: str | None) -> dict[str, Any]:
    if user is None:
        return {}
    entry = pwd.getpwnam(user)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _environ(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which ``stepfence`` and ``python3`` are those that run the tests."""
    env = {k: v for k, v in inherited.items() if not k.startswith(("STEPFENCE", "SWEBENCH", "PYTEST"))}
    return {**env, "PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "LC_ALL": "C.UTF-8"}


def _outside_a_job() -> dict[str, str]:
    return _environ({k: v for k, v in os.environ.items() if not k.startswith("SLURM")})


def _of(where: str, language: str = "console") -> Any:
    blocks = [b for page in PAGES for b in _blocks(page) if (b.where, b.language) == (where, language)]
    return pytest.mark.parametrize("block", blocks, ids=str)


def _python(block: Block, *, cwd: Path, env: Mapping[str, str], user: str | None = None) -> None:
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", block.text],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **_as(user),
    )
    assert answer.returncode == 0, answer.stderr


def test_every_block_says_where_it_runs() -> None:
    known = {"console": ("", "job", "root"), "python": ("", "job"), "sh": ("make",), "text": ("",)}
    for block in (b for page in PAGES for b in _blocks(page)):
        assert block.where in known.get(block.language, ()), f"{block}: ```{block.language} {block.where}"


@_of("")
def test_console_blocks_print_what_the_page_shows(block: Block, tmp_path: Path) -> None:
    _check(block, cwd=tmp_path, env=_outside_a_job())


@_of("", "python")
def test_python_blocks_run(block: Block, tmp_path: Path) -> None:
    _python(block, cwd=tmp_path, env=_outside_a_job())


@_of("make", "sh")
def test_make_targets_are_there(block: Block) -> None:
    for line in block.text.splitlines():
        target = line.split("#")[0].split()
        assert target[0] == "make"
        assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line


def _job_directory(job: Any, image: Path) -> Path:
    entry = pwd.getpwnam(job.user)
    directory = Path(tempfile.mkdtemp(prefix="docs-", dir=job.shared))
    os.chown(directory, entry.pw_uid, entry.pw_gid)
    (directory / "base.sqsh").symlink_to(image)
    return directory


@pytest.mark.cluster
@_of("job")
def test_console_blocks_in_a_job_print_what_the_page_shows(block: Block, job: Any, image: Path) -> None:
    _check(block, cwd=_job_directory(job, image), env=_environ(job.environ), user=job.user)


@pytest.mark.cluster
@_of("job", "python")
def test_python_blocks_run_in_a_job(block: Block, job: Any, image: Path) -> None:
    _python(block, cwd=_job_directory(job, image), env=_environ(job.environ), user=job.user)


@pytest.fixture(scope="module")
def own_cluster(testcluster: ModuleType) -> Iterator[Path]:
    """A directory for the documents' own cluster, which is ended in any case."""
    with tempfile.TemporaryDirectory(prefix="sfd-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        try:
            yield Path(name, "c")
        finally:
            subprocess.run([ROOT / "slurm/testcluster/down", "--dir", f"{name}/c"], check=True)


@pytest.mark.cluster
@_of("root")
def test_console_blocks_with_a_cluster_of_their_own(block: Block, own_cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    there = dataclasses.replace(block, text=block.text.replace("/tmp/c", str(own_cluster)))
    _check(there, cwd=tmp_path, env=_outside_a_job())


# ---- the reference ------------------------------------------------------------------------------------------


def _table(heading: str, page: Path = REFERENCE) -> list[str]:
    """Return the first cells, in backquotes, of the tables below a heading."""
    return [name for cells in _rows(heading, page) for name in re.findall(r"`([^`]+)`", cells[0])]


def _rows(heading: str, page: Path) -> list[list[str]]:
    section = re.search(rf"^#+ {heading}\n(.*?)(?=^#+ |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert section, heading
    return [row.split(" | ") for row in re.findall(r"^\| (`.*?) \|$", section[1], re.MULTILINE)]


@pytest.mark.parametrize("command", ["true", "/no/such/program"])
def test_the_reference_lists_every_field_of_the_result_file(tmp_path: Path, command: str) -> None:
    words = ["--run-dir", str(tmp_path / "run"), "--result", str(tmp_path / "result.json"), "--", command]
    subprocess.run([sys.executable, "-m", "stepfence", "run", *words], env=_outside_a_job(), check=False)
    assert sorted(_table("Result file")) == sorted(json.loads((tmp_path / "result.json").read_text()))


def test_the_reference_lists_every_variable_that_is_read() -> None:
    read = re.findall(r"^``(\w+)``", settings.__doc__ or "", re.MULTILINE)
    assert _table("Environment") == read
    source = Path(settings.__file__).read_text()
    assert set(re.findall(r'"((?:STEPFENCE|SWEBENCH)_\w+)"', source)) == set(read)


def test_the_reference_lists_what_srun_is_given_and_why() -> None:
    rows = re.findall(r"^\| `(\w+\*?)` \| (.*) \|$", REFERENCE.read_text(), re.MULTILINE)
    shown = {name: why for name, why in rows if name in _table("What srun is given")}
    assert shown == allowed_names()


def test_the_reference_lists_every_field_and_outcome_of_the_ledger() -> None:
    names = [field.name for field in dataclasses.fields(LedgerRecord)]
    assert sorted(_table("Ledger")) == sorted([*names, *map(str, Outcome), *map(str, RunQuality)])


def test_the_reference_lists_every_figure_of_a_summary() -> None:
    assert sorted(_table("Summary")) == sorted(field.name for field in dataclasses.fields(Summary))


@pytest.mark.parametrize("kind", ["Step", "Container", "Mount", "StepResult", "Evidence", "RetryPolicy"])
def test_the_api_page_lists_every_field(kind: str) -> None:
    known = {field.name for field in dataclasses.fields(getattr(stepfence, kind))} - {"exit"}
    assert sorted(_table(kind, API)) == sorted(known)


def test_the_api_page_gives_the_defaults_of_the_policy() -> None:
    shown = {name.strip("`"): default for name, default, _ in _rows("RetryPolicy", API)}
    assert shown == {name: str(value) for name, value in dataclasses.asdict(stepfence.RetryPolicy()).items()}


def test_the_api_page_draws_every_error_and_names_everything_public() -> None:
    text = API.read_text()
    assert all(re.search(rf"\b{name}\b", text) for name in stepfence.__all__ if name not in ("__version__", "Verdict"))
    for name in stepfence.__all__:
        if isinstance(kind := getattr(stepfence, name), type) and issubclass(kind, Exception):
            assert re.search(rf"^    [^`\n]*\b{name}\b", text, re.MULTILINE), name


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#[\w-]+)?\)", page.read_text()):
            assert not target or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_anchors_in_links_are_headings() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)#([\w-]+)\)", page.read_text()):
            text = ((page.parent / target) if target else page).read_text()
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{page.name} links to {target}#{anchor}"
