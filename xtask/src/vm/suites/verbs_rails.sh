# Two soft-RoCE devices on links of their own, as rails of each queue pair.
for n in 0 1; do
    dummy "r$n" "10.9.2$n.1/24" && rxe "rxer$n" "r$n" || fail "no device rxer$n"
done

rails() {
    run 240 "$BIN_PUSHGATE" bench allreduce --json --out-of-place --device cpu --qp verbs --ib-dev "$@"
}

# carried BEFORE0 BEFORE1: prints what each device has sent since.
carried() {
    echo "-- packets: rxer0 $(($(counter rxer0 sent_pkts) - $1)), rxer1 $(($(counter rxer1 sent_pkts) - $2))"
}

for imm in --no-imm=false --no-imm; do
    a=$(counter rxer0 sent_pkts) b=$(counter rxer1 sent_pkts)
    rails rxer0,rxer1 --ranks 2 --size 1M --iters 2 "$imm"
    verified
    carried "$a" "$b"
    [ "$(counter rxer0 sent_pkts)" -gt $((a + 100)) ] || fail "rxer0 carries nothing"
    [ "$(counter rxer1 sent_pkts)" -gt $((b + 100)) ] || fail "rxer1 carries nothing"
done
# By their place: on a host without a GPU all devices with an active port, rxe0 among them.
a=$(counter rxer0 sent_pkts) b=$(counter rxer1 sent_pkts)
PUSHGATE_LOG=info rails near --ranks 2 --size 1M --iters 2
verified
says 'RDMA devices near the GPU: '
[ "$(counter rxer0 sent_pkts)" -gt $((a + 100)) ] || fail "rxer0 carries nothing"
[ "$(counter rxer1 sent_pkts)" -gt $((b + 100)) ] || fail "rxer1 carries nothing"
# Receivers that post late, and then practically one receive at a time.
rails rxer0,rxer1 --ranks 3 --size 128K --iters 1 --receives 2 --slice 4K --late-ms 30
verified
stalled

# A rail's port goes down in the middle of a run: the other rail carries the rest.
falls() {
    until [ "$(counter rxer1 sent_pkts)" -gt "$1" ]; do sleep 0.1; done
    ip link set r1 down
    counter rxer1 sent_pkts >/tmp/down
}
falls $(($(counter rxer1 sent_pkts) + 2000)) &
PUSHGATE_LOG=info rails rxer0,rxer1 --ranks 2 --size 256K --iters 70
verified
[ -s /tmp/down ] || fail "the run ended before the port went down"
says 'a rail broke'
[ "$(counter rxer1 sent_pkts)" = "$(cat /tmp/down)" ] || fail "packets over a port that is down"

# It comes up again with another address: the rail comes back by itself.
ip link set r1 up
falls_and_comes_back() {
    falls "$1"
    until [ "$(counter rxer0 sent_pkts)" -gt "$2" ]; do sleep 0.1; done
    ip address delete 10.9.21.1/24 dev r1
    ip address add 10.9.31.1/24 dev r1
    ip link set r1 up
    now >/tmp/up
}
rm -f /tmp/up
falls_and_comes_back $(($(counter rxer1 sent_pkts) + 2000)) $(($(counter rxer0 sent_pkts) + 5000)) &
PUSHGATE_LOG=info rails rxer0,rxer1 --ranks 2 --size 256K --iters 150
verified
[ -s /tmp/up ] || fail "the run ended before the port came up"
says 'the rail carries again'
after=$(($(counter rxer1 sent_pkts) - $(cat /tmp/down)))
echo "-- rxer1 sent $after packets after its return"
[ "$after" -gt 500 ] || fail "the rail that came back carries nothing"

# A port that is down at the start: the ranks start over the other device, and take this one when its port comes up.
ip link set r1 down
comes_up() {
    until [ "$(counter rxer0 sent_pkts)" -gt "$1" ]; do sleep 0.1; done
    ip link set r1 up
    counter rxer1 sent_pkts >/tmp/up
}
rm -f /tmp/up
before=$(counter rxer1 sent_pkts)
comes_up $(($(counter rxer0 sent_pkts) + 3000)) &
PUSHGATE_LOG=info rails rxer0,rxer1 --ranks 2 --size 256K --iters 120
verified
[ -s /tmp/up ] || fail "the run ended before the port came up"
[ "$(cat /tmp/up)" = "$before" ] || fail "packets over a port that is down"
# Once for each of two processes.
[ "$(grep -c 'the port is down: queue pairs start over the other devices' /tmp/err)" -le 2 ] || fail "it says too often that the port is down"
says 'the port is down: queue pairs start over the other devices'
says 'the rail carries again'
after=$(($(counter rxer1 sent_pkts) - before))
echo "-- rxer1 sent $after packets after its start"
[ "$after" -gt 500 ] || fail "the rail whose port came up carries nothing"
# The first device of the list is the one whose port is down; then those of both are, or no rail could come back.
ip link set r1 down
rails rxer1,rxer0 --ranks 2 --size 64K --iters 2
verified
rails rxer1,rxer0 --ranks 2 --size 64K --iters 2 --recover 0
[ "$code" != 0 ] || fail "a rail that nothing brings back"
says 'rxer1'
ip link set r0 down
rails rxer1,rxer0 --ranks 2 --size 64K --iters 2
[ "$code" != 0 ] || fail "two ports that are down"
says 'rxer1'
ip link set r0 up
ip link set r1 up

# Chaos over two cables: it breaks the links of one rail and the other, sets one cable down at a time, and has it lose packets.
for n in 0 1; do
    cable "ca$n" "cb$n" "10.9.4$n.1/24" "10.9.4$n.2/24" && rxe "rxea$n" "ca$n" && rxe "rxeb$n" "cb$n" || fail "no cable $n"
done
PUSHGATE_QP=verbs PUSHGATE_TIMEOUT=$(stretched 120000) PUSHGATE_RECOVER=$(stretched 60000) PUSHGATE_PATH_TIMEOUT=$(stretched 1000) \
    run 300 "$BIN_PUSHGATE" chaos --json --seconds 12 --every 500ms --seed 33 --device cpu --link ca0,cb1 --ack-timeout 20 \
    --rank-ib-dev rxea0,rxea1 --rank-ib-dev rxeb0,rxeb1
[ "$code" = 0 ] || fail "chaos over two rails"
last=$(tail -n 1 /tmp/out)
for word in '"lost":0,' '"doubled":0,' '"wrong":0}' '"link-down":'; do
    case $last in *"$word"*) ;; *) fail "its last line has no $word" ;; esac
done

# A list that one end does not have, and names that are not there.
rails rxer0,nosuch --ranks 2 --size 64K --iters 1
[ "$code" != 0 ] || fail "a device that is not there"
says 'RDMA device nosuch is not there'

for n in 0 1; do
    timeout "$(stretched 60)" rdma link delete "rxer$n" || fail "rxer$n can't be removed"
    timeout "$(stretched 60)" ip link delete "r$n" || fail "r$n can't be removed"
done
