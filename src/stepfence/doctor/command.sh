# shellcheck shell=sh
# A command as any other, in the isolation that any other gets: it tells what it is able to do to its fence. Its words
# are the directories it must not see. It writes lines "KEY VALUE", the last of them "done".

unset IFS

# Inside a PID namespace of our own we are a child of its first process; only there an unmount hurts nobody.
dc_own=no
[ "$PPID" != 1 ] || dc_own=yes

dc_sees() { # whether directory $1 has entries
  for dc_entry in "$1"/*; do
    [ ! -e "$dc_entry" ] || return 0
  done
  return 1
}

dc_tell() { # $1 when, $2 directory
  dc_sees "$2" && printf 'sees %s %s\n' "$1" "$2"
  if { command : >"$2/doctor-was-here"; } 2>/dev/null; then
    printf 'writes %s %s\n' "$1" "$2"
  fi
}

for dc_path; do
  [ -d "$dc_path" ] || continue
  printf 'path %s\n' "$dc_path"
  dc_tell plainly "$dc_path"
  if [ "$dc_own" = yes ]; then
    for dc_process in /proc/[0-9]*; do
      ! dc_sees "$dc_process/root$dc_path" || printf 'sees proc %s\n' "$dc_path"
    done
    if umount "$dc_path" 2>/dev/null; then
      printf 'uncovered %s\n' "$dc_path"
      dc_tell uncovered "$dc_path"
    fi
  fi
done
for dc_tool in unshare setpriv mount sleep timeout grep; do
  command -v "$dc_tool" >/dev/null && printf 'tool %s\n' "$dc_tool"
done
sleep 0.01 2>/dev/null && echo 'tool fractions'
while read -r _ _ _ dc_root dc_point _; do
  [ "$dc_point" != / ] || printf 'rootfs %s\n' "$dc_root"
done </proc/self/mountinfo
printf 'user %s\n' "$(id -u 2>/dev/null)"
echo 'done'
exit 0
