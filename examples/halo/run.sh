#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# Starts ranks of this host, and ends them after five minutes at the latest: run.sh [./halo] [RANKS]
# HALO_CELLS (along each edge of a rank's cube), HALO_STEPS and HALO_BLOCKS choose the work.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec timeout --kill-after=10 300 pushgate run -n "${2:-2}" -- "${1:-./halo}" "$here/halo.cu"
