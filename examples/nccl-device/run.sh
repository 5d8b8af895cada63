#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs kernels on NCCL's device API over pushgate, on GPUs of this host, and ends them after two minutes at the latest:
# run.sh LIBRARY [./moe] [RANKS] [OPTION OF MPIRUN ...]
set -eu
library=${1:?the path of libnccl-net-pushgate.so}
program=${2:-./moe}
ranks=${3:-2}
shift
[ $# -lt 1 ] || shift
[ $# -lt 1 ] || shift
export NCCL_NET_PLUGIN="$library" NCCL_NET=pushgate NCCL_GIN_TYPE=2
# NCCL takes each rank for a host of its own, so that its puts go through the plugin and not over NVLink. Leave that out between hosts.
exec timeout --kill-after=10 120 mpirun -n "$ranks" --bind-to none "$@" \
	sh -c 'NCCL_HOSTID=host-$OMPI_COMM_WORLD_RANK exec "$0"' "$program"
