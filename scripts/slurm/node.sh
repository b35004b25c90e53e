#!/usr/bin/env bash
# One node's part of a job: torchrun over its GPUs. Started by srun, once a node: node.sh HEAD-NODE OVERRIDE...
#
# torchrun kills its ranks 30 seconds after it has received a signal, and a save may take longer. So it is started deaf,
# and the signal goes to the ranks from here: once a second, so that one which is just starting hears it too (they are
# deaf as well before they listen, and after it). They save and exit 0, and torchrun ends as after any other run.
# The restart count makes the rendezvous of a requeued job a new one.
set -euo pipefail
head=$1
shift
(
    trap '' USR1 USR2 TERM
    exec torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" --max-restarts=3 \
        --rdzv-backend=c10d --rdzv-endpoint="$head:$((29500 + SLURM_JOB_ID % 1000))" \
        --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-conf="is_host=$((SLURM_NODEID == 0))" \
        --local-addr="$SLURMD_NODENAME" --signals-to-handle=SIGINT train.py "$@"
) &
launcher=$!
signal=""
trap 'signal=USR1' USR1
trap 'signal=USR2' USR2
trap 'signal=TERM' TERM
while kill -0 "$launcher" 2>/dev/null; do
    [ -z "$signal" ] || pkill "-$signal" -P "$launcher" || true  # its children: the ranks
    sleep 1 || true
done
wait "$launcher"
