# Watches over one process and one folder for a program that may die at any
# instruction. Arguments: the folder ("" for none).
#
# Input, one command a line:
#   watch PID START SIGNAL   the process to end, its start time in clock ticks
#                            (a process id alone may have been given to another
#                            process by now) and the signal that ends it well
#   forget                   that process is gone
#   keep                     the folder is not ours
#
# End of input means that the program is gone, or has cleaned up itself; then
# there is nothing left to do here.
trap '' HUP INT TERM
dir=$1 pid= start= sig=
while read -r verb a b c; do
	case $verb in
	watch) pid=$a start=$b sig=$c ;;
	forget) pid= ;;
	keep) dir= ;;
	esac
done

# A zombie counts as gone: in a container its new parent may never reap it.
alive() {
	IFS= read -r stat <"/proc/$pid/stat" || return 1
	set -- ${stat##*) }
	[ "$1" != Z ] && [ "${20}" = "$start" ]
}

# PostgreSQL's backends leave their parent's process group, so they are found
# by their parent.
children() {
	for f in /proc/[0-9]*/stat; do
		IFS= read -r stat <"$f" || continue
		child=${stat%% *}
		set -- ${stat##*) }
		[ "$2" = "$pid" ] && echo "$child"
	done
}

if [ -n "$pid" ]; then
	if alive; then
		kids=$(children)
		kill -s "$sig" "$pid"
		# A stopped process takes no signal but SIGKILL before it goes on.
		for p in $kids $pid; do kill -s CONT "$p"; done
		n=0
		while alive && [ $n -lt 60 ]; do sleep 0.05; n=$((n + 1)); done
		if alive; then
			for p in $pid $(children) $kids; do kill -s KILL "$p"; done
		fi
	fi
	# What it forked into its own group, such as Redis rewriting its log.
	kill -s KILL -- "-$pid"
fi

[ -n "$dir" ] || exit 0

# A PostgreSQL that was killed leaves a System V segment behind, named in the
# seventh line of this file.
if [ -r "$dir/data/postmaster.pid" ]; then
	n=0 shm=
	while read -r a b; do
		n=$((n + 1))
		[ $n -eq 7 ] && shm=$b
	done <"$dir/data/postmaster.pid"
	[ -n "$shm" ] && ipcrm -m "$shm"
fi

# Repeated, since a process that is just dying may still write.
n=0
while [ -e "$dir" ] && [ $n -lt 100 ]; do
	rm -rf -- "$dir"
	[ -e "$dir" ] && sleep 0.05
	n=$((n + 1))
done
exit 0
