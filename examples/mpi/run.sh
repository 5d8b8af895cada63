#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# Starts ranks by Open MPI, and ends them after two minutes at the latest: run.sh [./ring] [RANKS] [OPTION OF MPIRUN ...]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
program=${1:-./ring}
ranks=${2:-2}
[ $# -lt 2 ] || shift
[ $# -lt 1 ] || shift
# Ranks need cores for the threads of the engine: mpirun would bind each to one core.
exec timeout --kill-after=10 120 mpirun -n "$ranks" --bind-to none "$@" "$program" "$here/ring.cu"
