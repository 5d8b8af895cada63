# One job of two hosts: each starts its rank, and makes faults to its own rank, sockets and port alone.
export PUSHGATE_SECRET='the secret of two guests'
# As in the suite verbs-recovery: an emulated machine takes seconds to register memory.
export PUSHGATE_TIMEOUT=$(stretched 120000) PUSHGATE_RECOVER=$(stretched 60000) PUSHGATE_PATH_TIMEOUT=$(stretched 1000)

# chaos_of_two NAME SECONDS ARGUMENT...
chaos_of_two() {
    together "$1"
    seconds=$2
    shift 2
    run 400 "$BIN_PUSHGATE" chaos --json --device cpu --rank "$((VM_GUEST - 1))" --ranks 2 --rendezvous 10.9.9.1:7000 --link n0 \
        --every 500ms --seconds "$seconds" "$@"
    [ "$code" = 0 ] || fail "chaos $*"
    last=$(tail -n 1 /tmp/out)
    # Of both hosts, as exchanged at the end; of this one; and the faults that this one made.
    all=${last#*'"all":{'}
    [ "$all" != "$last" ] || fail "its last line has nothing of all ranks"
    all=${all%%'}'*} own=${last#*'}'}
    for counts in "$all" "$own"; do
        for word in '"lost":0,' '"doubled":0,' '"wrong":0'; do
            case $counts in *"$word"*) ;; *) fail "its last line has no $word" ;; esac
        done
    done
    sent=${all#*'"sent":'} taken=${all#*'"messages":'}
    sent=${sent%%,*} taken=${taken%%,*}
    [ "$sent" = "$taken" ] && [ "$sent" -gt 100 ] || fail "$sent messages were sent and $taken taken"
    case $last in *'"faults":0,'* | *'"recovered":0,'*) fail "no fault" ;; esac
    # The cable was cut and joined again.
    case $last in *'"link-down":'*) ;; *) fail "its last line has no link-down" ;; esac
    [ "$(cat /sys/class/net/n0/carrier)" = 1 ] || fail "the link is still down"
    ! tc qdisc show dev n0 | grep netem || fail "the link still loses packets"
}
