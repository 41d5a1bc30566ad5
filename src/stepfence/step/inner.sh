# shellcheck shell=sh
# shellcheck disable=SC2015 # A && B || refuse: B never fails after A
# The inner half of the step script: the process that takes the fence and becomes the command's parent.
#
# Where the node allows namespaces it is the first process of a new PID namespace, in which the fence is covered, and has
# no privileges any more. It knows the start nonce, never the end nonce.
#
# Descriptors: 4 the task's stderr, 5 and 6 where the command's output goes, 8 the record, 9 the fence directory.
# Exit status: 93 refused, before the fence was taken.

unset sf_count sf_fence sf_line sf_one sf_path sf_start
sf_way=$1 sf_task=$2 sf_attempt=$3 sf_stdin=$4 sf_merge=$5 sf_files=$6

sf_refuse() {
  printf 'stepfence-refused %s %s %s %s\n' "${sf_start:--}" "$sf_task" "$1" "$2" >&4
  exit 93
}

sf_find() { # what exec would find; `command -v` finds builtins and functions as well
  case $1 in */*) [ -f "$1" ] && [ -x "$1" ] && return 0 || return 1 ;; esac
  sf_path=${PATH-}:
  while [ -n "$sf_path" ]; do
    sf_one=${sf_path%%:*}
    sf_path=${sf_path#*:}
    [ -f "${sf_one:-.}/$1" ] && [ -x "${sf_one:-.}/$1" ] && return 0
  done
  return 1
}

# ---- the command --------------------------------------------------------------------------------------------
# shellcheck disable=SC2034
sf_nl='
'
sf_fence=/proc/self/fd/9
IFS= LC_ALL=C read -r sf_line || sf_refuse request-torn "no whole command on stdin"
eval "set -- $sf_line"
[ "${1:-}" = sf2 ] && [ "$#" -ge 6 ] && [ "$2" = "$#" ] || sf_refuse request-torn "words are missing"
[ "$4" = - ] || [ "$4" = "$sf_task" ] || sf_refuse request-torn "it is that of command $4"
sf_start=$3 sf_count=$5
shift 5
# The command can open what its parent has open, and the next request may be in there.
case $sf_stdin in
  none) exec </dev/null ;;
  file)
    { command : <"$sf_fence/stdin.$sf_task"; } 2>/dev/null || sf_refuse record-failed "no file of its stdin"
    exec <"$sf_fence/stdin.$sf_task"
    ;;
esac
while [ "$sf_count" -gt 0 ]; do
  command export "${1?}" 2>/dev/null || sf_refuse env-refused "${1%%=*}"
  shift
  sf_count=$((sf_count - 1))
done
export STEPFENCE_ATTEMPT="$sf_attempt"
sf_find "$1" || {
  sf_one="not found"
  case $1 in */*)
    [ ! -f "$1" ] || sf_one="not executable"
    [ ! -d "$1" ] || sf_one=directory
    ;;
  esac
  sf_refuse command-missing "$sf_one: $1"
}
if [ "$sf_files" = 1 ]; then
  { command : >"$sf_fence/out.$sf_task" && command : >"$sf_fence/err.$sf_task"; } || sf_refuse record-failed "output files"
  exec 5>"$sf_fence/out.$sf_task" 6>"$sf_fence/err.$sf_task"
else
  exec 5>&1 6>&4
fi
[ "$sf_merge" = 0 ] || exec 6>&5

# ---- the fence ----------------------------------------------------------------------------------------------
# One side alone can create this file; on any error nothing runs.
set -C
{ command true >"$sf_fence/status.$sf_task"; } 2>/dev/null || {
  [ -e "$sf_fence/status.$sf_task" ] && sf_refuse fence-taken "the runner gave this attempt up"
  sf_refuse fence-error "the status file cannot be created"
}
set +C
# A sweep after the proof takes the revocation along, and with it the runner's own file.
[ -e "$sf_fence/attempt.json" ] || sf_refuse fence-error "somebody emptied its directory"
sf_line=0.00
IFS=' ' read -r sf_line sf_one </proc/uptime # the command's own IFS may be set
printf 'started %s %s\n' "$sf_way" "${sf_line%.*}${sf_line#*.}" >&8
printf 'stepfence-start %s %s %s %s\n' "$sf_start" "$sf_task" "${SLURMD_NODENAME:--}" \
  "${SLURM_JOB_ID:--}.${SLURM_STEP_ID:--}" >&4
printf 'stepfence-start %s %s %s %s\n' "$sf_start" "$sf_task" "${SLURMD_NODENAME:--}" \
  "${SLURM_JOB_ID:--}.${SLURM_STEP_ID:--}"
exec 9<&-
sf_run() {
  printf 'forked\n' >&8
  exec 4>&- 5>&- 6>&- 8>&-
  # Without an exec the exit status is this shell's, not the command's.
  trap 'printf "unreached\n" >>"/proc/$$/fd/8"' EXIT
  if command -v shopt >/dev/null; then # bash forgets the trap when exec fails
    # shellcheck disable=SC2016
    set -- /bin/sh -c 'shopt -s execfail; exec "$@"; printf "unreached\n" >>"$0"' "/proc/$$/fd/8" "$@"
  fi
  exec "$@"
}
(sf_run "$@") >&5 2>&6
printf 'exit %s\n' "$?" >&8
exit 0
