"""What each rank runs: from the attempt's config to trained steps, checkpoints and an evaluation.

    torchrun --nproc-per-node 4 -m gemctl.ranks.worker RUN      # by hand, as a new attempt of the run in directory RUN

The agent forks ranks that call `main`. A rank's stage and step, and the exception that ended it, go to the attempt's
record; the exception is then raised to the launcher.
"""

import hashlib
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from gemctl import env
from gemctl.checkpoint.load import load, load_some
from gemctl.checkpoint.save import Saver
from gemctl.cluster.host import this_host
from gemctl.config.compose import from_yaml
from gemctl.config.schema import Config
from gemctl.data.batch import Batch
from gemctl.data.files import find_files
from gemctl.data.fingerprint import changed
from gemctl.durable import create
from gemctl.errors import GemctlError, InputError
from gemctl.failpoints import failpoint
from gemctl.mesh.groups import HostReport, Mesh
from gemctl.mesh.topology import Topology
from gemctl.parallel.assemble import assemble
from gemctl.parallel.exchange import all_gather_json, broadcast_json
from gemctl.plan.state import saved_state
from gemctl.ranks import store
from gemctl.run import inputs
from gemctl.run.access import written_as
from gemctl.run.attempt import Attempt, Base, Heartbeat, claim, watch_beat
from gemctl.run.base import newest_verified, passed_over, record_rollback
from gemctl.run.directory import RunDir
from gemctl.run.files import create_json, read_json, read_text
from gemctl.run.manifest import RunFacts, count_kinds
from gemctl.run.mesh import read_mesh, write_mesh
from gemctl.run.rank_records import Stage, StageRecorder
from gemctl.run.requests import Request, pending
from gemctl.run.warm_start import match
from gemctl.specs import feature_spec
from gemctl.specs.count import step_flops
from gemctl.specs.data import FeatureSpec
from gemctl.train.ledger import Ledger
from gemctl.train.log import TrainLog
from gemctl.train.loop import Trainer
from gemctl.train.optim import DenseOptimizer
from gemctl.train.policy import RollBack
from gemctl.train.step import Flags


def main(run_path: str, attempt: int) -> str:
    """Trains as one rank of the launched world; returns "finished" or "stopped"."""
    ledger = Ledger()
    run = RunDir.open(run_path)
    worker = Worker(run, run.attempt(attempt), ledger)
    try:
        return worker.run()
    except BaseException as error:
        worker.stages.fail(error)
        raise


def init_world(kind: str, attempt: Attempt | None = None) -> torch.device:
    """Joins the world's default process group, NCCL on GPUs and gloo on CPUs; returns this rank's device.

    The ranks meet in the store of `attempt`, else in torchrun's.
    """
    device = torch.device("cuda", env.local_rank()) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        meeting = {} if attempt is None else store.of_ranks(attempt)
        backend, bound = ("nccl", device) if kind == "cuda" else ("gloo", None)
        dist.init_process_group(backend, device_id=bound, **meeting)
    return device


class Worker:
    """One rank of one attempt."""

    def __init__(self, run: RunDir, attempt: Attempt, ledger: Ledger) -> None:
        self.run_dir, self.attempt, self.ledger = run, attempt, ledger
        self.rank, self.world = env.rank(), env.world_size()
        self.stages = StageRecorder(attempt, self.rank)
        self.config = from_yaml(read_text(attempt.config), str(attempt.config))
        self.inputs = inputs.read(attempt.path, run.path)
        if self.inputs is not None:
            self.config.data = inputs.pinned(self.config.data, self.inputs, attempt.path)
        self.device = torch.device("cpu")
        self.handled = 0

    def run(self) -> str:
        with self.ledger.part("process_group"):
            self._enter("start", None)
            self.mesh = self._place()
            self._join_world()
        with self.ledger.part("build"):
            self._enter("build", None)
            trainer = self._build()
        base = self.attempt.base()
        with self.ledger.part("load"):
            self._enter("load", base.step)
            self._load(trainer, base)
        finished = self._train(trainer, base)
        self._enter("close", trainer.done)
        trainer.log.finish(trainer.done)
        trainer.log.close()
        trainer.saver.close()
        dist.barrier()
        dist.destroy_process_group()
        result: Literal["finished", "stopped"] = "finished" if finished else "stopped"
        self.stages.finish(result, trainer.done)
        return result

    def _train(self, trainer: Trainer, base: Base) -> bool:
        try:
            return trainer.run(base.step, base.passed_over)
        except RollBack as error:
            if self.rank == 0:
                record_rollback(self.attempt, error.cause)
            raise

    def _join_world(self) -> None:
        torch.set_num_threads(max(1, this_host(gpus=False).cores // env.local_world_size()))
        self.device = init_world(self.config.cluster.device, self.attempt)

    def _build(self) -> Trainer:
        spec = self._spec()
        topology = self.mesh.topology
        model = assemble(self.config, spec, topology, self.device)
        model.initialise(self.config.run.seed)
        log = TrainLog(
            self.attempt.path, spec, self.ledger,
            rank=self.rank, world=self.world, device=self.device, traffic=model.traffic,
            hosts=[rank.host for rank in self.mesh.ranks()],
        )  # fmt: skip
        return Trainer(
            self.config, spec, model, DenseOptimizer(model.dense, self.config.optim.dense),
            self._saver(topology), log, self.ledger, _flops(self.config, spec), self._enter, self._flags,
            self._stop_filed, self.rank, self.world,
        )  # fmt: skip

    def _spec(self) -> FeatureSpec:
        """The attempt's copy of the feature spec, once this host's data are verified to be those of the submission."""
        if self.inputs is not None:
            self._verify(self.inputs)
        return feature_spec.load(self.config.data.spec)

    def _verify(self, known: inputs.Inputs) -> None:
        """Compares the data with their fingerprints, on one rank per host, as the others see the same files.

        InputError if training rows have changed, or if evaluation rows are missing or differ between hosts. Evaluation
        rows that have changed on all hosts alike are only noted: evaluations do not touch the state.
        """
        first, host = env.local_rank() == 0, socket.gethostname()
        if first and (problems := changed("data.train", known.train)):
            raise InputError([f"host {host}: {problem}" for problem in problems])
        found = changed("data.eval", known.eval or []) if first else None
        by_host = {name: tuple(problems) for name, problems in all_gather_json([host, found]) if problems is not None}
        if len(set(by_host.values())) > 1:
            raise InputError([f"host {name}: {problem}" for name, problems in by_host.items() for problem in problems])
        if found and self.rank == 0 and self.config.data.eval is not None:
            find_files(self.config.data.eval)
            sys.stderr.write("\n".join([*found, ""]))

    def _place(self) -> Mesh:
        """The mesh as it was placed on the hosts; raises if it has this rank on another host."""
        mesh = read_mesh(self.attempt)
        mesh.check_place(self.rank, self.world, socket.gethostname(), env.local_rank())
        return mesh

    def _saver(self, topology: Topology) -> Saver:
        axes = {
            name: getattr(topology, name) for name in ("dp_replicate", "dp_shard", "ep", "mp_replicate", "mp_shard")
        }
        facts = RunFacts(
            world=self.world,
            axes=axes,
            hosts=[rank.host for rank in self.mesh.ranks()],
            plan_hash=_hash(self.attempt.plan),
            config_hash=_hash(self.attempt.config),
            seed=self.config.run.seed,
            optimizers={"dense": "adamw", "tables": self.config.optim.tables.kind},
        )
        return Saver(self.run_dir.checkpoints, self.attempt.number, self.config.checkpoint, facts)

    def _load(self, trainer: Trainer, base: Base) -> None:
        """Fills the state from the checkpoint of `base`, or at a warm start from another run's; records what came."""
        warm = self.config.checkpoint.warm_start
        if base.checkpoint is not None:
            folder = self.run_dir.checkpoints / base.checkpoint
            manifest = load(folder, trainer.state())
            if manifest.step != base.step:
                raise InputError(
                    f"{folder}: holds step {manifest.step} now, not step {base.step} as when it was chosen"
                )
            trainer.optimizer.applied = manifest.position["applied_updates"]
            trainer.spikes.restore(manifest.position.get("losses", []))
            trainer.skipped = manifest.position.get("skipped_in_a_row", 0)
            trainer.counted = set(manifest.position.get("counted", trainer.tasks))
        elif warm is not None:
            folder = Path(warm.source)
            found = match(warm, folder, saved_state(self.config, trainer.spec))
            manifest = load_some(folder, trainer.state(), found.loaded)
        else:
            return
        if self.rank == 0:
            counts = {kind: asdict(count) for kind, count in count_kinds(manifest.objects).items()}
            # The run's own checkpoint is recorded by its name alone, which stays right if the run is moved.
            name = base.checkpoint or str(folder)
            create_json(self.attempt.loaded, {"checkpoint": name, "step": manifest.step, "tensors": counts})

    def _enter(self, stage: Stage, step: int | None) -> None:
        self.stages.enter(stage, step)
        failpoint(stage, step)

    def _stop_filed(self) -> bool:
        """True on rank 0 if a stop request waits for the next step."""
        return self.rank == 0 and any(request.kind == "stop" for request in self._pending())

    def _pending(self) -> list[Request]:
        return pending(self.run_dir, self.attempt, self.handled)

    def _flags(self) -> Flags:
        """What this rank asks of all ranks in this step; only rank 0 reads requests."""
        flags = Flags()
        if self.rank == 0:
            for request in self._pending():
                self.handled = request.number
                flags.stop |= request.kind == "stop"
                flags.save |= request.kind == "save"
        return flags


def _flops(config: Config, spec: FeatureSpec) -> Callable[[Batch], float]:
    def flops(batch: Batch) -> float:
        lengths = {name: sequence.offsets.diff().cpu().numpy() for name, sequence in batch.sequences.items()}
        return float(step_flops(config.model, spec, len(batch), lengths))

    return flops


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def by_hand(run_path: str) -> str:
    """One rank of an attempt that no agent started: rank 0 claims a new attempt with the last one's configuration, from
    the newest verified checkpoint. Raises InputError if the run is running, and on every rank if the world
    size is not the planned one.
    """
    run = RunDir.open(run_path)
    with written_as(run.path):
        return _by_hand(run, run_path)


def _by_hand(run: RunDir, run_path: str) -> str:
    last, source = run.last_attempt(), run.configured()
    if last is None or source is None:
        raise InputError(f"{run_path}: no attempt has left a configuration here; start the run with gemctl train")
    config = from_yaml(read_text(source.config), str(source.config))
    planned = read_json(source.plan)["topology"]["world_size"]
    if planned != env.world_size():
        raise InputError(f"{run_path}: its plan has {planned} ranks, {env.world_size()} were started")
    init_world(config.cluster.device)
    attempt = run.attempt(broadcast_json(_take_over(run, last, source, config) if env.rank() == 0 else None))
    _lay_by_hand(attempt)
    if env.rank() != 0:
        return main(run_path, attempt.number)
    with Heartbeat(attempt, config.recover.heartbeat):
        result = main(run_path, attempt.number)
        attempt.write_end(result)
    return result


def _take_over(run: RunDir, last: Attempt, source: Attempt, config: Config) -> int:
    age = watch_beat(last)
    if age is not None:
        raise InputError(f"{run.run_id}: attempt {last.number} still runs on {last.claim().host}; gemctl stop ends it")
    local = env.local_world_size()
    attempt = claim(
        run.path, last.number + 1,
        nodes=env.world_size() // local, ranks_per_node=local, heartbeat=config.recover.heartbeat,
    )  # fmt: skip
    for file in ("config", "plan"):
        create(getattr(attempt, file), getattr(source, file).read_bytes())
    for part, text in inputs.texts(source.path).items():
        create(attempt.path / part, text)
    try:
        choice = newest_verified(run)
    except InputError:
        attempt.write_end("failed")
        raise
    name, step = (choice.checkpoint.path.name, choice.checkpoint.step) if choice.checkpoint else (None, 0)
    attempt.write_base(Base(name, step, passed_over(run.attempts(), step), choice.left_alone))
    return attempt.number


def _lay_by_hand(attempt: Attempt) -> None:
    """Places the mesh on the hosts that the ranks report, in the order of the ranks where no topology is known."""
    reports = [(name, address) for name, address in all_gather_json([socket.gethostname(), env.topology_address()])]
    hosts = [HostReport(name, reports.count((name, address)), address) for name, address in dict.fromkeys(reports)]
    if env.rank() == 0:
        write_mesh(attempt, hosts)
    dist.barrier()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: torchrun … -m gemctl.ranks.worker RUN")
    try:
        by_hand(sys.argv[1])
    except GemctlError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
