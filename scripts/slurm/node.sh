#!/usr/bin/env bash
# Runs torchrun over the GPUs of one node. srun starts it once per node: node.sh HEAD-NODE OTHER-NODE OVERRIDE...
#
# torchrun kills its ranks 30 seconds after it receives a signal, and a save may take longer. So torchrun is started with
# the signal ignored, and this script sends it to the ranks, once a second, so that a rank that is starting gets it too
# (ranks ignore it before they handle it, and after). They save and exit 0, and torchrun ends as after any other run.
# The restart count gives a requeued job a new rendezvous.
set -euo pipefail
head=$1 other=$2
shift 2

# gloo uses the interface to which the node's name resolves, which is the loopback on many systems. This finds the one
# that reaches the other nodes. NCCL finds it by itself.
interface() {
    local named=${NCCL_SOCKET_IFNAME:-} address
    if [ -n "$named" ] && [ -e "/sys/class/net/${named#=}" ]; then
        echo "${named#=}"
        return
    fi
    ((SLURM_NODEID)) && address=$head || address=$other
    address=$(getent ahosts "$address" | awk 'NR == 1 { print $1 }')
    ip -o route get "$address" | sed -n 's/.* dev \([^ ]*\).*/\1/p'
}
if [ "$SLURM_NNODES" -gt 1 ] && [ -z "${GLOO_SOCKET_IFNAME:-}" ]; then
    GLOO_SOCKET_IFNAME=$(interface || true)
    if [ -n "$GLOO_SOCKET_IFNAME" ]; then
        export GLOO_SOCKET_IFNAME
    else
        echo "no interface found that leads to other nodes: GLOO_SOCKET_IFNAME=... names one, if gloo does not connect" >&2
        unset GLOO_SOCKET_IFNAME
    fi
fi
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
