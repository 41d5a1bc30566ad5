"""Turn what srun, slurmstepd, Pyxis and enroot wrote into a hint for people.

A hint says what probably happened and what to do, and whether another attempt could succeed. It is never proof of
anything: the same ``Socket timed out on send/recv operation`` appears with and without the command having run. Whether
the command ran is the fence's to say.

The words looked for are in `hint_rules`. What is unknown is taken for transient, because a retry happens only on proof.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepfence.step.hint_rules import MAYBE_NO_PYXIS, PLUGIN_MISSING, PLUGIN_MISSING_TEXT, REFUSALS, RULES, SHELL_LINE

_LONGEST_DETAIL = 200
_QUOTES = "'`\",\u2018\u2019"

_NODE_IN_WORDS = re.compile(r"failed on node (\S+?):|^slurmstepd-(\S+?): |^srun: error: (\S+?): task", re.MULTILINE)

_AFTERMATH = frozenset({"step-cancelled", "killed", "container-start", "pyxis-failed", "launch-aborted"})
"""What ending a step at its deadline leaves in the log as well: it is no cause."""

_DEADLINE = (
    "{deadline} passed before {node} was heard of: a slow image import, or a node or controller that does not answer. "
    "Raise that deadline (--launch-deadline), or see `stepfence doctor`."
)
_GRACE = (
    "The end of the command was not heard of by its time limit and the grace after it: {node} or the controller does "
    "not answer, or the run directory is not to be had there."
)
_SILENT = (
    "the step was probably lost between slurmctld and {node}. If that goes on, look at the time in slurmd's log there."
)


@dataclass(frozen=True, slots=True)
class Hint:
    """What probably happened.

    Attributes:
        slug: a short constant name of the cause, to count by.
        text: one or two sentences: what probably happened, and what to do.
        transient: whether another attempt could succeed.
    """

    slug: str
    text: str
    transient: bool


NO_RECORD = Hint(
    "no-record",
    "The script came to its end without a record of how the command ended: its wrapper was killed, or the program "
    "could not be executed (a missing interpreter, another format).",
    False,
)
"""For a step that told its end, but not the command's."""


def hint_for(
    stderr_text: str,
    *,
    srun_rc: int | None = None,
    image: str | None = None,
    node: str = "",
    binding_variables: Sequence[str] = (),
    refusal: str = "",
    refusal_detail: str = "",
    slurm_conf: str = "",
    architectures: tuple[str, str] | None = None,
    deadline: str | None = None,
) -> Hint:
    """Return the hint for one attempt that has no result.

    Args:
        stderr_text: what srun, slurmstepd and Pyxis wrote, or its tail; not the command's own output.
        srun_rc: srun's exit status; None while unknown, negative for a signal.
        image: the image asked for, or None for the bare node.
        node: where the step was to run, or "": then the words may tell.
        binding_variables: the caller's variables that lay out or bind tasks (`launch.environment.binding_variables`).
            srun is given none of them: they only tell how the job was laid out.
        refusal, refusal_detail: the step script's reason for not running the command, and what it is about; or "".
        slurm_conf: the value of SLURM_CONF that srun was given, or "".
        architectures: the image's and the node's, where both are known.
        deadline: the name of the deadline that passed, or None.

    Returns:
        Always a hint: ``unknown`` or ``silent`` where no rule matches.
    """
    words = _words(
        image=image,
        node=node or _node_in(stderr_text),
        binding=binding_variables,
        conf=slurm_conf,
        architectures=architectures,
    )
    if refusal:
        return _hint_for_refusal(refusal, refusal_detail, stderr_text, image=image, words=words)
    hint = _hint_for_words(stderr_text, words)
    if deadline == "grace_s" and (hint is None or hint.slug in _AFTERMATH):
        return Hint("deadline", _GRACE.format_map(words), False)
    if deadline and (hint is None or hint.slug in _AFTERMATH):
        return Hint("deadline", _DEADLINE.format(deadline=deadline, **words), True)
    if hint:
        return hint
    if stderr_text.strip():
        return Hint("unknown", f"{_exit(srun_rc)} on {words['node']}; its last words are in the evidence.", True)
    return Hint("silent", f"{_exit(srun_rc)} without a word: {_SILENT.format_map(words)}", True)


def _hint_for_refusal(
    refusal: str, detail: str, stderr_text: str, *, image: str | None, words: Mapping[str, str]
) -> Hint:
    if refusal not in REFUSALS:
        return Hint(refusal, f"The step script refused to run the command ({refusal}); see `stepfence doctor`.", True)
    if refusal == "no-fence" and PLUGIN_MISSING.search(stderr_text):
        return Hint("plugin-missing", PLUGIN_MISSING_TEXT.format_map(words), False)
    kind, _, what = detail.partition(": ") if refusal == "command-missing" else ("", "", detail)
    text, transient = REFUSALS.get(f"{refusal}: {kind}", REFUSALS[refusal])
    if refusal == "no-fence" and image is not None:
        text += MAYBE_NO_PYXIS
    if kind == "not found" and " " in what.strip():
        text += SHELL_LINE
    return Hint(refusal, _sentence(text.format_map({**words, "detail": _shown(what) or "unknown"})), transient)


def _hint_for_words(stderr_text: str, words: Mapping[str, str]) -> Hint | None:
    for rule in RULES:
        match = rule.pattern.search(stderr_text)
        if match:
            found = {**words, **match.groupdict(), "detail": _detail(match)}
            return Hint(rule.slug, _sentence(rule.text.format_map(found)), rule.transient)
    return None


def _words(
    *,
    image: str | None,
    node: str,
    binding: Sequence[str],
    conf: str,
    architectures: tuple[str, str] | None,
) -> dict[str, str]:
    return {
        "image": f"image {image}" if image else "the image",
        "node": node or "the node",
        "binding": (
            f"How the job, or a step around this one, was laid out is in {', '.join(binding)}: compare (srun is not "
            "given them). "
            if binding
            else ""
        ),
        "conf": f"SLURM_CONF is {conf}" if conf else "SLURM_CONF is not set",
        "architectures": (
            f"it is for {architectures[0]}, {node or 'the node'} is {architectures[1]}"
            if architectures
            else f"compare `uname -m` on {node or 'the node'} with the architecture the image was built for"
        ),
    }


def _node_in(stderr_text: str) -> str:
    match = _NODE_IN_WORDS.search(stderr_text)
    return next(filter(None, match.groups()), "") if match else ""


def _detail(match: re.Match[str]) -> str:
    text = next((group for group in match.groups() if group), match.group(0))
    return _shown(text).strip(_QUOTES)


def _shown(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_DETAIL]


def _exit(srun_rc: int | None) -> str:
    if srun_rc is None:
        return "srun is not known to have ended"
    return f"srun was ended by signal {-srun_rc}" if srun_rc < 0 else f"srun ended with exit status {srun_rc}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] if text.startswith(("image ", "the ")) else text
