# What the scripts of suites may use. VM_SUITE names the one that runs.

# Waits until the other guest has come to the same point; fails if it has ended the suite already.
together() {
    : >"/run/both/$VM_SUITE.$1.$VM_GUEST"
    until [ -e "/run/both/$VM_SUITE.$1.$((3 - VM_GUEST))" ]; do
        if [ -e "/run/share/$((3 - VM_GUEST))/suite-$VM_SUITE" ]; then
            echo "the other guest has ended before it came to: $1" >&2
            return 1
        fi
        sleep 0.05
    done
}

# Waits until something listens on a TCP port of this guest, ten seconds at most.
listening() {
    tries=0
    until ss -Hltn "sport = :$1" | grep -q .; do
        tries=$((tries + 1))
        if [ "$tries" -gt 100 ]; then
            echo "nothing listens on port $1" >&2
            return 1
        fi
        sleep 0.1
    done
}
