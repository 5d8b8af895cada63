# The device outside of the machine: runs the same kernels on this host's DEVICE, and stores into the file
# that is a BAR in the guest. BELL=0 means without the doorbell.
bell=
[ "$ASK_BELL" = 0 ] || bell="--bell-fd $BELL_0"
export PUSHGATE_DEVICE="$DEVICE" PUSHGATE_TIMEOUT=$((30000 * ASK_PATIENCE))
# Unquoted: two words or none.
exec timeout -k 2 $((60 * ASK_PATIENCE)) "$EXAMPLE_OUTSIDE" --role device --threads "$THREADS" --memory "$RUN/ivshmem-shared" \
    --offset "$ASK_OFFSET" --count "$ASK_COUNT" --bytes "$ASK_BYTES" --bursts "$ASK_BURSTS" $bell
