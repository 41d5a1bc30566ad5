# shellcheck shell=sh
# Runs on a node, outside any container, as one step that answers questions until its stdin ends.
#
# A question is a line "ID VERB [WORD]..."; the answer is lines "ID KEY VALUE", the last of them "ID done". $1 is the
# directory of this examination, which every node must see; $2 is the caller's working directory.

unset IFS
set -f
# The programs run here must not read the next question.
exec 3<&0 </dev/null
dr_dir=$1 dr_cwd=$2

dr_say() { printf '%s %s\n' "$dr_id" "$*"; }

dr_now() { date +%s.%N; }

# Create COUNT files, each exclusively, as the step script does: one letter each for won, lost, undecided.
dr_race() {
  dr_count=1 dr_outcome=
  set -C
  while [ "$dr_count" -le "$2" ]; do
    if { command true >"$1.$dr_count"; } 2>/dev/null; then
      dr_outcome=${dr_outcome}W
    elif [ -e "$1.$dr_count" ]; then
      dr_outcome=${dr_outcome}L
    else
      dr_outcome=${dr_outcome}E
    fi
    dr_count=$((dr_count + 1))
  done
  set +C
  dr_say outcome "$dr_outcome"
}

# The mounts that the directory may be on; the last of the longest is the one.
dr_mounts() {
  while read -r dr_one dr_two dr_three dr_four dr_point dr_rest; do
    case $dr_dir/ in
      "${dr_point%/}"/*) dr_say mount "$dr_one $dr_two $dr_three $dr_four $dr_point $dr_rest" ;;
    esac
  done </proc/self/mountinfo
}

dr_sysctls() {
  for dr_one in user/max_user_namespaces user/max_mnt_namespaces user/max_pid_namespaces \
    kernel/unprivileged_userns_clone kernel/apparmor_restrict_unprivileged_userns; do
    # The kernel gives these files whole or not at all: a shell's `read`, byte by byte, gets one digit.
    [ ! -r "/proc/sys/$dr_one" ] || dr_say sysctl "$dr_one $(cat "/proc/sys/$dr_one" 2>/dev/null)"
  done
}

# One of enroot's directories: $1 its name, $2 the path. It may not exist before its first use.
dr_path() {
  dr_near=$2
  while [ ! -d "$dr_near" ] && [ "$dr_near" != / ] && [ -n "$dr_near" ]; do
    dr_near=${dr_near%/*}
    [ -n "$dr_near" ] || dr_near=/
  done
  dr_two=no
  if [ "$dr_near" != "$2" ]; then
    [ ! -w "$dr_near" ] || dr_two=yes
  elif { command : >"$2/.stepfence-doctor.$$"; } 2>/dev/null; then
    dr_two=yes
    rm -f "$2/.stepfence-doctor.$$"
  fi
  dr_three=$(df -Pk "$dr_near" 2>/dev/null | tail -n 1)
  dr_say path "$1 $dr_two $2"
  dr_say space "$1 $dr_three"
}

# enroot's own files of configuration, read as enroot reads them: the value goes through the shell. Under Pyxis the
# caller's own variables of these names do not count.
dr_enroot() {
  dr_one=$(command -v enroot) || return 0
  dr_say enroot "$dr_one $(enroot version 2>/dev/null)"
  unset ENROOT_DATA_PATH ENROOT_CACHE_PATH ENROOT_TEMP_PATH ENROOT_RUNTIME_PATH
  : "${HOME:=/}"
  set +f
  for dr_two in "${ENROOT_SYSCONF_PATH:-/etc/enroot}/enroot.conf" \
    "${ENROOT_SYSCONF_PATH:-/etc/enroot}"/enroot.conf.d/*.conf; do
    [ -r "$dr_two" ] || continue
    dr_say conf "$dr_two"
    while IFS=' 	=' read -r dr_key dr_value; do
      case $dr_key in
        ENROOT_DATA_PATH) : "${ENROOT_DATA_PATH:=$(eval "echo $dr_value")}" ;;
        ENROOT_CACHE_PATH) : "${ENROOT_CACHE_PATH:=$(eval "echo $dr_value")}" ;;
        ENROOT_TEMP_PATH) : "${ENROOT_TEMP_PATH:=$(eval "echo $dr_value")}" ;;
        ENROOT_RUNTIME_PATH) : "${ENROOT_RUNTIME_PATH:=$(eval "echo $dr_value")}" ;;
      esac
    done <"$dr_two"
  done
  set -f
  dr_path data "${ENROOT_DATA_PATH:-${XDG_DATA_HOME:-$HOME/.local/share}/enroot}"
  dr_path cache "${ENROOT_CACHE_PATH:-${XDG_CACHE_HOME:-$HOME/.cache}/enroot}"
  dr_path temp "${ENROOT_TEMP_PATH:-${TMPDIR:-/tmp}}"
  dr_path runtime "${ENROOT_RUNTIME_PATH:-${XDG_RUNTIME_DIR:-/run}/enroot}"
}

dr_facts() {
  dr_say arch "$(uname -m 2>/dev/null)"
  [ ! -d "$dr_cwd" ] || dr_say cwd yes
  dr_mounts
  dr_sysctls
  (dr_enroot)
  enroot list 2>/dev/null | while read -r dr_one dr_rest; do dr_say container "$dr_one"; done
}

while read -r dr_id dr_verb dr_first dr_second <&3; do
  case $dr_verb in
    facts) dr_facts ;;
    race) dr_race "$dr_first" "$dr_second" ;;
    clock)
      dr_one=$(dr_now)
      { command : >"$dr_first"; } 2>/dev/null || dr_say error "cannot create $dr_first"
      dr_say clock "$dr_one $(dr_now)"
      ;;
    rename) mv -f "$dr_first" "$dr_second" 2>/dev/null || dr_say error "mv failed" ;;
    write) { printf '%s\n' "$dr_second" >"$dr_first"; } 2>/dev/null || dr_say error "cannot write $dr_first" ;;
  esac
  dr_say 'done'
done
exit 0
