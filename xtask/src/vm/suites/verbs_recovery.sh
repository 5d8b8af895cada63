# Four seconds until a packet is sent again: the default, 67 ms, passes without any loss where cores are few.
export PUSHGATE_QP=verbs PUSHGATE_IB_DEV=rxe0 PUSHGATE_ACK_TIMEOUT=20 PUSHGATE_PATH_TIMEOUT=30s
# An emulated machine takes seconds to register memory: the limit is not the subject.
export PUSHGATE_TIMEOUT=$(stretched 120000) PUSHGATE_RECOVER=$(stretched 60000)

# With a rendezvous the ranks' sockets are those of ranks of two hosts: they are reset, too.
before=$(counter rxe0 sent_pkts)
for how in '--no-imm=false --rendezvous=127.0.0.1:7000' --no-imm; do
    # shellcheck disable=SC2086 # several words
    run 300 "$BIN_PUSHGATE" chaos --json --seconds 12 --every 1s --seed 64 --device cpu $how
    [ "$code" = 0 ] || fail "chaos over rxe0, $how"
    last=$(tail -n 1 /tmp/out)
    for word in '"lost":0,' '"doubled":0,' '"wrong":0}'; do
        case $last in *"$word"*) ;; *) fail "its last line has no $word" ;; esac
    done
    case $last in *'"recovered":0,'*) fail "no link was replaced" ;; esac
done

run 900 "$TEST_NCCL" --ignored --test-threads 1 recovering::
[ "$code" = 0 ] || fail "the plugin over rxe0"
grep -q 'test result: ok. 2 passed' /tmp/out || fail "the tests did not run"
sleep 0.05
[ "$(counter rxe0 sent_pkts)" -gt $((before + 1000)) ] || fail "nothing went over rxe0"
! dmesg | grep -E 'BUG|Oops|WARNING:|blocked for more than' || fail "the kernel complains"
