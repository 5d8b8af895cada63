# Functions for the scripts of suites. VM_SUITE names the suite that runs. VM_PATIENCE, a whole number, is the
# factor by which the host stretches time limits. Limits here guard against a hang unless a comment says
# otherwise.
: "${VM_PATIENCE:=1}"

# Records over RDMA wait for their payload, as over adapters that may place WRITEs in any order. The suite `verbs` takes the way of
# soft-RoCE, whose WRITEs stay in order; so do the endpoint's tests through rdma_cm, and those of iWARP. (`doctor` names the setting.)
case ${VM_SUITE:-} in
    verbs | verbs-cm | siw* | doctor) ;;
    *) export PUSHGATE_WRITE_ORDER=wait ;;
esac

# stretched SECONDS: this many seconds, stretched for this machine.
stretched() {
    echo $(($1 * VM_PATIENCE))
}

# within SECONDS WHAT COMMAND...: waits until the command succeeds; otherwise fails and names WHAT.
within() {
    read -r up _ </proc/uptime
    end=$((${up%.*} + $(stretched "$1"))) awaited=$2
    shift 2
    until "$@"; do
        read -r up _ </proc/uptime
        if [ "${up%.*}" -ge "$end" ]; then
            echo "$awaited" >&2
            return 1
        fi
        sleep 0.05
    done
}

# Makes a link that leads nowhere, for RDMA within this guest: its name, its address.
dummy() {
    ip link add "$1" mtu 4200 type dummy && ip address add "$2" dev "$1" && ip link set "$1" up
}

# Makes a cable, two links whose packets really go from one to the other: their names and their addresses, with masks, in one
# subnet of their own. Between two RDMA devices over them nothing is short-cut, as it is within one device.
cable() {
    ip link add "$1" mtu 4200 type veth peer name "$2" mtu 4200 || return 1
    echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
    for end in "$1" "$2"; do
        # Each end belongs to this guest, so packets come in with an address of this guest as sender.
        echo 1 >"/proc/sys/net/ipv4/conf/$end/accept_local"
        echo 0 >"/proc/sys/net/ipv4/conf/$end/rp_filter"
    done
    ip address add "$3" dev "$1" && ip address add "$4" dev "$2" && ip link set "$1" up && ip link set "$2" up
}

# Makes a soft-RoCE device over a link, and waits until the link's address shows as a GID.
rxe() {
    rdma link add "$1" type rxe netdev "$2" || return 1
    within 60 "$1 has got no GID of the address of $2" \
        grep -qs '[1-9a-f]' "/sys/class/infiniband/$1/ports/1/gids/1"
}

# Makes a device of software iWARP over a link that has an address: its name, the link. The suite's field `siw` of suites.rs has
# the module built. A link has one RDMA device: of two, rdma_cm takes the one that was made first, so siw gets a
# link of its own (`dummy`), or the link of a device that is taken away before (`without`).
siw() {
    if [ ! -e /sys/module/siw ]; then
        modprobe -a iw_cm libcrc32c && insmod "$SIW_DIR/siw.ko" || return 1
    fi
    rdma link add "$1" type siw netdev "$2" || return 1
    within 60 "the port of $1 is not active" grep -qs ACTIVE "/sys/class/infiniband/$1/ports/1/state"
}

# Takes away an RDMA device, which waits until no process uses it, and the links named after it.
without() {
    rdma link delete "$1" || return 1
    shift
    for link in "$@"; do ip link delete "$link" || return 1; done
}

# Waits until the other guest has reached the same point; fails if that guest has ended the suite already.
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

# Waits until a process listens on a TCP port of this guest.
listening() {
    within 60 "nothing listens on port $1" listens "$1"
}
listens() {
    ss -Hltn "sport = :$1" | grep -q .
}

# Has the host run the suite's host script, with numbers for it as NAME=NUMBER. Returns the script's exit
# status once it has ended; its output is in /run/out/host.txt.
on_host() {
    rm -f /run/out/answer
    printf '%s\n' "$@" >/run/out/ask.part
    mv /run/out/ask.part /run/out/ask
    until [ -e /run/out/answer ]; do sleep 0.05; done
    return "$(cat /run/out/answer)"
}
