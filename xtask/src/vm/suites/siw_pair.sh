# One link has one RDMA device at a time: of two, rdma_cm takes the one that was made first.
without rxen0
siw siwn0 n0

together demonstration
run 120 "$BIN_PUSHGATE" bench allreduce --json --out-of-place --device cpu --qp verbs --ib-dev siwn0 --ranks 4 --nodes 2 --node "$((VM_GUEST - 1))" \
    --rendezvous 10.9.9.1:7000 --size 1M --iters 1 --warmup 0
[ "$code" = 0 ] || fail "exit code $code"
[ "$VM_GUEST" = 2 ] || is_right verbs

chaos_of_two iwarp 20 --qp verbs --ib-dev siwn0 --seed 336

together done
without siwn0
rxe rxen0 n0
