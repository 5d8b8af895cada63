#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# Starts ranks of this host, and ends them after five minutes at the latest: run.sh ddp [RANKS], run.sh moe
# [RANKS [OPTION OF moe.py ...]], or run.sh push
# The Python in the path has torch and pushgate. torchrun is started as a module, so that this Python runs the ranks too.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
what=${1:-ddp}
case "$what" in
ddp)
    set -- "${2:-2}" "$here/ddp.py"
    ;;
moe)
    # NCCL's device API over the plugin.
    export NCCL_GIN_TYPE=2
    ranks=${2:-2}
    shift "$(($# < 2 ? $# : 2))"
    set -- "$ranks" "$here/moe.py" "$@"
    ;;
push) exec timeout --kill-after=10 300 python3 -m torch.distributed.run --standalone --nproc-per-node 2 "$here/push.py" ;;
*)
    echo "usage: run.sh ddp [RANKS] | run.sh moe [RANKS [OPTION OF moe.py ...]] | run.sh push" >&2
    exit 2
    ;;
esac
ranks=$1
shift
eval "$(python3 -m pushgate env)"
# NCCL uses a network between GPUs of one host only if it takes the ranks for ranks of different hosts.
exec timeout --kill-after=10 300 python3 -m torch.distributed.run --standalone --nproc-per-node "$ranks" --no-python \
    sh -c 'NCCL_HOSTID=rank$RANK exec python3 "$0" "$@"' "$@"
