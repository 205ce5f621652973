"""Batches for one rank: fixed global batches in a seeded order, prefetched by a thread.

    for step, batch in Loader(config.data, spec, global_batch=4096, seed=0, rank=0, world=4): ...

Every rank computes the same list of rows for global batch s and reads its own slice, so the ranks' batches,
concatenated, are those of a single process, whatever the world size.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gemctl.config.schema import DataConfig
from gemctl.data.batch import Batch, EventSequence, Jagged
from gemctl.data.files import DataPath, shown
from gemctl.data.order import RowOrder, local_slice
from gemctl.data.parquet import ParquetSource
from gemctl.data.rows import JaggedRows, RowBlock
from gemctl.errors import InputError
from gemctl.specs.data import FeatureSpec


class Loader:
    """Endless iterator over (step, this rank's rows of global batch `step`), from `start_step` on.

    `epoch_rows`: rows of one pass over the data. A problem in the data raises InputError from `next`, at the step that
    needs the row. `close` ends the reading thread; the iterator can't be used afterwards.
    """

    def __init__(
        self,
        data: DataConfig,
        spec: FeatureSpec,
        *,
        global_batch: int,
        seed: int,
        rank: int,
        world: int,
        start_step: int = 0,
    ) -> None:
        self._source = open_source(data.train, data, spec)
        window = data.window if data.order == "shuffled" else None
        self._order = RowOrder(self._source.group_rows, seed, window)
        self.epoch_rows = self._order.epoch_rows
        self._global_batch, self._slice = global_batch, local_slice(global_batch, rank, world)
        self._step = start_step
        self._ahead = _ReadAhead(self._steps(start_step), data.prefetch) if data.prefetch else None
        self._batches: Iterator[tuple[int, Batch]] = self._ahead or self._steps(start_step)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        return self

    def __next__(self) -> tuple[int, Batch]:
        return next(self._batches)

    def close(self) -> None:
        """Ends the reading thread and closes the files."""
        if self._ahead:
            self._ahead.close()
        self._source.close()

    def _steps(self, step: int) -> Iterator[tuple[int, Batch]]:
        while True:
            start, stop = (step * self._global_batch + edge for edge in self._slice)
            self._source.keep = self._order.groups_of_window(stop)
            yield step, to_batch(self._source.read(self._order.rows(start, stop)), self._source.spec)
            step += 1


def eval_batches(data: DataConfig, spec: FeatureSpec, *, global_batch: int, rank: int, world: int) -> Iterator[Batch]:
    """This rank's part of all rows of `data.eval` once, in file order; as many batches (some empty) on every rank."""
    if data.eval is None:
        raise InputError("data.eval is not set: there are no rows to evaluate on")
    source = open_source(data.eval, data, spec)
    order = RowOrder(source.group_rows, 0, None)
    try:
        for first in range(0, source.row_count, global_batch):
            start, stop = local_slice(min(global_batch, source.row_count - first), rank, world)
            yield to_batch(source.read(order.rows(first + start, first + stop)), spec)
    finally:
        source.close()


def open_source(url: DataPath, data: DataConfig, spec: FeatureSpec) -> ParquetSource:
    """The rows at `url`, read as configured in `data`; InputError if there is none."""
    source = ParquetSource(url, spec, histories=data.histories == "keep")
    if source.row_count == 0:
        raise InputError(f"{shown(url)}: no rows")
    return source


def to_batch(block: RowBlock, spec: FeatureSpec) -> Batch:
    """The block as tensors; ids become int64."""
    count = len(block.fixed["rows"])
    categorical = {f.name: _categorical(block, f.name, f.multi, count) for f in spec.categorical}
    sequences = {s.name: _sequence(block.jagged[f"sequence/{s.name}"]) for s in spec.sequences}
    return Batch(
        rows=torch.from_numpy(block.fixed["rows"]),
        categorical=categorical,
        dense=torch.from_numpy(block.fixed["dense"]),
        sequences=sequences,
        labels=torch.from_numpy(block.fixed["labels"]),
        label_mask=torch.from_numpy(block.fixed["label_mask"]),
        weight=torch.from_numpy(block.fixed["weight"]),
        domain=torch.from_numpy(block.fixed["domain"]),
        true_probability=torch.from_numpy(block.fixed["true_probability"]),
        unknown_ids=_unknown(spec, categorical, sequences),
    )


def _categorical(block: RowBlock, name: str, multi: bool, count: int) -> Jagged:
    if multi:
        jagged = block.jagged[f"categorical/{name}"]
        return Jagged(torch.from_numpy(jagged.values["ids"]).long(), torch.from_numpy(jagged.offsets))
    return Jagged(torch.from_numpy(block.fixed[f"categorical/{name}"]).long(), torch.arange(count + 1))


def _sequence(jagged: JaggedRows) -> EventSequence:
    ids = {k.removeprefix("ids/"): torch.from_numpy(v).long() for k, v in jagged.values.items() if k[:4] == "ids/"}
    floats = {k.removeprefix("floats/"): torch.from_numpy(v) for k, v in jagged.values.items() if k[:7] == "floats/"}
    longest = int(jagged.lengths().max(initial=0))
    return EventSequence(
        torch.from_numpy(jagged.offsets), ids, floats, torch.from_numpy(jagged.values["ages"]), longest
    )


def _unknown(spec: FeatureSpec, categorical: dict[str, Jagged], sequences: dict[str, EventSequence]) -> dict[str, int]:
    """Number of unknown ids by table: the ids with the last row."""
    last = {table.name: table.rows - 1 for table in spec.tables}
    counts = dict.fromkeys(last, 0)
    for feature in spec.categorical:
        counts[feature.table] += int((categorical[feature.name].values == last[feature.table]).sum())
    for sequence in spec.sequences:
        for event in sequence.ids:
            counts[event.table] += int((sequences[sequence.name].ids[event.name] == last[event.table]).sum())
    return counts


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _ReadAhead:
    """Runs an iterator in a thread, at most `depth` items ahead; raises its exception in the consumer."""

    def __init__(self, items: Iterator[tuple[int, Batch]], depth: int) -> None:
        self._queue: queue.Queue[tuple[int, Batch] | _Failure] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(items,), name="gemctl-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        return self

    def __next__(self) -> tuple[int, Batch]:
        item = self._queue.get()
        if isinstance(item, _Failure):
            self._queue.put(item)  # every later call fails in the same way
            raise item.error
        return item

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _fill(self, items: Iterator[tuple[int, Batch]]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as error:
            self._put(_Failure(error))

    def _put(self, item: "tuple[int, Batch] | _Failure") -> bool:
        """False once the consumer has closed."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
