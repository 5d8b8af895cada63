node=$((VM_GUEST - 1))
# After how long a path counts as silent. The default, 1 s, passes here too where cores are few.
silence=30s

# The guests reach each other, so their ranks need a secret.
export PUSHGATE_SECRET='the secret of two guests'

# Starts the bench allreduce over both guests, one rank in each.
start() {
    run 120 "$BIN_PUSHGATE" bench allreduce --json --out-of-place --device cpu --path-timeout "$silence" --iters 1 --warmup 0 \
        --ranks 2 --nodes 2 --node "$node" --rendezvous 10.9.9.1:7000 "$@"
}

# Checks that node 0 has the result, over this transport, and that both have an exit code.
right_over() {
    [ "$node" = 1 ] || verified "$1"
    [ "$code" = 0 ] || fail "exit code $code"
}

# Without a choice two hosts with RDMA devices take RDMA.
together auto
PUSHGATE_LOG=info start --size 64K --ib-dev rxen0 --ack-timeout 20
right_over verbs
says "queue pairs with rank $((1 - node)) are verbs: both ends have an RDMA device"

# What the kernel sends out of the payload's own memory, and what it copies, as its notices say.
for io in socket io-uring; do
    together "copies-$io"
    PUSHGATE_LOG=info start --qp tcp --tcp-io "$io" --size 4M --slice 512K --window-size 4M
    right_over tcp
done
grep -qE 'io_uring sent [1-9][0-9]* bytes out of their memory' /tmp/err || fail "no send was without a copy"
# Over loopback the kernel copies whatever it is asked for, and must say so: else its notices mean nothing.
together loopback
PUSHGATE_LOG=info run 120 "$BIN_PUSHGATE" bench allreduce --json --out-of-place --device cpu --path-timeout "$silence" --iters 1 --warmup 0 \
    --ranks 2 --qp tcp --tcp-io io-uring --size 4M --slice 512K --window-size 4M
verified tcp
says 'io_uring sent 0 bytes out of their memory'
! grep -qE 'io_uring sent [1-9][0-9]* bytes out of their memory' /tmp/err || fail "the kernel claims to copy nothing over loopback"

# A far peer behind a cable that loses packets.
tc qdisc add dev n0 root netem delay 50ms loss 1%
together far
start --qp tcp --size 1M
right_over tcp
[ "$node" = 1 ] || echo "1 MiB over 50 ms each way and 1 % loss: $(grep -o '"time_us":[0-9.]*' /tmp/out) us"
together near
tc qdisc delete dev n0 root
