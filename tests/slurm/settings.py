"""The configuration files and command lines of a cluster's daemons (tests/slurm/cluster.py)."""

import os
from pathlib import Path

LOGIN = "10.78.0.254"
NODES = {
    "n1": ("leaf1", "10.78.0.1"),
    "n2": ("leaf2", "10.78.0.2"),
    "n3": ("leaf1", "10.78.0.3"),
    "n4": ("leaf2", "10.78.0.4"),
}
GPUS = 8  # of each node: copies of /dev/null
SLURMDBD_PORT, DATABASE_PORT = 6819, 3306
GRANTS = (
    "create user slurm@'127.0.0.1' identified by 'slurm'; create user slurm@localhost identified by 'slurm';"
    "grant all on slurm_acct.* to slurm@'127.0.0.1'; grant all on slurm_acct.* to slurm@localhost;"
)


def write(folder: Path, accounting: bool) -> None:
    """Makes the cluster's folders and files."""
    for part in ("etc", "state", "spool", "log", "run", "dev"):
        (folder / part).mkdir(parents=True)
    for name in NODES:
        (folder / "spool" / name).mkdir()
    folder.chmod(0o755)
    for gpu in range(GPUS):
        os.mknod(folder / f"dev/gpu{gpu}", 0o20666, os.makedev(1, 3))
    key = folder / "etc/munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    etc = folder / "etc"
    names = [f"127.0.0.1 localhost\n{LOGIN} login", *(f"{address} {name}" for name, (_, address) in NODES.items())]
    (etc / "hosts").write_text("\n".join(names) + "\n")
    (etc / "slurm.conf").write_text(_slurm(folder, accounting))
    (etc / "gres.conf").write_text(f"NodeName={_nodes()} Name=gpu File={folder}/dev/gpu[0-{GPUS - 1}]\n")
    (etc / "topology.conf").write_text(_topology())
    if accounting:
        (etc / "slurmdbd.conf").touch(0o600)
        (etc / "slurmdbd.conf").write_text(_slurmdbd(folder))


def munged(folder: Path) -> list[str]:
    """Options of munged."""
    files = {"key-file": "etc/munge.key", "socket": "run/munge.socket", "pid-file": "run/munged.pid",
             "log-file": "log/munged.log", "seed-file": "run/munge.seed"}  # fmt: skip
    return ["--force", *(f"--{option}={folder / file}" for option, file in files.items())]


def database_install(folder: Path) -> list[str]:
    """The command that makes an empty database."""
    return ["mysql_install_db", "--no-defaults", "--user=root", f"--datadir={folder}/mysql", "--skip-test-db",
            "--auth-root-authentication-method=socket"]  # fmt: skip


def database(folder: Path) -> list[str]:
    """The command that serves it."""
    return ["mariadbd", "--no-defaults", "--user=root", f"--datadir={folder}/mysql",
            f"--socket={folder}/run/mysql.sock", f"--pid-file={folder}/run/mariadbd.pid",
            f"--port={DATABASE_PORT}", "--bind-address=127.0.0.1", "--innodb-buffer-pool-size=64M",
            "--innodb-lock-wait-timeout=900"]  # fmt: skip


def _nodes() -> str:
    return ",".join(NODES)


def _topology() -> str:
    leaves: dict[str, list[str]] = {}
    for name, (leaf, _) in NODES.items():
        leaves.setdefault(leaf, []).append(name)
    lines = [f"SwitchName={leaf} Nodes={','.join(names)}" for leaf, names in leaves.items()]
    return "\n".join([*lines, f"SwitchName=spine Switches={','.join(leaves)}"]) + "\n"


def _slurm(folder: Path, accounting: bool) -> str:
    """Nodes are found dead within seconds, jobs start as soon as they can, and `urgent` takes nodes from `main`."""
    account = "AccountingStorageType=accounting_storage/none"
    if accounting:
        account = f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=login
AccountingStoragePort={SLURMDBD_PORT}
AccountingStoragePass={folder}/run/munge.socket"""
    lines = [f"NodeName={name} NodeAddr={address} CPUs=8 RealMemory=4096 Gres=gpu:{GPUS}"
             for name, (_, address) in NODES.items()]  # fmt: skip
    return f"""\
ClusterName=test
SlurmctldHost=login({LOGIN})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/run/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
{account}
JobCompType=jobcomp/none
MpiDefault=none
ReturnToService=1
SlurmdTimeout=10
InactiveLimit=0
KillWait=30
MinJobAge=600
BatchStartTimeout=10
MessageTimeout=10
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
TopologyPlugin=topology/tree
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{chr(10).join(lines)}
PartitionName=main Nodes={_nodes()} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes={_nodes()} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def _slurmdbd(folder: Path) -> str:
    return f"""\
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket
DbdHost=login
DbdPort={SLURMDBD_PORT}
SlurmUser=root
PidFile={folder}/run/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={DATABASE_PORT}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
"""
