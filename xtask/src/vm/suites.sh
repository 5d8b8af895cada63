
# suite NAME: runs a suite; its exit status and seconds are for the host. The first failure ends this machine,
# because what a failed suite leaves in the kernel (links, modules) must not reach the next suite.
suite() {
    export VM_SUITE=$1
    echo "==== $1"
    read -r start _ </proc/uptime
    code=0
    # The inner shell is the namespace's first process: it adopts orphans, and all of them end with it.
    unshare -m -p -f --mount-proc /bin/sh -c '/bin/sh -eu "/run/vm/suite-$VM_SUITE"; exit $?' || code=$?
    read -r end _ </proc/uptime
    for folder in /tmp /var/tmp /dev/shm; do
        # The repository may be mounted below one of these folders, so stay on this file system.
        find "$folder" -xdev -mindepth 1 -delete 2>/dev/null
    done
    seconds=$(awk "BEGIN { print $end - $start }")
    result=/run/share/$VM_GUEST/suite-$1
    echo "$code $seconds" >"$result.part"
    mv "$result.part" "$result"
    if [ -n "${VM_PEER_IP:-}" ]; then
        other=/run/share/$((3 - VM_GUEST))/suite-$1
        until [ -e "$other" ]; do sleep 0.05; done
        read -r others _ <"$other"
        [ "$others" = 0 ] || exit "$code"
    fi
    [ "$code" = 0 ] || exit "$code"
}
