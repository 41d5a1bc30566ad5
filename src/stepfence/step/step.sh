# shellcheck shell=sh
# shellcheck disable=SC2015 # A && B || refuse: B never fails after A
# The step script: it runs on the node, asks the fence whether the command may start, starts it once, and tells
# how it ended. POSIX sh (dash, bash and busybox ash run it); nothing of the image is needed but /bin/sh.
#
# Sourced by the bootstrap in argv with $1, the fence root as it is seen here, and $2, the attempt's directory in
# it. Everything else arrives on stdin as two lines of quoted shell words: this shell reads the first, inner.sh the
# second. The end nonce stays in this shell alone: the command shares no process, argument list, environment or
# file with it.
#
# srun forwards no stdin for the first hundredths of a second. So the first line, which says nothing of the command, may be
# $4: the namespaces are made meanwhile. What it lacks, the end nonce, is then the last line on stdin, and read at the end.
#
# With $3, `session`, it serves one command after the other, each with two such lines, fence files and nonces of its own,
# until its stdin ends.
#
# The text of inner.sh is in sf_inner, set in front of this file where it is written to the fence box: a shell that has
# its script open as a file would give the command, by /proc, a way to rewrite what later attempts run.
#
# Descriptors: 4 the task's stderr, 8 the record, 9 the fence directory.
# Exit status: 0 when both end sentinels are out; 93 when the command was refused.

# An image could define these, and what the environment defines is exported when it is assigned. SHELLOPTS sets options
# of a /bin/sh that is bash: with allexport the command would inherit the end nonce.
set +aeuvxC
unset sf_attempt sf_begun sf_cover sf_dir sf_drop sf_elders sf_end sf_exit sf_files sf_gid sf_isolation sf_keep sf_key \
  sf_kids sf_kill sf_left sf_limit sf_line sf_machine sf_merge sf_mode sf_nap sf_nl sf_now sf_number sf_one sf_options \
  sf_pid sf_pids sf_program sf_rc sf_rest sf_root sf_rootfs sf_self sf_serves sf_setpriv sf_shell sf_since sf_stdin \
  sf_survivors sf_task sf_tasks sf_token sf_top sf_uid sf_value sf_watch sf_way sf_whole sf_workdir
unset IFS
set -f
sf_attempt=$2 sf_dir=$1/$2 sf_serves=${3:-} sf_line=${4-} sf_end=- sf_task=${SLURM_PROCID:-0} sf_shell=$$
# shellcheck disable=SC2034 # it stands for a newline inside the quoted words of a request
sf_nl='
'
sf_watch='' sf_whole=''
exec 4>&2

sf_start_watch() {
  [ "$sf_limit" != 0 ] || return 0
  command -v sleep >/dev/null || sf_refuse sleep-missing "no sleep in PATH"
  # Pyxis starts enroot from the process that became this shell: with use_squashfuse it serves the root file system.
  read -r sf_elders <"/proc/$sf_shell/task/$sf_shell/children"
  sf_watch </dev/null >/dev/null 4>&- 8>&- 9<&- &
  sf_watch=$!
  # Also where this shell ends because it cannot fork: nobody else would end the watch then.
  trap 'kill "$sf_watch"' EXIT
}

sf_end_watch() {
  [ -z "$sf_watch" ] || { trap - EXIT && kill "$sf_watch" && wait "$sf_watch"; }
}

sf_read_end() { # the end nonce, where the request came without it
  [ "$sf_end" = - ] || return 0
  IFS= LC_ALL=C read -r sf_line
  case $sf_line in 'sf3 '*) sf_end=${sf_line#sf3 } ;; esac
  [ "$sf_end" != - ]
}

sf_refuse() {
  sf_end_watch
  printf 'stepfence-refused %s %s %s %s\n' "$sf_end" "$sf_task" "$1" "$2" >&4
  exit 93
}

# ---- the watch over a time limit ---------------------------------------------------------------------------
# It runs outside the command's namespaces: the command can neither see it nor stop it.
sf_read_record() {
  sf_mode='' sf_exit=unreached sf_since=0
  while read -r sf_key sf_value sf_rest; do
    case $sf_key in
      started) [ -n "$sf_mode" ] || sf_mode=$sf_value sf_since=$sf_rest ;;
      forked) sf_exit=- ;;
      unreached) sf_exit=unreached ;; # the status is the shell's own: there was no exec, or else no fork
      exit) [ "$sf_exit" = unreached ] || sf_exit=$sf_value ;;
    esac
  done <"/proc/$sf_shell/fd/8" # by its descriptor: the directory may have been moved or swept
  case $sf_since in '' | *[!0-9]*) sf_since=0 ;; esac
  case $sf_mode in '' | none | full | userns | root-userns) ;; *) sf_mode=unknown ;; esac
  case $sf_exit in '' | *[!0-9]* | ????*) sf_exit=- ;; esac
}

sf_children() { # set sf_kids to the children of $1
  sf_kids=
  for sf_one in "/proc/$1/task/"*/children; do
    sf_rest=
    read -r sf_rest <"$sf_one"
    sf_kids="$sf_kids $sf_rest"
  done
}

sf_below() { # add every pid below $1 to sf_pids, but for the watch's own and those that were there before us
  sf_children "$1"
  for sf_pid in $sf_kids; do
    case " $sf_self $sf_elders " in
      *" $sf_pid "*) ;;
      *) sf_pids="$sf_pids $sf_pid" && sf_below "$sf_pid" ;;
    esac
  done
}

sf_ask_sleep() { # set sf_whole to whether sleep takes whole seconds only
  sf_whole=0
  sleep 0.001 2>/dev/null || sf_whole=1
}

sf_sleep() { # $1 hundredths of a second; more where sleep takes whole seconds only
  sf_one=$(($1 % 100 + 100))
  if [ "$sf_whole" = 1 ]; then sleep $((($1 + 99) / 100)) & else sleep "$(($1 / 100)).${sf_one#1}" & fi
  sf_nap=$!
  wait "$sf_nap"
}

sf_watch() {
  trap 'kill "$sf_nap"; exit 0' TERM
  set +f
  [ -n "$sf_whole" ] || sf_ask_sleep
  sf_left=$sf_limit sf_begun=
  while [ "$sf_left" -gt 0 ]; do
    sf_sleep "$sf_left" || exit 0
    # Without its shell, which was killed, the number of that shell is somebody else's by now.
    read -r sf_self sf_rest </proc/self/stat
    sf_rest=${sf_rest##*") "}
    sf_rest=${sf_rest#* }
    [ "${sf_rest%% *}" = "$sf_shell" ] || exit 0
    [ -e "$sf_dir/status.$sf_task" ] || continue # its time has not begun
    read -r sf_now sf_rest </proc/uptime
    sf_now=${sf_now%.*}${sf_now#*.}
    if [ -z "$sf_begun" ]; then
      # The command's parent has the record open, so the command can rewrite it: it is read once, and no later than now.
      sf_read_record
      sf_begun=$sf_since
      [ -n "$sf_mode" ] && [ "$sf_since" -le "$sf_now" ] || sf_begun=$sf_now
    fi
    sf_left=$((sf_limit + sf_begun - sf_now))
  done
  sf_pids='' && sf_below "$sf_shell"
  # The first below this shell is inner.sh, or unshare and then the PID namespace's first process.
  # shellcheck disable=SC2086 # words on purpose, here and below
  set -- $sf_pids
  [ "$sf_mode" = none ] || shift
  sf_top=${1:-}
  [ -n "$sf_top" ] && printf 'limit\n' >"$sf_dir/limit.$sf_task" || exit 0
  sf_pids='' && sf_below "$sf_top"
  # shellcheck disable=SC2086
  kill -TERM $sf_pids
  sf_sleep "$sf_kill"
  trap '' TERM # the first death ends the command, and the outer shell then ends this watch
  for sf_key in 1 2 3; do # again for what was forked meanwhile
    sf_pids='' && sf_below "$sf_top"
    # shellcheck disable=SC2086
    [ -z "$sf_pids" ] || kill -KILL $sf_pids
  done
  [ "$sf_mode" = none ] || kill -KILL "$sf_top" # and with it the namespace
}

# ---- where the command runs ---------------------------------------------------------------------------------
# The first process of the new namespaces, with privileges: it covers the fence and gives way to inner.sh without them.
# An empty directory is what the command finds there; a second proc file system would be a trap for its `grep -r`.
# shellcheck disable=SC2016
sf_cover='
  sf_inner=$1 sf_drop=$2 sf_way=$3 sf_task=$4 sf_attempt=$5 sf_stdin=$6 sf_merge=$7 sf_files=$8
  shift 8
  for sf_one; do
    [ ! -d "$sf_one" ] || mount -n -i -t tmpfs -o ro,nosuid,nodev,size=4k,mode=555 none "$sf_one" || exit 94
  done
  # A process group reaches across namespaces: a command that kills its own would kill the script.
  command -v setsid >/dev/null && sf_drop="setsid $sf_drop"
  exec $sf_drop /bin/sh -c "$sf_inner" stepfence "$sf_way" "$sf_task" "$sf_attempt" "$sf_stdin" "$sf_merge" "$sf_files"
'

# Each way is tried until the fence is taken or the command is refused; a way that fails took no fence. A status file may
# be swept while the command runs: another way would then read the command's own stdin as a request.
sf_is_over() {
  [ "$sf_rc" = 93 ] || [ -e "$sf_dir/status.$sf_task" ] || [ -s "/proc/$sf_shell/fd/8" ]
}

sf_isolate() { # $1 way; then the directories to cover
  ! sf_is_over || return 0
  sf_way=$1
  shift
  for sf_one in 1 2 3 4 5; do
    # shellcheck disable=SC2154 # sf_inner is set in front of this file
    "$sf_program" "$sf_way" "$sf_uid" "$sf_gid" "$sf_task" "$sf_limit" "$sf_kill" "$#" "$@" \
      /bin/sh -c "$sf_inner" stepfence "$sf_way" "$sf_task" "$sf_attempt" "$sf_stdin" "$sf_merge" "$sf_files"
    sf_rc=$?
    # It is busy while anybody has it open for writing, for example a runner's child that has not executed yet.
    [ "$sf_rc" = 126 ] || return 0
    sleep 0.02
  done
}

sf_try() { # $1 way, $2 options of unshare, $3 what drops privileges; then the directories to cover
  ! sf_is_over || return 0
  sf_way=$1 sf_options=$2 sf_drop=$3
  shift 3
  # shellcheck disable=SC2086 # words on purpose
  unshare $sf_options --mount --pid --fork --mount-proc /bin/sh -c "$sf_cover" stepfence "$sf_inner" "$sf_drop" \
    "$sf_way" "$sf_task" "$sf_attempt" "$sf_stdin" "$sf_merge" "$sf_files" "$@"
  sf_rc=$?
}

# Enough for package managers and patches; not enough to mount, unmount, trace or make devices.
sf_keep=-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+net_bind_service
sf_setpriv="setpriv --inh-caps=-all --no-new-privs --bounding-set=$sf_keep"
sf_root='--user --map-root-user'

# ---- one request --------------------------------------------------------------------------------------------
sf_serve() {
  eval "set -- $sf_line"
  [ "${1:-}" = sf1 ] && [ "$#" -ge 14 ] && [ "$2" = "$#" ] || sf_refuse request-torn "words are missing"
  sf_end=$3 sf_number=$4 sf_limit=$5 sf_kill=$6 sf_stdin=$7 sf_isolation=$8 sf_workdir=$9
  shift 9
  sf_merge=$1 sf_tasks=$2 sf_rootfs=$3 sf_uid=$4 sf_gid=$5
  shift 5 # what is left are the directories to cover before the command starts
  if [ -n "$sf_serves" ]; then
    sf_task=$sf_number sf_attempt=$sf_attempt.$sf_number
  else
    # The runner revokes the fences of the tasks it knows of; another one's would stay open.
    [ "$sf_task" -lt "$sf_tasks" ] || sf_refuse wrong-task "task $sf_task of $sf_tasks"
  fi
  sf_files=0
  [ "$sf_tasks" = 1 ] || sf_files=1

  # ---- is this the right place? -----------------------------------------------------------------------------
  [ -d "$sf_dir" ] && [ ! -L "$sf_dir" ] || sf_refuse no-fence "$sf_dir"
  [ ! -e "$sf_dir/status.$sf_task" ] || sf_refuse fence-taken "$sf_dir"

  # A root file system of ours carries a token. Another one's, and somebody else's image is under this name; none,
  # and its creation never finished.
  case $sf_rootfs in
    create:*) { printf '%s\n' "${sf_rootfs#create:}" >/.stepfence-rootfs; } 2>/dev/null ;;
    exec:*)
      sf_token=
      { IFS= read -r sf_token </.stepfence-rootfs; } 2>/dev/null
      [ -n "$sf_token" ] || sf_refuse half-made-rootfs "it has no mark of a finished creation"
      [ "$sf_token" = "${sf_rootfs#exec:}" ] || sf_refuse wrong-rootfs "it was made by another creation"
      ;;
  esac
  if [ -n "$sf_workdir" ]; then
    cd -- "$sf_workdir" 2>/dev/null || sf_refuse workdir-missing "$sf_workdir"
  fi
  { command : >>"$sf_dir/record.$sf_task"; } 2>/dev/null || sf_refuse record-failed "$sf_dir"
  exec 8>>"$sf_dir/record.$sf_task" 9<"$sf_dir"
  # The shell's own words about a killed child are not the command's stderr.
  exec 2>/dev/null

  # ---- the command ------------------------------------------------------------------------------------------
  sf_rc=0
  if [ "$sf_isolation" != none ]; then
    # isolate.c does in one program what takes six below, where it was built for this machine and may be started here.
    sf_machine=
    read -r sf_machine </proc/sys/kernel/arch || sf_machine=$(uname -m)
    sf_program=${sf_dir%/*}/isolate-$sf_machine
    if [ -x "$sf_program" ]; then
      if [ "$sf_uid" = 0 ]; then
        sf_isolate full "$@"
        sf_isolate root-userns "$@"
      else
        sf_isolate userns "$@"
      fi
    fi
  fi
  sf_is_over || sf_start_watch
  if [ "$sf_isolation" != none ] && ! sf_is_over && command -v unshare >/dev/null; then
    if [ "$sf_uid" = 0 ]; then
      command -v setpriv >/dev/null && sf_try full '' "$sf_setpriv" "$@"
      sf_try full '' 'unshare --user --map-root-user' "$@"
    else
      sf_try userns "$sf_root" "unshare --user --map-user=$sf_uid --map-group=$sf_gid" "$@"
      command -v setpriv >/dev/null && sf_try root-userns "$sf_root" "$sf_setpriv" "$@"
    fi
    sf_try root-userns "$sf_root" 'unshare --user --map-root-user' "$@"
  fi
  if [ "$sf_isolation" = require ]; then
    sf_is_over || sf_refuse no-isolation "no way of unshare works here"
  fi
  if ! sf_is_over; then
    # What outlives its command here would write into the output of the next one.
    [ -z "$sf_serves" ] || sf_files=1
    set -- /bin/sh -c "$sf_inner" stepfence none "$sf_task" "$sf_attempt" "$sf_stdin" "$sf_merge" "$sf_files"
    if [ "$sf_end" = - ]; then
      # The command could read what this shell has not read yet.
      IFS= LC_ALL=C read -r sf_one && sf_read_end || sf_refuse request-torn "no whole request on stdin"
      printf '%s\n' "$sf_one" | "$@"
    else
      "$@"
    fi
    sf_rc=$?
  fi
  sf_end_watch
  [ "$sf_rc" != 93 ] || exit 93

  # ---- how it ended -----------------------------------------------------------------------------------------
  sf_read_end || exit 1 # whoever could be told is gone
  sf_read_record
  sf_limit=0
  [ ! -e "$sf_dir/limit.$sf_task" ] || sf_limit=1
  sf_survivors=-
  if [ "$sf_mode" = none ]; then
    set +f
    sf_pids=
    command -v grep >/dev/null || sf_pids=,unknown
    # shellcheck disable=SC2013 # paths of pids have no blanks
    for sf_one in $(grep -lzxF "STEPFENCE_ATTEMPT=$sf_attempt" /proc/[0-9]*/environ); do
      sf_one=${sf_one#/proc/}
      sf_pids="$sf_pids,${sf_one%/environ}"
    done
    [ -z "$sf_pids" ] || sf_survivors=${sf_pids#,}
  fi
  # The reader of the streams may be gone: `finished` is written all the same.
  trap '' PIPE
  printf 'stepfence-end %s %s %s %s %s %s\n' "$sf_end" "$sf_task" "$sf_exit" "$sf_limit" "${sf_mode:--}" "$sf_survivors"
  printf 'stepfence-end %s %s %s %s %s %s\n' "$sf_end" "$sf_task" "$sf_exit" "$sf_limit" "${sf_mode:--}" "$sf_survivors" >&4
  printf '%s %s %s %s\n' "$sf_end" "$sf_exit" "$sf_limit" "$sf_end" >"$sf_dir/finished.$sf_task"
  exit 0
}

# ---- one command, or a session of them ------------------------------------------------------------------------
case $sf_task in *[!0-9]* | 0?*) sf_refuse wrong-task "SLURM_PROCID is $sf_task" ;; esac
if [ -z "$sf_serves" ]; then
  [ -n "$sf_line" ] || IFS= LC_ALL=C read -r sf_line || sf_refuse request-torn "no whole request on stdin"
  sf_serve
fi

sf_ask_sleep
# A request that is refused leaves its second line behind, and the runner sends empty lines that nobody reads.
while IFS= LC_ALL=C read -r sf_line; do
  case $sf_line in 'sf1 '*) ;; *) continue ;; esac
  # In a process of its own: whatever becomes of it, the next one finds this shell as it was.
  (
    read -r sf_shell sf_rest </proc/self/stat
    sf_serve
  )
  sf_rc=$?
  case $sf_rc in 0 | 93) continue ;; esac
  # It was killed. Its words are taken apart without evaluating them.
  sf_end=${sf_line#*\'}
  sf_task=${sf_end#*\' \'}
  sf_end=${sf_end%%\'*} sf_task=${sf_task%%\'*}
  if [ -e "$sf_dir/status.$sf_task" ]; then
    printf 'stepfence-end %s %s - 0 - -\n' "$sf_end" "$sf_task"
    printf 'stepfence-end %s %s - 0 - -\n' "$sf_end" "$sf_task" >&4
  else
    printf 'stepfence-refused %s %s shell-lost status %s\n' "$sf_end" "$sf_task" "$sf_rc" >&4
  fi
done
exit 0
