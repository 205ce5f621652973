"""Ten steps of gem_nano in a world of one, on a GPU beside the CPU's: tables, dense part and loader as a run has them.

    python -m tests.kernels.gpu_train LOG cpu losses.json     # LOG: a folder, in which the synthetic log is made
    python -m tests.kernels.gpu_train LOG cuda losses.json    # exit 1 where a loss is off by more than 1e-4

float32 everywhere and no TF32, so the losses differ by rounding alone, which ten steps carry on. The GPU's run goes
through NCCL, FSDP2, TorchRec's CUDA tables and the Triton kernels.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gemctl.config.compose import compose
from gemctl.config.schema import Config
from gemctl.data import synthetic
from gemctl.data.loader import Loader
from gemctl.kernels import dispatch
from gemctl.mesh.topology import resolve
from gemctl.parallel.assemble import assemble
from gemctl.parallel.tables import local_slices
from gemctl.ranks.worker import init_world
from gemctl.specs import feature_spec
from gemctl.train.ledger import Ledger
from gemctl.train.optim import DenseOptimizer
from gemctl.train.step import Flags, Stepper

STEPS, ROWS = 10, 1024
TOLERANCE = 1e-4
WORLD = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}


def job(log: Path, kind: str) -> Config:
    """The main job on one rank, ten steps long, over a log of its own in `log`."""
    files = {"spec": "spec.yaml", "train": "train.parquet", "eval": "eval.parquet"}
    sizes = [f"data.synthetic.rows={STEPS * ROWS}", "data.synthetic.eval_rows=1000", f"train.global_batch={ROWS}"]
    topology = [f"topology.{axis}=1" for axis in ("dp_replicate", "dp_shard", "mp_replicate", "mp_shard")]
    places = [f"data.{key}={log / name}" for key, name in files.items()]
    return compose(None, [*places, *sizes, *topology, "launcher.ranks_per_node=1", "model=gem_nano", f"cluster={kind}"])


def losses(config: Config) -> list[float]:
    """Global losses of the first steps, from the seed's initial state."""
    device = init_world(config.cluster.device)
    spec = feature_spec.load(config.data.spec)
    model = assemble(config, spec, resolve(config.topology, config.launcher), device)
    model.initialise(config.run.seed)
    stepper = Stepper(config, model, DenseOptimizer(model.dense, config.optim.dense), Ledger())
    loader = Loader(config.data, spec, global_batch=ROWS, seed=config.run.seed, rank=0, world=1)
    found = []
    for step, batch in loader:
        found.append(stepper.step(step, batch.to(device), ROWS, Flags()).loss)
        sys.stdout.write(f"step {step}: {found[-1]:.9f}\n")
        if len(found) == STEPS:
            break
    loader.close()
    sys.stdout.write(f"kernels: {dispatch.used()}\n")
    parts = (part.tensor for value in model.tables.state().values() for part in local_slices(value))
    devices = {str(part.device) for part in parts}
    sys.stdout.write(f"tables on {devices}, {dist.get_backend()}, torch {torch.__version__}\n")
    return found


def main(log: str, kind: str, file: str) -> int:
    """Writes the CPU's losses to `file`, or compares a GPU's with them."""
    os.environ.update(WORLD | {key: os.environ[key] for key in WORLD if key in os.environ})
    torch.set_float32_matmul_precision("highest")
    config = job(Path(log), kind)
    synthetic.ensure(config.data)
    found = losses(config)
    dist.destroy_process_group()
    if kind == "cpu":
        Path(file).write_text(json.dumps(found))
        return 0
    wanted = json.loads(Path(file).read_text())
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    sys.stdout.write(f"worst relative difference {worst:.2e}, allowed {TOLERANCE}\n")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
