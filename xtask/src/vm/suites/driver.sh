# Tests the kernel module: its calls, and the bench allreduce over the windows that it provides.
load
# A path that is silent because a host of few cores is busy is no fault.
export PUSHGATE_PATH_TIMEOUT=30s
# Some tests below act as another user.
chmod 666 /dev/pushgate*

# Four ranks, each with a window to either neighbour: eight slices of the first BAR.
for window in staging bar; do
    for imm in --no-imm=false --no-imm; do
        right rxe0 --ranks 4 --size 1M --iters 1 "$imm" --window "$window" --window-size 256K
        last=$(tail -n 1 /tmp/out)
        case $last in *"\"window\":\"$window\","*) ;; *) fail "the window was another" ;; esac
        # Soft-RoCE can't register a BAR, so its payload is copied on the way; that of staging is not.
        case $window$last in
            staging*'"bounced":0,'*) ;;
            bar*'"bounced":0,'*) fail "who sent out of a BAR?" ;;
            staging*) fail "payload in staging was copied" ;;
        esac
    done
done
# What is impossible is refused with a reason.
run 60 "$BIN_PUSHGATE" bench allreduce --device cpu --qp verbs --ib-dev rxe0 --ranks 2 --size 64K \
    --window bar --window-dev /dev/pushgate9
[ "$code" != 0 ] || fail "a window of a device that is not there"
says '/dev/pushgate9'
run 60 "$BIN_PUSHGATE" bench allreduce --device cpu --qp verbs --ib-dev rxe0 --ranks 2 --size 64K \
    --window bar --window-size 8M
[ "$code" != 0 ] || fail "a window larger than the BAR"
says 'a bar window of 8388608 bytes'
run 60 "$BIN_PUSHGATE" bench allreduce --device cpu --ranks 2 --size 64K --window bar
[ "$code" = 2 ] || fail "exit code $code"
says 'expected memory or staging with qp = local'

# Windows of the module between ranks of one host: the peer, or the peer's proxy, maps a view. Proxies and ranks are killed
# under them. The areas of killed ranks go at once, because the tests below count areas.
for proxy in process thread; do
    (
        unset PUSHGATE_QP PUSHGATE_IB_DEV
        run 200 "$BIN_PUSHGATE" chaos --json --seconds 6 --every 400ms --seed 7 --device cpu --qp local \
            --window staging --staging-ttl 1ms --proxy "$proxy"
        [ "$code" = 0 ] || fail "chaos over staging with proxy = $proxy"
        last=$(tail -n 1 /tmp/out)
        for word in '"lost":0,' '"doubled":0,' '"wrong":0}'; do
            case $last in *"$word"*) ;; *) fail "its last line has no $word" ;; esac
        done
        case $last in *'"recovered":0,'*) fail "nothing was recovered" ;; esac
    ) || exit 1
done

before=$(rnr rxe0)
# The proxy sleeps at the beginning of each burst and is woken by the interrupt; by chance it may be awake for
# one burst.
outside 64 16384 8 1
[ "$interrupts" -ge 4 ] || fail "$interrupts interrupts woke the proxy in 8 bursts"
outside 8 65536 4 0
[ "$interrupts" = 0 ] || fail "$interrupts interrupts without a ring"
[ "$(rnr rxe0)" = "$before" ] || fail "RNR counters went from $before to $(rnr rxe0)"
unset PUSHGATE_DEVICE PUSHGATE_QP PUSHGATE_IB_DEV PUSHGATE_TIMEOUT

status=0 RUST_BACKTRACE=0
# Each test in a process of its own, because what a process has mapped is kept from others as long as it
# lives.
for test in $("$TEST_DRIVER" --list | sed -n 's/: test$//p'); do
    [ "$test" != role ] || continue
    "$TEST_DRIVER" --exact "$test" --ignored --nocapture >/tmp/said 2>&1 || status=$?
    cat /tmp/said
    grep -q '^test result: ok. 1 passed' /tmp/said || status=1
done
dmesg_is_clean
exit "$status"
