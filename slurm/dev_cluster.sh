#!/bin/bash
# A real Slurm of virtual nodes on this machine, to try ROSE's cluster side and to test it:
#     slurm/dev_cluster.sh start|stop|status|install      then:  export SLURM_CONF=<what start prints>
#     slurm/dev_cluster.sh lose|return n1                 a node goes, with all that runs on it, as if its power failed
# slurmctld, one slurmd per node (with its own host name), slurmdbd on a private MariaDB, munge; partitions
#     train   what a training job asks for (default)
#     serve   more urgent than the others
#     spare   preemptible: its jobs are requeued when train or serve need their node
# Fake GPUs, as many per node as GPUS says, so that --gres=gpu:N and CUDA_VISIBLE_DEVICES behave as on a real node.
# Settings from the environment: FOLDER (default ~/.cache/rose/dev_cluster) NODES (4) CPUS (8, per node, more than
# there are is fine) GPUS (2) MEM (MB per node, 8000) PORT (first of about 130, 17000).
# OWNERS, for tests: process ids. When the first of these processes has ended, in whatever way, the cluster is stopped
# and FOLDER removed.
# Needs root and Debian's or Ubuntu's packages (`install` fetches them). Everything it writes and every daemon it
# starts is under FOLDER; stop ends exactly those daemons, and what their jobs have left. Not for production: for one
# machine and one user.
set -u
FOLDER=${FOLDER:-${XDG_CACHE_HOME:-$HOME/.cache}/rose/dev_cluster}
NODES=${NODES:-4} CPUS=${CPUS:-8} GPUS=${GPUS:-2} MEM=${MEM:-8000} PORT=${PORT:-17000}
PACKAGES="slurm-wlm slurm-wlm-basic-plugins slurm-client slurmdbd slurm-wlm-mysql-plugin munge mariadb-server"
PROGRAMS="munged slurmctld slurmd slurmdbd mariadbd mariadb-install-db sbatch srun sacctmgr unshare"
DEADLINE_S=300
etc=$FOLDER/etc log=$FOLDER/log run=$FOLDER/run
export SLURM_CONF=$etc/slurm.conf
PATH=$PATH:/usr/sbin:/sbin

fail() { echo "dev_cluster: $*" >&2; exit 2; }

check() {
    case $FOLDER in *[!A-Za-z0-9/._-]*) fail "FOLDER=$FOLDER: only letters, digits and / . _ - (Slurm's files know no quotes)";; esac
    [ ${#FOLDER} -le 80 ] || fail "FOLDER=$FOLDER has ${#FOLDER} characters; sockets need a path of at most 80"
    for pair in "NODES $NODES" "CPUS $CPUS" "MEM $MEM" "PORT $PORT" "GPUS $GPUS"; do
        case ${pair#* } in ''|*[!0-9]*) fail "${pair% *}=${pair#* }: a whole number";; esac
    done
    [ "$NODES" -ge 1 ] && [ "$NODES" -le 64 ] || fail "NODES=$NODES: from 1 to 64"
    for pid in ${OWNERS:-}; do
        case $pid in *[!0-9]*) fail "OWNERS=$OWNERS: process ids";; esac
        runs "$pid" || fail "OWNERS=$OWNERS: there is no process $pid"
    done
    [ "$(id -u)" = 0 ] || fail "needs root (virtual nodes have host names of their own); you are $(id -un). On a cluster you need none of this: use its Slurm."
    for program in $PROGRAMS; do
        command -v "$program" >/dev/null || fail "$program is missing; slurm/dev_cluster.sh install fetches it (Debian, Ubuntu: $PACKAGES)"
    done
}

install() {
    missing=""
    for program in $PROGRAMS; do command -v "$program" >/dev/null || missing="$missing $program"; done
    [ -z "$missing" ] && return 0
    [ "$(id -u)" = 0 ] || fail "missing:$missing. Ask for Debian's packages $PACKAGES, or run this as root"
    command -v apt-get >/dev/null || fail "missing:$missing, and there is no apt-get; install Slurm 21.08 or later, munge and MariaDB"
    echo "installing Slurm, munge and MariaDB (their services stay off)"
    policy=/usr/sbin/policy-rc.d  # tells Debian's packages not to start their daemons
    [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' > $policy; chmod +x $policy; trap "rm -f $policy" EXIT; }
    apt-get -qq update
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends -y $PACKAGES >/dev/null ||
        fail "apt-get could not install $PACKAGES"
}

runs() { grep -qsE '^State:[[:space:]]+[^ZX[:space:]]' "/proc/$1/status"; }  # PID; one that ended, and that nobody waited for, does not

alive() { [ -s "$1" ] && runs "$(cat "$1")"; }

up() { alive $run/slurmctld.pid; }

wait_for() {  # DESCRIPTION LOG COMMAND...
    local what=$1 file=$2 end=$((SECONDS + DEADLINE_S)); shift 2
    until "$@" >/dev/null 2>&1; do
        if [ $SECONDS -ge $end ]; then
            echo "dev_cluster: waited ${DEADLINE_S} s for $what; last lines of $file:" >&2
            tail -n 8 "$file" >&2
            stop
            exit 1
        fi
        sleep 0.1
    done
}

write_configuration() {
    local host; host=$(hostname -s)
    mkdir -p $etc $log $run $FOLDER/state $FOLDER/spool $FOLDER/pmix $FOLDER/dev
    chmod 755 $FOLDER $log $run
    for i in $(seq 0 $((GPUS - 1))); do
        [ -c $FOLDER/dev/gpu$i ] || mknod $FOLDER/dev/gpu$i c 1 3 || fail "mknod in $FOLDER is not allowed; set GPUS=0"
    done
    [ -s $etc/munge.key ] || (umask 077; head -c 1024 /dev/urandom > $etc/munge.key)
    local gres=""
    : > $etc/gres.conf
    if [ "$GPUS" -gt 0 ]; then
        gres="Gres=gpu:$GPUS"
        echo "NodeName=n[1-$NODES] Name=gpu File=$FOLDER/dev/gpu[0-$((GPUS - 1))]" > $etc/gres.conf
    fi
    cat > $etc/slurm.conf <<CONF
ClusterName=rose
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$((PORT + 17))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$run/munge.sock,cred_expire=5
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool/%n
SlurmctldPidFile=$run/slurmctld.pid
SlurmdPidFile=$run/slurmd-%n.pid
SlurmctldLogFile=$log/slurmctld.log
SlurmdLogFile=$log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0,bf_continue
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
MinJobAge=600
InactiveLimit=0
Waittime=0
MessageTimeout=20
SlurmdTimeout=30
JobRequeue=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePass=$run/munge.sock
AccountingStoragePort=$((PORT + 19))
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
NodeName=n[1-$NODES] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((PORT + 101))-$((PORT + 100 + NODES))] CPUs=$CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=$MEM $gres State=UNKNOWN
PartitionName=train Nodes=n[1-$NODES] Default=YES MaxTime=INFINITE PriorityTier=50 PreemptMode=OFF State=UP
PartitionName=serve Nodes=n[1-$NODES] MaxTime=INFINITE PriorityTier=100 PreemptMode=OFF State=UP
PartitionName=spare Nodes=n[1-$NODES] MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 State=UP
CONF
    echo "PMIxCliTmpDirBase=$FOLDER/pmix" > $etc/mpi.conf
    echo "CgroupAutomount=no" > $etc/cgroup.conf
    (umask 077; cat > $etc/slurmdbd.conf <<CONF
AuthType=auth/munge
AuthInfo=socket=$run/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((PORT + 19))
SlurmUser=root
LogFile=$log/slurmdbd.log
PidFile=$run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
CONF
)
}

all_idle() { [ "$(sinfo -h -N -t idle -p train 2>/dev/null | wc -l)" = "$NODES" ]; }

start() {
    check
    if up; then echo "already running:"; status; return 0; fi
    write_configuration
    trap 'stop; exit 130' INT TERM  # Ctrl-C while it starts: a half of a cluster is of no use
    [ -z "${OWNERS:-}" ] || { setsid "$0" watch $$ $OWNERS >$log/watch.log 2>&1 </dev/null & }
    # Daemons must not hold the caller's pipes: who reads our output would wait for them.
    munged --key-file=$etc/munge.key --socket=$run/munge.sock --pid-file=$run/munged.pid --log-file=$log/munged.log \
        --seed-file=$run/munged.seed --force >$log/munged.out 2>&1 </dev/null
    wait_for munged $log/munged.out munge -n -S $run/munge.sock
    if [ ! -d $FOLDER/mysql/mysql ]; then
        mkdir -p $FOLDER/mysql
        mariadb-install-db --no-defaults --user=root --datadir=$FOLDER/mysql --auth-root-authentication-method=socket \
            --skip-test-db >$log/mariadb-install.log 2>&1 </dev/null
    fi
    setsid mariadbd --no-defaults --user=root --datadir=$FOLDER/mysql --socket=$run/mysql.sock --skip-networking \
        --pid-file=$run/mariadbd.pid --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
        --innodb-flush-log-at-trx-commit=0 >$log/mariadbd.log 2>&1 </dev/null &
    wait_for mariadbd $log/mariadbd.log mariadb-admin --no-defaults -S $run/mysql.sock ping
    mariadb --no-defaults -S $run/mysql.sock -e "create database if not exists slurm_acct"
    MYSQL_UNIX_PORT=$run/mysql.sock slurmdbd >$log/slurmdbd.out 2>&1 </dev/null  # its only way to learn the socket
    wait_for slurmdbd $log/slurmdbd.log timeout 30 sacctmgr -n list cluster
    wait_for "accounts" $log/slurmdbd.log accounts
    start_controller
    wait_for slurmctld $log/slurmctld.log sh -c "scontrol ping | grep -q UP"
    namespaces || echo "no namespaces here: all nodes have this machine's host name"
    for i in $(seq 1 "$NODES"); do start_node n$i; done
    wait_for "$NODES idle nodes" $log/slurmctld.log all_idle
    status
}

accounts() {  # whose limits bind, as on a site: a job of QOS short has ten minutes, and none is taken for QOS none
    local words
    for words in "cluster rose" "account dev" "user root account=dev" "qos short set MaxWall=00:10:00" \
            "qos none set MaxSubmitJobsPerUser=0"; do
        sacctmgr -i add $words </dev/null
    done
    sacctmgr -i modify user root set qos=normal,short,none defaultqos=normal </dev/null
    sacctmgr -n show assoc user=root format=qos%60 </dev/null | grep -q short
}

start_controller() {  # with an /etc/hosts of its own that has the nodes: Slurm 24 looks for an srun's node for 10 s
    if namespaces; then
        { cat /etc/hosts; echo "127.0.0.1 $(seq -f 'n%g' -s ' ' "$NODES")"; } > $etc/hosts
        unshare -m --propagation private bash -c "mount --bind $etc/hosts /etc/hosts && exec slurmctld -i" \
            >$log/slurmctld.out 2>&1 </dev/null
    else
        slurmctld -i >$log/slurmctld.out 2>&1 </dev/null
    fi
}

namespaces() { unshare -m -u true 2>/dev/null; }

start_node() {  # NAME: its own PMIx folder, /dev/shm and host name (mount and UTS namespaces), where the kernel lets us
    mkdir -p $FOLDER/spool/$1 $FOLDER/pmix-$1
    if namespaces; then
        unshare -m -u --propagation private bash -c "mount --bind $FOLDER/pmix-$1 $FOLDER/pmix &&
            mount -t tmpfs -o mode=1777 tmpfs /dev/shm && hostname $1 && exec slurmd -N $1" >$log/slurmd-$1.out 2>&1 </dev/null
    else
        slurmd -N $1 >$log/slurmd-$1.out 2>&1 </dev/null
    fi
}

check_node() {
    check
    up || fail "the cluster is not running"
    case " $(scontrol show hostnames "n[1-$NODES]" | tr '\n' ' ')" in *" ${1:-} "*) ;; *) fail "no node '${1:-}'; there are n1 to n$NODES";; esac
}

watch() {  # STARTER OWNERS...: stop and remove the cluster when the first owner has ended
    local starter=$1 pid; shift
    echo $$ > $run/watch.pid
    while :; do
        for pid in "$@"; do runs "$pid" || break 2; done
        sleep 0.3
    done
    # The start may have ended with the owner, or it goes on, or it was killed when it had started a part.
    grep -qsz "^FOLDER=$FOLDER$" "/proc/$starter/environ" && kill -9 "$starter"
    rm -f $run/watch.pid
    stop
    rm -rf "$FOLDER" || { sleep 1; rm -rf "$FOLDER"; }  # a process that was just killed may have written once more
}

lose() {  # NAME: Slurm is told at once, and not after SlurmdTimeout
    check_node "${1:-}"
    namespaces || fail "without namespaces nobody knows what runs on $1"
    alive $run/slurmd-$1.pid || fail "$1 is lost already"
    local space; space=$(namespace_of "$(cat $run/slurmd-$1.pid)")
    [ -n "$space" ] && [ "$space" != "$(namespace_of $$)" ] || fail "$1 has no namespace of its own"
    kill_all in_namespace "$space"
    rm -f $run/slurmd-$1.pid
    scontrol update nodename=$1 state=down reason=lost
}

return_node() {  # NAME
    check_node "${1:-}"
    alive $run/slurmd-$1.pid && fail "$1 is here"
    start_node $1
    wait_for "$1 to report in" $log/slurmd-$1.log sh -c "sinfo -h -N -n $1 -t idle,alloc,mix | grep -q ."
}

end() {  # PIDFILE...: TERM to all at once, as each takes two seconds to leave, then KILL after 10 s
    local pids="" pid
    for file in "$@"; do alive "$file" && pids="$pids $(cat "$file")"; done
    for pid in $pids; do kill "$pid"; done
    for pid in $pids; do
        for _ in $(seq 100); do runs "$pid" || break; sleep 0.1; done
        runs "$pid" && kill -9 "$pid" 2>/dev/null
    done
    rm -f "$@"
}

kill_all() {  # COMMAND...: SIGKILL to all whose folder in /proc it prints, until it prints none, for 10 s
    local found end=$((SECONDS + 10))
    while [ $SECONDS -lt $end ] && found=$("$@" | grep -oE "^/proc/[0-9]+" | sort -u) && [ -n "$found" ]; do
        for process in $found; do kill -9 "${process#/proc/}" 2>/dev/null; done
        sleep 0.1
    done
}

namespace_of() { readlink "/proc/$1/ns/uts" 2>/dev/null | tr -dc 0-9; }  # PID: its UTS namespace's number

in_namespace() { find /proc/[0-9]*/ns/uts -maxdepth 0 -lname "uts:\\[$1\\]" 2>/dev/null; }  # NUMBER

# A job's process has the number of its job and this cluster in its environment; whoever calls sbatch has only the one.
jobs_left() {
    grep -lsz "^SLURM_CONF=$SLURM_CONF$" /proc/[0-9]*/environ | xargs -r grep -lsz "^SLURM_JOB_ID="
}

# A daemon of this cluster has FOLDER in its command line, or the cluster in its environment.
daemons_left() {
    for process in $(grep -lsF "$FOLDER/" /proc/[0-9]*/cmdline /proc/[0-9]*/environ | grep -oE "^/proc/[0-9]+" | sort -u); do
        case $(cat "$process/comm" 2>/dev/null) in
            munged|mariadb*|slurmdbd|slurmctld|slurmd|slurmstepd*) runs "${process#/proc/}" && echo "$process" ;;
        esac
    done
}

stop() {
    trap "" INT TERM
    [ ! -s $run/watch.pid ] || kill "$(cat $run/watch.pid)" 2>/dev/null
    if up; then  # jobs first: slurmd leaves theirs running
        scancel --full --user=root 2>/dev/null
        local tidy=$((SECONDS + 15))
        while [ $SECONDS -lt $tidy ] && [ -n "$(squeue -h -t running,completing 2>/dev/null)" ]; do sleep 0.2; done
    fi
    local spaces="" space file
    for file in $run/slurmd-*.pid; do alive "$file" && spaces="$spaces $(namespace_of "$(cat "$file")")"; done
    end $run/slurmd-*.pid $run/slurmctld.pid  # those that others need go after them
    for space in $spaces; do [ "$space" = "$(namespace_of $$)" ] || kill_all in_namespace "$space"; done
    end $run/slurmdbd.pid
    end $run/mariadbd.pid $run/munged.pid
    kill_all jobs_left     # they may outlive their scancel
    kill_all daemons_left  # one that was starting had not yet written its number
    return 0
}

status() {
    up || { echo "not running (FOLDER=$FOLDER)"; return 1; }
    sinfo -N -o "%8N %8P %6t %5c %10G %m"
    squeue
    echo
    echo "export SLURM_CONF=$SLURM_CONF"
}

case ${1:-} in
    start) start ;;
    stop) stop ;;
    status) status ;;
    install) install ;;
    lose) lose "${2:-}" ;;
    return) return_node "${2:-}" ;;
    watch) shift; watch "$@" ;;  # of `start` alone
    *) fail "usage: slurm/dev_cluster.sh start|stop|status|install|lose NODE|return NODE" ;;
esac
